package proxy

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
)

// hint returns the endpoint with hints for a zone and a node.
func hint(e discoveryv1.Endpoint, zone, node string) discoveryv1.Endpoint {
	e.Hints = &discoveryv1.EndpointHints{}
	if zone != "" {
		e.Hints.ForZones = []discoveryv1.ForZone{{Name: zone}}
	}
	if node != "" {
		e.Hints.ForNodes = []discoveryv1.ForNode{{Name: node}}
	}
	return e
}

// F117: hints keep traffic on the node or in the zone, and never leave a node without a backend.
// The policy Local takes precedence.
func TestHints(t *testing.T) {
	here := endpoint("10.244.0.2", "w1", true, true, false)
	near := endpoint("10.244.1.2", "w2", true, true, false)
	far := endpoint("10.244.2.2", "w3", true, true, false)
	unready := endpoint("10.244.0.9", "w1", false, false, false)
	endingHere := endpoint("10.244.0.3", "w1", false, true, true)
	local := v1.ServiceInternalTrafficPolicyLocal
	internalLocal := func(s *v1.Service) { s.Spec.InternalTrafficPolicy = &local }
	externalLocal := func(s *v1.Service) { s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal }
	const all = "10.244.0.2:8080 10.244.1.2:8080 10.244.2.2:8080"
	for name, c := range map[string]struct {
		change            func(*v1.Service)
		at                Location
		endpoints         []discoveryv1.Endpoint
		internal, outside string
	}{
		"the zone's": {nil, Location{"w1", "a"}, []discoveryv1.Endpoint{hint(here, "a", ""), hint(near, "a", ""), hint(far, "b", "")},
			"10.244.0.2:8080 10.244.1.2:8080", "10.244.0.2:8080 10.244.1.2:8080"},
		"the hint counts, not where the endpoint is": {nil, Location{"w1", "a"}, []discoveryv1.Endpoint{hint(here, "b", ""), hint(near, "b", ""), hint(far, "a", "")},
			"10.244.2.2:8080", "10.244.2.2:8080"},
		"the node's": {nil, Location{"w1", "a"}, []discoveryv1.Endpoint{hint(here, "a", "w1"), hint(near, "a", "w2"), hint(far, "b", "w3")},
			"10.244.0.2:8080", "10.244.0.2:8080"},
		"no endpoint of the node, so the zone's": {nil, Location{"w9", "a"}, []discoveryv1.Endpoint{hint(here, "a", "w1"), hint(near, "a", "w2"), hint(far, "b", "w3")},
			"10.244.0.2:8080 10.244.1.2:8080", "10.244.0.2:8080 10.244.1.2:8080"},
		"neither node nor zone, so all": {nil, Location{"w9", "z"}, []discoveryv1.Endpoint{hint(here, "a", "w1"), hint(near, "a", "w2"), hint(far, "b", "w3")}, all, all},
		"a node without a zone":         {nil, Location{"w1", ""}, []discoveryv1.Endpoint{hint(here, "a", ""), hint(near, "a", ""), hint(far, "b", "")}, all, all},
		"one has no hint, so none counts": {nil, Location{"w1", "a"}, []discoveryv1.Endpoint{hint(here, "a", ""), near, hint(far, "b", "")},
			all, all},
		"one has no hint of a node, so zones count": {nil, Location{"w1", "a"}, []discoveryv1.Endpoint{hint(here, "a", "w1"), hint(near, "a", ""), hint(far, "b", "w3")},
			"10.244.0.2:8080 10.244.1.2:8080", "10.244.0.2:8080 10.244.1.2:8080"},
		"of those that are not ready none is asked": {nil, Location{"w1", "a"}, []discoveryv1.Endpoint{hint(here, "a", ""), unready, hint(far, "b", "")},
			"10.244.0.2:8080", "10.244.0.2:8080"},
		"only unready ones are for the zone, so all": {nil, Location{"w1", "a"}, []discoveryv1.Endpoint{hint(unready, "a", ""), hint(near, "b", ""), hint(far, "b", "")},
			"10.244.1.2:8080 10.244.2.2:8080", "10.244.1.2:8080 10.244.2.2:8080"},
		"internal local wins": {internalLocal, Location{"w1", "a"}, []discoveryv1.Endpoint{hint(here, "b", ""), hint(near, "a", ""), hint(far, "a", "")},
			"10.244.0.2:8080", "10.244.1.2:8080 10.244.2.2:8080"},
		"external local wins": {externalLocal, Location{"w1", "a"}, []discoveryv1.Endpoint{hint(here, "b", ""), hint(near, "a", ""), hint(far, "a", "")},
			"10.244.1.2:8080 10.244.2.2:8080", "10.244.0.2:8080"},
		"local with only one that ends, while others are ready elsewhere": {externalLocal, Location{"w1", "a"}, []discoveryv1.Endpoint{endingHere, near},
			"10.244.1.2:8080", "10.244.0.3:8080"},
		"local with one that ends beside a ready one": {internalLocal, Location{"w1", "a"}, []discoveryv1.Endpoint{endingHere, here, near},
			"10.244.0.2:8080", "10.244.0.2:8080 10.244.1.2:8080"},
	} {
		t.Run(name, func(t *testing.T) {
			svc := service("a", "10.96.0.10", 30080)
			if c.change != nil {
				c.change(svc)
			}
			p := only(t, Compute([]*v1.Service{svc}, []*discoveryv1.EndpointSlice{slice("a", c.endpoints...)}, c.at))
			if got := addresses(p.Cluster); got != c.internal {
				t.Errorf("cluster traffic goes to %q, want %q", got, c.internal)
			}
			if got := addresses(p.taking()); got != c.outside {
				t.Errorf("outside traffic goes to %q, want %q", got, c.outside)
			}
		})
	}
}

// F117: the rules follow the zone of the node itself. A change of another node changes no rules.
func TestRulesFollowTheZone(t *testing.T) {
	objects := fake.NewCluster()
	node := func(name, zone string) *v1.Node {
		return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelTopologyZone: zone}}}
	}
	objects.Put(node("w1", "a"), service("web", "10.96.0.10", 0),
		slice("web", hint(endpoint("10.244.0.2", "w1", true, true, false), "a", ""), hint(endpoint("10.244.1.2", "w2", true, true, false), "b", "")))
	s := newState(nil, "w1")
	take := func(news agent.ObjectChanges) (changes []Change) {
		s.updateModel(objects, news)
		return s.model.UpdatePorts()
	}
	named := func(name string) (c agent.ObjectChanges) {
		c.AddKey(agent.ObjectKey{Kind: "Node", Name: name})
		return c
	}
	if take(agent.ObjectChanges{All: true}); addresses(only(t, s.model).Cluster) != "10.244.0.2:8080" {
		t.Error(addresses(only(t, s.model).Cluster))
	}
	if c := take(named("w0")); len(c) != 0 {
		t.Errorf("another node's zone changes %v", c)
	}
	objects.Put(node("w1", "b"))
	if c := take(named("w1")); len(c) != 1 || addresses(c[0].New.Cluster) != "10.244.1.2:8080" {
		t.Errorf("the node's own zone changes %v", c)
	}
}
