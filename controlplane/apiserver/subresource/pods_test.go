package subresource_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// F90: of many binders exactly one wins; the pod says that it is scheduled.
func TestBinding(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	pods := r.Admin().CoreV1().Pods("default")
	ctx := apiservertest.Within(t)
	r.Must(apiservertest.NewPod("p"))
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Add(1)
		go func() {
			defer wg.Done()
			errs[i] = pods.Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "p"},
				Target: corev1.ObjectReference{Kind: "Node", Name: fmt.Sprintf("n%d", i)}}, metav1.CreateOptions{})
		}()
	}
	wg.Wait()
	p, err := pods.Get(ctx, "p", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	won := 0
	for i, err := range errs {
		switch {
		case err == nil:
			won++
			if p.Spec.NodeName != fmt.Sprintf("n%d", i) {
				t.Errorf("binder %d was told that it won, the pod is on %s", i, p.Spec.NodeName)
			}
		case !apierrors.IsConflict(err) ||
			!strings.Contains(err.Error(),
				fmt.Sprintf(`Operation cannot be fulfilled on pods/binding "p": pod p is already assigned to node %q`,
					p.Spec.NodeName)):
			t.Errorf("binder %d: %v", i, err)
		}
	}
	if won != 1 {
		t.Errorf("%d binders won", won)
	}
	if c := apiservertest.Condition(p, corev1.PodScheduled); c == nil || c.Status != corev1.ConditionTrue ||
		c.ObservedGeneration == 0 || c.ObservedGeneration != p.Generation {
		t.Errorf("condition %+v of generation %d", c, p.Generation)
	}
	if err := pods.Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "p"}},
		metav1.CreateOptions{}); !isPlainError(err, "target.name: Required value") {
		t.Errorf("a binding to nowhere: %v", err)
	}
	for text, target := range map[string]corev1.ObjectReference{
		`target.name: Invalid value: "Bad_Node": a lowercase RFC 1123 subdomain must consist of`: {Kind: "Node",
			Name: "Bad_Node"},
		`target.name: Invalid value: "a/b": a lowercase RFC 1123 subdomain must consist of`: {Name: "a/b"},
		`target.kind: Unsupported value: "Pod": supported values: "Node", "<empty>"`: {Kind: "Pod",
			Name: "Bad_Node"},
	} {
		err := pods.Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Target: target},
			metav1.CreateOptions{})
		if !isPlainError(err, text) || target.Kind == "Pod" && strings.Contains(err.Error(), "target.name") {
			t.Errorf("a binding to %+v: %v, want %s", target, err, text)
		}
	}
	if err := pods.Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "ghost"},
		Target: corev1.ObjectReference{Name: "n"}}, metav1.CreateOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a binding of nothing: %v", err)
	}
	if err := pods.Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "ghost"}},
		metav1.CreateOptions{}); !isPlainError(err, "target.name: Required value") {
		t.Errorf("an invalid binding of a missing pod: %v", err)
	}
	if err := bindPath(ctx, r, "p",
		&corev1.Binding{Target: corev1.ObjectReference{Name: "n"}}); !apierrors.IsBadRequest(err) ||
		!strings.Contains(err.Error(), "name in URL does not match name in Binding object") {
		t.Errorf("a binding without a name: %v", err)
	}
	for text, meta := range map[string]metav1.ObjectMeta{
		`Operation cannot be fulfilled on pods "p": Precondition failed: UID in precondition: ` +
			`other`: {Name: "p", UID: "other"},
		`Operation cannot be fulfilled on pods "p": Precondition failed: ResourceVersion in ` +
			`precondition: 1,`: {Name: "p", ResourceVersion: "1"},
	} {
		err := pods.Bind(ctx, &corev1.Binding{ObjectMeta: meta, Target: corev1.ObjectReference{Name: "n"}},
			metav1.CreateOptions{})
		if !apierrors.IsConflict(err) || !strings.Contains(err.Error(), text) {
			t.Errorf("a binding with precondition %+v: %v, want %s", meta, err, text)
		}
	}
}

// bindPath creates pods/binding for a pod name that the Binding need not have.
func bindPath(ctx context.Context, r *apiservertest.Replica, pod string, b *corev1.Binding) error {
	return r.Admin().CoreV1().RESTClient().Post().Namespace("default").Resource("pods").Name(pod).SubResource(
		"binding").Body(b).Do(ctx).Error()
}

// isPlainError reports whether a client received status 500 without reason and details, and with
// text in its message. The API server of Kubernetes responds so to errors that are not API
// statuses.
func isPlainError(err error, text string) bool {
	var s apierrors.APIStatus
	return errors.As(err, &s) && s.Status().Code == http.StatusInternalServerError && s.Status().Reason == "" &&
		s.Status().Details == nil &&
		strings.HasPrefix(s.Status().Message, text)
}

// F90: a patch of spec.nodeName binds too, once, for those who may bind.
func TestBindByPatch(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	r.Must(apiservertest.NewPod("p"))
	to := func(n string) []byte { return []byte(fmt.Sprintf(`{"spec":{"nodeName":%q}}`, n)) }
	apiservertest.GrantEdit(t, r, "alice")
	if _, err := r.Client("alice").CoreV1().Pods("default").Patch(ctx, "p", types.MergePatchType, to("n1"),
		metav1.PatchOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("alice bound a pod: %v", err)
	}
	put, err := r.Client("alice").CoreV1().Pods("default").Get(ctx, "p", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	put.Spec.NodeName = "n1"
	if _, err := r.Client("alice").CoreV1().Pods("default").Update(ctx, put,
		metav1.UpdateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("alice bound a pod by an update: %v", err)
	}
	pods := r.Admin().CoreV1().Pods("default")
	p, err := pods.Patch(ctx, "p", types.StrategicMergePatchType, to("n1"), metav1.PatchOptions{})
	if err != nil || p.Spec.NodeName != "n1" || apiservertest.Condition(p, corev1.PodScheduled) == nil {
		t.Fatalf("%v %+v", err, p)
	}
	if _, err := pods.Patch(ctx, "p", types.StrategicMergePatchType, to("n2"),
		metav1.PatchOptions{}); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(),
			"spec: Forbidden: pod updates may not change fields other than `spec.containers[*].image`") {
		t.Errorf("the second binder: %v", err)
	}
}

// The token volume, the tolerations, the class: what admission writes into a pod.
func TestPodAdmission(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	never := corev1.PreemptNever
	r.Must(&schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: "gold"}, Value: 1000,
		PreemptionPolicy: &never})
	spec := apiservertest.NewPod("p")
	spec.Spec.PriorityClassName = "gold"
	spec.Spec.InitContainers = []corev1.Container{{Name: "i", Image: "x"}}
	p := r.Must(spec).(*corev1.Pod)
	if p.Spec.ServiceAccountName != "default" || *p.Spec.Priority != 1000 || *p.Spec.PreemptionPolicy != never {
		t.Errorf("%+v", p.Spec)
	}
	if len(p.Spec.Volumes) != 1 || !strings.HasPrefix(p.Spec.Volumes[0].Name, "kube-api-access-") ||
		len(p.Spec.Volumes[0].Projected.Sources) != 3 {
		t.Fatalf("volumes %+v", p.Spec.Volumes)
	}
	for _, c := range append(p.Spec.InitContainers, p.Spec.Containers...) {
		if len(c.VolumeMounts) != 1 || c.VolumeMounts[0].Name != p.Spec.Volumes[0].Name ||
			c.VolumeMounts[0].MountPath != "/var/run/secrets/kubernetes.io/serviceaccount" ||
			!c.VolumeMounts[0].ReadOnly {
			t.Errorf("mounts of %s: %+v", c.Name, c.VolumeMounts)
		}
	}
	if len(p.Spec.Tolerations) != 2 || *p.Spec.Tolerations[0].TolerationSeconds != 300 {
		t.Errorf("tolerations %+v", p.Spec.Tolerations)
	}
	// Its manifest may be written again in the form that Kubernetes returns: the token's volume is not
	// among that.
	again := p.DeepCopy()
	again.Spec.Priority, again.Spec.PreemptionPolicy, again.Spec.Tolerations = nil, nil, nil
	again.Labels = map[string]string{"again": "true"}
	if got, err := r.Admin().CoreV1().Pods("default").Update(ctx, again, metav1.UpdateOptions{}); err != nil ||
		*got.Spec.Priority != 1000 ||
		*got.Spec.PreemptionPolicy != never || len(got.Spec.Tolerations) != 2 || got.Labels["again"] != "true" {
		t.Errorf("written again: %v, %v", got, err)
	}
	no := false
	spec = apiservertest.NewPod("q")
	spec.Spec.AutomountServiceAccountToken = &no
	spec.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	if p = r.Must(spec).(*corev1.Pod); len(p.Spec.Volumes) != 0 || len(p.Spec.Tolerations) != 1 {
		t.Errorf("volumes %+v, tolerations %+v", p.Spec.Volumes, p.Spec.Tolerations)
	}
	// A namespace that is going takes nothing new.
	r.Must(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "going"}})
	if err := r.Admin().CoreV1().Namespaces().Delete(ctx, "going", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err := r.Admin().CoreV1().ConfigMaps("going").Create(ctx,
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c"}}, metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) || !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) ||
		!strings.Contains(err.Error(),
			"unable to create new content in namespace going because it is being terminated") {
		t.Errorf("%v", err)
	}
	// finalize ends it.
	ns, err := r.Admin().CoreV1().Namespaces().Get(ctx, "going", metav1.GetOptions{})
	if err != nil || ns.Status.Phase != corev1.NamespaceTerminating {
		t.Fatalf("%v %+v", err, ns)
	}
	ns.Spec.Finalizers = nil
	if _, err := r.Admin().CoreV1().Namespaces().Finalize(ctx, ns, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Admin().CoreV1().Namespaces().Get(ctx, "going", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("after finalize: %v", err)
	}
}

func TestDefaultStorageClass(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	r.Must(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "slow"}, Provisioner: "x"})
	r.Must(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "fast",
		Annotations: map[string]string{"storageclass.kubernetes.io/is-default-class": "true"}}, Provisioner: "x"})
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c"},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceStorage: apiservertest.Quantity("1Gi")}},
		}}
	if got := r.Must(claim).(*corev1.PersistentVolumeClaim); got.Spec.StorageClassName == nil ||
		*got.Spec.StorageClassName != "fast" {
		t.Errorf("%+v", got.Spec)
	}
}

// Addresses and ports are given once, kept over updates, refused when taken, and freed by deletion.
func TestServiceAllocation(t *testing.T) {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Network.ServiceCIDR = netip.MustParsePrefix("10.96.0.0/24")
		c.Network.NodePorts = [2]int{30000, 30003}
	})
	ctx := apiservertest.Within(t)
	services := r.Admin().CoreV1().Services("default")
	svc := func(name string, kind corev1.ServiceType, ports ...corev1.ServicePort) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.ServiceSpec{Type: kind, Ports: ports}}
	}
	port := corev1.ServicePort{Port: 80}
	a, err := services.Create(ctx, svc("a", corev1.ServiceTypeNodePort, port), metav1.CreateOptions{})
	if err != nil || !netip.MustParsePrefix("10.96.0.0/24").Contains(netip.MustParseAddr(a.Spec.ClusterIP)) ||
		a.Spec.Ports[0].NodePort < 30000 || a.Spec.IPFamilies[0] != corev1.IPv4Protocol {
		t.Fatalf("%v %+v", err, a)
	}
	b := svc("b", corev1.ServiceTypeClusterIP, port)
	b.Spec.ClusterIP = a.Spec.ClusterIP
	if _, err := services.Create(ctx, b, metav1.CreateOptions{}); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), "provided IP is already allocated") {
		t.Errorf("a taken address: %v", err)
	}
	b = svc("b", corev1.ServiceTypeNodePort, corev1.ServicePort{Port: 80, NodePort: a.Spec.Ports[0].NodePort})
	if _, err := services.Create(ctx, b, metav1.CreateOptions{}); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), "provided port is already allocated") {
		t.Errorf("a taken port: %v", err)
	}
	// An update that leaves the values out keeps them.
	next := svc("a", corev1.ServiceTypeNodePort, port)
	next.Spec.Selector = map[string]string{"x": "y"}
	kept, err := services.Update(ctx, next, metav1.UpdateOptions{})
	if err != nil || kept.Spec.ClusterIP != a.Spec.ClusterIP ||
		kept.Spec.Ports[0].NodePort != a.Spec.Ports[0].NodePort {
		t.Fatalf("%v %+v", err, kept)
	}
	// DNS: one port for both protocols.
	d, err := services.Create(ctx, svc("d", corev1.ServiceTypeNodePort,
		corev1.ServicePort{Name: "u", Port: 53, Protocol: corev1.ProtocolUDP},
		corev1.ServicePort{Name: "t", Port: 53, Protocol: corev1.ProtocolTCP}), metav1.CreateOptions{})
	if err != nil || d.Spec.Ports[0].NodePort != d.Spec.Ports[1].NodePort {
		t.Fatalf("%v %+v", err, d)
	}
	// A full range says so, and leaves nothing behind.
	if _, err = services.Create(ctx, svc("e", corev1.ServiceTypeNodePort, corev1.ServicePort{Name: "x", Port: 1},
		corev1.ServicePort{Name: "y", Port: 2}, corev1.ServicePort{Name: "z", Port: 3}), metav1.CreateOptions{}); err ==
		nil || !strings.Contains(err.Error(), "range is full") {
		t.Errorf("a full range: %v", err)
	}
	if err := services.Delete(ctx, "d", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err = services.Create(ctx, svc("e", corev1.ServiceTypeNodePort, corev1.ServicePort{Name: "x", Port: 1},
		corev1.ServicePort{Name: "y", Port: 2}, corev1.ServicePort{Name: "z", Port: 3}), metav1.CreateOptions{}); err !=
		nil {
		t.Errorf("after a deletion: %v", err)
	}
	// Turned into a name, the addresses go.
	kept.Spec.Type, kept.Spec.ExternalName = corev1.ServiceTypeExternalName, "example.org"
	if kept, err = services.Update(ctx, kept, metav1.UpdateOptions{}); err != nil || kept.Spec.ClusterIP != "" ||
		kept.Spec.Ports[0].NodePort != 0 {
		t.Errorf("%v %+v", err, kept.Spec)
	}
}

func TestKubernetesService(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	ip := netip.MustParseAddr("10.96.0.1")
	ports := func(s ...string) (out []netip.AddrPort) {
		for _, x := range s {
			out = append(out, netip.MustParseAddrPort(x))
		}
		return out
	}
	for _, ready := range [][]netip.AddrPort{ports("172.30.0.2:6443"), ports("172.30.0.3:6443", "172.30.0.2:6443"),
		ports("172.30.0.3:6443")} {
		for range 2 { // the second time changes nothing
			if err := r.Setup.EnsureKubernetesService(ctx, 0, ip, ready); err != nil {
				t.Fatal(err)
			}
		}
		slice, err := r.Admin().DiscoveryV1().EndpointSlices("default").Get(ctx, "kubernetes", metav1.GetOptions{})
		if err != nil || len(slice.Endpoints) != len(ready) || *slice.Ports[0].Port != 6443 ||
			slice.Labels[discoveryv1.LabelServiceName] != "kubernetes" {
			t.Fatalf("%v %+v", err, slice)
		}
	}
	before := r.Store.Applied()
	if err := r.Setup.EnsureKubernetesService(ctx, 0, ip, ports("172.30.0.3:6443")); err != nil ||
		r.Store.Applied() != before {
		t.Errorf("%v: a call without a change wrote revision %d after %d", err, r.Store.Applied(), before)
	}
	svc, err := r.Admin().CoreV1().Services("default").Get(ctx, "kubernetes", metav1.GetOptions{})
	if err != nil || svc.Spec.ClusterIP != "10.96.0.1" || svc.Spec.Ports[0].Port != 443 {
		t.Errorf("%v %+v", err, svc)
	}
	if err := r.Setup.EnsureBootstrap(ctx, 0); err != nil || r.Store.Applied() != before {
		t.Errorf("%v: a second bootstrap wrote revision %d after %d", err, r.Store.Applied(), before)
	}
}

// An eviction honours the budget that covers the pod: 429, and not one pod too many when many evict
// at once.
func TestEviction(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	admin := r.Admin()
	for i := range 4 {
		p := apiservertest.NewPod(fmt.Sprintf("p%d", i))
		p.Labels = map[string]string{"app": "x"}
		r.Must(p)
		_, err := admin.CoreV1().Pods("default").Patch(ctx, p.Name, types.MergePatchType,
			[]byte(`{"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True"}]}}`),
			metav1.PatchOptions{}, "status")
		if err != nil {
			t.Fatal(err)
		}
	}
	two := intstr.FromInt32(2)
	r.Must(&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "b"},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: &two, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "x"}},
		}})
	evict := func(ctx context.Context, name string) error {
		for {
			err := admin.CoreV1().Pods("default").EvictV1(ctx,
				&policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}})
			if !apierrors.IsConflict(err) {
				return err
			}
		}
	}
	var wg sync.WaitGroup
	answers := make([]apiservertest.Response, 4)
	c := r.AdminHTTP()
	for i := range answers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			answers[i] = r.Call(c, "POST", fmt.Sprintf("/api/v1/namespaces/default/pods/p%d/eviction", i),
				fmt.Sprintf(`{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"p%d"}}`, i))
		}()
	}
	wg.Wait()
	gone := 0
	for _, a := range answers {
		if a.Code == 201 {
			gone++
			continue
		}
		apiservertest.Refused(t, a, 429, "Cannot evict pod as it would violate the pod's disruption budget.")
		if !strings.Contains(a.Body, "The disruption budget b needs 2 healthy pods and has") {
			t.Errorf("%v %s", a.Header, a.Body)
		}
	}
	if gone != 2 {
		t.Errorf("%d pods were evicted, 2 may be", gone)
	}
	r.Must(apiservertest.NewPod("alone"))
	if err := evict(ctx, "alone"); err != nil {
		t.Errorf("a pod without a budget: %v", err)
	}
}

// The scale facet of a deployment: read, replaced, patched.
func TestScale(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	deployments := r.Admin().AppsV1().Deployments("default")
	r.Must(apiservertest.Deployment("d", 3))
	s, err := deployments.GetScale(ctx, "d", metav1.GetOptions{})
	if err != nil || s.Spec.Replicas != 3 || s.Status.Selector != "app=d" {
		t.Fatalf("%v %+v", err, s)
	}
	s.Spec.Replicas = 5
	if s, err = deployments.UpdateScale(ctx, "d", s, metav1.UpdateOptions{}); err != nil || s.Spec.Replicas != 5 {
		t.Fatalf("%v %+v", err, s)
	}
	if _, err := deployments.Patch(ctx, "d", types.MergePatchType, []byte(`{"spec":{"replicas":7}}`),
		metav1.PatchOptions{}, "scale"); err != nil {
		t.Logf("typed patch of scale: %v", err)
	}
	d, err := deployments.Get(ctx, "d", metav1.GetOptions{})
	if err != nil || *d.Spec.Replicas != 7 {
		t.Errorf("%v, %d replicas", err, *d.Spec.Replicas)
	}
}
