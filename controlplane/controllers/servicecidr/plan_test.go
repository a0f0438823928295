package servicecidr

import (
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"keelson.dev/keelson/controlplane/api/kinds/networking"
)

func serviceAt(name, address string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: address, ClusterIPs: []string{address}}}
}

// F117 F125: from any IPAddresses, and with repairs interrupted at any point, repairing in any
// order reaches a stable state. Each address in a range then belongs to one Service that has it; an
// event reports every other Service that has it.
func TestRepairComesToRest(t *testing.T) {
	ranges := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/24")}
	rapid.Check(t, func(t *rapid.T) {
		have := map[string]*networkingv1.IPAddress{}
		services := map[string]*corev1.Service{}
		address := rapid.SampledFrom([]string{"10.96.0.2", "10.96.0.3", "10.96.0.4", "10.97.0.2"})
		for _, name := range []string{"a", "b", "c"} {
			services[name] = serviceAt(name, address.Draw(t, name))
		}
		for range rapid.IntRange(0, 4).Draw(t, "addresses") {
			a := networking.NewServiceIPAddress(serviceAt(rapid.SampledFrom([]string{"a", "b", "c", "gone"}).Draw(t,
				"parent"), ""), address.Draw(t, "address"))
			switch rapid.IntRange(0, 3).Draw(t, "harm") {
			case 0:
				a.Labels = nil
			case 1:
				a.Spec.ParentRef.Resource = "gateways"
			}
			have[a.Name] = a
		}
		judge := func(s *corev1.Service) Fault {
			at := s.Spec.ClusterIP
			var parent *corev1.Service
			if a := have[at]; a != nil && a.Spec.ParentRef.Resource == "services" {
				parent = services[a.Spec.ParentRef.Name]
			}
			return Judge(s, at, ranges, have[at], parent)
		}
		mend := func(s *corev1.Service, crash bool) (changed bool) {
			f := judge(s)
			if f.Replace {
				delete(have, s.Spec.ClusterIP)
				if crash {
					return true
				}
			}
			if f.Create || f.Replace {
				have[s.Spec.ClusterIP] = networking.NewServiceIPAddress(s, s.Spec.ClusterIP)
			}
			return f.Create || f.Replace
		}
		for range rapid.IntRange(0, 6).Draw(t, "steps") { // any order, and some repairs are interrupted
			mend(services[rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "who")], rapid.Bool().Draw(t, "crash"))
		}
		for round := 0; ; round++ {
			changed := false
			for _, name := range []string{"a", "b", "c"} {
				changed = mend(services[name], false) || changed
			}
			if !changed {
				break
			}
			if round > 3 {
				t.Fatal("repairing does not come to rest")
			}
		}
		for _, s := range services {
			at := s.Spec.ClusterIP
			inside := networking.IsInRanges(netip.MustParseAddr(at), ranges)
			f, a := judge(s), have[at]
			switch {
			case !inside:
				if f.Reason != "ClusterIPOutOfRange" {
					t.Fatalf("%s outside of all ranges: %+v", at, f)
				}
			case a == nil || a.Labels[networkingv1.LabelManagedBy] != networking.IPAllocator ||
				services[a.Spec.ParentRef.Name].Spec.ClusterIP != at:
				t.Fatalf("the IPAddress of %s is %+v", at, a)
			case !networking.IsServiceIPAddress(a, s) && f.Reason != "ClusterIPAlreadyAllocated":
				t.Fatalf("a second Service at %s: %+v", at, f)
			case networking.IsServiceIPAddress(a, s) && f != (Fault{}):
				t.Fatalf("the Service that has %s: %+v", at, f)
			}
		}
	})
}

// F117 F125: from any interrupted state of a ServiceCIDR, each step is one write, there are few
// steps, and it is deleted only when no address needs it.
func TestServiceCIDRComesToRest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "more"},
			Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.97.0.0/24"}}}
		if rapid.Bool().Draw(t, "marked") {
			c.Finalizers = []string{"example.org/hold", Finalizer}
		}
		if rapid.Bool().Draw(t, "deleted") {
			c.DeletionTimestamp = &metav1.Time{}
		}
		if rapid.Bool().Draw(t, "was ready") {
			c.Status.Conditions = []metav1.Condition{{Type: networkingv1.ServiceCIDRConditionReady,
				Status: metav1.ConditionTrue, Reason: "Ready"}}
		}
		other := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "other"},
			Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{
				rapid.SampledFrom([]string{"10.97.0.0/16", "10.98.0.0/16"}).Draw(t, "other")}}}
		var used []netip.Addr
		if rapid.Bool().Draw(t, "used") {
			used = append(used, netip.MustParseAddr("10.97.0.9"))
		}
		needed := Needed(c, []*networkingv1.ServiceCIDR{c, other}, used)
		if want := len(used) > 0 && other.Spec.CIDRs[0] == "10.98.0.0/16"; needed != want {
			t.Fatalf("needed %v, want %v", needed, want)
		}
		for writes := 0; ; writes++ {
			step := Next(c, needed)
			if step.Finalizers != nil && step.Ready != nil {
				t.Fatalf("two writes at once: %+v", step)
			}
			if step.Finalizers == nil && step.Ready == nil {
				break
			}
			if writes > 3 {
				t.Fatalf("not at rest: %+v", step)
			}
			if step.Ready != nil {
				c.Status.Conditions = []metav1.Condition{*step.Ready}
			} else {
				c.Finalizers = step.Finalizers
			}
		}
		held := slices.Contains(c.Finalizers, Finalizer)
		if c.DeletionTimestamp == nil && (!held || len(networking.ServiceRanges(c)) != 1) ||
			c.DeletionTimestamp != nil && (held && !needed || len(networking.ServiceRanges(c)) != 0) {
			t.Fatalf("deleted %v, needed %v: %+v", c.DeletionTimestamp != nil, needed, c)
		}
	})
}
