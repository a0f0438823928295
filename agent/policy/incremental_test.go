package policy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/knftables"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
)

// recorded is a table in memory that records the last transactions.
type recorded struct {
	*knftables.Fake
	said []string // one line per step
	fail error    // error of the next transaction
	deaf bool     // nothing is stored
}

func (r *recorded) Run(ctx context.Context, tx *knftables.Transaction) error {
	if err := r.fail; err != nil {
		r.fail = nil
		return err
	}
	for line := range strings.Lines(tx.String()) {
		r.said = append(r.said, strings.TrimSpace(line))
	}
	if r.deaf {
		return nil
	}
	return r.Fake.Run(ctx, tx)
}

// memory returns an enforcer with a table in memory, whose steps the test runs itself.
func memory(cluster *fake.Cluster) (*enforcerRun, *recorded) {
	e := New(Config{Objects: cluster, Sandboxes: sandboxes{}, Disabled: func() bool {
		return false
	}, Log: slog.New(slog.DiscardHandler)})
	nft := &recorded{Fake: knftables.NewFake(knftables.InetFamily, Table)}
	return &enforcerRun{e: e, nft: nft, filterBridges: func() error {
		return nil
	}, generation: func() (uint32, error) { return 0, nil }}, nft
}

func (t *enforcerRun) own(p *place) {
	t.e.mu.Lock()
	defer t.e.mu.Unlock()
	t.e.setAddresses(p.uid(), p.addresses)
}

// sorted returns the contents of a table: rules in their order, elements in alphabetical order.
func sorted(r *recorded) string {
	lines := strings.Split(r.Dump(), "\n")
	var elements []string
	lines = slices.DeleteFunc(lines, func(l string) bool {
		is := strings.HasPrefix(l, "add element")
		if is {
			elements = append(elements, l)
		}
		return is
	})
	slices.Sort(elements)
	return strings.Join(append(lines, elements...), "\n")
}

// After any history of changes, the table equals one that is created from the final state, and no
// change writes unrelated rules.
func TestIncrementalPoliciesAreFromScratch(t *testing.T) {
	for range 60 {
		seed := rand.Uint64()
		rnd := rand.New(rand.NewPCG(seed, 2))
		var places []*place
		for i := range 6 {
			places = append(places, &place{name: fmt.Sprint("p", i), local: i < 4,
				addresses: addrs(fmt.Sprintf("10.88.0.%d", 10+i), fmt.Sprintf("fd88::%x", 10+i))})
		}
		randomPlaces(rnd, places)
		r := &rig{site: &site{places: places}, cluster: fake.NewCluster(), shown: map[string]bool{},
			groups: map[string]bool{}}
		changes := r.cluster.Follow(t.Context(), "NetworkPolicy", "AddressGroup", "Pod")
		r.putPods()
		it, nft := memory(r.cluster)
		var policies []*networkingv1.NetworkPolicy
		for step := range 25 {
			switch rnd.IntN(4) {
			case 0:
				randomPlaces(rnd, places)
				r.putPods()
			case 1:
				it.own(pick(rnd, places...))
			case 2:
				if rnd.IntN(5) == 0 {
					nft.fail = errors.New("refused")
				}
			}
			policies = slices.DeleteFunc(policies, func(*networkingv1.NetworkPolicy) bool { return rnd.IntN(5) == 0 })
			p := randomPolicy(rnd, fmt.Sprint("p", rnd.IntN(3)))
			policies = append(slices.DeleteFunc(policies, func(o *networkingv1.NetworkPolicy) bool {
				return o.Name == p.Name && o.Namespace == p.Namespace
			}), p)
			r.put(policies...)
			due := <-changes
			if err := it.applyView(t.Context(), due, true); err != nil {
				due.All = true // as Run does after an error
				must(t, it.applyView(t.Context(), due, true))
			}
			again, scratch := memory(r.cluster)
			again.e.owners, again.e.addresses = it.e.owners, it.e.addresses
			must(t, again.applyView(t.Context(), agent.ObjectChanges{All: true}, true))
			if got, want := sorted(nft), sorted(scratch); got != want {
				t.Fatalf("seed %d, step %d:\n%s\nfrom scratch:\n%s", seed, step, got, want)
			}
			nft.said = nil
			must(t, it.applyView(t.Context(), agent.ObjectChanges{All: true}, true))
			if len(nft.said) > 0 {
				t.Fatalf("seed %d, step %d: nothing has changed, and was written:\n%s", seed, step,
					strings.Join(nft.said, "\n"))
			}
		}
	}
}

// With a thousand policies and groups of ten thousand addresses, a change of one group writes only
// its elements.
func TestManyPoliciesAndLargeGroups(t *testing.T) {
	cluster := fake.NewCluster()
	web := &place{name: "web", namespace: "a", local: true, labels: map[string]string{"app": "web"},
		addresses: addrs("10.88.0.10")}
	cluster.Put(web.object())
	large := func(n int, more ...string) *v1.Endpoints {
		g := &v1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: "large"}}
		for i := range n {
			more = append(more, fmt.Sprintf("10.%d.%d.%d", 90+i>>16, i>>8&255, i&255))
		}
		for _, ip := range more {
			g.Subsets = append(g.Subsets, v1.EndpointSubset{Addresses: []v1.EndpointAddress{{IP: ip}}})
		}
		return g
	}
	cluster.Put(large(10000))
	for i := range 1000 {
		cluster.Put(&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "a",
			Name: fmt.Sprintf("p%d", i), Annotations: map[string]string{agent.AddressGroups: "large"}},
			Spec: networkingv1.NetworkPolicySpec{Ingress: []networkingv1.NetworkPolicyIngressRule{
				{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}}}}}})
	}
	it, nft := memory(cluster)
	nft.deaf = true
	it.own(web)
	must(t, it.applyView(t.Context(), agent.ObjectChanges{All: true}, true))
	nft.said = nil
	cluster.Put(large(10000, "10.95.0.1"))
	due := agent.ObjectChanges{}
	due.AddKey(agent.ObjectKey{Kind: "AddressGroup", Name: "large"})
	must(t, it.applyView(t.Context(), due, true))
	if len(nft.said) != 1 || !strings.Contains(nft.said[0], "{ 10.95.0.1 }") {
		t.Errorf("one address came, and %d steps were made: %.200s", len(nft.said), strings.Join(nft.said, "; "))
	}
	if n := len(it.applied.sets); n != 1 {
		t.Errorf("a thousand policies of one group have %d sets", n)
	}
}

// No policy can break the node's rules: arbitrary names, peers that cannot be parsed, invalid
// addresses.
func TestHostilePolicies(t *testing.T) {
	cluster := fake.NewCluster()
	web := &place{name: "web", namespace: "a", local: true, labels: map[string]string{}, addresses: addrs("10.88.0.10")}
	cluster.Put(web.object())
	bad := "x\"; flush ruleset; }\n\\" + strings.Repeat("é", 300)
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: bad,
		Annotations: map[string]string{agent.AddressGroups: bad + ", ,,"}}}
	var from []networkingv1.NetworkPolicyPeer
	for range 5 {
		from = append(from, networkingv1.NetworkPolicyPeer{PodSelector: &metav1.LabelSelector{}})
	}
	from = append(from, networkingv1.NetworkPolicyPeer{},
		networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: bad}},
		networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: "11.0.0.0/8", Except: []string{bad}}},
		networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: "10.1.2.3/8",
			Except: []string{"::/0", "9.0.0.0/8"}}})
	p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: from,
		Ports: []networkingv1.NetworkPolicyPort{{Protocol: new(v1.Protocol(bad))},
			randomPort(rand.New(rand.NewPCG(1, 1)))}},
		{From: from}}
	g := &v1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: bad},
		Subsets: []v1.EndpointSubset{{Addresses: []v1.EndpointAddress{
			{IP: bad}, {IP: "fe80::1%eth0"}, {IP: "::ffff:10.9.9.9"}, {IP: "fd00::1"}, {IP: ""}},
			Ports: []v1.EndpointPort{{Name: bad, Port: 1 << 20}, {Name: bad, Port: -1}}}}}
	cluster.Put(p, g)
	it, nft := memory(cluster)
	it.own(web)
	must(t, it.applyView(t.Context(), agent.ObjectChanges{All: true}, true))
	var held []string
	for _, s := range it.applied.sets {
		held = slices.AppendSeq(held, maps.Keys(s.elements))
	}
	if slices.Sort(held); !slices.Equal(held, []string{"10.9.9.9"}) {
		t.Errorf("the group holds %v", held)
	}
	for _, line := range nft.said {
		if strings.Contains(line, "flush ruleset") && !strings.Contains(line, "comment") || len(line) > 400 {
			t.Errorf("written: %s", line)
		}
	}
	said := strings.Join(nft.said, "\n")
	if !strings.Contains(said, "10.0.0.0-10.255.255.255") || strings.Contains(said, "11.0.0.0") {
		t.Errorf("of the blocks the one that can be read lets through, the others nobody: %s", said)
	}
}

// The addresses of an ipBlock are those of its range that are in no exception, whatever the
// exceptions are.
func FuzzBlock(f *testing.F) {
	f.Add(uint8(24), uint32(0x0a000000), uint8(26), uint32(0x0a000040), uint8(32), uint32(0x0a0000ff),
		uint32(0x0a000041))
	f.Fuzz(func(t *testing.T, bits uint8, base uint32, b1 uint8, e1 uint32, b2 uint8, e2, probe uint32) {
		cidr := func(ip uint32, bits uint8) string {
			return fmt.Sprintf("%d.%d.%d.%d/%d", ip>>24, ip>>16&255, ip>>8&255, ip&255, bits%33)
		}
		within := func(ip, base uint32, bits uint8) bool { return ip>>(32-bits%33) == base>>(32-bits%33) }
		spans, err := parseIPBlock(cidr(base, bits), []string{cidr(e1, b1), cidr(e2, b2)})
		must(t, err)
		ip := addrs(strings.Split(cidr(probe, 0), "/")[0])[0]
		in := 0
		for i, s := range spans {
			if s.to.Less(s.from) || i > 0 && !spans[i-1].to.Less(s.from) {
				t.Fatalf("spans %v", spans)
			}
			if !ip.Less(s.from) && !s.to.Less(ip) {
				in++
			}
		}
		want := within(probe, base, bits) && !within(probe, e1, b1) && !within(probe, e2, b2)
		if (in == 1) != want || in > 1 {
			t.Errorf("%s without %s and %s holds %s: %v, want %v", cidr(base, bits), cidr(e1, b1),
				cidr(e2, b2), ip, in, want)
		}
	})
}

// Pods with many common policies cost little more than one pod. Otherwise anybody who may write
// policies in a namespace of this node could keep its CPU busy for minutes.
func TestPoliciesInCommonAreCompiledOnce(t *testing.T) {
	var policies []*policy
	for i := range 1000 {
		p, err := parsePolicy(&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "a",
			Name: fmt.Sprint("p", i)}, Spec: networkingv1.NetworkPolicySpec{
			Ingress: []networkingv1.NetworkPolicyIngressRule{
				{From: []networkingv1.NetworkPolicyPeer{
					{IPBlock: &networkingv1.IPBlock{CIDR: fmt.Sprintf("10.%d.%d.0/25", i>>8, i&255)}}}}}}})
		must(t, err)
		policies = append(policies, p)
	}
	var pods []Pod
	for i := range 100 {
		pods = append(pods, Pod{Namespace: "a", Ports: []NamedPort{{"http", "tcp", 80}},
			Addresses: addrs(fmt.Sprintf("10.88.0.%d", i))})
	}
	made := func(pods []Pod) float64 { return testing.AllocsPerRun(3, func() { compileRules(pods, policies) }) }
	if one, all := made(pods[:1]), made(pods); all > 3*one {
		t.Fatalf("rules of %d pods with the same policies take %.0f allocations, those of one %.0f",
			len(pods), all, one)
	}
}

// A rule that another program replaced is damage, unless the enforcer has written the chain in the
// meantime.
func TestReplacedRulesAreDamage(t *testing.T) {
	cluster := fake.NewCluster()
	it, _ := memory(cluster)
	it.e.cfg.Log = slog.New(slog.DiscardHandler)
	at, pod := uint32(0), Pod{Namespace: "a", Addresses: addrs("10.88.0.10")}
	it.generation = func() (uint32, error) { at++; return at, nil }
	var policies []*policy
	for i := range 2 {
		p, err := parsePolicy(&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "a",
			Name: fmt.Sprint("p", i)}, Spec: networkingv1.NetworkPolicySpec{
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}}})
		must(t, err)
		policies = append(policies, p)
	}
	it.applied, it.built = compileRules([]Pod{pod}, policies[:1]).withSets(nil, func(string) bool {
		return true
	}, nil), true
	listing := func(verdict string, handle int) (out tableContents) {
		var parts []string
		for _, c := range baseChains {
			parts = append(parts, fmt.Sprintf(`{"chain":{"name":%q,"hook":%q}}`, c.name, c.hook))
			for range baseRules(c, bridge) {
				parts = append(parts, fmt.Sprintf(`{"rule":{"chain":%q,"handle":7,"expr":[]}}`, c.name))
			}
		}
		for _, name := range slices.Sorted(maps.Keys(it.applied.chains)) {
			for range it.applied.chains[name] {
				parts = append(parts, fmt.Sprintf(`{"rule":{"chain":%q,"handle":%d,"expr":[{%q:null}]}}`, name,
					handle, verdict))
			}
		}
		out, err := parseTable([]byte(`{"nftables":[` + strings.Join(parts, ",") + `]}`))
		must(t, err)
		for name, m := range it.applied.maps {
			out.elements[name] = map[string]bool{}
			for key, verdict := range m {
				out.elements[name][key+" : "+verdict] = true
			}
		}
		maps.Copy(out.elements, it.applied.selves)
		for name, owners := range it.applied.owners {
			out.elements[name] = map[string]bool{}
			for address := range owners {
				out.elements[name][address] = true
			}
		}
		return out
	}
	for i, step := range []struct {
		verdict string
		handle  int
		fine    bool
	}{{"drop", 1, true}, {"drop", 1, true}, {"accept", 1, false}, {"accept", 1, true}, {"accept", 2, false}} {
		it.built, it.nextCheck = true, time.Time{}
		if i == 3 {
			it.chainCode = nil // as a rebuild does
		}
		it.listTable = func(context.Context) (tableContents, error) { return listing(step.verdict, step.handle), nil }
		must(t, it.checkTable(t.Context()))
		if it.built != step.fine {
			t.Fatalf("step %d, %v: taken for whole: %v", i, step, it.built)
		}
	}
}

// A policy that is added, changed or removed among a thousand policies for the same pods costs only
// its own rules.
func TestOneOfManyPolicies(t *testing.T) {
	cluster := fake.NewCluster()
	it, nft := memory(cluster)
	nft.deaf = true
	for i := range 5 {
		p := &place{name: fmt.Sprint("web", i), namespace: "a", local: true,
			addresses: addrs(fmt.Sprintf("10.88.0.%d", 10+i))}
		cluster.Put(p.object())
		it.own(p)
	}
	group := func(i, n int) *v1.Endpoints {
		g := &v1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("g", i)}, Subsets: []v1.EndpointSubset{{}}}
		for j := range n {
			g.Subsets[0].Addresses = append(g.Subsets[0].Addresses,
				v1.EndpointAddress{IP: fmt.Sprintf("10.%d.%d.%d", 100+i>>8, i&255, j)})
		}
		return g
	}
	policy := func(i int) *networkingv1.NetworkPolicy {
		return &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: fmt.Sprintf("p%d", i),
			Annotations: map[string]string{agent.AddressGroups: fmt.Sprint("g", i)}},
			Spec: networkingv1.NetworkPolicySpec{Ingress: []networkingv1.NetworkPolicyIngressRule{
				{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}}}}}}
	}
	for i := range 1000 {
		cluster.Put(group(i, 20), policy(i))
	}
	must(t, it.applyView(t.Context(), agent.ObjectChanges{All: true}, true))
	step := func(what string, most int, due agent.ObjectChanges) {
		t.Helper()
		nft.said = nil
		must(t, it.applyView(t.Context(), due, true))
		if n := len(nft.said); n == 0 || n > most {
			t.Errorf("%s: %d steps were made, at most %d are due: %.300s", what, n, most, strings.Join(nft.said, "; "))
		}
	}
	changed := func(kind, name string) (due agent.ObjectChanges) {
		due.AddKey(agent.ObjectKey{Kind: kind, Namespace: map[bool]string{true: "a"}[kind == "NetworkPolicy"],
			Name: name})
		return due
	}
	const chain = 8 // steps that write the rules of the pods' chain: they name the policies
	cluster.Put(group(1000, 20), policy(1000))
	step("one comes", 20+chain, changed("NetworkPolicy", "p1000"))
	cluster.Put(group(7, 21))
	step("a group grows", 1, changed("AddressGroup", "g7"))
	cluster.Delete(policy(1000))
	step("one goes", 20+chain, changed("NetworkPolicy", "p1000"))
}
