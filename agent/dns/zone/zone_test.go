package zone

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files")

func service(namespace, name, ip string, ports ...v1.ServicePort) *v1.Service {
	return &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: v1.ServiceSpec{ClusterIP: ip, Ports: ports}}
}

func tcp(name string, port int32) v1.ServicePort {
	return v1.ServicePort{Name: name, Port: port, Protocol: v1.ProtocolTCP}
}

func part(
	of *v1.Service, name string, ports []discoveryv1.EndpointPort, endpoints ...discoveryv1.Endpoint,
) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: of.Namespace, Name: name,
		Labels: map[string]string{discoveryv1.LabelServiceName: of.Name}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: ports, Endpoints: endpoints}
}

func endpoint(address, host string, ready bool) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{Addresses: []string{address},
		Conditions: discoveryv1.EndpointConditions{Ready: new(ready)}}
	if host != "" {
		e.Hostname = new(host)
	}
	return e
}

func port(name string, n int32) []discoveryv1.EndpointPort {
	return []discoveryv1.EndpointPort{{Name: new(name), Port: new(n), Protocol: new(v1.ProtocolTCP)}}
}

// example returns a cluster with every kind of Service.
func example() *Index {
	x := New()
	web := service("default", "kubernetes", "10.3.0.1", tcp("https", 443))
	dual := service("default", "dual", "10.3.0.2", tcp("", 80),
		v1.ServicePort{Name: "dns", Port: 53, Protocol: v1.ProtocolUDP})
	dual.Spec.ClusterIPs = []string{"10.3.0.2", "fd00:3::2"}
	headless := service("default", "headless", v1.ClusterIPNone, tcp("https", 443))
	empty := service("default", "empty", v1.ClusterIPNone)
	elsewhere := service("default", "foo", "")
	elsewhere.Spec.Type, elsewhere.Spec.ExternalName = v1.ServiceTypeExternalName, "www.Example.com"
	inside := service("default", "alias", "")
	inside.Spec.Type, inside.Spec.ExternalName = v1.ServiceTypeExternalName, "kubernetes.default.svc.cluster.local"
	six := service("prod", "six", v1.ClusterIPNone, tcp("https", 443))
	sixes := part(six, "six-1", port("https", 443), endpoint("fd00::1:2", "", true))
	sixes.AddressType = discoveryv1.AddressTypeIPv6
	unready := endpoint("10.3.0.103", "gone", false)
	parts := []*discoveryv1.EndpointSlice{
		part(web, "kubernetes", port("https", 6443), endpoint("192.0.2.1", "", true)),
		part(headless, "headless-1", port("https", 8443), endpoint("10.3.0.100", "my-pet", true),
			endpoint("10.3.0.101", "", true), unready),
		part(headless, "headless-2", port("https", 9443), endpoint("10.3.0.102", "my-pet", true),
			endpoint("10.3.0.101", "", true)),
		part(empty, "empty-1", nil, unready),
		sixes,
	}
	x.Sync([]*v1.Service{web, dual, headless, empty, elsewhere, inside, six}, parts)
	return x
}

// text returns an answer in readable form.
func (a Answer) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "  %s", dns.RcodeToString[a.Rcode])
	if a.Alias != "" {
		fmt.Fprintf(&b, " follow %s", a.Alias)
	}
	b.WriteByte('\n')
	for name, rrs := range map[string][]dns.RR{"": a.Records} {
		for _, rr := range rrs {
			fmt.Fprintf(&b, "  %s%s\n", name, strings.ReplaceAll(rr.String(), "\t", " "))
		}
	}
	for _, rr := range a.Extra {
		fmt.Fprintf(&b, "  + %s\n", strings.ReplaceAll(rr.String(), "\t", " "))
	}
	return b.String()
}

// Every kind of record of the specification, and similar names: testdata/answers.txt has questions
// and answers.
func TestAnswers(t *testing.T) {
	x := example()
	o := &Options{TTL: 5, Pods: true, Servers: []netip.Addr{netip.MustParseAddr("10.3.0.10")}}
	file := filepath.Join("testdata", "answers.txt")
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for line := range strings.Lines(string(raw)) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "#") || line == "":
			out.WriteString(line + "\n")
		case strings.HasPrefix(line, "? "):
			out.WriteString(line + "\n")
			f := strings.Fields(line)
			name, kind := dns.Fqdn(f[1]), dns.StringToType[f[2]]
			lowerName := strings.ToLower(name)
			if strings.HasSuffix(lowerName, ".arpa.") {
				a, found := x.Reverse(o, "cluster.local.", name, lowerName, kind)
				if !found {
					out.WriteString("  nothing\n")
					continue
				}
				out.WriteString(a.text())
				continue
			}
			out.WriteString(x.Answer(o, "cluster.local.", name, lowerName, kind, 0, 100).text())
		}
	}
	if *rewrite {
		if err := os.WriteFile(file, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if out.String() != string(raw) {
		t.Errorf("answers differ from %s (-rewrite updates the file):\n%s", file, out.String())
	}
}

// The options of the zone in a Corefile.
func TestOptions(t *testing.T) {
	x := example()
	code := func(o Options, name string) int {
		return x.Answer(&o, "cluster.local.", name, name, dns.TypeA, 0, 100).Rcode
	}
	if got := code(Options{}, "1-2-3-4.default.pod.cluster.local."); got != dns.RcodeNameError {
		t.Errorf("a pod's name where pods are disabled: %s", dns.RcodeToString[got])
	}
	if got := code(Options{Namespaces: []string{"prod"}}, "kubernetes.default.svc.cluster.local."); got !=
		dns.RcodeNameError {
		t.Errorf("a namespace that is left out: %s", dns.RcodeToString[got])
	}
	if got := code(Options{IgnoreEmpty: true}, "dual.default.svc.cluster.local."); got != dns.RcodeNameError {
		t.Errorf("a Service without endpoints where these are ignored: %s", dns.RcodeToString[got])
	}
	if got := code(Options{IgnoreEmpty: true}, "empty.default.svc.cluster.local."); got != dns.RcodeSuccess {
		t.Errorf("a headless one: %s", dns.RcodeToString[got])
	}
	pod := service("default", "pods", v1.ClusterIPNone)
	ep := endpoint("10.3.0.9", "", true)
	ep.TargetRef = &v1.ObjectReference{Kind: "Pod", Name: "web-7f"}
	x.SetService(Key{"default", "pods"}, pod, []*discoveryv1.EndpointSlice{part(pod, "p", nil, ep)})
	a := x.Answer(&Options{PodNames: true}, "cluster.local.", "web-7f.pods.default.svc.cluster.local.",
		"web-7f.pods.default.svc.cluster.local.", dns.TypeA, 0, 100)
	if len(a.Records) != 1 {
		t.Errorf("an endpoint by its pod's name: %s", a.text())
	}
}

// A query for a Service with many endpoints returns the first ones, for every type, and each
// endpoint is found by its name.
func TestManyEndpoints(t *testing.T) {
	x := New()
	big := service("default", "big", v1.ClusterIPNone, tcp("http", 80))
	var all []discoveryv1.Endpoint
	for i := range 1000 {
		all = append(all, endpoint(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String(),
			fmt.Sprintf("big-%d", i), true))
	}
	x.Sync([]*v1.Service{big}, []*discoveryv1.EndpointSlice{part(big, "a", port("http", 8080), all...)})
	const name = "big.default.svc.cluster.local."
	for _, kind := range []uint16{dns.TypeA, dns.TypeSRV} {
		a := x.Answer(&Options{}, "cluster.local.", name, name, kind, 0, 100)
		if !a.Truncated || len(a.Records) != 100 {
			t.Errorf("%s: %d records, cut %v", dns.TypeToString[kind], len(a.Records), a.Truncated)
		}
	}
	for _, i := range []int{0, 64, 999} {
		host := fmt.Sprintf("big-%d.", i) + name
		if a := x.Answer(&Options{}, "cluster.local.", host, host, dns.TypeA, 0, 100); len(a.Records) != 1 {
			t.Errorf("%s: %s", host, a.text())
		}
	}
}

// Answers for one name start with a different address each time.
func TestRotation(t *testing.T) {
	x := example()
	const name = "headless.default.svc.cluster.local."
	first := map[string]int{}
	for turn := range uint32(9) {
		first[x.Answer(&Options{}, "cluster.local.", name, name, dns.TypeA, turn, 100).Records[0].(*dns.A).A.String()]++
	}
	for a, n := range first {
		if n != 3 {
			t.Errorf("%s came first %d times of 9: %v", a, n, first)
		}
	}
}

// Whatever objects are added and removed in any order, the index equals a new one with the same
// objects. An existing Service always has its name.
func TestSyncIsAsNew(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x, y := New(), New() // y is updated with the changed objects
		services, parts := map[string]*v1.Service{}, map[string]*discoveryv1.EndpointSlice{}
		ips := []string{"10.3.0.1", "10.3.0.2", v1.ClusterIPNone}
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0:
				services[name] = service("ns", name, rapid.SampledFrom(ips).Draw(t, "ip"), tcp("http", 80))
			case 1:
				delete(services, name)
			case 2:
				of := service("ns", rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "of"), "")
				parts[name] = part(of, name, port("http", 1),
					endpoint(rapid.SampledFrom([]string{"10.1.0.1", "10.1.0.2"}).Draw(t, "ep"), "h",
						rapid.Bool().Draw(t, "ready")))
			case 3:
				delete(parts, name)
			}
			all, slicesOf := values(services), values(parts)
			x.Sync(all, slicesOf)
			if again := x.Sync(all, slicesOf); again != 0 {
				t.Fatalf("the same objects again: %d Services were looked into", again)
			}
			fresh := New()
			fresh.Sync(all, slicesOf)
			compare(t, x, fresh)
			y.Update([]Key{{"ns", name}}, []Key{{"ns", name}}, source{services, parts})
			compare(t, y, fresh)
		}
	})
}

type source struct {
	services map[string]*v1.Service
	parts    map[string]*discoveryv1.EndpointSlice
}

func (s source) Service(_, name string) (*v1.Service, bool) {
	v, ok := s.services[name]
	return v, ok
}

func (s source) EndpointSlice(_, name string) (*discoveryv1.EndpointSlice, bool) {
	v, ok := s.parts[name]
	return v, ok
}

func values[T any](m map[string]T) (out []T) {
	for _, v := range m {
		out = append(out, v)
	}
	return out
}

func compare(t *rapid.T, x, fresh *Index) {
	o := &Options{TTL: 5}
	for _, host := range []string{"", "h.", "_tcp.", "_http._tcp."} {
		for _, name := range []string{"a", "b", "c"} {
			for _, kind := range []uint16{dns.TypeA, dns.TypeSRV} {
				q := host + name + ".ns.svc.cluster.local."
				got, want := x.Answer(o, "cluster.local.", q, q, kind, 0, 100),
					fresh.Answer(o, "cluster.local.", q, q, kind, 0, 100)
				if got.text() != want.text() {
					t.Fatalf("%s: %s\nwant %s", q, got.text(), want.text())
				}
				if exists := x.services[Key{"ns", name}] != nil; host == "" &&
					exists == (got.Rcode == dns.RcodeNameError) {
					t.Fatalf("%s exists: %v; answer %s", q, exists, got.text())
				}
			}
		}
	}
	for _, q := range []string{"1.0.3.10.in-addr.arpa.", "2.0.3.10.in-addr.arpa.", "1.0.1.10.in-addr.arpa.",
		"2.0.1.10.in-addr.arpa."} {
		got, a := x.Reverse(o, "cluster.local.", q, q, dns.TypePTR)
		want, b := fresh.Reverse(o, "cluster.local.", q, q, dns.TypePTR)
		sorted := func(a Answer) string {
			lines := strings.Split(a.text(), "\n")
			slices.Sort(lines)
			return strings.Join(lines, "\n")
		}
		if a != b || sorted(got) != sorted(want) {
			t.Fatalf("%s: %v %s\nwant %v %s", q, a, got.text(), b, want.text())
		}
	}
	if len(x.byAddress) != len(fresh.byAddress) || len(x.namespaces) != len(fresh.namespaces) ||
		len(x.heldSlices) != len(fresh.heldSlices) || len(x.slicesByService) != len(fresh.slicesByService) {
		t.Fatalf("something is left over: %d addresses, %d namespaces, %d slices; want %d, %d, %d", len(x.byAddress),
			len(x.namespaces), len(x.heldSlices),
			len(fresh.byAddress), len(fresh.namespaces), len(fresh.heldSlices))
	}
}

// A change costs only the changed Service; others are not read.
func TestOneChangeCostsOneService(t *testing.T) {
	x := New()
	var services []*v1.Service
	var parts []*discoveryv1.EndpointSlice
	for i := range 1000 {
		s := service("default", fmt.Sprintf("s%d", i), netip.AddrFrom4([4]byte{10, 3, byte(i >> 8), byte(i)}).String())
		services, parts = append(services, s), append(parts, part(s, s.Name, nil, endpoint("10.1.0.1", "", true)))
	}
	if n := x.Sync(services, parts); n != 1000 || x.Len() != 1000 {
		t.Fatalf("first: %d of %d", n, x.Len())
	}
	parts[7] = parts[7].DeepCopy()
	services[8] = services[8].DeepCopy()
	if n := x.Sync(services, parts); n != 2 {
		t.Errorf("two changes: %d Services were looked into", n)
	}
	if n := x.Sync(services[1:], parts[1:]); n != 1 || x.Len() != 999 {
		t.Errorf("one that went: %d Services were looked into, %d are left", n, x.Len())
	}
}

// No name causes a panic, and every answer can be packed.
func FuzzAnswer(f *testing.F) {
	for _, s := range []string{"kubernetes.default.svc.cluster.local.",
		"_https._tcp.headless.default.svc.cluster.local.", "1-2-3-4.default.pod.cluster.local.",
		"1.0.3.10.in-addr.arpa.", "..svc.cluster.local.", "a..b.cluster.local.", "cluster.local.",
		"_._..svc.cluster.local."} {
		f.Add(s, dns.TypeA)
	}
	x := example()
	o := &Options{Pods: true, PodNames: true}
	f.Fuzz(func(t *testing.T, name string, kind uint16) {
		name = strings.ToLower(name)
		if _, ok := dns.IsDomainName(name); !ok {
			return
		}
		x.Reverse(o, "cluster.local.", name, name, kind)
		if !strings.HasSuffix(name, "cluster.local.") {
			return
		}
		a := x.Answer(o, "cluster.local.", name, name, kind, 3, 100)
		m := dns.Msg{Answer: a.Records, Extra: a.Extra}
		if _, err := m.Pack(); err != nil {
			t.Errorf("%q %d: %v", name, kind, err)
		}
	})
}
