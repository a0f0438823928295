package proxy

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/proxy/proxytest"
	"keelson.dev/keelson/agent/proxy/servicemodel"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/internal/wakeup"
	"keelson.dev/keelson/test/testenv/space"
)

type inside = fake.Cluster

// reported records the revisions that a proxy reported as applied.
type reported struct {
	*inside
	mu   sync.Mutex
	last uint64
}

func (r *reported) ProxyApplied(revision uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last = revision
}

func (r *reported) shows() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

// recorder is a Writer that records its calls.
type recorder struct {
	mu     sync.Mutex
	ports  map[string]*servicemodel.Port
	syncs  int
	refuse error // error of the next Apply
	broken bool
}

func (r *recorder) Check(context.Context) error { return nil }
func (r *recorder) Clean(context.Context) error { return nil }
func (r *recorder) Counts(context.Context) (Counts, error) {
	web := netip.MustParseAddr("10.96.0.10")
	return Counts{map[servicemodel.Frontend]uint64{{IP: web, Proto: "tcp", Port: 80}: 7,
			{IP: netip.MustParseAddr("10.89.0.101"), Proto: "tcp", Port: 30080}: 2},
			map[servicemodel.Frontend]uint64{{IP: web, Proto: "tcp", Port: 80}: 3}},
		nil
}

func (r *recorder) Sync(_ context.Context, _ Base, ports iter.Seq[*servicemodel.Port]) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.syncs, r.broken, r.ports = r.syncs+1, false, map[string]*servicemodel.Port{}
	for p := range ports {
		r.ports[p.ID] = p
	}
	return nil
}

func (r *recorder) Apply(_ context.Context, changes []servicemodel.Change) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.refuse; err != nil {
		r.refuse = nil
		return err
	}
	for _, c := range changes {
		if c.New == nil {
			delete(r.ports, c.Old.ID)
		} else {
			r.ports[c.New.ID] = c.New
		}
	}
	return nil
}

func (r *recorder) Intact(context.Context) (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.broken, nil
}

func (r *recorder) names() (out []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.ports {
		out = append(out, p.Name+"="+backendAddresses(p.Backends.Cluster))
	}
	slices.Sort(out)
	return out
}

// F112 F117: the proxy reports a revision when its rules reflect it, with or without a change.
// After the kernel has rejected a change, it writes all rules.
func TestConfirms(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	objects := &reported{inside: fake.NewCluster()}
	objects.Put(proxytest.Service("web", "10.96.0.10", 30080),
		proxytest.Slice("web", proxytest.Endpoint("10.244.0.2", "w1", true, true, false)))
	r := &recorder{}
	p := &Proxy{Node: "w1", Log: slog.New(slog.DiscardHandler), Metrics: NewMetrics(),
		writer: func(Mode) (Writer, error) { return r, nil }}
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx, objects, objects) }()
	defer func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}()
	expect := func(want ...string) {
		t.Helper()
		await.Until(ctx, t, await.Patience, time.Millisecond, "the current revision", func() error {
			if rev := objects.Revision(); objects.shows() != rev {
				return fmt.Errorf("the proxy shows %d of %d", objects.shows(), rev)
			}
			return nil
		})
		if got := r.names(); !slices.Equal(got, want) {
			t.Errorf("confirmed with %v, want %v", got, want)
		}
	}
	expect("default/web:http=10.244.0.2:8080")
	objects.Put(proxytest.Slice("web"))
	expect("default/web:http=")
	objects.Put(&v1.ConfigMap{})
	expect("default/web:http=")
	r.mu.Lock()
	r.refuse = errors.New("the kernel says no")
	r.mu.Unlock()
	objects.Put(proxytest.Slice("web", proxytest.Endpoint("10.244.0.6", "w1", true, true, false)))
	expect("default/web:http=10.244.0.6:8080")
	objects.Delete(proxytest.Service("web", "10.96.0.10", 0))
	expect()
	objects.Put(proxytest.Service("web", "10.96.0.10", 30080))
	expect("default/web:http=10.244.0.6:8080")
	if r.syncs != 2 {
		t.Errorf("all rules were written %d times, want 2: at first and after the refusal", r.syncs)
	}
	var text strings.Builder
	if err := p.WriteMetrics(ctx, &text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`keelson_service_connections_total{namespace="default",service="web",port="http",` +
		`protocol="tcp",from="cluster"} 7`,
		`from="outside"} 2`,
		`keelson_service_unserved_packets_total{namespace="default",service="web",port="http",protocol="tcp",` +
			`from="cluster"} 3`, "kubeproxy_sync_proxy_rules_duration_seconds_count 5",
		"kubeproxy_network_programming_duration_seconds_count 0",
		"kubeproxy_sync_proxy_rules_nftables_sync_failures_total 1",
		"kubeproxy_sync_full_proxy_rules_duration_seconds_count 2"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
}

// F117: rules that another program removed are detected, whatever part of them, and written again.
// Rules of other programs are not changed.
func TestDamageIsMended(t *testing.T) {
	for mode, damages := range map[Mode][][]string{
		ModeNFTables: {{"nft", "flush ruleset"},
			{"nft", "delete element ip keelson services { 10.96.0.10 . tcp . 80 }"},
			{"nft", "add element ip keelson services { 10.96.9.9 . tcp . 80 : drop }"},
			{"nft", "flush chain ip keelson dispatch"},
			{"nft", "delete element ip keelson services { 10.96.0.10 . tcp . 80 } ; add element ip " +
				"keelson services { 10.96.0.10 . tcp . 80 : drop }"},
			{"nft", "delete element ip keelson endpoints-tcp { 10.96.0.10 . 80 . 0 } ; add element ip keelson " +
				"endpoints-tcp { 10.96.0.10 . 80 . 0 : 10.244.0.6 . 8080 }"},
			{"nft", "flush map ip keelson endpoints-tcp"},
			{"sh", "-c", `h=$(nft -a list chain ip keelson refuse | sed -n 's/.*reset # handle //p') && nft replace ` +
				`rule ip keelson refuse handle $h drop`},
			{"sh", "-c", `h=$(nft -a list chain ip keelson pick-tcp-1 | sed -n 's/.*dnat.*# handle //p') && nft ` +
				`replace rule ip keelson pick-tcp-1 handle $h accept`},
			{"nft", "add chain ip keelson refuse-forward { policy drop; }"},
			{"nft", "add table ip keelson { flags dormant; }"}},
		ModeIPTables: {{"iptables", "-t", "nat", "-F"}, {"iptables", "-t", "nat", "-D", "KEELSON-SERVICES", "1"},
			{"iptables", "-t", "nat", "-D", "PREROUTING", "1"},
			{"iptables", "-t", "nat", "-R", "KEELSON-SERVICES", "1", "-j", "RETURN"}},
	} {
		t.Run(string(mode), func(t *testing.T) {
			if _, err := exec.LookPath(damages[0][0]); err != nil {
				t.Skip("needs " + damages[0][0])
			}
			town := newTown(t)
			w, err := NewWriter(mode)
			if err != nil {
				t.Fatal(err)
			}
			objects := fake.NewCluster()
			objects.About.ServiceCIDR, objects.About.ClusterCIDR = "10.96.0.0/16", "10.244.0.0/16"
			objects.Put(proxytest.Service("web", "10.96.0.10", 30080),
				proxytest.Slice("web", proxytest.Endpoint("10.244.0.2", "w1", true, true, false)))
			p := &Proxy{Node: "w1", NodeIP: netip.MustParseAddr(nodeV4), Log: slog.New(slog.DiscardHandler)}
			s := newState(w, "w1")
			do := func(f func() error) {
				t.Helper()
				if err := space.In(town.node, f); err != nil {
					t.Fatal(err)
				}
			}
			do(func() error { return p.applyChanges(t.Context(), s, objects, objects, agent.ObjectChanges{All: true}) })
			for _, d := range damages {
				do(func() error {
					if out, err := exec.CommandContext(t.Context(), d[0], d[1:]...).CombinedOutput(); err != nil {
						return fmt.Errorf("%v: %w: %s", d, err, out)
					}
					_ = exec.CommandContext(t.Context(), "nft", "add table ip elsewhere").Run()
					if ok, err := w.Intact(t.Context()); ok || err != nil {
						t.Errorf("%v is not noticed: %v", d, err)
					}
					return p.repairRules(t.Context(), s)
				})
				if err := try(town.node, "10.96.0.10:80", expected{to: map[string]bool{"a": true}}); err != nil {
					t.Errorf("after %v: %v", d, err)
				}
				do(func() error {
					ok, err := w.Intact(t.Context())
					if err == nil && !ok {
						err = fmt.Errorf("%v is not mended", d)
					}
					return err
				})
			}
			do(func() error { return w.Clean(t.Context()) })
			if mode == ModeNFTables {
				do(func() error {
					return exec.CommandContext(t.Context(), "nft", "list", "table", "ip", "elsewhere").Run()
				})
			}
		})
	}
}

// F117: a new agent, or another mode, takes over under traffic: existing connections continue, and
// each new connection reaches an endpoint.
func TestTakeOverUnderTraffic(t *testing.T) {
	for _, program := range []string{"nft", "iptables-restore"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip("needs " + program)
		}
	}
	town := newTown(t)
	echo(t, town.clients["a"], "0.0.0.0:9090")
	services := []*v1.Service{proxytest.Service("web", "10.96.0.10", 30080), proxytest.Service("echo", "10.96.0.12", 0),
		proxytest.Service("sticky", "10.96.0.11", 0, func(s *v1.Service) {
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		})}
	m := servicemodel.Compute(services, nil, servicemodel.Location{Node: "w1"})
	port := int32(9090)
	long := proxytest.Slice("echo", proxytest.Endpoint("10.244.0.2", "w1", true, true, false))
	long.Ports[0].Port = &port
	m.Replace(services,
		append(sliceList(proxytest.Slice("web", proxytest.Endpoint("10.244.0.2", "w1", true, true, false),
			proxytest.Endpoint("10.244.0.6", "w1", true, true, false)),
			proxytest.Slice("sticky", proxytest.Endpoint("10.244.0.2", "w1", true, true, false),
				proxytest.Endpoint("10.244.0.6", "w1", true, true, false))), long))
	m.UpdatePorts()
	do := func(f func() error) {
		t.Helper()
		if err := space.In(town.node, f); err != nil {
			t.Fatal(err)
		}
	}
	do(func() error { return routeServices(testBase) })
	begin := func(mode Mode) {
		do(func() error {
			w, err := NewWriter(mode)
			if err != nil {
				return err
			}
			return errors.Join(w.Sync(t.Context(), testBase, maps.Values(m.Ports())), cleanOthers(t.Context(), mode))
		})
	}
	begin(ModeNFTables)
	var lives net.Conn
	do(func() (err error) { lives, err = net.Dial("tcp4", "10.96.0.12:80"); return err })
	defer lives.Close()
	first, err := ask(town.clients["outside"], "10.96.0.11:80")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	failed, tries := make(chan error, 1), wakeup.New()
	go func() {
		for ctx.Err() == nil {
			if err := try(town.node, "10.96.0.10:80", expected{to: map[string]bool{"a": true, "b": true}}); err != nil {
				failed <- err
				return
			}
			tries.Send()
		}
		failed <- nil
	}()
	for range 3 {
		for _, mode := range []Mode{ModeNFTables, ModeNFTables, ModeIPTables, ModeIPTables, ModeNFTables} {
			begin(mode)
			if _, err := lives.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			_ = lives.SetReadDeadline(time.Now().Add(time.Minute))
			if _, err := lives.Read(make([]byte, 1)); err != nil {
				t.Fatalf("a connection ended as mode %s took over: %v", mode, err)
			}
			select {
			case <-tries:
			case err := <-failed:
				t.Fatalf("no endpoint was found as mode %s took over: %v", mode, err)
			}
		}
	}
	stop()
	if err := <-failed; err != nil {
		t.Error(err)
	}
	begin(ModeNFTables)
	now, err := ask(town.clients["outside"], "10.96.0.11:80")
	if err != nil {
		t.Fatal(err)
	}
	begin(ModeNFTables)
	for range 4 {
		if again, err := ask(town.clients["outside"], "10.96.0.11:80"); err != nil || again != now {
			t.Errorf("a client of %q (at first %q) came to %q after a restart: %v", now, first, again, err)
		}
	}
}

// F118: Check rejects a mode that the machine does not support, with one sentence that states the
// remedy.
func TestModesAreRefused(t *testing.T) {
	if _, err := os.Stat("/proc/net/ip_vs"); err != nil {
		p := &Proxy{Node: "w1", Mode: ModeIPVS, Log: slog.New(slog.DiscardHandler)}
		err := p.Run(t.Context(), fake.NewCluster(), nil)
		if err == nil || !strings.Contains(err.Error(), "ip_vs") || !strings.Contains(err.Error(), "--proxy-mode") {
			t.Errorf("ipvs: %v", err)
		}
	}
	t.Setenv("PATH", t.TempDir())
	for mode, want := range map[Mode]string{ModeNFTables: "install nft", ModeIPTables: "install the package iptables"} {
		err := (&Proxy{Node: "w1", Mode: mode, Log: slog.New(slog.DiscardHandler)}).Run(t.Context(),
			fake.NewCluster(), nil)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", mode, err)
		}
	}
	if _, err := ParseMode("userspace"); err == nil ||
		!strings.Contains(err.Error(), "nftables, iptables, ipvs or none") {
		t.Error(err)
	}
}

// With a third-party network, pods' traffic to other networks is not masqueraded. It is masqueraded
// again when the third-party network is removed.
func TestForeignNetworkMasquerades(t *testing.T) {
	const rule = "ip saddr 10.244.0.0/16 ip daddr != { 10.244.0.0/16 } masquerade"
	objects := fake.NewCluster()
	objects.About.ServiceCIDR, objects.About.ClusterCIDR = "10.96.0.0/16", "10.244.0.0/16"
	objects.Put(proxytest.Service("web", "10.96.0.10", 30080),
		proxytest.Slice("web", proxytest.Endpoint("10.244.0.2", "w1", true, true, false)))
	foreign := false
	p := &Proxy{Node: "w1", ForeignNetwork: func() bool { return foreign }, Log: slog.New(slog.DiscardHandler)}
	n, dump := onFakes(nftDialect)
	s := newState(n, "w1")
	for _, foreign = range []bool{false, true, false} {
		if err := p.applyChanges(t.Context(), s, objects, objects, agent.ObjectChanges{All: true}); err != nil {
			t.Fatal(err)
		}
		if text := dump(); strings.Contains(text, rule) == foreign || !strings.Contains(text, "10.244.0.2") {
			t.Errorf("foreign %v:\n%s", foreign, text)
		}
	}
}

// refusing is a Writer whose kernel rejects all rules.
type refusing struct {
	recorder
	err error
}

func (r *refusing) Sync(ctx context.Context, b Base, ports iter.Seq[*servicemodel.Port]) error {
	return errors.Join(r.err, r.recorder.Sync(ctx, b, ports))
}

// waiting records queued changes and confirmed rules.
type waiting struct {
	mu      sync.Mutex
	pending bool
	updated int
}

func (w *waiting) Queued()  { w.mu.Lock(); w.pending = true; w.mu.Unlock() }
func (w *waiting) Updated() { w.mu.Lock(); w.pending = false; w.updated++; w.mu.Unlock() }
func (w *waiting) state() (bool, int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pending, w.updated
}

// F117: a change is pending from the time the proxy receives it until the kernel has accepted its
// rules, even if the kernel rejects them first and the proxy is restarted.
func TestChangesWaitForRules(t *testing.T) {
	objects, seen := &reported{inside: fake.NewCluster()}, &waiting{}
	objects.Put(proxytest.Service("web", "10.96.0.10", 30080))
	w := &refusing{err: errors.New("no room")}
	p := &Proxy{Node: "w1", Log: slog.New(slog.DiscardHandler), Synced: seen, writer: func(Mode) (Writer, error) {
		return w, nil
	}}
	if err := p.Run(t.Context(), objects, objects); err == nil {
		t.Fatal("a proxy whose rules are refused runs")
	}
	if pending, updated := seen.state(); !pending || updated != 0 {
		t.Errorf("after rules were refused: pending %v, updated %d times", pending, updated)
	}
	w.err = nil
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx, objects, objects) }()
	limit, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := wait.For(limit, time.Millisecond, func() error {
		if pending, updated := seen.state(); pending || updated == 0 {
			return fmt.Errorf("pending %v, updated %d times", pending, updated)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	stop()
	<-ended
}
