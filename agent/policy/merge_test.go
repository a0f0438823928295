package policy

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/agent"
)

// Whatever is merged or exceeds the limit of merging, the rules allow the connections that
// Kubernetes' documentation allows.
func TestMergedAgainstOracle(t *testing.T) {
	for trial := range 60 {
		seed := rand.Uint64()
		rnd := rand.New(rand.NewPCG(seed, 3))
		places := town()
		for _, p := range places[:5] {
			p.namespace, p.labels = pick(rnd, "a", "b"), randomLabels(rnd)
			p.ports = []NamedPort{{"http", "tcp", uint16(pick(rnd, 80, 8080))},
				{"dns", "udp", uint16(pick(rnd, 53, 5000))}}
		}
		var objects []*networkingv1.NetworkPolicy
		var policies []*policy
		groups := map[string]*v1.Endpoints{}
		for i := range rnd.IntN(40) {
			o := randomPolicy(rnd, fmt.Sprint("p", i))
			for j := range o.Spec.Ingress { // many lists of ports, so that they become part of sets
				for k := range o.Spec.Ingress[j].Ports {
					if p := &o.Spec.Ingress[j].Ports[k]; p.Port != nil && p.Port.Type == intstr.Int &&
						p.EndPort == nil {
						p.Port = new(intstr.FromInt(pick(rnd, 53, 80, 5000, 5432, 8080, 9090, 32000, 32768) +
							rnd.IntN(3)))
					}
				}
			}
			sent, has := grouped(o, places)
			for name, g := range has {
				groups[name] = g
			}
			p, err := parsePolicy(sent)
			must(t, err)
			objects, policies = append(objects, o), append(policies, p)
		}
		for _, limit := range []int{mergedLimit, rnd.IntN(20)} {
			r := compileRules(local(places), policies).fillSets(&setFiller{nil, func(string) bool { return true },
				func(name string) (*v1.Endpoints, bool) {
					g, ok := groups[name]
					return g, ok
				}, map[setSource]map[string]bool{}, limit})
			j := judged{t, r}
			for _, a := range everyPair(places) {
				if got, may := j.passes(a), permitted(objects, a); got != may {
					t.Fatalf("seed %d, trial %d, room for %d: %s: the rules say %v, the documents %v", seed, trial,
						limit, title(a), got, may)
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

// The number of rules for a first packet does not depend on the number of policies, whether their
// ports are equal, different, or for ipBlocks.
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
			return networkingv1.NetworkPolicyPeer{
				IPBlock: &networkingv1.IPBlock{CIDR: fmt.Sprintf("10.%d.%d.0/25", i>>8, i&255)}}
		}, func(int) int32 { return 80 }, 4},
	} {
		var policies []*policy
		for i := range 1000 {
			name := fmt.Sprint("group-", i)
			groups[name] =
				&v1.Endpoints{Subsets: []v1.EndpointSubset{
					{Addresses: []v1.EndpointAddress{{IP: fmt.Sprintf("10.9.%d.%d", i>>8, i&255)}}}}}
			peer := networkingv1.NetworkPolicyPeer{PodSelector: &metav1.LabelSelector{}}
			if c.peer != nil {
				peer = c.peer(i)
			}
			p, err := parsePolicy(&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "a",
				Name: fmt.Sprint("p", i), Annotations: map[string]string{agent.AddressGroups: name}},
				Spec: networkingv1.NetworkPolicySpec{
					Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{peer},
						Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(c.port(i)))}}}}}})
			must(t, err)
			policies = append(policies, p)
		}
		r := compileRules([]Pod{{Namespace: "a", Addresses: addrs("10.88.0.10")}}, policies).
			withSets(nil, func(string) bool {
				return true
			}, func(name string) (*v1.Endpoints, bool) { g, ok := groups[name]; return g, ok })
		for name, lines := range r.chains {
			if len(lines) > c.most {
				t.Errorf("%s: chain %s has %d rules", c.name, name, len(lines))
			}
		}
	}
}

// Sets of many address ranges, and of addresses with ports, are stored unchanged in the kernel, in
// both families. The listing by nft is not considered damage, and the sets allow the connections of
// the policies.
func TestMergedSetsInTheKernel(t *testing.T) {
	r := settled(t)
	open := denyAll("a")
	for i := range 12 {
		port := []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt(80 + i))}}
		open.Spec.Ingress = append(open.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{Ports: port,
			From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{},
				NamespaceSelector: &metav1.LabelSelector{MatchLabels: nsLabels[[]string{"b", "c"}[i%2]]}},
				{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": fmt.Sprint("p", i)}}}}})
		for _, cidr := range []string{fmt.Sprintf("10.%d.0.0/16", 100+2*i), fmt.Sprintf("10.89.%d.7/32", 2*i),
			fmt.Sprintf("fd00:%x::/32", i), fmt.Sprintf("fd89::%x/128", 2*i+1)} {
			peer := networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: cidr}}
			if i == 3 {
				peer.IPBlock.CIDR = map[bool]string{true: "fd00:ff::/32", false: "11.0.0.0/8"}[strings.Contains(cidr,
					":")]
				peer.IPBlock.Except = map[bool][]string{true: {"fd00:ff:1::/48"},
					false: {"11.0.0.9/32", "11.2.0.0/15"}}[strings.Contains(cidr, ":")]
			}
			open.Spec.Egress = append(open.Spec.Egress,
				networkingv1.NetworkPolicyEgressRule{To: []networkingv1.NetworkPolicyPeer{peer}})
		}
	}
	r.put(open)
	r.start(t, nil)
	r.guard(t)
	r.settle(t)
	table := r.nft(t, "-s", "list", "table", "inet", Table)
	for _, set := range []string{"set blocks-4-", "set blocks-6-", "set ports-4-", "set ports-6-"} {
		if !strings.Contains(table, set) {
			t.Errorf("there is no %s:\n%s", set, table)
		}
	}
	if err := r.differs(t); err != nil {
		t.Errorf("what was made is taken for damage: %v\n%s", err, table)
	}
	r.judge(t, r.every(), func(a try) bool { return permitted([]*networkingv1.NetworkPolicy{open}, a) })
}
