package proxy

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"
	"sigs.k8s.io/knftables"

	"keelson.dev/keelson/agent/proxy/proxytest"
	"keelson.dev/keelson/agent/proxy/servicemodel"
)

var (
	testBase = Base{ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"),
		netip.MustParsePrefix("fd00:96::/112")},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10::/64")}}
	testPlace = servicemodel.Location{Node: "w1", Zone: "a"}
)

// onFakes returns an nftables writer in memory and a function that dumps its rules.
func onFakes(d tableDialect) (*nft, func() string) {
	n := newNFTDialect(d)
	n.read = nil
	fakes := map[knftables.Family]*knftables.Fake{}
	n.open = func(f knftables.Family) (knftables.Interface, error) {
		fakes[f] = knftables.NewFake(f, d.table)
		return fakes[f], nil
	}
	return n, func() (out string) {
		for _, f := range slices.Sorted(maps.Keys(fakes)) {
			if fakes[f].Table != nil {
				out += sortedElements(fakes[f].Dump())
			}
		}
		return out
	}
}

// sortedElements sorts map elements, which have no order. Rules keep their order.
func sortedElements(dump string) string {
	var lines, elements []string
	for line := range strings.SplitSeq(dump, "\n") {
		if strings.HasPrefix(line, "add element") {
			elements = append(elements, line)
		} else {
			lines = append(lines, line)
		}
	}
	slices.Sort(elements)
	return strings.Join(append(lines, elements...), "\n")
}

// nftDialect is the dialect of mode nftables.
var nftDialect = tableDialect{table: Table, skeleton: family.fullSkeleton, render: family.renderPort}

// restored holds the tables of iptables in memory, as written by iptables-restore.
type restored map[string]map[string][]string

// take simulates iptables-restore --noflush, including its errors.
func (r restored) take(text string) error {
	table := ""
	for line := range strings.SplitSeq(text, "\n") {
		f := strings.Fields(line)
		switch {
		case line == "" || line == "COMMIT":
		case line[0] == '*':
			if table = line[1:]; r[table] == nil {
				r[table] = map[string][]string{"PREROUTING": {}, "INPUT": {}, "FORWARD": {}, "OUTPUT": {},
					"POSTROUTING": {}}
			}
		case line[0] == ':':
			r[table][f[0][1:]] = []string{}
		case f[0] == "-X":
			for name, rules := range r[table] {
				for _, rule := range rules {
					if strings.HasSuffix(rule, "-j "+f[1]) {
						return fmt.Errorf("%s: %s in %s refers to it", line, rule, name)
					}
				}
			}
			delete(r[table], f[1])
		default:
			rule := strings.TrimPrefix(strings.TrimPrefix(line, f[0]+" "+f[1]), " ")
			have, ok := r[table][f[1]]
			if !ok {
				return fmt.Errorf("%s: no such chain", line)
			}
			if to := f[len(f)-1]; strings.HasPrefix(to, chainPrefix) && r[table][to] == nil {
				return fmt.Errorf("%s: no such target", line)
			}
			switch f[0] {
			case "-A":
				r[table][f[1]] = append(have, rule)
			case "-I":
				r[table][f[1]] = slices.Insert(have, 0, rule)
			case "-D":
				at := slices.Index(have, rule)
				if at < 0 {
					return fmt.Errorf("%s: no such rule", line)
				}
				r[table][f[1]] = slices.Delete(have, at, at+1)
			}
		}
	}
	return nil
}

// save simulates iptables-save for a table.
func (r restored) save(table string) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(r[table])) {
		b.WriteString(":" + name + " - [0:0]\n")
	}
	for _, name := range slices.Sorted(maps.Keys(r[table])) {
		for _, rule := range r[table][name] {
			b.WriteString("-A " + name + " " + rule + "\n")
		}
	}
	return b.String()
}

// text returns all tables. Chains that all ports share are sorted.
func (r restored) text() string {
	var b strings.Builder
	for _, table := range slices.Sorted(maps.Keys(r)) {
		for _, name := range slices.Sorted(maps.Keys(r[table])) {
			rules := slices.Clone(r[table][name])
			if isSharedChain(name) {
				slices.Sort(rules)
			}
			fmt.Fprintf(&b, "%s %s\n  %s\n", table, name, strings.Join(rules, "\n  "))
		}
	}
	return b.String()
}

// inMemory returns an iptables writer in memory and a function that dumps its rules.
func inMemory() (*iptables, func() string) {
	w, tables := newIPTables(), map[bool]restored{false: {}, true: {}}
	for _, t := range w.tables {
		t.run = func(_ context.Context, input, program string, args ...string) (string, error) {
			if strings.HasSuffix(program, "-save") {
				return tables[t.v6].save(args[len(args)-1]), nil
			}
			return "", tables[t.v6].take(input)
		}
	}
	return w, func() string { return tables[false].text() + tables[true].text() }
}

// drawn is a cluster with random changes.
type drawn struct {
	services map[string]*v1.Service
	parts    map[string]*discoveryv1.EndpointSlice
}

// change makes a random change and updates the model.
func (d *drawn) change(t *rapid.T, m *servicemodel.Model) {
	i := rapid.IntRange(0, 3).Draw(t, "which")
	name := fmt.Sprint("s", i)
	key := types.NamespacedName{Namespace: "default", Name: name}
	switch rapid.IntRange(0, 5).Draw(t, "what") {
	case 0:
		delete(d.services, name)
		m.SetService(key, nil)
	case 1, 2:
		d.services[name] = drawService(t, name, i)
		m.SetService(key, d.services[name])
	default:
		v6 := rapid.Bool().Draw(t, "v6")
		part := fmt.Sprint(name, "-", v6, rapid.IntRange(0, 1).Draw(t, "part"))
		key.Name = part
		if rapid.IntRange(0, 3).Draw(t, "gone") == 0 {
			delete(d.parts, part)
			m.SetSlice(key, nil)
			return
		}
		d.parts[part] = drawSlice(t, name, part, v6)
		m.SetSlice(key, d.parts[part])
	}
}

func drawService(t *rapid.T, name string, i int) *v1.Service {
	flip := func(what string) bool { return rapid.IntRange(0, 3).Draw(t, what) == 0 }
	return proxytest.Service(name, fmt.Sprintf("10.96.0.%d", 10+i), 0, func(s *v1.Service) {
		s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
		if flip("dual") {
			s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, fmt.Sprintf("fd00:96::%d", 10+i))
		}
		if flip("second port") {
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "dns", Port: 53, Protocol: v1.ProtocolUDP})
		}
		if flip("node port") {
			// two Services may have the same node port
			s.Spec.Ports[0].NodePort = 30000 + int32(rapid.IntRange(0, 2).Draw(t, "port"))
		}
		if flip("external") {
			s.Spec.ExternalIPs = []string{fmt.Sprintf("192.0.2.%d", rapid.IntRange(1, 3).Draw(t, "address")),
				"10.96.0.11"}
		}
		if flip("wide") { // requires chains of addresses, even if two Services claim the same pair
			for p := range int32(rapid.IntRange(2, 4).Draw(t, "ports")) {
				s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("wide", p), Port: 90 + p})
			}
			s.Spec.ExternalIPs = nil
			from := rapid.IntRange(1, 4).Draw(t, "from")
			for a := range rapid.IntRange(2, 6).Draw(t, "addresses") {
				s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("192.0.2.%d", from+a),
					fmt.Sprintf("2001:db8::%d", from+a))
			}
		}
		if flip("balanced") {
			s.Spec.Type = v1.ServiceTypeLoadBalancer
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: fmt.Sprintf("192.0.2.%d", 2+i)}}
			for _, ip := range s.Spec.ExternalIPs {
				s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: ip})
			}
			if flip("guarded") {
				s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24"}
			}
		}
		if flip("sticky") {
			seconds := int32(rapid.IntRange(1, 2).Draw(t, "seconds"))
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{
				ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &seconds}}
		}
		if flip("local") {
			s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		}
		if flip("inside") {
			local := v1.ServiceInternalTrafficPolicyLocal
			s.Spec.InternalTrafficPolicy = &local
		}
	})
}

func drawSlice(t *rapid.T, svc, name string, v6 bool) *discoveryv1.EndpointSlice {
	var endpoints []discoveryv1.Endpoint
	for range rapid.IntRange(0, 3).Draw(t, "endpoints") {
		host := rapid.IntRange(2, 5).Draw(t, "host")
		ip := fmt.Sprintf("10.244.0.%d", host)
		if v6 {
			ip = fmt.Sprintf("fd00:10::%d", host)
		}
		node := []string{"w1", "w2"}[host%2]
		state := rapid.SampledFrom([]string{"ready", "ready", "ending", "unready"}).Draw(t, "state")
		e := proxytest.Endpoint(ip, node, state == "ready", state != "unready", state == "ending")
		if rapid.Bool().Draw(t, "hinted") {
			e = proxytest.Hint(e, rapid.SampledFrom([]string{"a", "b"}).Draw(t, "zone"), "")
		}
		endpoints = append(endpoints, e)
	}
	out := proxytest.Slice(svc, endpoints...)
	out.Name = name
	dns, port, udp := "dns", int32(5353), v1.ProtocolUDP
	out.Ports = append(out.Ports, discoveryv1.EndpointPort{Name: &dns, Port: &port, Protocol: &udp})
	for _, name := range []string{"wide0", "wide1", "wide2"} { // the fourth Service has no endpoint
		out.Ports = append(out.Ports, discoveryv1.EndpointPort{Name: &name, Port: out.Ports[0].Port})
	}
	if v6 {
		out.AddressType = discoveryv1.AddressTypeIPv6
	}
	return out
}

// F112 F117 F118: whatever the order of changes, the model equals one that is computed from the
// final state. The same holds for the rules of each writer, without remains of earlier states.
func TestIncrementalIsFromScratch(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ctx := t.Context()
		d := &drawn{map[string]*v1.Service{}, map[string]*discoveryv1.EndpointSlice{}}
		m := servicemodel.NewModel(testPlace)
		n, dump := onFakes(nftDialect)
		beside, besideDump := onFakes(tableDialect{ipvsTable, ipvsSkeleton, renderForIPVS})
		ipt, text := inMemory()
		vs := newFakeIPVS()
		writers := []Writer{n, beside, ipt, vs}
		for _, w := range writers {
			if err := w.Sync(ctx, testBase, maps.Values(m.Ports())); err != nil {
				t.Fatal(err)
			}
		}
		for range rapid.IntRange(1, 8).Draw(t, "steps") {
			for range rapid.IntRange(1, 3).Draw(t, "changes at once") {
				d.change(t, m)
			}
			changes := m.UpdatePorts()
			for _, w := range writers {
				if err := w.Apply(ctx, changes); err != nil {
					t.Fatalf("%T: %v", w, err)
				}
			}
			fresh := servicemodel.Compute(slices.Collect(maps.Values(d.services)),
				slices.Collect(maps.Values(d.parts)), testPlace)
			if !maps.EqualFunc(m.Ports(), fresh.Ports(), (*servicemodel.Port).EqualPort) {
				t.Fatalf("step by step:\n%+v\nfrom nothing:\n%+v", m.Ports(), fresh.Ports())
			}
			if err := resolvesAll(ipt, m.Ports()); err != nil {
				t.Fatalf("%v\n%s", err, text())
			}
			n2, dump2 := onFakes(nftDialect)
			beside2, besideDump2 := onFakes(tableDialect{ipvsTable, ipvsSkeleton, renderForIPVS})
			ipt2, text2 := inMemory()
			vs2 := newFakeIPVS()
			for _, w := range []Writer{n2, beside2, ipt2, vs2} {
				if err := w.Sync(ctx, testBase, maps.Values(fresh.Ports())); err != nil {
					t.Fatal(err)
				}
			}
			for _, c := range []struct{ name, got, want string }{{"nft", dump(), dump2()},
				{"beside ipvs", besideDump(), besideDump2()},
				{"iptables", text(), text2()}, {"ipvs", vs.kernel.text(), vs2.kernel.text()}} {
				if c.got != c.want {
					t.Fatalf("%s, after the changes:\n%s\nfrom nothing:\n%s", c.name, c.got, c.want)
				}
			}
			// A new agent finds the rules of the old one, and leaves the same rules.
			n3 := newNFTDialect(nftDialect)
			n3.read = nil
			n3.open = func(f knftables.Family) (knftables.Interface, error) {
				for _, t := range n.tables {
					if t.v6 == (f == knftables.IPv6Family) {
						return t.nft, nil
					}
				}
				return nil, nil
			}
			if err := n3.Sync(ctx, testBase, maps.Values(m.Ports())); err != nil {
				t.Fatal(err)
			}
			if got, want := dump(), dump2(); got != want {
				t.Fatalf("after a restart:\n%s\nfrom nothing:\n%s", got, want)
			}
		}
	})
}

// fakeIPVS is the IPVS writer with a kernel in memory.
type fakeIPVS struct {
	*ipvs
	kernel *fakeServers
}

func newFakeIPVS() *fakeIPVS {
	w := newIPVS()
	w.nft, _ = onFakes(tableDialect{ipvsTable, ipvsSkeleton, renderForIPVS})
	k := &fakeServers{servers: map[virtualServer]realServers{}, held: map[netip.Addr]bool{}}
	k.own = map[netip.Addr]bool{netip.MustParseAddr("10.89.0.101"): true, netip.MustParseAddr("fd00:89::101"): true}
	w.open = func() (ipvsInterface, error) { k.linked = true; return k, nil }
	w.linkExists = func() (bool, error) { return k.linked, nil }
	w.interfaceAddresses = func() (map[netip.Addr]bool, error) { return maps.Clone(k.own), nil }
	w.checkKernel = func() error { return nil }
	return &fakeIPVS{w, k}
}

type fakeServers struct {
	servers map[virtualServer]realServers
	held    map[netip.Addr]bool
	own     map[netip.Addr]bool // addresses of the node
	linked  bool                // the interface exists
	said    []string
}

func (k *fakeServers) Close() {}

func (k *fakeServers) Read() (map[virtualServer]realServers, map[netip.Addr]bool, error) {
	out := map[virtualServer]realServers{}
	for v, p := range k.servers {
		if v.isOurs(k.held, k.own) {
			out[v] = maps.Clone(p)
		}
	}
	return out, maps.Clone(k.held), nil
}

func (k *fakeServers) Do(c ipvsCommand) error {
	k.said = append(k.said, c.String())
	refuse := func(when bool) error {
		if when {
			return fmt.Errorf("refused: %s", c)
		}
		return nil
	}
	p, there := k.servers[c.server]
	_, real := p[c.to]
	var err error
	switch c.verb {
	case "address add":
		k.held[c.server.IP] = true
	case "address del":
		err = refuse(!k.held[c.server.IP])
		delete(k.held, c.server.IP)
	case "-A":
		err = refuse(there)
		k.servers[c.server] = realServers{}
	case "-D":
		err = refuse(!there)
		delete(k.servers, c.server)
	case "-a", "-e":
		if err = refuse(!there || real != (c.verb == "-e")); err == nil {
			p[c.to] = c.weight
		}
	case "-d":
		err = refuse(!real)
		delete(p, c.to)
	}
	return err
}

func (k *fakeServers) text() string {
	var out []string
	for v, p := range k.servers {
		out = append(out, fmt.Sprint(v, " ", slices.SortedFunc(maps.Keys(p), netip.AddrPort.Compare), p))
	}
	for ip := range k.held {
		out = append(out, ip.String())
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}
