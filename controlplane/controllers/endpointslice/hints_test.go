package endpointslice

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"
)

// node is a ready one with CPUs in a zone.
func node(name, zone string, cpus int64) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
		Labels: map[string]string{corev1.LabelTopologyZone: zone}},
		Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{corev1.ResourceCPU: *resource.NewQuantity(cpus,
			resource.DecimalSI)},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}}
}

// zonesOf returns the Nodes of two zones.
func zonesOf(nodes ...*corev1.Node) Nodes { return Nodes{Zone: twoZones, CPU: zoneCPUs(nodes)} }

// on puts pod number n on a node.
func on(n int, node string, change func(p *corev1.Pod)) *corev1.Pod {
	return pod(n, func(p *corev1.Pod) {
		p.Spec.NodeName = node
		if change != nil {
			change(p)
		}
	})
}

func distribution(how string) func(s *corev1.Service) {
	return func(s *corev1.Service) { s.Spec.TrafficDistribution = &how }
}

func auto(s *corev1.Service) {
	s.Annotations = map[string]string{corev1.AnnotationTopologyMode: "Auto"}
}

// showHints formats the hints of each endpoint: address zones/nodes, sorted.
func showHints(list []*discoveryv1.EndpointSlice) string {
	var out []string
	for _, s := range list {
		for _, e := range s.Endpoints {
			text := e.Addresses[0]
			if e.Hints != nil {
				for _, z := range e.Hints.ForZones {
					text += " zone=" + z.Name
				}
				for _, n := range e.Hints.ForNodes {
					text += " node=" + n.Name
				}
			}
			out = append(out, text)
		}
	}
	slices.Sort(out)
	return strings.Join(out, "; ")
}

var twoZones = map[string]string{"w1": "a", "w2": "b", "w3": ""}

// F116: ready endpoints have the hints that trafficDistribution requests, and lose them with it.
func TestTrafficDistribution(t *testing.T) {
	unready := func(p *corev1.Pod) { p.Status.Conditions = nil }
	pods := []*corev1.Pod{on(0, "w1", nil), on(1, "w2", nil), on(2, "w3", nil), on(3, "w1", unready)}
	const none = "10.244.0.1; 10.244.0.2; 10.244.0.3; 10.244.0.4"
	const zones = "10.244.0.1 zone=a; 10.244.0.2 zone=b; 10.244.0.3; 10.244.0.4"
	next := 0
	var have []*discoveryv1.EndpointSlice
	for _, c := range []struct {
		name   string
		change func(s *corev1.Service)
		want   string
	}{
		{"nothing asked", nil, none},
		{"the zone", distribution(corev1.ServiceTrafficDistributionPreferClose), zones},
		{"the node", distribution(corev1.ServiceTrafficDistributionPreferSameNode),
			"10.244.0.1 zone=a node=w1; 10.244.0.2 zone=b node=w2; 10.244.0.3 node=w3; 10.244.0.4"},
		{"the zone by its newer name", distribution(corev1.ServiceTrafficDistributionPreferSameZone), zones},
		{"nothing again", nil, none},
	} {
		svc := service(c.change)
		plan := Reconcile(svc, pods, have, zonesOf())
		have = apply(have, plan, &next)
		if got := showHints(have); got != c.want {
			t.Errorf("%s: hints\n%s\nwant\n%s", c.name, got, c.want)
		}
		again := Reconcile(svc, pods, have, zonesOf())
		if len(again.Create)+len(again.Update)+len(again.Delete) > 0 {
			t.Errorf("%s: not at rest: %+v", c.name, again)
		}
	}
}

// F116: with the annotation, endpoints are allocated by the CPUs of the zones, or not at all, and
// an event reports which.
func TestSharedOutAmongZones(t *testing.T) {
	two := zonesOf(node("w1", "a", 4), node("w2", "b", 4))
	crowd := []*corev1.Pod{on(0, "w1", nil), on(1, "w1", nil), on(2, "w1", nil), on(3, "w1", nil)}
	count := func(list []*discoveryv1.EndpointSlice, zone string) int {
		return strings.Count(showHints(list), "zone="+zone)
	}
	svc, next := service(auto), 0
	plan := Reconcile(svc, crowd, nil, two)
	have := apply(nil, plan, &next)
	if count(have, "a") != 2 || count(have, "b") != 2 {
		t.Errorf("four endpoints in one of two equal zones: %s", showHints(have))
	}
	if len(plan.HintEvents) != 1 || plan.HintEvents[0].Reason != hintsEnabled {
		t.Errorf("told: %+v", plan.HintEvents)
	}
	// One more where there are enough already: no other endpoint changes its zone.
	var dozen []*corev1.Pod
	for i := range 12 {
		dozen = append(dozen, on(i, "w1", nil))
	}
	have = apply(nil, Reconcile(svc, dozen, nil, two), &next)
	before := showHints(have)
	more := Reconcile(svc, append(slices.Clone(dozen), on(99, "w2", nil)), have, two)
	if got := showHints(apply(have, more, &next)); strings.Replace(got, "10.244.0.100 zone=b; ", "", 1) != before ||
		len(more.HintEvents) != 0 {
		t.Errorf("one more: %s, before %s, told %+v", got, before, more.HintEvents)
	}
	// The annotation has precedence over the field.
	both := service(func(s *corev1.Service) {
		auto(s)
		distribution(corev1.ServiceTrafficDistributionPreferSameNode)(s)
	})
	if got := showHints(Reconcile(both, crowd, nil, two).Create); strings.Contains(got, "node=") ||
		!strings.Contains(got, "zone=b") {
		t.Errorf("annotation and field: %s", got)
	}
	for name, c := range map[string]struct {
		nodes Nodes
		pods  []*corev1.Pod
		why   string
	}{
		"one zone": {zonesOf(node("w1", "a", 4)), crowd, "no ready nodes in two zones"},
		"a node without a zone": {zonesOf(node("w1", "a", 4), node("w2", "b", 4), node("w3", "", 4)),
			crowd, "no zone"},
		"a node without CPU":     {zonesOf(node("w1", "a", 4), node("w2", "b", 0)), crowd, "no allocatable CPU"},
		"fewer endpoints":        {two, crowd[:1], "1 ready endpoints for 2 zones"},
		"three cannot be halved": {two, crowd[:3], "without too few in one"},
		"an endpoint in no zone": {two, append(slices.Clone(crowd), on(8, "w1", nil), on(9, "w3", nil)), "in no zone"},
	} {
		plan := Reconcile(svc, c.pods, have, c.nodes)
		if got := showHints(apply(have, plan, &next)); strings.Contains(got, "zone=") {
			t.Errorf("%s: hints stay: %s", name, got)
		}
		if len(plan.HintEvents) != 1 || plan.HintEvents[0].Reason != hintsDisabled ||
			!strings.Contains(plan.HintEvents[0].Message, c.why) {
			t.Errorf("%s: told %+v", name, plan.HintEvents)
		}
	}
}

// F116: whatever pods, nodes and wishes come and go, one plan is enough: the next has nothing to write, which would go
// on for ever, and each endpoint is where the pods are.
func TestHintsComeToRest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		chance := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		var have []*discoveryv1.EndpointSlice
		next := 0
		for range 6 {
			var nodes []*corev1.Node
			byNode := map[string]string{}
			for i := range 1 + chance.IntN(6) {
				n := node(fmt.Sprint("w", i), string(rune('a'+chance.IntN(3))), int64(1+chance.IntN(8)))
				nodes, byNode[n.Name] = append(nodes, n), n.Labels[corev1.LabelTopologyZone]
			}
			zones := Nodes{Zone: byNode, CPU: zoneCPUs(nodes)}
			var pods []*corev1.Pod
			for i := range chance.IntN(220) {
				if chance.IntN(3) == 0 {
					continue
				}
				pods = append(pods, on(i, fmt.Sprint("w", chance.IntN(len(nodes))), func(p *corev1.Pod) {
					if chance.IntN(4) == 0 {
						p.Status.Conditions = nil
					}
				}))
			}
			svc := service([]func(*corev1.Service){nil, auto, auto, distribution("PreferClose"),
				distribution("PreferSameNode")}[chance.IntN(5)])
			have = apply(have, Reconcile(svc, pods, have, zones), &next)
			if got, want := show(have), show(apply(nil, Reconcile(svc, pods, nil, zones), &next)); got != want {
				t.Fatalf("got\n%s\nwant\n%s", got, want)
			}
			fairly(t, svc, have, zones.CPU)
			again := Reconcile(svc, pods, have, zones)
			if len(again.Create)+len(again.Update)+len(again.Delete) > 0 {
				t.Fatalf("%+v %v not at rest: %+v", svc.Annotations, ptr.Deref(svc.Spec.TrafficDistribution, ""), again)
			}
		}
	})
}

// fairly checks that either every ready endpoint has a zone hint and no zone has too few endpoints,
// or no endpoint has a hint.
func fairly(t *rapid.T, svc *corev1.Service, have []*discoveryv1.EndpointSlice, cpu map[string]int64) {
	if !wantsTopologyHints(svc) {
		return
	}
	count, ready, hinted := map[string]int{}, 0, 0
	for _, s := range have {
		for _, e := range s.Endpoints {
			if !*e.Conditions.Ready {
				if e.Hints != nil {
					t.Fatalf("a hint of an endpoint that is not ready: %+v", e)
				}
				continue
			}
			if ready++; e.Hints != nil {
				hinted++
				count[e.Hints.ForZones[0].Name]++
			}
		}
	}
	if hinted == 0 {
		return
	}
	for zone, least := range zoneMinimums(ready, cpu) {
		if hinted != ready || count[zone] < least {
			t.Fatalf("%d of %d endpoints are for a zone, %v by zone where CPUs are %v", hinted, ready, count, cpu)
		}
	}
}
