package kinds

import (
	"fmt"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
)

// update runs an update through the kind as the registry does and returns what was judged.
func update[P api.Object](t *testing.T, old P, sub string, change func(P)) (P, []string) {
	t.Helper()
	k := All().ByType(old)
	obj := old.DeepCopyObject().(P)
	change(obj)
	prepare, judge := k.PrepareUpdate, k.ValidateUpdate
	if sub != "" {
		prepare, judge = k.Subresources[sub].PrepareUpdate, k.Subresources[sub].ValidateUpdate
	}
	if prepare != nil {
		prepare(obj, old)
	}
	if k.Default != nil {
		k.Default(obj)
	}
	var out []string
	for _, e := range judge(obj, old) {
		out = append(out, e.Field)
	}
	return obj, out
}

func ptr[T any](v T) *T { return &v }

func TestPodUpdate(t *testing.T) {
	stored := load[*corev1.Pod](t, `
metadata: {name: a, generation: 1}
spec:
  tolerations: [{key: a, operator: Exists}]
  schedulingGates: [{name: g}]
  containers: [{name: c, image: i}]
`)
	for _, c := range []struct {
		name       string
		change     func(*corev1.Pod)
		wrong      []string
		generation int64
	}{
		{"nothing", func(p *corev1.Pod) {}, nil, 1},
		{"labels", func(p *corev1.Pod) { p.Labels = map[string]string{"a": "b"} }, nil, 1},
		{"image", func(p *corev1.Pod) { p.Spec.Containers[0].Image = "j" }, nil, 2},
		{"toleration added", func(p *corev1.Pod) { p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: "b"}) }, nil, 2},
		{"toleration removed", func(p *corev1.Pod) { p.Spec.Tolerations = nil }, []string{"spec.tolerations"}, 2},
		{"deadline", func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = ptr(int64(5)) }, nil, 2},
		{"gate removed", func(p *corev1.Pod) { p.Spec.SchedulingGates = nil }, nil, 2},
		{"gate added", func(p *corev1.Pod) {
			p.Spec.SchedulingGates = append(p.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: "h"})
		}, []string{"spec.schedulingGates[1].name"}, 2},
		{"bound", func(p *corev1.Pod) { p.Spec.NodeName = "w1" }, nil, 2}, // F90
		{"command", func(p *corev1.Pod) { p.Spec.Containers[0].Command = []string{"sh"} }, []string{"spec"}, 2},
		{"container added", func(p *corev1.Pod) {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "d", Image: "i"})
		}, []string{"spec.containers"}, 2},
		{"host network", func(p *corev1.Pod) { p.Spec.HostNetwork = true }, []string{"spec"}, 2},
		{"name", func(p *corev1.Pod) { p.Name = "b" }, []string{"metadata.name"}, 1},
		{"status", func(p *corev1.Pod) { p.Status.Phase = "Running" }, nil, 1},
		{"debug container", func(p *corev1.Pod) { p.Spec.EphemeralContainers = []corev1.EphemeralContainer{{}} }, []string{"spec"}, 2},
	} {
		got, wrong := update(t, stored, "", c.change)
		if !slices.Equal(wrong, c.wrong) || got.Generation != c.generation {
			t.Errorf("%s: errors at %q, generation %d; want %q, %d", c.name, wrong, got.Generation, c.wrong, c.generation)
		}
		if got.Status.Phase != corev1.PodPending {
			t.Errorf("%s: the main resource wrote what belongs to a subresource", c.name)
		}
	}
	bound := stored.DeepCopy()
	bound.Spec.NodeName = "w1"
	if _, wrong := update(t, bound, "", func(p *corev1.Pod) { p.Spec.NodeName = "w2" }); !slices.Equal(wrong, []string{"spec"}) {
		t.Errorf("moved to another node: %q", wrong) // F90: exactly one bind
	}
}

func TestPodSubresources(t *testing.T) {
	stored := load[*corev1.Pod](t, podText)
	stored.Status.QOSClass = corev1.PodQOSBestEffort
	got, wrong := update(t, stored, "status", func(p *corev1.Pod) {
		p.Spec.NodeName = "w9"
		p.Finalizers = []string{"a/b"}
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "n", UID: "u"}}
		p.Status = corev1.PodStatus{Phase: corev1.PodRunning}
	})
	if wrong != nil || got.Spec.NodeName != "" || !slices.Equal(got.Finalizers, []string{"a/b"}) || got.OwnerReferences != nil || got.Status.Phase != corev1.PodRunning ||
		got.Status.QOSClass != corev1.PodQOSBestEffort {
		t.Errorf("status: %q, %+v", wrong, got)
	}
	if _, wrong := update(t, stored, "status", func(p *corev1.Pod) { p.Status.QOSClass = corev1.PodQOSGuaranteed }); !slices.Equal(wrong, []string{"status.qosClass"}) {
		t.Errorf("class: %q", wrong)
	}
	debug := corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "d", Image: "tools"}, TargetContainerName: "web"}
	added, wrong := update(t, stored, "ephemeralcontainers", func(p *corev1.Pod) {
		p.Spec.EphemeralContainers = []corev1.EphemeralContainer{debug}
		p.Spec.Containers[0].Image = "other"
	})
	// What no node would run is refused, not left to wait.
	if !slices.Equal(wrong, []string{"spec.ephemeralContainers[0]"}) || added.Spec.Containers[0].Image != "nginx" || added.Spec.EphemeralContainers[0].ImagePullPolicy != corev1.PullAlways || added.Generation != stored.Generation+1 {
		t.Errorf("debug: %q, %+v", wrong, added.Spec)
	}
	if _, wrong := update(t, added, "ephemeralcontainers", func(p *corev1.Pod) { p.Spec.EphemeralContainers = nil }); !slices.Equal(wrong, []string{"spec.ephemeralContainers"}) {
		t.Errorf("debug container removed: %q", wrong)
	}
}

func TestCreate(t *testing.T) {
	for qos, res := range map[corev1.PodQOSClass]string{
		"BestEffort": "{}", "Burstable": "{requests: {cpu: 1}}", "Guaranteed": "{limits: {cpu: 1, memory: 1Gi}}",
	} {
		p := load[*corev1.Pod](t, "{metadata: {name: a}, status: {phase: Running, podIP: 1.2.3.4}, spec: {containers: [{name: c, image: i, resources: "+res+"}]}}")
		k := All().ByType(p)
		k.PrepareCreate(p)
		p.Spec.Priority = ptr(int32(1)) // what a mutating stage might do
		k.Default(p)
		if p.Status.Phase != corev1.PodPending || p.Status.PodIP != "" || p.Status.QOSClass != qos || p.Generation != 1 { // F56
			t.Errorf("%s: %+v, generation %d", qos, p.Status, p.Generation)
		}
	}
	mixed := load[*corev1.Pod](t, "{metadata: {name: a}, spec: {containers: [{name: c, image: i, resources: {limits: {cpu: 1, memory: 1}}}, {name: d, image: i}]}}")
	if q := podspec.QOSClass(&mixed.Spec); q != corev1.PodQOSBurstable {
		t.Errorf("one container without limits: %s", q)
	}
	ns := load[*corev1.Namespace](t, "{metadata: {name: a}}")
	k := All().ByType(ns)
	k.PrepareCreate(ns)
	if !slices.Equal(ns.Spec.Finalizers, []corev1.FinalizerName{"kubernetes"}) {
		t.Errorf("namespace %+v", ns)
	}
	if got, _ := update(t, ns, "", func(n *corev1.Namespace) { n.Spec.Finalizers = nil }); len(got.Spec.Finalizers) != 1 {
		t.Errorf("a replaced manifest took the finalizer away: %+v", got)
	}
	now := metav1.NewTime(t0)
	ns.DeletionTimestamp = &now
	k.PrepareDelete(ns)
	got, wrong := update(t, ns, "finalize", func(n *corev1.Namespace) { n.Spec.Finalizers = nil })
	if wrong != nil || len(got.Spec.Finalizers) != 0 || got.Status.Phase != corev1.NamespaceTerminating {
		t.Errorf("finalized: %q, %+v", wrong, got)
	}
}

func TestGracePeriod(t *testing.T) {
	for _, c := range []struct {
		node      string
		phase     corev1.PodPhase
		spec      *int64
		requested *int64
		want      int64
	}{
		{"", "Pending", nil, ptr(int64(10)), 0},
		{"w1", "Succeeded", nil, nil, 0},
		{"w1", "Failed", nil, nil, 0},
		{"w1", "Running", nil, nil, 30},
		{"w1", "Running", ptr(int64(5)), nil, 5},
		{"w1", "Running", ptr(int64(5)), ptr(int64(60)), 60},
		{"w1", "Running", ptr(int64(5)), ptr(int64(0)), 0},
		{"w1", "Running", nil, ptr(int64(-3)), 1},
	} {
		p := &corev1.Pod{Spec: corev1.PodSpec{NodeName: c.node, TerminationGracePeriodSeconds: c.spec}, Status: corev1.PodStatus{Phase: c.phase}}
		if got := podspec.PodGracePeriod(p, c.requested); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

func TestImmutable(t *testing.T) {
	d := load[*appsv1.Deployment](t, "{metadata: {name: a, generation: 1}, spec: {selector: {matchLabels: {a: b}}}}")
	if got, wrong := update(t, d, "", func(d *appsv1.Deployment) { d.Spec.Replicas = ptr(int32(3)); d.Status.Replicas = 9 }); wrong != nil || got.Generation != 2 || got.Status.Replicas != 0 {
		t.Errorf("scaled: %q, generation %d, %+v", wrong, got.Generation, got.Status)
	}
	if _, wrong := update(t, d, "", func(d *appsv1.Deployment) { d.Spec.Selector = &metav1.LabelSelector{} }); !slices.Equal(wrong, []string{"spec.selector"}) {
		t.Errorf("selector: %q", wrong)
	}
	if got, wrong := update(t, d, "status", func(d *appsv1.Deployment) { d.Status.Replicas = 2; d.Spec.Replicas = ptr(int32(3)) }); wrong != nil || got.Generation != 1 || *got.Spec.Replicas != 1 || got.Status.Replicas != 2 {
		t.Errorf("status: %q, %+v", wrong, got)
	}
	b := load[*rbacv1.RoleBinding](t, "{metadata: {name: a}, roleRef: {kind: Role, name: r}}")
	if _, wrong := update(t, b, "", func(b *rbacv1.RoleBinding) { b.RoleRef.Name = "s" }); !slices.Equal(wrong, []string{"roleRef"}) {
		t.Errorf("roleRef: %q", wrong)
	}
	c := load[*corev1.ConfigMap](t, "{metadata: {name: a}, immutable: true, data: {a: b}}")
	if _, wrong := update(t, c, "", func(c *corev1.ConfigMap) { c.Immutable = nil; c.Data["a"] = "c" }); !slices.Equal(wrong, []string{"immutable", "data"}) {
		t.Errorf("config map: %q", wrong)
	}
	claim := load[*corev1.PersistentVolumeClaim](t, "{metadata: {name: a}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}")
	if _, wrong := update(t, claim, "", func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "v"; c.Spec.StorageClassName = ptr("s") }); wrong != nil {
		t.Errorf("bound: %q", wrong)
	}
	claim.Spec.VolumeName = "v"
	if _, wrong := update(t, claim, "", func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "w" }); !slices.Equal(wrong, []string{"spec"}) {
		t.Errorf("bound elsewhere: %q", wrong)
	}
}

func TestServiceUpdate(t *testing.T) {
	stored := load[*corev1.Service](t, "{metadata: {name: a}, spec: {type: NodePort, clusterIP: 10.96.0.9, ports: [{port: 80, nodePort: 30080}]}}")
	held := func(s *corev1.Service) string { return fmt.Sprint(core.ServiceReservations(s)) }
	const all = "[{clusterips 10.96.0.9 spec.clusterIPs[0]} {nodeports TCP-30080 spec.ports[0].nodePort}]"
	if got := held(stored); got != all {
		t.Errorf("reserved %s", got)
	}
	for _, c := range []struct {
		name   string
		change func(*corev1.Service)
		held   string
		wrong  []string
	}{
		{"a manifest without addresses", func(s *corev1.Service) {
			s.Spec = corev1.ServiceSpec{Type: s.Spec.Type, Ports: []corev1.ServicePort{{Port: 80}}}
		}, all, nil},
		{"to ClusterIP", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP }, "[{clusterips 10.96.0.9 spec.clusterIPs[0]}]", nil},
		{"to ExternalName", func(s *corev1.Service) { s.Spec.Type, s.Spec.ExternalName = "ExternalName", "a.b" }, "[]", nil},
		{"another address", func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.96.0.10", []string{"10.96.0.10"} },
			"[{clusterips 10.96.0.10 spec.clusterIPs[0]} {nodeports TCP-30080 spec.ports[0].nodePort}]", []string{"spec.clusterIPs[0]"}},
	} {
		got, wrong := update(t, stored, "", c.change)
		if held(got) != c.held || !slices.Equal(wrong, c.wrong) {
			t.Errorf("%s: holds %s, errors at %q", c.name, held(got), wrong)
		}
		if errs := All().ByType(got).Validate(got); len(errs) > 0 {
			t.Errorf("%s: %v", c.name, errs)
		}
	}
}
