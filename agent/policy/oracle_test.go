package policy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/test/testenv/space"
)

// permitted reports whether Kubernetes' documentation allows a connection.
func permitted(policies []*networkingv1.NetworkPolicy, a try) bool {
	if a.from != nil && a.from.local && !passes(policies, networkingv1.PolicyTypeEgress, a.from, a.to,
		a.server, a.to, a) {
		return false
	}
	if a.to != nil && a.to.local && a.from != nil {
		return passes(policies, networkingv1.PolicyTypeIngress, a.to, a.from, a.client, a.to, a)
	}
	return true
}

// passes evaluates one direction for pod own and its peer. ip and server determine the destination.
func passes(
	policies []*networkingv1.NetworkPolicy, kind networkingv1.PolicyType, own, peer *place, ip netip.Addr,
	server *place, a try,
) bool {
	isolated := false
	for _, p := range policies {
		if p.Namespace != own.namespace || !matches(&p.Spec.PodSelector, own.labels) || !concerns(p, kind) {
			continue
		}
		isolated = true
		if kind == networkingv1.PolicyTypeIngress {
			for _, r := range p.Spec.Ingress {
				if meets(p, r.From, peer, ip) && portMeets(r.Ports, server, a) {
					return true
				}
			}
			continue
		}
		for _, r := range p.Spec.Egress {
			for i := range max(1, len(r.To)) {
				to := r.To
				if len(to) > 0 {
					to = to[i : i+1]
				}
				if meets(p, to, peer, ip) && portMeets(r.Ports, server, a) {
					return true
				}
			}
		}
	}
	return !isolated
}

func concerns(p *networkingv1.NetworkPolicy, kind networkingv1.PolicyType) bool {
	if len(p.Spec.PolicyTypes) == 0 {
		return kind == networkingv1.PolicyTypeIngress || len(p.Spec.Egress) > 0
	}
	return slices.Contains(p.Spec.PolicyTypes, kind)
}

func meets(p *networkingv1.NetworkPolicy, peers []networkingv1.NetworkPolicyPeer, other *place, ip netip.Addr) bool {
	for i := range peers {
		b := peers[i].IPBlock
		if b == nil {
			if other != nil && peerSelects(p.Namespace, &peers[i], other) {
				return true
			}
			continue
		}
		if netip.MustParsePrefix(b.CIDR).Contains(ip) && !slices.ContainsFunc(b.Except, func(e string) bool {
			return netip.MustParsePrefix(e).Contains(ip)
		}) {
			return true
		}
	}
	return len(peers) == 0
}

// portMeets reports whether a port of a rule is that of the attempt. Names are those of the ports of the server's containers.
func portMeets(ports []networkingv1.NetworkPolicyPort, server *place, a try) bool {
	for _, p := range ports {
		proto := "tcp"
		if p.Protocol != nil {
			proto = strings.ToLower(string(*p.Protocol))
		}
		if proto != a.proto {
			continue
		}
		switch {
		case p.Port == nil:
			return true
		case p.Port.Type == intstr.String:
			if server != nil && !server.stranger &&
				slices.Contains(server.ports, NamedPort{p.Port.StrVal, a.proto, uint16(a.port)}) {
				return true
			}
		case p.EndPort != nil:
			if a.port >= p.Port.IntValue() && a.port <= int(*p.EndPort) {
				return true
			}
		case a.port == p.Port.IntValue():
			return true
		}
	}
	return len(ports) == 0
}

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

func randomLabels(r *rand.Rand) map[string]string {
	return map[string]string{"app": pick(r, "web", "db"), "tier": pick(r, "1", "2")}
}

func randomSelector(r *rand.Rand) *metav1.LabelSelector {
	return pick(r, &metav1.LabelSelector{},
		&metav1.LabelSelector{MatchLabels: map[string]string{"app": pick(r, "web", "db")}},
		&metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "tier",
			Operator: pick(r, metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn), Values: []string{"1"}}}},
		&metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: pick(r, "app", "none"),
			Operator: pick(r, metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist)}}})
}

func randomPeer(r *rand.Rand) networkingv1.NetworkPolicyPeer {
	var p networkingv1.NetworkPolicyPeer
	switch r.IntN(5) {
	case 0:
		p.PodSelector = randomSelector(r)
	case 1:
		p.NamespaceSelector = &metav1.LabelSelector{MatchLabels: pick(r, nil, map[string]string{"team": "x"},
			map[string]string{"env": "prod"})}
	case 2:
		p.PodSelector, p.NamespaceSelector = randomSelector(r),
			&metav1.LabelSelector{MatchLabels: pick(r, nil, map[string]string{"team": "y"})}
	case 3:
		p.IPBlock = pick(r, &networkingv1.IPBlock{CIDR: "10.88.0.0/24",
			Except: pick(r, nil, []string{"10.88.0.10/32", "10.88.0.12/31"})},
			&networkingv1.IPBlock{CIDR: "0.0.0.0/0",
				Except: pick(r, nil, []string{"10.88.0.0/16"}, []string{"10.89.0.128/25", "10.89.0.0/24"})},
			&networkingv1.IPBlock{CIDR: "10.89.0.7/32"}, &networkingv1.IPBlock{CIDR: "10.89.0.128/25"})
	default:
		p.IPBlock = pick(r, &networkingv1.IPBlock{CIDR: "fd88::/64", Except: pick(r, nil, []string{"fd88::a/127"})},
			&networkingv1.IPBlock{CIDR: "::/0", Except: pick(r, nil, []string{"fd89::/64"})},
			&networkingv1.IPBlock{CIDR: "fd89::80/121"})
	}
	return p
}

func randomPort(r *rand.Rand) networkingv1.NetworkPolicyPort {
	var p networkingv1.NetworkPolicyPort
	p.Protocol = pick(r, nil, new(v1.ProtocolTCP), new(v1.ProtocolUDP), new(v1.ProtocolSCTP))
	switch r.IntN(5) {
	case 0:
	case 1:
		p.Port = new(intstr.FromString(pick(r, "http", "dns", "nobody")))
	case 2:
		p.Port, p.EndPort = new(intstr.FromInt32(80)), new(pick[int32](r, 80, 81, 9000))
	default:
		p.Port = new(intstr.FromInt32(pick[int32](r, 80, 81, 8080)))
	}
	return p
}

func some[T any](r *rand.Rand, most int, one func(*rand.Rand) T) []T {
	var out []T
	for range r.IntN(most + 1) {
		out = append(out, one(r))
	}
	return out
}

func randomPolicy(r *rand.Rand, name string) *networkingv1.NetworkPolicy {
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: pick(r, "a", "b"), Name: name}}
	p.Spec.PodSelector = *randomSelector(r)
	p.Spec.PolicyTypes = pick(r, nil, []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
		[]networkingv1.PolicyType{networkingv1.PolicyTypeEgress},
		[]networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress})
	p.Spec.Ingress = some(r, 2, func(r *rand.Rand) networkingv1.NetworkPolicyIngressRule {
		return networkingv1.NetworkPolicyIngressRule{From: some(r, 2, randomPeer), Ports: some(r, 2, randomPort)}
	})
	p.Spec.Egress = some(r, 2, func(r *rand.Rand) networkingv1.NetworkPolicyEgressRule {
		return networkingv1.NetworkPolicyEgressRule{To: some(r, 2, randomPeer), Ports: some(r, 2, randomPort)}
	})
	return p
}

func randomPlaces(r *rand.Rand, places []*place) {
	for _, p := range places {
		p.labels = randomLabels(r)
		switch {
		case !p.local:
			p.namespace = "c"
		case p.namespace == "":
			p.namespace = pick(r, "a", "b")
		}
		if p.ports != nil {
			continue // immutable, like the namespace
		}
		p.ports = []NamedPort{{"http", "tcp", uint16(pick(r, 80, 8080))}, {"dns", "udp", uint16(pick(r, 80, 81))}}
		if p.stranger {
			p.ports = nil
		}
	}
}

// every returns all attempts that are possible on a site.
func (s *site) every() []try {
	var out []try
	add := func(from, to *place, client, server []netip.Addr) {
		for f := range 2 {
			for _, proto := range []string{"tcp", "udp"} {
				for _, port := range testPorts {
					out = append(out, try{from: from, to: to, client: client[f], server: server[f],
						proto: proto, port: port})
				}
			}
		}
	}
	for _, from := range s.places {
		for _, to := range s.places {
			if from != to && (from.local || to.local) {
				add(from, to, from.addresses, to.addresses)
			}
		}
		if from.local {
			add(from, nil, from.addresses, s.gateway)
			add(nil, from, s.gateway, from.addresses)
		}
	}
	return out
}

// judge makes the attempts and compares their results with may. Attempts that must fail are made
// first, so that they have had at least as much time as all others when they are checked.
func (r *rig) judge(t *testing.T, attempts []try, may func(try) bool) (allowed, denied int) {
	t.Helper()
	must(t, space.In(r.node, func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
	var closed, open []*try
	for i := range attempts {
		if a := &attempts[i]; may(*a) {
			open = append(open, a)
		} else {
			closed = append(closed, a)
		}
	}
	for _, a := range slices.Concat(closed, open) {
		ns := r.node
		if a.from != nil {
			ns = a.from.ns
		}
		must(t, space.In(ns, a.begin))
		defer a.end()
	}
	for _, a := range open {
		if !a.reached(patience) {
			t.Errorf("%s does not get through", a)
		}
		if t.Failed() {
			return
		}
	}
	for _, a := range closed {
		if a.reached(0) {
			t.Errorf("%s gets through", a)
		}
	}
	return len(open), len(closed)
}

// With random pods, policies and groups, exactly the connections that Kubernetes' documentation
// allows are established in the kernel, through many changes of the same table.
func TestRandomAgainstOracle(t *testing.T) {
	needsKernel(t)
	trials := 16
	if testing.Short() {
		trials = 3
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	r := newRig(newSite(t, 4))
	randomPlaces(rnd, r.places)
	r.putPods()
	r.start(t, nil)
	r.guard(t)
	allowed, denied := 0, 0
	var policies []*networkingv1.NetworkPolicy
	for trial := range trials {
		if rnd.IntN(3) == 0 {
			randomPlaces(rnd, r.places)
			r.putPods()
		}
		// Some policies remain, some are removed, some change under the same name.
		policies = slices.DeleteFunc(policies, func(*networkingv1.NetworkPolicy) bool { return rnd.IntN(3) == 0 })
		for i := range rnd.IntN(4) {
			p := randomPolicy(rnd, fmt.Sprint("p", i))
			policies = slices.DeleteFunc(policies, func(o *networkingv1.NetworkPolicy) bool {
				return o.Name == p.Name && o.Namespace == p.Namespace
			})
			policies = append(policies, p)
		}
		r.put(policies...)
		r.settle(t)
		a, d := r.judge(t, r.every(), func(a try) bool { return permitted(policies, a) })
		allowed, denied = allowed+a, denied+d
		if t.Failed() {
			for _, p := range policies {
				t.Logf("%+v", p)
			}
			for _, p := range r.places {
				t.Logf("%+v", p)
			}
			t.Fatalf("trial %d", trial)
		}
	}
	t.Logf("%d connections were made, %d were not", allowed, denied)
}
