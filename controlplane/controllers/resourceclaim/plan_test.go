package resourceclaim

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
)

func of[T any](v T) *T { return &v }

// devices holds the objects of a test's namespace.
type devices struct {
	claims    map[string]*resourcev1.ResourceClaim
	templates map[string]*resourcev1.ResourceClaimTemplate
}

func (d devices) cluster() Cluster {
	return Cluster{
		Claim: func(name string) (*resourcev1.ResourceClaim, bool) { c, ok := d.claims[name]; return c, ok },
		Template: func(name string) (*resourcev1.ResourceClaimTemplate, bool) {
			t, ok := d.templates[name]
			return t, ok
		},
	}
}

func gpuPod() *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u1"}, Spec: corev1.PodSpec{
		ResourceClaims: []corev1.PodResourceClaim{
			{Name: "gpu", ResourceClaimTemplateName: of("t")},
			{Name: "shared", ResourceClaimName: of("common")},
		}}}
}

func gpuTemplate() *resourcev1.ResourceClaimTemplate {
	return &resourcev1.ResourceClaimTemplate{Spec: resourcev1.ResourceClaimTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"l": "1"}, Annotations: map[string]string{"a": "2"}},
		Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{
			{Name: "r", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "gpu.example.com"}}}}}}}
}

// tell formats a plan as one line.
func tell(p PodPlan) string {
	var out []string
	for _, m := range p.Missing {
		out = append(out, "make "+m.Entry)
	}
	for _, t := range p.Troubles {
		out = append(out, t.Entry+": "+t.Why)
	}
	for _, s := range p.Statuses {
		out = append(out, "name "+s.Name)
	}
	for _, c := range p.Reserve {
		out = append(out, "reserve "+c.Name)
	}
	return strings.Join(out, "; ")
}

// A pod gets one claim for each template that it names, with the template's labels and spec, and
// its status names them. Another owner's claim is never used. The claims of a pod that was created
// with a node are reserved for it.
func TestPlanPod(t *testing.T) {
	d := devices{map[string]*resourcev1.ResourceClaim{}, map[string]*resourcev1.ResourceClaimTemplate{}}
	p := gpuPod()
	made := func() *resourcev1.ResourceClaim {
		t.Helper()
		plan := PlanPod(p, d.cluster())
		if len(plan.Missing) != 1 {
			t.Fatalf("missing: %s", tell(plan))
		}
		c := plan.Missing[0].Claim
		d.claims[c.Name] = c
		return c
	}
	var first, second *resourcev1.ResourceClaim
	for _, step := range []struct {
		what   string
		change func()
		want   string
	}{
		{"no template", func() {}, `gpu: resource claim template "t": not found`},
		{"the template comes", func() { d.templates["t"] = gpuTemplate() }, "make gpu"},
		{"the claim is made", func() { first = made() }, "name gpu"},
		{"it is named", func() { p.Status.ResourceClaimStatuses = PlanPod(p, d.cluster()).Statuses }, ""},
		{"the template goes", func() { delete(d.templates, "t") }, ""},
		{"the claim goes with it", func() {
			delete(d.claims, first.Name)
		}, `gpu: resource claim template "t": not found`},
		{"both come again", func() { d.templates["t"] = gpuTemplate(); second = made() }, ""},
		{"somebody takes the name", func() { second.OwnerReferences[0].UID = "u0" },
			"gpu: ResourceClaim ns/" + claimName(p, "gpu", 0) + " was not created for Pod ns/p (Pod is not owner)"},
		{"the status forgets it", func() { p.Status.ResourceClaimStatuses = nil }, "make gpu"},
		{"under another name", func() { second = made() }, "name gpu"},
		{"the pod has ended", func() { p.Status.Phase = corev1.PodFailed }, ""},
		{"the pod goes", func() { p.Status.Phase, p.DeletionTimestamp = "", &metav1.Time{Time: time.Unix(1, 0)} }, ""},
	} {
		step.change()
		if got := tell(PlanPod(p, d.cluster())); got != step.want {
			t.Errorf("%s: %q, want %q", step.what, got, step.want)
		}
	}
	if second.Name == first.Name {
		t.Error("a name that was taken was used")
	}
	ref := metav1.GetControllerOf(second)
	if ref == nil || ref.UID != "u1" || ref.Kind != "Pod" || second.Namespace != "ns" || second.Labels["l"] != "1" ||
		second.Annotations["a"] != "2" ||
		second.Annotations[resourcev1.PodResourceClaimAnnotation] != "gpu" ||
		second.Spec.Devices.Requests[0].Exactly.DeviceClassName != "gpu.example.com" {
		t.Errorf("claim %+v", second)
	}
}

func TestPlanPodReserves(t *testing.T) {
	p := gpuPod()
	p.Spec.ResourceClaims = p.Spec.ResourceClaims[1:]
	p.Spec.NodeName = "w1"
	common := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "common"}}
	d := devices{claims: map[string]*resourcev1.ResourceClaim{"common": common}}
	for _, step := range []struct {
		what   string
		change func()
		want   string
	}{
		{"no devices yet", func() {}, ""},
		{"it has some", func() { common.Status.Allocation = &resourcev1.AllocationResult{} }, "reserve common"},
		{"on its way to a node", func() { p.Spec.NodeName = "" }, ""},
		{"there", func() { p.Spec.NodeName = "w1" }, "reserve common"},
		{"as many as there may be", func() {
			for i := range resourcev1.ResourceClaimReservedForMaxSize {
				common.Status.ReservedFor = append(common.Status.ReservedFor,
					resourcev1.ResourceClaimConsumerReference{Resource: "pods", UID: "x", Name: fmt.Sprint(i)})
			}
		}, ""},
		{"reserved", func() {
			common.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods",
				Name: "p", UID: "u1"}}
		}, ""},
	} {
		step.change()
		if got := tell(PlanPod(p, d.cluster())); got != step.want {
			t.Errorf("%s: %q, want %q", step.what, got, step.want)
		}
	}
}

// The names are valid, however long the pod's is, and belong to one entry of one pod.
func TestClaimNames(t *testing.T) {
	seen := map[string]bool{}
	for _, pod := range []string{"p", strings.Repeat("x", 253)} {
		for _, entry := range []string{"gpu", strings.Repeat("y", 63)} {
			for try := range maxNames {
				name := claimName(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: pod, UID: "u"}}, entry, try)
				if errs := validation.IsDNS1123Subdomain(name); len(errs) > 0 || len(name) > 63 || seen[name] {
					t.Errorf("%q (%d): %v, seen %v", name, len(name), errs, seen[name])
				}
				seen[name] = true
			}
		}
	}
}

// From any state, a claim reaches a stable state. Devices are deallocated once and only when no pod
// may use them. Reservations of pods that may need the claim are never removed.
func TestPlanClaimProperty(t *testing.T) {
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 0))
		pods := map[string]UserState{"a": UserState(r.IntN(3)), "b": UserState(r.IntN(3)), "c": UserState(r.IntN(3))}
		c := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}
		if r.IntN(2) == 0 {
			c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "a", UID: "a",
				Controller: of(true)}}
		}
		if r.IntN(3) == 0 {
			c.DeletionTimestamp = &metav1.Time{}
		}
		needed, foreign := false, r.IntN(6) == 0
		ours := r.IntN(4) > 0
		if ours {
			c.Finalizers = []string{"else", resourcev1.Finalizer}
		}
		if r.IntN(4) > 0 {
			c.Status.Allocation = &resourcev1.AllocationResult{}
			for name := range pods {
				if r.IntN(2) == 0 {
					c.Status.ReservedFor = append(c.Status.ReservedFor,
						resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: name, UID: types.UID(name)})
					needed = needed || pods[name] == UserThere
				}
			}
			if foreign {
				c.Status.ReservedFor = append(c.Status.ReservedFor,
					resourcev1.ResourceClaimConsumerReference{APIGroup: "x", Resource: "jobs", Name: "j", UID: "j"})
			}
		}
		needed = needed || foreign && c.Status.Allocation != nil
		had, removed, steps := c.Status.Allocation != nil, false, 0
		reserved := len(c.Status.ReservedFor) > 0
		for ; ; steps++ {
			plan := PlanClaim(c, func(name, _ string) UserState { return pods[name] })
			if plan.Step == Remove {
				removed = true
			}
			if plan.Step == Nothing || plan.Step == Remove {
				break
			}
			if steps > 4 {
				t.Fatalf("seed %d: no end: %+v", seed, plan)
			}
			c = plan.Next
		}
		has := c.Status.Allocation != nil
		switch {
		case had && !has && (needed || !ours):
			t.Fatalf("seed %d: devices were taken: %+v", seed, c)
		case has && ours && !needed && (reserved || c.DeletionTimestamp != nil):
			t.Fatalf("seed %d: devices are kept for nobody: %+v", seed, c)
		case removed && (needed || pods["a"] == UserThere || len(c.OwnerReferences) == 0):
			t.Fatalf("seed %d: removed: %+v", seed, c)
		case !removed && !needed && c.DeletionTimestamp == nil && len(c.OwnerReferences) > 0 && pods["a"] != UserThere:
			t.Fatalf("seed %d: the claim of a pod that is no more stays: %+v", seed, c)
		case c.DeletionTimestamp != nil && !needed && len(c.Finalizers) > 0 &&
			c.Finalizers[len(c.Finalizers)-1] == resourcev1.Finalizer:
			t.Fatalf("seed %d: a deleted claim is held: %+v", seed, c)
		}
		for _, ref := range c.Status.ReservedFor {
			if ref.APIGroup == "" && pods[ref.Name] != UserThere {
				t.Fatalf("seed %d: reserved for %s, which is no more: %+v", seed, ref.Name, c)
			}
		}
	}
}
