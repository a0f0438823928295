package endpointslice

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
)

func byHand(subsets ...corev1.EndpointSubset) *corev1.Endpoints {
	return &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "db", UID: "e",
		Labels: map[string]string{"team": "a"},
		Annotations: map[string]string{"a": "b", corev1.LastAppliedConfigAnnotation: "{}",
			corev1.EndpointsLastChangeTriggerTime: "x"}}, Subsets: subsets}
}

func subset(port int32, ready, not string) corev1.EndpointSubset {
	s := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Name: "sql", Port: port, Protocol: corev1.ProtocolTCP}}}
	for ip := range strings.FieldsSeq(ready) {
		s.Addresses = append(s.Addresses, corev1.EndpointAddress{IP: ip})
	}
	for ip := range strings.FieldsSeq(not) {
		s.NotReadyAddresses = append(s.NotReadyAddresses, corev1.EndpointAddress{IP: ip})
	}
	return s
}

// mirrored formats slices: the family, addresses with their readiness, the port.
func mirrored(list []*discoveryv1.EndpointSlice) string {
	var out []string
	for _, s := range list {
		for _, e := range s.Endpoints {
			out = append(out, fmt.Sprintf("%s %s %v :%d", s.AddressType, e.Addresses[0], *e.Conditions.Ready,
				*s.Ports[0].Port))
		}
	}
	slices.Sort(out)
	return strings.Join(out, "; ")
}

// F116
func TestMirror(t *testing.T) {
	for _, c := range []struct {
		name    string
		subsets []corev1.EndpointSubset
		want    string
		skipped SkippedAddresses
	}{
		{"nobody", nil, "", SkippedAddresses{}},
		{"ready and not", []corev1.EndpointSubset{subset(1, "192.0.2.1 192.0.2.2", "192.0.2.3")},
			"IPv4 192.0.2.1 true :1; IPv4 192.0.2.2 true :1; IPv4 192.0.2.3 false :1", SkippedAddresses{}},
		{"both families", []corev1.EndpointSubset{subset(1, "192.0.2.1 2001:db8::1", "")},
			"IPv4 192.0.2.1 true :1; IPv6 2001:db8::1 true :1", SkippedAddresses{}},
		{"the same twice", []corev1.EndpointSubset{subset(1, "192.0.2.1", ""), subset(1, "192.0.2.1", "192.0.2.1")},
			"IPv4 192.0.2.1 true :1", SkippedAddresses{}},
		{"on two ports", []corev1.EndpointSubset{subset(1, "192.0.2.1", ""), subset(2, "192.0.2.1", "")},
			"IPv4 192.0.2.1 true :1; IPv4 192.0.2.1 true :2", SkippedAddresses{}},
		{"no address", []corev1.EndpointSubset{subset(1, "example.com 192.0.2.1", "")}, "IPv4 192.0.2.1 true :1",
			SkippedAddresses{Invalid: 1}},
	} {
		plan, skipped := Mirror(byHand(c.subsets...), nil)
		if got := mirrored(plan.Create); got != c.want || skipped != c.skipped ||
			len(plan.Update)+len(plan.Delete) > 0 {
			t.Errorf("%s: %q, skipped %+v, want %q, %+v", c.name, got, skipped, c.want, c.skipped)
		}
	}
	many := subset(1, "", "")
	for i := range MaxMirrored + 30 {
		many.NotReadyAddresses = append(many.NotReadyAddresses,
			corev1.EndpointAddress{IP: fmt.Sprintf("192.0.%d.%d", i/200, i%200+1)})
	}
	many.Addresses = []corev1.EndpointAddress{{IP: "198.51.100.1", Hostname: "db-0", NodeName: &many.Ports[0].Name}}
	plan, skipped := Mirror(byHand(many), nil)
	if len(plan.Create) != MaxMirrored/MaxEndpoints || skipped.TooMany != 31 ||
		!strings.Contains(mirrored(plan.Create), "IPv4 198.51.100.1 true :1") {
		t.Errorf("%d slices of %d addresses, %+v", len(plan.Create), MaxMirrored+31, skipped)
	}
	s := plan.Create[0]
	if ref := metav1.GetControllerOf(s); ref == nil || ref.Kind != "Endpoints" || ref.UID != "e" ||
		s.GenerateName != "db-" {
		t.Errorf("made as %+v", s.ObjectMeta)
	}
	if want := map[string]string{"team": "a", discoveryv1.LabelServiceName: "db",
		discoveryv1.LabelManagedBy: MirroredBy}; !maps.Equal(s.Labels, want) {
		t.Errorf("labels %v", s.Labels)
	}
	if !maps.Equal(s.Annotations, map[string]string{"a": "b"}) {
		t.Errorf("annotations %v", s.Annotations)
	}
}

func TestWhatIsMirrored(t *testing.T) {
	for name, c := range map[string]struct {
		svc  func(*corev1.Service)
		e    func(*corev1.Endpoints)
		want bool
	}{
		"kept by hand":       {want: true},
		"a selector":         {svc: func(s *corev1.Service) { s.Spec.Selector = map[string]string{"a": "b"} }},
		"a name outside":     {svc: func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeExternalName }},
		"made of pods":       {e: func(e *corev1.Endpoints) { e.Labels[endpointsManagedBy] = "endpoint-controller" }},
		"not to be mirrored": {e: func(e *corev1.Endpoints) { e.Labels[discoveryv1.LabelSkipMirror] = "true" }},
		"mirrored after all": {e: func(e *corev1.Endpoints) {
			e.Labels[discoveryv1.LabelSkipMirror] = "false"
		}, want: true},
		"an election": {e: func(e *corev1.Endpoints) { e.Annotations[leaderAnnotation] = "{}" }},
		"on its way out": {e: func(e *corev1.Endpoints) {
			e.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
		}},
	} {
		svc, e := service(c.svc), byHand()
		if c.e != nil {
			c.e(e)
		}
		if got := isMirrored(svc, e); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// F116: after any changes, the slices match the Endpoints, and then nothing more is written.
func TestMirrorsFollow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var have []*discoveryv1.EndpointSlice
		next := 0
		for range 4 {
			var subsets []corev1.EndpointSubset
			for range rapid.IntRange(0, 3).Draw(t, "subsets") {
				ips := func(what string) string {
					var out []string
					for _, n := range rapid.SliceOfN(rapid.IntRange(1, 250), 0, 150).Draw(t, what) {
						out = append(out, fmt.Sprint("192.0.2.", n))
					}
					return strings.Join(out, " ")
				}
				subsets = append(subsets, subset(int32(rapid.IntRange(1, 2).Draw(t, "port")), ips("ready"),
					ips("not ready")))
			}
			e := byHand(subsets...)
			e.Labels["n"] = fmt.Sprint(rapid.IntRange(0, 1).Draw(t, "label"))
			plan, _ := Mirror(e, have)
			have = apply(have, plan, &next)
			fresh, _ := Mirror(e, nil)
			if got, want := mirrored(have), mirrored(fresh.Create); got != want {
				t.Fatalf("got\n%s\nwant\n%s", got, want)
			}
			for _, s := range have {
				if len(s.Endpoints) == 0 || len(s.Endpoints) > MaxEndpoints || s.Labels["n"] != e.Labels["n"] {
					t.Fatalf("slice %s has %d endpoints and labels %v", s.Name, len(s.Endpoints), s.Labels)
				}
			}
			if p, _ := Mirror(e, have); len(p.Create)+len(p.Update)+len(p.Delete) > 0 {
				t.Fatalf("not at rest: %+v", p)
			}
		}
	})
}

// A slice whose creation returned no response exists twice after the next attempt: one of the two
// is deleted.
func TestMirrorMadeTwice(t *testing.T) {
	e, next := byHand(subset(1, "192.0.2.1 192.0.2.2", "192.0.2.3")), 0
	var have []*discoveryv1.EndpointSlice
	for range 2 {
		again, _ := Mirror(e, nil)
		have = apply(have, again, &next)
	}
	plan, _ := Mirror(e, have)
	have = apply(have, plan, &next)
	if want := "IPv4 192.0.2.1 true :1; IPv4 192.0.2.2 true :1; IPv4 192.0.2.3 false :1"; len(have) != 1 ||
		mirrored(have) != want {
		t.Errorf("%d slices say %q", len(have), mirrored(have))
	}
	if plan, _ := Mirror(e, have); len(plan.Create)+len(plan.Update)+len(plan.Delete) > 0 {
		t.Errorf("not at rest: %+v", plan)
	}
}
