package servicemodel

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"keelson.dev/keelson/agent/proxy/proxytest"
)

// F117: hints keep traffic on the node or in the zone, and never leave a node without a backend.
// The policy Local takes precedence.
func TestHints(t *testing.T) {
	here := proxytest.Endpoint("10.244.0.2", "w1", true, true, false)
	near := proxytest.Endpoint("10.244.1.2", "w2", true, true, false)
	far := proxytest.Endpoint("10.244.2.2", "w3", true, true, false)
	unready := proxytest.Endpoint("10.244.0.9", "w1", false, false, false)
	endingHere := proxytest.Endpoint("10.244.0.3", "w1", false, true, true)
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
		"the zone's": {nil, Location{"w1", "a"},
			[]discoveryv1.Endpoint{proxytest.Hint(here, "a", ""), proxytest.Hint(near, "a", ""),
				proxytest.Hint(far, "b", "")},
			"10.244.0.2:8080 10.244.1.2:8080", "10.244.0.2:8080 10.244.1.2:8080"},
		"the hint counts, not where the endpoint is": {nil, Location{"w1", "a"},
			[]discoveryv1.Endpoint{proxytest.Hint(here, "b", ""), proxytest.Hint(near, "b", ""),
				proxytest.Hint(far, "a", "")},
			"10.244.2.2:8080", "10.244.2.2:8080"},
		"the node's": {nil, Location{"w1", "a"},
			[]discoveryv1.Endpoint{proxytest.Hint(here, "a", "w1"), proxytest.Hint(near, "a", "w2"),
				proxytest.Hint(far, "b", "w3")},
			"10.244.0.2:8080", "10.244.0.2:8080"},
		"no endpoint of the node, so the zone's": {nil, Location{"w9", "a"},
			[]discoveryv1.Endpoint{proxytest.Hint(here, "a", "w1"), proxytest.Hint(near, "a", "w2"),
				proxytest.Hint(far, "b", "w3")},
			"10.244.0.2:8080 10.244.1.2:8080", "10.244.0.2:8080 10.244.1.2:8080"},
		"neither node nor zone, so all": {nil, Location{"w9", "z"},
			[]discoveryv1.Endpoint{proxytest.Hint(here, "a", "w1"), proxytest.Hint(near, "a", "w2"),
				proxytest.Hint(far, "b", "w3")}, all, all},
		"a node without a zone": {nil, Location{"w1", ""},
			[]discoveryv1.Endpoint{proxytest.Hint(here, "a", ""), proxytest.Hint(near, "a", ""),
				proxytest.Hint(far, "b", "")}, all, all},
		"one has no hint, so none counts": {nil, Location{"w1", "a"},
			[]discoveryv1.Endpoint{proxytest.Hint(here, "a", ""), near, proxytest.Hint(far, "b", "")},
			all, all},
		"one has no hint of a node, so zones count": {nil, Location{"w1", "a"},
			[]discoveryv1.Endpoint{proxytest.Hint(here, "a", "w1"), proxytest.Hint(near, "a", ""),
				proxytest.Hint(far, "b", "w3")},
			"10.244.0.2:8080 10.244.1.2:8080", "10.244.0.2:8080 10.244.1.2:8080"},
		"of those that are not ready none is asked": {nil, Location{"w1", "a"},
			[]discoveryv1.Endpoint{proxytest.Hint(here, "a", ""), unready, proxytest.Hint(far, "b", "")},
			"10.244.0.2:8080", "10.244.0.2:8080"},
		"only unready ones are for the zone, so all": {nil, Location{"w1", "a"},
			[]discoveryv1.Endpoint{proxytest.Hint(unready, "a", ""), proxytest.Hint(near, "b", ""),
				proxytest.Hint(far, "b", "")},
			"10.244.1.2:8080 10.244.2.2:8080", "10.244.1.2:8080 10.244.2.2:8080"},
		"internal local wins": {internalLocal, Location{"w1", "a"},
			[]discoveryv1.Endpoint{proxytest.Hint(here, "b", ""), proxytest.Hint(near, "a", ""),
				proxytest.Hint(far, "a", "")},
			"10.244.0.2:8080", "10.244.1.2:8080 10.244.2.2:8080"},
		"external local wins": {externalLocal, Location{"w1", "a"},
			[]discoveryv1.Endpoint{proxytest.Hint(here, "b", ""), proxytest.Hint(near, "a", ""),
				proxytest.Hint(far, "a", "")},
			"10.244.1.2:8080 10.244.2.2:8080", "10.244.0.2:8080"},
		"local with only one that ends, while others are ready elsewhere": {externalLocal, Location{"w1", "a"},
			[]discoveryv1.Endpoint{endingHere, near},
			"10.244.1.2:8080", "10.244.0.3:8080"},
		"local with one that ends beside a ready one": {internalLocal, Location{"w1", "a"},
			[]discoveryv1.Endpoint{endingHere, here, near},
			"10.244.0.2:8080", "10.244.0.2:8080 10.244.1.2:8080"},
	} {
		t.Run(name, func(t *testing.T) {
			svc := proxytest.Service("a", "10.96.0.10", 30080)
			if c.change != nil {
				c.change(svc)
			}
			p := only(t, Compute([]*v1.Service{svc}, []*discoveryv1.EndpointSlice{proxytest.Slice("a", c.endpoints...)},
				c.at))
			if got := addresses(p.Backends.Cluster); got != c.internal {
				t.Errorf("cluster traffic goes to %q, want %q", got, c.internal)
			}
			if got := addresses(p.taking()); got != c.outside {
				t.Errorf("outside traffic goes to %q, want %q", got, c.outside)
			}
		})
	}
}
