package kinds_test

import (
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestCreate(t *testing.T) {
	for qos, res := range map[corev1.PodQOSClass]string{
		"BestEffort": "{}", "Burstable": "{requests: {cpu: 1}}", "Guaranteed": "{limits: {cpu: 1, memory: 1Gi}}",
	} {
		p := kindstest.Load[*corev1.Pod](t, "{metadata: {name: a}, status: {phase: Running, podIP: 1.2.3.4}, spec: "+
			"{containers: [{name: c, image: i, resources: "+res+"}]}}")
		k := kinds.All().ByType(p)
		k.Writes.PrepareCreate(p)
		p.Spec.Priority = new(int32(1)) // what a mutating stage might do
		k.Writes.Default(p)
		if p.Status.Phase != corev1.PodPending || p.Status.PodIP != "" || p.Status.QOSClass != qos ||
			p.Generation != 1 {
			// F56
			t.Errorf("%s: %+v, generation %d", qos, p.Status, p.Generation)
		}
	}
	mixed := kindstest.Load[*corev1.Pod](t, "{metadata: {name: a}, spec: {containers: [{name: c, image: i, resources: "+
		"{limits: {cpu: 1, memory: 1}}}, {name: d, image: i}]}}")
	if q := podspec.QOSClass(&mixed.Spec); q != corev1.PodQOSBurstable {
		t.Errorf("one container without limits: %s", q)
	}
	ns := kindstest.Load[*corev1.Namespace](t, "{metadata: {name: a}}")
	k := kinds.All().ByType(ns)
	k.Writes.PrepareCreate(ns)
	if !slices.Equal(ns.Spec.Finalizers, []corev1.FinalizerName{"kubernetes"}) {
		t.Errorf("namespace %+v", ns)
	}
	if got, _ := kindstest.RunUpdate(t, ns, "", func(n *corev1.Namespace) {
		n.Spec.Finalizers = nil
	}); len(got.Spec.Finalizers) != 1 {
		t.Errorf("a replaced manifest took the finalizer away: %+v", got)
	}
	now := metav1.NewTime(kindstest.Now)
	ns.DeletionTimestamp = &now
	k.Deletion.Prepare(ns)
	got, wrong := kindstest.RunUpdate(t, ns, "finalize", func(n *corev1.Namespace) { n.Spec.Finalizers = nil })
	if wrong != nil || len(got.Spec.Finalizers) != 0 || got.Status.Phase != corev1.NamespaceTerminating {
		t.Errorf("finalized: %q, %+v", wrong, got)
	}
}

func TestImmutable(t *testing.T) {
	d := kindstest.Load[*appsv1.Deployment](t,
		"{metadata: {name: a, generation: 1}, spec: {selector: {matchLabels: {a: b}}}}")
	if got, wrong := kindstest.RunUpdate(t, d, "", func(d *appsv1.Deployment) {
		d.Spec.Replicas = new(int32(3))
		d.Status.Replicas = 9
	}); wrong != nil || got.Generation != 2 || got.Status.Replicas != 0 {
		t.Errorf("scaled: %q, generation %d, %+v", wrong, got.Generation, got.Status)
	}
	if _, wrong := kindstest.RunUpdate(t, d, "", func(d *appsv1.Deployment) {
		d.Spec.Selector = &metav1.LabelSelector{}
	}); !slices.Equal(wrong, []string{"spec.selector"}) {
		t.Errorf("selector: %q", wrong)
	}
	if got, wrong := kindstest.RunUpdate(t, d, "status", func(d *appsv1.Deployment) {
		d.Status.Replicas = 2
		d.Spec.Replicas = new(int32(3))
	}); wrong != nil || got.Generation != 1 || *got.Spec.Replicas != 1 || got.Status.Replicas != 2 {
		t.Errorf("status: %q, %+v", wrong, got)
	}
	b := kindstest.Load[*rbacv1.RoleBinding](t, "{metadata: {name: a}, roleRef: {kind: Role, name: r}}")
	if _, wrong := kindstest.RunUpdate(t, b, "", func(b *rbacv1.RoleBinding) {
		b.RoleRef.Name = "s"
	}); !slices.Equal(wrong, []string{"roleRef"}) {
		t.Errorf("roleRef: %q", wrong)
	}
	c := kindstest.Load[*corev1.ConfigMap](t, "{metadata: {name: a}, immutable: true, data: {a: b}}")
	if _, wrong := kindstest.RunUpdate(t, c, "", func(c *corev1.ConfigMap) {
		c.Immutable = nil
		c.Data["a"] = "c"
	}); !slices.Equal(wrong, []string{"immutable", "data"}) {
		t.Errorf("config map: %q", wrong)
	}
	claim := kindstest.Load[*corev1.PersistentVolumeClaim](t,
		"{metadata: {name: a}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}")
	if _, wrong := kindstest.RunUpdate(t, claim, "", func(c *corev1.PersistentVolumeClaim) {
		c.Spec.VolumeName = "v"
		c.Spec.StorageClassName = new("s")
	}); wrong != nil {
		t.Errorf("bound: %q", wrong)
	}
	claim.Spec.VolumeName = "v"
	if _, wrong := kindstest.RunUpdate(t, claim, "", func(c *corev1.PersistentVolumeClaim) {
		c.Spec.VolumeName = "w"
	}); !slices.Equal(wrong, []string{"spec"}) {
		t.Errorf("bound elsewhere: %q", wrong)
	}
}
