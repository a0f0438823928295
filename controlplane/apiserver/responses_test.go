package apiserver_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// The generation counts changes of the spec: 500 changes result in 501, and a binding does not
// count.
func TestGenerationCountsSpecChanges(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	r.Must(apiservertest.NewPod("p"))
	pods := r.Admin().CoreV1().Pods("default")
	if err := pods.Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Target: corev1.ObjectReference{Name: "n"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p, err := pods.Get(ctx, "p", metav1.GetOptions{})
	if err != nil || p.Spec.NodeName != "n" || p.Generation != 1 {
		t.Fatalf("a bound pod: %v, on %q, generation %d", err, p.Spec.NodeName, p.Generation)
	}
	for i := range 500 {
		p, err = pods.Patch(ctx, "p", types.StrategicMergePatchType,
			[]byte(fmt.Sprintf(`{"spec":{"containers":[{"name":%q,"image":"i:%d"}]}}`, p.Spec.Containers[0].Name, i)),
			metav1.PatchOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	if p.Generation != 501 {
		t.Errorf("after 500 changes the generation is %d", p.Generation)
	}
}

// A deletion that removes the object responds with a Status, except for the kinds for which
// Kubernetes returns the object. A deletion that leaves the object responds with the object.
func TestDeleteResponses(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"}})
	r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "held",
		Finalizers: []string{"example.com/x"}}})
	r.Must(apiservertest.NewPod("waits"))
	r.Must(&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
	r.Must(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"}})
	r.Must(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Provisioner: "x"})
	r.Must(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
	const here = "/api/v1/namespaces/default/"
	for _, d := range []struct{ path, want string }{
		{here + "configmaps/a",
			`{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Success","details":{"name":"a",` +
				`"kind":"configmaps","uid":`},
		{"/apis/rbac.authorization.k8s.io/v1/clusterroles/a",
			`"details":{"name":"a","group":"rbac.authorization.k8s.io","kind":"clusterroles","uid":`},
		{here + "configmaps/held", `"kind":"ConfigMap"`},
		{here + "pods/waits", `"kind":"Pod"`},
		{here + "serviceaccounts/a", `"kind":"ServiceAccount"`},
		{"/apis/storage.k8s.io/v1/storageclasses/a", `"kind":"StorageClass"`},
		{"/api/v1/namespaces/a", `"kind":"Namespace"`},
	} {
		if got := r.Call(c, "DELETE", d.path, ""); got.Code != 200 || !strings.Contains(got.Body, d.want) {
			t.Errorf("%s: %d %s\nwant %s", d.path, got.Code, got.Body, d.want)
		}
	}
	r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "b"}})
	if err := r.Admin().CoreV1().ConfigMaps("default").Delete(apiservertest.Within(t), "b",
		metav1.DeleteOptions{}); err != nil {
		// by protobuf
		t.Error(err)
	}
}

// What users write is shown as they wrote it, without the trace context that Keelson keeps with it;
// the timeline is found by the object's own path.
func TestTraceAnnotationsAreHidden(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
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
		{"GET", deployments + "/web", "", []string{"Accept",
			"application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}},
		{"GET", deployments + "?watch=true&timeoutSeconds=1&resourceVersion=0", "", nil},
		{"PATCH", deployments + "/web", `{"spec":{"replicas":2}}`, merge},
		{"PATCH", deployments + "/web?fieldManager=x", applied, apply},
		{"PATCH", maps + "/web", `[{"op":"replace","path":"/metadata/annotations","value":{"own":"2"}}]`,
			[]string{"Content-Type", "application/json-patch+json"}},
		{"PUT", maps + "/web", `{"metadata":{"name":"web"},"data":{"a":"c"}}`, nil},
		{"GET", maps + "/web", "", []string{"Accept", "application/yaml"}},
		{"DELETE", maps, "", nil},
	} {
		got := r.Call(c, step.method, step.path, step.body, step.headers...)
		if got.Code > 201 || got.Body == "" || strings.Contains(got.Body, "keelson.dev/") {
			t.Errorf("%s %s: %d %s", step.method, step.path, got.Code, got.Body)
		}
	}
	// What was changed last is what the timeline shows, as for whoever follows the Traceparent of
	// the answer.
	changed := r.Call(c, "PATCH", deployments+"/web", `{"spec":{"replicas":3}}`, merge...)
	got := r.Call(c, "GET", "/timeline"+deployments+"/web", "")
	if id := api.TraceID(changed.Header.Get("Traceparent")); got.Code != 200 || id == "" ||
		!strings.Contains(got.Body, id) || !strings.Contains(got.Body, `"committed"`) {
		t.Errorf("timeline: %d %s", got.Code, got.Body)
	}
	apiservertest.Refused(t, r.Call(c, "GET", "/timeline"+deployments+"/none", ""), 404,
		`deployments.apps "none" not found`)
	apiservertest.Refused(t, r.Call(c, "GET", "/timeline"+deployments, ""), 404, "is not the path of an object")
	r.Must(&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "times"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "keelson:timeline"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "alice"}}})
	apiservertest.Eventually(t, func() error {
		a := r.Call(r.HTTP(nil), "GET", "/timeline"+deployments+"/web", "", "Authorization", "Bearer alice-token")
		if a.Code != 403 || !strings.Contains(a.Body, `cannot get resource`) {
			return fmt.Errorf("who may not read the object: %d %s", a.Code, a.Body)
		}
		return nil
	})
	// The pods of it show theirs: agents and people follow it there.
	if got := r.Call(c, "POST", "/api/v1/namespaces/default/pods", podJSON); !strings.Contains(got.Body,
		api.TraceParentAnnotation) {
		t.Errorf("a pod: %s", got.Body)
	}
}

// The profiles of the process are for administrators.
func TestProfiles(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	if got := r.Call(c, "GET", "/debug/pprof/heap?gc=1", ""); got.Code != 200 ||
		!strings.HasPrefix(got.Body, "\x1f\x8b") {
		t.Errorf("heap: %d %.80q", got.Code, got.Body)
	}
	if got := r.Call(c, "GET", "/debug/pprof/", ""); got.Code != 200 || !strings.Contains(got.Body, "goroutine") {
		t.Errorf("index: %d %.80q", got.Code, got.Body)
	}
	apiservertest.Refused(t, r.Call(r.HTTP(nil), "GET", "/debug/pprof/heap", "", "Authorization", "Bearer alice-token"),
		403, `cannot get path "/debug/pprof/heap"`)
}
