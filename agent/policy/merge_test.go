package policy

import (
	"fmt"
	"math/rand/v2"
	"testing"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/agent"
)

// F113: whatever is merged, and wherever there is no room for that, the rules let through what Kubernetes' words allow.
func TestMergedAgainstOracle(t *testing.T) {
	for trial := range 60 {
		seed := rand.Uint64()
		rnd := rand.New(rand.NewPCG(seed, 3))
		places := town()
		for _, p := range places[:5] {
			p.namespace, p.labels = pick(rnd, "a", "b"), randomLabels(rnd)
			p.ports = []NamedPort{{"http", "tcp", uint16(pick(rnd, 80, 8080))}, {"dns", "udp", uint16(pick(rnd, 53, 5000))}}
		}
		var objects []*networkingv1.NetworkPolicy
		var policies []*policy
		groups := map[string]*v1.Endpoints{}
		for i := range rnd.IntN(40) {
			o := randomPolicy(rnd, fmt.Sprint("p", i))
			for j := range o.Spec.Ingress { // many lists of ports, so that they go into sets
				for k := range o.Spec.Ingress[j].Ports {
					if p := &o.Spec.Ingress[j].Ports[k]; p.Port != nil && p.Port.Type == intstr.Int && p.EndPort == nil {
						p.Port = new(intstr.FromInt(pick(rnd, 53, 80, 5000, 5432, 8080, 9090, 32000, 32768) + rnd.IntN(3)))
					}
				}
			}
			sent, has := grouped(o, places)
			for name, g := range has {
				groups[name] = g
			}
			p, err := read(sent)
			must(t, err)
			objects, policies = append(objects, o), append(policies, p)
		}
		for _, limit := range []int{mergedLimit, rnd.IntN(20)} {
			r := compile(local(places), policies).filled(&filler{nil, func(string) bool { return true },
				func(name string) (*v1.Endpoints, bool) { g, ok := groups[name]; return g, ok }, map[source]map[string]bool{}, limit})
			j := judged{t, r}
			for _, a := range everyPair(places) {
				if got, may := j.passes(a), permitted(objects, a); got != may {
					t.Fatalf("seed %d, trial %d, room for %d: %s: the rules say %v, the documents %v", seed, trial, limit, title(a), got, may)
				}
			}
			elements := 0
			for _, s := range r.sets {
				if len(s.sources) > 1 {
					elements += len(s.elements)
				}
			}
			if elements > limit {
				t.Fatalf("seed %d: merged sets hold %d elements, %d may be", seed, elements, limit)
			}
		}
	}
}

// F113: how many rules a first packet meets does not depend on how many policies there are, be the ports the same, others
// for each, or in blocks.
func TestRulesDoNotGrowWithPolicies(t *testing.T) {
	groups := map[string]*v1.Endpoints{}
	for _, c := range []struct {
		name string
		peer func(i int) networkingv1.NetworkPolicyPeer
		port func(i int) int32
		most int
	}{
		{"groups with the same ports", nil, func(int) int32 { return 80 }, 4},
		{"groups with other ports each", nil, func(i int) int32 { return int32(1000 + 2*i) }, 4},
		{"blocks with the same ports", func(i int) networkingv1.NetworkPolicyPeer {
			return networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: fmt.Sprintf("10.%d.%d.0/25", i>>8, i&255)}}
		}, func(int) int32 { return 80 }, 4},
	} {
		var policies []*policy
		for i := range 1000 {
			name := fmt.Sprint("group-", i)
			groups[name] = &v1.Endpoints{Subsets: []v1.EndpointSubset{{Addresses: []v1.EndpointAddress{{IP: fmt.Sprintf("10.9.%d.%d", i>>8, i&255)}}}}}
			peer := networkingv1.NetworkPolicyPeer{PodSelector: &metav1.LabelSelector{}}
			if c.peer != nil {
				peer = c.peer(i)
			}
			p, err := read(&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: fmt.Sprint("p", i), Annotations: map[string]string{agent.AddressGroups: name}},
				Spec: networkingv1.NetworkPolicySpec{Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{peer},
					Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(c.port(i)))}}}}}})
			must(t, err)
			policies = append(policies, p)
		}
		r := compile([]Pod{{Namespace: "a", Addresses: addrs("10.88.0.10")}}, policies).
			withSets(nil, func(string) bool { return true }, func(name string) (*v1.Endpoints, bool) { g, ok := groups[name]; return g, ok })
		for name, lines := range r.chains {
			if len(lines) > c.most {
				t.Errorf("%s: chain %s has %d rules", c.name, name, len(lines))
			}
		}
	}
}
