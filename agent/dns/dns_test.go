package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/await"
)

// rig is a server on loopback, with a cluster behind it.
type rig struct {
	*testing.T
	s       *Server
	cluster *fake.Cluster
	at      string
}

func service(namespace, name, ip string) *v1.Service {
	return &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: v1.ServiceSpec{ClusterIP: ip, Ports: []v1.ServicePort{{Name: "http", Port: 80}}}}
}

func external(name, to string) *v1.Service {
	s := service("default", name, "")
	s.Spec.Type, s.Spec.ExternalName = v1.ServiceTypeExternalName, to
	return s
}

func coreDNS(text string, more map[string]string) *v1.ConfigMap {
	cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "coredns", UID: "cm"},
		Data: map[string]string{"Corefile": text}}
	for k, v := range more {
		cm.Data[k] = v
	}
	return cm
}

func start(t *testing.T, objects ...any) *rig {
	t.Helper()
	r := &rig{T: t, cluster: fake.NewCluster()}
	r.cluster.Put(service("default", "web", "10.96.0.7"))
	r.cluster.Put(objects...)
	for !r.begin() {
	}
	return r
}

// begin returns false if another program has taken one of the server's ports.
func (r *rig) begin() bool {
	r.Helper()
	pc, l := bothPorts(r.T)
	port := l.Addr().(*net.TCPAddr).AddrPort().Port()
	resolv := filepath.Join(r.TempDir(), "resolv.conf") // no test queries the machine's own resolver
	if err := errors.Join(pc.Close(), l.Close(), os.WriteFile(resolv, nil, 0o644)); err != nil {
		r.Fatal(err)
	}
	r.at = fmt.Sprintf("127.0.0.1:%d", port)
	r.s = New(Config{Node: "w1", StateDir: r.TempDir(), RunDir: r.TempDir(), ResolvConf: resolv, Port: port,
		Addresses: []netip.Addr{netip.MustParseAddr("127.0.0.1")},
		Log:       slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	done, ended := make(chan struct{}), error(nil)
	go func() {
		defer close(done)
		ended = r.s.Run(ctx, r.cluster, r.cluster)
	}()
	r.Cleanup(func() {
		cancel()
		<-done
	})
	r.until(func() error {
		select {
		case <-done:
			return nil
		default:
		}
		_, err := r.tryFor(time.Second, "udp", "web.default.svc.cluster.local.", dns.TypeA)
		return err
	})
	select {
	case <-done:
		if !errors.Is(ended, syscall.EADDRINUSE) {
			r.Fatal(ended)
		}
		return false
	default:
		return true
	}
}

func (r *rig) until(cond func() error) {
	r.Helper()
	await.Until(context.Background(), r, await.Patience, 5*time.Millisecond, "the answer", cond)
}

func (r *rig) try(network, name string, kind uint16) (*dns.Msg, error) {
	return r.tryFor(20*time.Second, network, name, kind)
}

func (r *rig) tryFor(limit time.Duration, network, name string, kind uint16) (*dns.Msg, error) {
	m := &dns.Msg{}
	m.SetQuestion(name, kind)
	c := dns.Client{Net: network, Timeout: limit}
	out, _, err := c.Exchange(m, r.at)
	return out, err
}

// ask returns the response code and the records in a short form.
func (r *rig) ask(network, name string, kind uint16) string {
	r.Helper()
	m, err := r.try(network, name, kind)
	if err != nil {
		r.Fatalf("%s %s: %v", name, dns.TypeToString[kind], err)
	}
	return short(m)
}

func short(m *dns.Msg) string {
	out := []string{dns.RcodeToString[m.Rcode]}
	for _, rr := range m.Answer {
		f := strings.SplitN(strings.ReplaceAll(rr.String(), "\t", " "), " ", 5)
		out = append(out, f[0]+" "+f[3]+" "+f[4])
	}
	return strings.Join(out, ", ")
}

// expect waits until a query has the answer, because a change takes effect with a delay.
func (r *rig) expect(name string, kind uint16, want string) {
	r.Helper()
	got := ""
	r.until(func() error {
		if got = r.ask("udp", name, kind); got != want {
			return fmt.Errorf("%s %s: %s\nwant %s", name, dns.TypeToString[kind], got, want)
		}
		return nil
	})
}

// upstream starts another server, which answers with f.
func upstream(t *testing.T, f dns.HandlerFunc) string {
	t.Helper()
	pc, l := bothPorts(t)
	for _, s := range []*dns.Server{{PacketConn: pc, Handler: f}, {Listener: l, Handler: f}} {
		ready := make(chan struct{})
		s.NotifyStartedFunc = func() { close(ready) }
		go func() { _ = s.ActivateAndServe() }()
		<-ready
		t.Cleanup(func() { _ = s.Shutdown() })
	}
	return pc.LocalAddr().String()
}

// bothPorts returns a UDP and a TCP listener on the same port. A port that is free for one protocol
// may be used for the other.
func bothPorts(t *testing.T) (net.PacketConn, net.Listener) {
	t.Helper()
	var errs []error
	for range 50 {
		pc, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l, err := net.Listen("tcp", pc.LocalAddr().String())
		if err == nil {
			return pc, l
		}
		pc.Close()
		errs = append(errs, err)
	}
	t.Fatal(errors.Join(errs...))
	return nil, nil
}

func records(t *testing.T, lines ...string) (out []dns.RR) {
	t.Helper()
	for _, l := range lines {
		rr, err := dns.NewRR(l)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, rr)
	}
	return out
}

// table answers by name and type.
func table(t *testing.T, asked *atomic.Int64, lines ...string) dns.HandlerFunc {
	all := records(t, lines...)
	return func(w dns.ResponseWriter, q *dns.Msg) {
		asked.Add(1)
		m := &dns.Msg{}
		m.SetReply(q)
		for _, rr := range all {
			if strings.EqualFold(rr.Header().Name, q.Question[0].Name) &&
				(rr.Header().Rrtype == q.Question[0].Qtype || rr.Header().Rrtype == dns.TypeCNAME) {
				m.Answer = append(m.Answer, rr)
			}
		}
		if len(m.Answer) == 0 {
			m.Rcode = dns.RcodeNameError
			m.Ns = records(t, "example. 60 IN SOA ns.example. h.example. 1 1 1 1 60")
		}
		_ = w.WriteMsg(m)
	}
}

// Names of the cluster, of upstream servers, of stub domains, hosts entries and rewritten names,
// over UDP and TCP.
func TestCorefile(t *testing.T) {
	for !answersByCorefile(t) && !t.Failed() {
	}
}

// answersByCorefile returns false if the machine was so slow that the other servers may have been
// queried twice.
func answersByCorefile(t *testing.T) bool {
	t.Helper()
	var outside, stub atomic.Int64
	out := upstream(t, table(t, &outside, "www.example. 60 IN A 192.0.2.1", "short.example. 60 IN CNAME www.example."))
	in := upstream(t, table(t, &stub, "db.corp.test. 60 IN A 192.0.2.2"))
	r := start(t, external("away", "www.example"), external("near", "web.default.svc.cluster.local"),
		coreDNS(fmt.Sprintf(`
.:53 {
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
    }
    hosts /etc/coredns/NodeHosts {
        192.0.2.9 printer.lan printer
        fallthrough
    }
    rewrite name exact old.example www.example
    rewrite name regex (.*)\.short\.name {1}.default.svc.cluster.local answer auto
    rewrite stop name suffix .apps.test .default.svc.cluster.local
    forward . %s
    cache 30
    loadbalance
}
corp.test:53 {
    cache 30
    forward . %s
}
`, out, in), map[string]string{"NodeHosts": "192.0.2.20 w1 # a node\n"}))
	late := false
	for _, network := range []string{"udp", "tcp"} {
		for _, c := range []struct {
			name string
			kind uint16
			want string
		}{
			{"web.default.svc.cluster.local.", dns.TypeA, "NOERROR, web.default.svc.cluster.local. A 10.96.0.7"},
			{"WEB.default.SVC.cluster.local.", dns.TypeA, "NOERROR, WEB.default.SVC.cluster.local. A 10.96.0.7"},
			{"web.default.svc.cluster.local.", dns.TypeAAAA, "NOERROR"},
			{"no.default.svc.cluster.local.", dns.TypeA, "NXDOMAIN"},
			{"7.0.96.10.in-addr.arpa.", dns.TypePTR,
				"NOERROR, 7.0.96.10.in-addr.arpa. PTR web.default.svc.cluster.local."},
			{"away.default.svc.cluster.local.", dns.TypeA,
				"NOERROR, away.default.svc.cluster.local. CNAME www.example., www.example. A 192.0.2.1"},
			{"away.default.svc.cluster.local.", dns.TypeCNAME,
				"NOERROR, away.default.svc.cluster.local. CNAME www.example."},
			{"near.default.svc.cluster.local.", dns.TypeA,
				"NOERROR, near.default.svc.cluster.local. CNAME web.default.svc.cluster.local., " +
					"web.default.svc.cluster.local. A 10.96.0.7"},
			{"www.example.", dns.TypeA, "NOERROR, www.example. A 192.0.2.1"},
			{"WWW.example.", dns.TypeA, "NOERROR, WWW.example. A 192.0.2.1"},
			{"none.example.", dns.TypeA, "NXDOMAIN"},
			{"db.corp.test.", dns.TypeA, "NOERROR, db.corp.test. A 192.0.2.2"},
			{"printer.lan.", dns.TypeA, "NOERROR, printer.lan. A 192.0.2.9"},
			{"printer.lan.", dns.TypeAAAA, "NOERROR"},
			{"w1.", dns.TypeA, "NOERROR, w1. A 192.0.2.20"},
			{"old.example.", dns.TypeA, "NOERROR, old.example. A 192.0.2.1"},
			{"web.short.name.", dns.TypeA, "NOERROR, web.short.name. A 10.96.0.7"},
			{"web.apps.test.", dns.TypeA, "NOERROR, web.apps.test. A 10.96.0.7"},
			{"1-2-3-4.default.pod.cluster.local.", dns.TypeA, "NOERROR, 1-2-3-4.default.pod.cluster.local. A 1.2.3.4"},
			{"web.default.svc.cluster.local.", dns.TypeAXFR, "REFUSED"},
			{"web.default.svc.cluster.local.", dns.TypeANY,
				`NOERROR, web.default.svc.cluster.local. HINFO "RFC8482" ""`},
		} {
			if network == "tcp" && c.kind == dns.TypeAXFR {
				continue
			}
			began := time.Now()
			if got := r.ask(network, c.name, c.kind); got != c.want {
				t.Errorf("%s %s %s: %s\nwant %s", network, c.name, dns.TypeToString[c.kind], got, c.want)
			}
			late = late || time.Since(began) > askedOnce
		}
	}
	if late {
		return false
	}
	if stub.Load() != 1 || outside.Load() > 4 {
		t.Errorf("%d questions to the stub domain's server and %d to the other: the cache did not answer the rest",
			stub.Load(), outside.Load())
	}
	var b strings.Builder
	if err := r.s.Metrics(&b); err != nil || !strings.Contains(b.String(),
		`coredns_dns_requests_total{server="dns://:53",view="",zone=".",family="1",proto="tcp",type="PTR"} 1`) ||
		!strings.Contains(b.String(),
			`coredns_cache_hits_total{server="dns://:53",type="success",view="",zones="corp.test."} 1`) {
		t.Errorf("metrics: %v\n%s", err, b.String())
	}
	return true
}

// The replies to messages without a regular question.
func TestMessages(t *testing.T) {
	var all []discoveryv1.Endpoint
	for i := range 300 {
		all = append(all, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.1.%d.%d", i/200, i%200)}})
	}
	big := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "big-1",
		Labels: map[string]string{discoveryv1.LabelServiceName: "big"}}, Endpoints: all}
	r := start(t, service("default", "big", v1.ClusterIPNone), big)
	ask := func(network string, change func(*dns.Msg)) *dns.Msg {
		t.Helper()
		m := &dns.Msg{}
		m.SetQuestion("big.default.svc.cluster.local.", dns.TypeA)
		change(m)
		c := dns.Client{Net: network, Timeout: 20 * time.Second, UDPSize: 4096}
		out, _, err := c.Exchange(m, r.at)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	size := func(m *dns.Msg) int { m.Compress = true; return m.Len() }
	if m := ask("udp", func(*dns.Msg) {}); !m.Truncated || size(m) > 512 || m.IsEdns0() != nil || len(m.Answer) == 0 {
		t.Errorf("without EDNS: %d bytes, truncated %v", size(m), m.Truncated)
	}
	if m := ask("udp", func(m *dns.Msg) {
		m.SetEdns0(4096, false)
	}); !m.Truncated || size(m) > 1232 || size(m) < 900 || m.IsEdns0() == nil {
		t.Errorf("with EDNS: %d bytes, truncated %v", size(m), m.Truncated)
	}
	if m := ask("tcp", func(*dns.Msg) {}); m.Truncated || len(m.Answer) != 300 {
		t.Errorf("over TCP: %d records, truncated %v", len(m.Answer), m.Truncated)
	}
	if m := ask("udp", func(m *dns.Msg) {
		m.SetEdns0(1232, false)
		m.IsEdns0().SetVersion(3)
	}); m.Rcode != dns.RcodeBadVers {
		t.Errorf("another version of EDNS: %s", dns.RcodeToString[m.Rcode])
	}
	if m := ask("udp", func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }); m.Rcode != dns.RcodeNotImplemented {
		t.Errorf("an update: %s", dns.RcodeToString[m.Rcode])
	}
	if m := ask("udp", func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }); m.Rcode != dns.RcodeRefused {
		t.Errorf("another class: %s", dns.RcodeToString[m.Rcode])
	}
}

// An invalid Corefile leaves the last valid one active, also in the next process. Unsupported parts
// are reported once, in an Event for the ConfigMap.
func TestCorefileChanges(t *testing.T) {
	const zone = ".:53 {\n kubernetes cluster.local\n hosts {\n 192.0.2.%d host.lan\n fallthrough\n }\n%s}\n"
	r := start(t, coreDNS(fmt.Sprintf(zone, 1, ""), nil))
	r.expect("host.lan.", dns.TypeA, "NOERROR, host.lan. A 192.0.2.1")
	r.cluster.Put(coreDNS(fmt.Sprintf(zone, 2, "dnssec\n"), nil))
	r.expect("host.lan.", dns.TypeA, "NOERROR, host.lan. A 192.0.2.2")
	event := func(reason, part string) {
		t.Helper()
		r.until(func() error {
			for _, e := range r.cluster.Events("cm") {
				if strings.HasPrefix(e, reason+" ") && strings.Contains(e, part) {
					return nil
				}
			}
			return fmt.Errorf("no Event %s with %q: %v", reason, part, r.cluster.Events("cm"))
		})
	}
	event("CorefileNotUnderstood", "line 7: plugin dnssec is not understood")
	r.cluster.Put(coreDNS(fmt.Sprintf(zone, 3, "forward . nowhere\n"), nil))
	event("CorefileRefused", "Corefile line")
	r.expect("host.lan.", dns.TypeA, "NOERROR, host.lan. A 192.0.2.2")
	if raw, err := os.ReadFile(r.s.cfg.StateDir + "/Corefile"); err != nil ||
		!strings.Contains(string(raw), "192.0.2.2") {
		t.Errorf("what is kept for the next process: %v %s", err, raw)
	}
	r.cluster.Delete(coreDNS("", nil))
	r.expect("host.lan.", dns.TypeA, "SERVFAIL") // the node has no resolver
}

// A new Service is answered, and a deleted one is not. The address of the Service that agents serve
// is theirs.
func TestFollows(t *testing.T) {
	r := start(t)
	r.cluster.Put(service("default", "late", "10.96.0.8"))
	r.expect("late.default.svc.cluster.local.", dns.TypeA, "NOERROR, late.default.svc.cluster.local. A 10.96.0.8")
	r.cluster.Delete(service("default", "late", "10.96.0.8"))
	r.expect("late.default.svc.cluster.local.", dns.TypeA, "NXDOMAIN")

	s := New(Config{Local: LinkLocal})
	dnsService := service("kube-system", "kube-dns", "10.96.0.10")
	dnsService.Annotations = map[string]string{"keelson.dev/served-by": "agent"}
	r.cluster.Put(dnsService)
	if got := fmt.Sprint(s.wantedAddresses(r.cluster)); got != "[169.254.20.10 10.96.0.10]" {
		t.Errorf("with the Service: %s", got)
	}
	own := dnsService.DeepCopy()
	own.Spec.Selector = map[string]string{"k8s-app": "kube-dns"}
	r.cluster.Put(own)
	if got := fmt.Sprint(s.wantedAddresses(r.cluster)); got != "[169.254.20.10]" {
		t.Errorf("with an add-on's Service: %s", got)
	}
}
