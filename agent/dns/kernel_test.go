package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/test/testenv/space"
)

// pair connects a pod's namespace to the node's.
func pair(t *testing.T, node, pod netns.NsHandle) {
	t.Helper()
	up := func(ns netns.NsHandle, name, address string, gateway net.IP) error {
		return space.In(ns, func() error {
			l, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(address)
			if err != nil {
				return err
			}
			if err := errors.Join(netlink.AddrAdd(l, a), netlink.LinkSetUp(l)); err != nil || gateway == nil {
				return err
			}
			return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: gateway})
		})
	}
	err := space.In(node, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "pod0"
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(pod))})
	})
	if err == nil {
		err = up(node, "pod0", "10.88.0.1/24", nil)
	}
	if err == nil {
		err = up(pod, "eth0", "10.88.0.2/24", net.IPv4(10, 88, 0, 1))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// pagesOnDemand checks that the ports of HTTP endpoints are free for pods on the host network
// unless the Corefile enables an endpoint.
func pagesOnDemand(t *testing.T, node netns.NsHandle, at netip.Addr, cluster *fake.Cluster, until func(func() error)) {
	t.Helper()
	listens := func() (yes bool) {
		if err := space.In(node, func() error {
			c, err := net.Dial("tcp", netip.AddrPortFrom(at, metricsPort).String())
			if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) {
				// the listener is being closed
				return nil
			}
			if err == nil {
				yes = true
				c.Close()
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return yes
	}
	if listens() {
		t.Error("the port of a page is taken that nobody asked for")
	}
	config := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "coredns"},
		Data: map[string]string{"Corefile": ".:53 {\n kubernetes cluster.local\n prometheus :9153\n}\n"}}
	for _, step := range []struct {
		do   func(...any)
		want bool
	}{{cluster.Put, true}, {cluster.Delete, false}} {
		step.do(config)
		until(func() error {
			if listens() != step.want {
				return fmt.Errorf("it listens: %v", !step.want)
			}
			return nil
		})
	}
}

// silentBetweenAgents checks that no ICMP errors are sent while no agent runs, so that clients
// retry.
func silentBetweenAgents(t *testing.T, pod netns.NsHandle) {
	t.Helper()
	if err := space.In(pod, func() error {
		c, err := net.Dial("udp", "10.96.0.10:53")
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
			return err
		}
		if _, err := c.Write(make([]byte, 20)); err != nil {
			return err
		}
		if _, err := c.Read(make([]byte, 100)); errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
		return nil
	}); err != nil {
		t.Errorf("while no agent runs: %v", err)
	}
}

// untracked checks that no query has a conntrack entry.
func untracked(t *testing.T, node netns.NsHandle) {
	t.Helper()
	if err := space.In(node, func() error {
		raw, err := os.ReadFile("/proc/thread-self/net/nf_conntrack")
		if errors.Is(err, os.ErrNotExist) {
			raw, err = os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
			if strings.TrimSpace(string(raw)) != "0" && err == nil {
				return fmt.Errorf("%s connections are tracked", strings.TrimSpace(string(raw)))
			}
			return err
		}
		if strings.Contains(string(raw), "dport=53") {
			return fmt.Errorf("questions are tracked:\n%s", raw)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

// track adds a rule that matches connections, so that the kernel tracks those that are not exempt.
func track(t *testing.T, node netns.NsHandle) {
	t.Helper()
	if err := space.In(node, func() error {
		c := exec.Command("nft", "-f", "-")
		c.Stdin = strings.NewReader("table ip t { chain c { type filter hook input priority 0; ct state " +
			"invalid counter; }; }")
		out, err := c.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// again is the time after which musl's resolver retries; other resolvers wait longer.
const again = 2500 * time.Millisecond

// gap returns the longest time between two answers to queries of a pod, sent every two
// milliseconds, while do runs.
func gap(t *testing.T, pod netns.NsHandle, at netip.Addr, do func()) (longest time.Duration) {
	t.Helper()
	var conn net.Conn
	if err := space.In(pod, func() (err error) {
		conn, err = net.Dial("udp", netip.AddrPortFrom(at, 53).String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	m := &dns.Msg{}
	m.SetQuestion("web.default.svc.cluster.local.", dns.TypeA)
	packet, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	var both sync.WaitGroup
	ended := make(chan struct{})
	both.Go(func() {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				_, _ = conn.Write(packet) // an error is expected while no server listens
			case <-ended:
				return
			}
		}
	})
	both.Go(func() {
		last := time.Now()
		for buf := make([]byte, 1500); ; {
			_, err := conn.Read(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				longest, last = max(longest, time.Since(last)), time.Now()
			}
		}
	})
	do()
	close(ended)
	conn.Close()
	both.Wait()
	return longest
}

// goesToAddOn checks that the Service's address is removed from the node when an add-on serves the
// Service.
func goesToAddOn(t *testing.T, node netns.NsHandle, svc *v1.Service, cluster *fake.Cluster, until func(func() error)) {
	t.Helper()
	addon := svc.DeepCopy()
	addon.Spec.Selector = map[string]string{"k8s-app": "kube-dns"}
	cluster.Put(addon)
	until(func() error {
		return space.In(node, func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			all, err := netlink.AddrList(lo, netlink.FAMILY_V4)
			if err != nil {
				return err
			}
			if got := fmt.Sprint(all); strings.Contains(got, "10.96.0.10") || !strings.Contains(got, "169.254.20.10") {
				return fmt.Errorf("addresses once an add-on has the Service: %s", got)
			}
			return nil
		})
	})
}

// A pod reaches its node's DNS at the Service's address and at the link-local one, without a
// conntrack entry. The next agent finds the addresses, and removes one that is no longer wanted.
//
// P22
func TestOnANode(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("needs nft")
	}
	node, pod := space.New(t), space.New(t)
	pair(t, node, pod)
	track(t, node)
	cluster := fake.NewCluster()
	svc := service("kube-system", "kube-dns", "10.96.0.10")
	svc.Annotations = map[string]string{"keelson.dev/served-by": "agent"}
	cluster.Put(svc, service("default", "web", "10.96.0.7"))
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "resolv.conf"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	agent := func() (stop func()) {
		s := New(Config{Node: "w1", StateDir: dir, RunDir: dir, ResolvConf: filepath.Join(dir, "resolv.conf"),
			Local: LinkLocal, Log: slog.New(slog.DiscardHandler)})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- space.In(node, func() error { return s.Run(ctx, cluster, cluster) }) }()
		return func() {
			cancel()
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Errorf("the server: %v", err)
			}
		}
	}
	ask := func(network string, at netip.Addr) error {
		return space.In(pod, func() error {
			m := &dns.Msg{}
			m.SetQuestion("web.default.svc.cluster.local.", dns.TypeA)
			conn, err := net.Dial(network, netip.AddrPortFrom(at, 53).String())
			if err != nil {
				return err
			}
			defer conn.Close()
			c := dns.Client{Net: network, Timeout: time.Second} // repeated until there is an answer
			out, _, err := c.ExchangeWithConn(m, &dns.Conn{Conn: conn})
			if err != nil {
				return err
			}
			if got := short(out); got != "NOERROR, web.default.svc.cluster.local. A 10.96.0.7" {
				return errors.New(got)
			}
			return nil
		})
	}
	until := func(cond func() error) {
		t.Helper()
		await.Until(context.Background(), t, await.Patience, 10*time.Millisecond, "the answer", cond)
	}
	own := netip.MustParseAddr("10.96.0.10")
	stop := agent()
	for _, network := range []string{"udp", "tcp"} {
		for _, at := range []netip.Addr{own, LinkLocal} {
			until(func() error { return ask(network, at) })
		}
	}
	pagesOnDemand(t, node, own, cluster, until)
	// Packets before the server started met no rules and may have conntrack entries, so flush the
	// table.
	if err := space.In(node, func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }); err != nil {
		t.Fatal(err)
	}
	for _, network := range []string{"udp", "tcp"} {
		for _, at := range []netip.Addr{own, LinkLocal} {
			until(func() error { return ask(network, at) })
		}
	}
	untracked(t, node)
	stop()
	silentBetweenAgents(t, pod)
	stop = agent()
	until(func() error { return ask("udp", own) })
	unanswered := gap(t, pod, own, func() {
		stop()
		stop = agent()
		until(func() error { return ask("udp", own) })
	})
	t.Logf("nobody answers for %s when the server is replaced by another one", unanswered)
	if unanswered > again {
		t.Errorf("nobody answers for %s when the server is replaced: resolvers ask again after %s", unanswered, again)
	}
	goesToAddOn(t, node, svc, cluster, until)
	stop()
}
