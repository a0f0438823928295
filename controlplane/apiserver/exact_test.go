package apiserver

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
)

// A health check's port is held like any node port: nobody else gets it.
func TestHealthCheckNodePortIsReserved(t *testing.T) {
	r := start(t, nil)
	ctx := within(t)
	services := r.admin().CoreV1().Services("default")
	balancer := func(name string, health int32) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal, HealthCheckNodePort: health,
			Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(80)}},
		}}
	}
	a, err := services.Create(ctx, balancer("a", 30100), metav1.CreateOptions{})
	if err != nil || a.Spec.HealthCheckNodePort != 30100 {
		t.Fatalf("%v %+v", err, a)
	}
	if _, err := services.Create(ctx, balancer("b", 30100), metav1.CreateOptions{}); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), "spec.healthCheckNodePort: Invalid value: \"30100\": provided port is already allocated") {
		t.Errorf("a second health check at the port: %v", err)
	}
	taken := balancer("c", 0)
	taken.Spec.Ports[0].NodePort = 30100
	if _, err := services.Create(ctx, taken, metav1.CreateOptions{}); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.ports[0].nodePort") {
		t.Errorf("a node port of the same number: %v", err)
	}
	if err := services.Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := services.Create(ctx, balancer("b", 30100), metav1.CreateOptions{}); err != nil {
		t.Errorf("after its holder was deleted: %v", err)
	}
}

// The commit of a Service reserves the health check port that was picked for it by key, and the commit that no longer
// needs the port releases it.
func TestPickedHealthCheckNodePortIsReservedByKey(t *testing.T) {
	r := start(t, nil)
	ctx := within(t)
	services := r.admin().CoreV1().Services("default")
	svc, err := services.Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
		Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(80)}},
	}}, metav1.CreateOptions{})
	if err != nil || svc.Spec.HealthCheckNodePort == 0 {
		t.Fatalf("%v %+v", err, svc)
	}
	value := fmt.Sprintf("TCP-%d", svc.Spec.HealthCheckNodePort)
	r.await(func() bool { return r.cfg.Registry.Reserved("nodeports", value) })
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	if _, err := services.Update(ctx, svc, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	r.await(func() bool { return !r.cfg.Registry.Reserved("nodeports", value) })
}

// A claim grows where its class says that volumes can, and is 403 elsewhere.
func TestClaimGrowsWhereItsClassAllowsIt(t *testing.T) {
	r := start(t, nil)
	ctx := within(t)
	yes := true
	r.must(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "grows"}, Provisioner: "x", AllowVolumeExpansion: &yes})
	r.must(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "stays"}, Provisioner: "x"})
	claims := r.admin().CoreV1().PersistentVolumeClaims("default")
	grow := func(name string) error {
		_, err := claims.Patch(ctx, name, types.MergePatchType, []byte(`{"spec":{"resources":{"requests":{"storage":"2Gi"}}}}`), metav1.PatchOptions{})
		return err
	}
	for _, class := range []string{"grows", "stays", "gone", ""} {
		name := "of-" + class + "-class"
		c := r.must(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		}}).(*corev1.PersistentVolumeClaim).DeepCopy()
		if err := grow(name); !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
			t.Errorf("%s, not bound: %v", name, err)
		}
		c.Status.Phase = corev1.ClaimBound
		if _, err := claims.UpdateStatus(ctx, c, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		err := grow(name)
		if class == "grows" && err != nil || class != "grows" && (!apierrors.IsForbidden(err) ||
			!strings.Contains(err.Error(), "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize")) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A generation counts what was wished for: 500 changes make 501, and a bind is none.
func TestGenerationCountsWishes(t *testing.T) {
	r := start(t, nil)
	ctx := within(t)
	r.must(newPod("p"))
	pods := r.admin().CoreV1().Pods("default")
	if err := pods.Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Target: corev1.ObjectReference{Name: "n"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p, err := pods.Get(ctx, "p", metav1.GetOptions{})
	if err != nil || p.Spec.NodeName != "n" || p.Generation != 1 {
		t.Fatalf("a bound pod: %v, on %q, generation %d", err, p.Spec.NodeName, p.Generation)
	}
	for i := range 500 {
		p, err = pods.Patch(ctx, "p", types.StrategicMergePatchType,
			[]byte(fmt.Sprintf(`{"spec":{"containers":[{"name":%q,"image":"i:%d"}]}}`, p.Spec.Containers[0].Name, i)), metav1.PatchOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	if p.Generation != 501 {
		t.Errorf("after 500 changes the generation is %d", p.Generation)
	}
}

// A deletion that leaves nothing answers with a Status, but for the kinds whose last state Kubernetes shows; one that
// leaves something answers with that.
func TestAnswersOfDelete(t *testing.T) {
	r := start(t, nil)
	c := r.adminHTTP()
	r.must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"}})
	r.must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "held", Finalizers: []string{"example.com/x"}}})
	r.must(newPod("waits"))
	r.must(&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
	r.must(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"}})
	r.must(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Provisioner: "x"})
	r.must(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
	const here = "/api/v1/namespaces/default/"
	for _, d := range []struct{ path, want string }{
		{here + "configmaps/a", `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Success","details":{"name":"a","kind":"configmaps","uid":`},
		{"/apis/rbac.authorization.k8s.io/v1/clusterroles/a", `"details":{"name":"a","group":"rbac.authorization.k8s.io","kind":"clusterroles","uid":`},
		{here + "configmaps/held", `"kind":"ConfigMap"`},
		{here + "pods/waits", `"kind":"Pod"`},
		{here + "serviceaccounts/a", `"kind":"ServiceAccount"`},
		{"/apis/storage.k8s.io/v1/storageclasses/a", `"kind":"StorageClass"`},
		{"/api/v1/namespaces/a", `"kind":"Namespace"`},
	} {
		if got := r.call(c, "DELETE", d.path, ""); got.code != 200 || !strings.Contains(got.body, d.want) {
			t.Errorf("%s: %d %s\nwant %s", d.path, got.code, got.body, d.want)
		}
	}
	r.must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "b"}})
	if err := r.admin().CoreV1().ConfigMaps("default").Delete(within(t), "b", metav1.DeleteOptions{}); err != nil { // by protobuf
		t.Error(err)
	}
}

// What users write is shown as they wrote it, without the trace context that Keelson keeps with it; the timeline is
// found by the object's own path.
func TestTraceLeavesUsersObjects(t *testing.T) {
	r := start(t, nil)
	c := r.adminHTTP()
	const deployments = "/apis/apps/v1/namespaces/default/deployments"
	const maps = "/api/v1/namespaces/default/configmaps"
	const deployment = `{"metadata":{"name":"web"},"spec":{"selector":{"matchLabels":{"app":"web"}},
"template":{"metadata":{"labels":{"app":"web"}},"spec":{"containers":[{"name":"c","image":"i"}]}}}}`
	const service = `{"metadata":{"name":"web"},"spec":{"ports":[{"port":80}]}}`
	table := []string{"Accept", "application/json;as=Table;g=meta.k8s.io;v=v1"}
	merge := []string{"Content-Type", "application/merge-patch+json"}
	apply := []string{"Content-Type", "application/apply-patch+yaml"}
	const applied = `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"web"},"spec":{"paused":true}}`
	for _, step := range []struct {
		method, path, body string
		headers            []string
	}{
		{"POST", deployments, deployment, nil},
		{"POST", maps, `{"metadata":{"name":"web","annotations":{"own":"1"}},"data":{"a":"b"}}`, nil},
		{"POST", "/api/v1/namespaces/default/services", service, nil},
		{"GET", deployments + "/web", "", nil},
		{"GET", deployments, "", nil},
		{"GET", deployments, "", table},
		{"GET", deployments + "?includeObject=Object", "", table},
		{"GET", deployments + "/web", "", []string{"Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}},
		{"GET", deployments + "?watch=true&timeoutSeconds=1&resourceVersion=0", "", nil},
		{"PATCH", deployments + "/web", `{"spec":{"replicas":2}}`, merge},
		{"PATCH", deployments + "/web?fieldManager=x", applied, apply},
		{"PATCH", maps + "/web", `[{"op":"replace","path":"/metadata/annotations","value":{"own":"2"}}]`, []string{"Content-Type", "application/json-patch+json"}},
		{"PUT", maps + "/web", `{"metadata":{"name":"web"},"data":{"a":"c"}}`, nil},
		{"GET", maps + "/web", "", []string{"Accept", "application/yaml"}},
		{"DELETE", maps, "", nil},
	} {
		got := r.call(c, step.method, step.path, step.body, step.headers...)
		if got.code > 201 || got.body == "" || strings.Contains(got.body, "keelson.dev/") {
			t.Errorf("%s %s: %d %s", step.method, step.path, got.code, got.body)
		}
	}
	// What was changed last is what the timeline shows, as for whoever follows the Traceparent of the answer.
	changed := r.call(c, "PATCH", deployments+"/web", `{"spec":{"replicas":3}}`, merge...)
	got := r.call(c, "GET", "/timeline"+deployments+"/web", "")
	if id := api.TraceID(changed.header.Get("Traceparent")); got.code != 200 || id == "" || !strings.Contains(got.body, id) || !strings.Contains(got.body, `"committed"`) {
		t.Errorf("timeline: %d %s", got.code, got.body)
	}
	refused(t, r.call(c, "GET", "/timeline"+deployments+"/none", ""), 404, `deployments.apps "none" not found`)
	refused(t, r.call(c, "GET", "/timeline"+deployments, ""), 404, "is the path of none")
	r.must(&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "times"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "keelson:timeline"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "alice"}}})
	eventually(t, func() error {
		a := r.call(r.http(nil), "GET", "/timeline"+deployments+"/web", "", "Authorization", "Bearer alice-token")
		if a.code != 403 || !strings.Contains(a.body, `cannot get resource`) {
			return fmt.Errorf("who may not read the object: %d %s", a.code, a.body)
		}
		return nil
	})
	// The pods of it show theirs: agents and people follow it there.
	if got := r.call(c, "POST", "/api/v1/namespaces/default/pods", podJSON); !strings.Contains(got.body, api.TraceParentAnnotation) {
		t.Errorf("a pod: %s", got.body)
	}
}

// The profiles of the process are for administrators.
func TestProfiles(t *testing.T) {
	r := start(t, nil)
	c := r.adminHTTP()
	if got := r.call(c, "GET", "/debug/pprof/heap?gc=1", ""); got.code != 200 || !strings.HasPrefix(got.body, "\x1f\x8b") {
		t.Errorf("heap: %d %.80q", got.code, got.body)
	}
	if got := r.call(c, "GET", "/debug/pprof/", ""); got.code != 200 || !strings.Contains(got.body, "goroutine") {
		t.Errorf("index: %d %.80q", got.code, got.body)
	}
	refused(t, r.call(r.http(nil), "GET", "/debug/pprof/heap", "", "Authorization", "Bearer alice-token"), 403, `cannot get path "/debug/pprof/heap"`)
}
