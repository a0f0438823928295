package apiproxy

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"keelson.dev/keelson/agent"
)

// view is an agent's view of the replicas.
type view struct {
	agent.Objects
	mu      sync.Mutex
	slice   *discoveryv1.EndpointSlice
	changes chan agent.ObjectChanges
}

func (v *view) EndpointSlice(namespace, name string) (*discoveryv1.EndpointSlice, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.slice, v.slice != nil && namespace == "default" && name == "kubernetes"
}

func (v *view) Follow(context.Context, ...string) <-chan agent.ObjectChanges { return v.changes }

// set lists replicas; those with the prefix "-" are not ready.
func (v *view) set(port int32, addresses ...string) {
	s := &discoveryv1.EndpointSlice{Ports: []discoveryv1.EndpointPort{{Port: &port}}}
	for _, a := range addresses {
		ready := !strings.HasPrefix(a, "-")
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{strings.TrimPrefix(a, "-")},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready}, TargetRef: (*v1.ObjectReference)(nil)})
	}
	v.mu.Lock()
	v.slice = s
	v.mu.Unlock()
	v.changes <- agent.ObjectChanges{Keys: map[agent.ObjectKey]struct{}{{Kind: "EndpointSlice", Namespace: "default",
		Name: "kubernetes"}: {}}}
}

// replica sends its name to each client and then echoes the client's data.
func replica(t *testing.T, address string) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	host, _, _ := net.SplitHostPort(address)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				fmt.Fprintf(c, "%-16s", host)
				io.Copy(c, c)
			}()
		}
	}()
	return ln
}

// serve runs a Server with a view until the test ends.
func serve(t *testing.T, cfg Config) (*view, string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cfg.Log = slog.New(slog.DiscardHandler)
	v := &view{changes: make(chan agent.ObjectChanges, 16)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		New(cfg).Serve(ctx, ln, v)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return v, ln.Addr().String()
}

// dial returns the name of the replica that responds; "" if none does.
func dial(t *testing.T, address string) (net.Conn, string) {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(time.Minute))
	name := make([]byte, 16)
	if _, err := io.ReadFull(c, name); err != nil {
		return c, ""
	}
	return c, strings.TrimSpace(string(name))
}

// Every client reaches a ready replica, whichever replica fails. Without a ready replica, the
// connection is closed immediately.
func TestLeadsToReplicas(t *testing.T) { // F5
	v, at := serve(t, Config{})
	if _, who := dial(t, at); who != "" {
		t.Fatalf("%s answers, and none was listed", who)
	}
	first := replica(t, "127.0.0.2:0")
	port := first.Addr().(*net.TCPAddr).Port
	replica(t, fmt.Sprintf("127.0.0.3:%d", port))
	replica(t, fmt.Sprintf("127.0.0.4:%d", port))
	v.set(int32(port), "127.0.0.2", "-127.0.0.3", "127.0.0.4")
	met := map[string]int{}
	for range 8 {
		_, who := dial(t, at)
		met[who]++
	}
	if met["127.0.0.2"] != 4 || met["127.0.0.4"] != 4 {
		t.Fatalf("of 8 clients came to %v: want 4 to each replica that is ready", met)
	}
	first.Close()
	for range 4 {
		if _, who := dial(t, at); who != "127.0.0.4" {
			t.Fatalf("a client came to %q although 127.0.0.4 is ready", who)
		}
	}
	c, _ := dial(t, at)
	fmt.Fprint(c, "all of it")
	c.(*net.TCPConn).CloseWrite()
	if got, err := io.ReadAll(c); err != nil || string(got) != "all of it" {
		t.Fatalf("after the client's end: %q, %v", got, err)
	}
}

// Connections to a replica that is no longer listed are closed after a while, and no others. None
// are closed while the list is empty.
func TestPartsFromReplicas(t *testing.T) {
	v, at := serve(t, Config{DrainTime: 50 * time.Millisecond})
	ln := replica(t, "127.0.0.2:0")
	port := ln.Addr().(*net.TCPAddr).Port
	replica(t, fmt.Sprintf("127.0.0.3:%d", port))
	v.set(int32(port), "127.0.0.2")
	leaves, who := dial(t, at)
	if who != "127.0.0.2" {
		t.Fatal(who)
	}
	v.set(int32(port))
	v.set(int32(port), "127.0.0.3")
	stays, who := dial(t, at)
	if who != "127.0.0.3" {
		t.Fatal(who)
	}
	if _, err := leaves.Read(make([]byte, 1)); err != io.EOF && !strings.Contains(fmt.Sprint(err), "reset") {
		t.Fatalf("the connection to the replica that went: %v", err)
	}
	echo := make([]byte, 2)
	fmt.Fprint(stays, "ok")
	if _, err := io.ReadFull(stays, echo); err != nil || string(echo) != "ok" {
		t.Fatalf("the connection to the one that stayed: %q, %v", echo, err)
	}
}

// The number of open connections is limited, and closed connections free their slots.
func TestConnectionsAreBounded(t *testing.T) {
	v, at := serve(t, Config{Limit: 2})
	ln := replica(t, "127.0.0.2:0")
	v.set(int32(ln.Addr().(*net.TCPAddr).Port), "127.0.0.2")
	a, _ := dial(t, at)
	if _, who := dial(t, at); who == "" {
		t.Fatal("the second client was refused")
	}
	if _, who := dial(t, at); who != "" {
		t.Fatal("a third client was let in where there is room for two")
	}
	a.Close()
	for until := time.Now().Add(time.Minute); ; {
		if _, who := dial(t, at); who != "" {
			break
		}
		if time.Now().After(until) {
			t.Fatal("no client is admitted although a connection has been closed")
		}
	}
}

// An empty list closes no connections, and a replica that returns to the list in time keeps its
// connections.
func TestPartingIsPatient(t *testing.T) {
	a, b := netip.MustParseAddrPort("192.0.2.1:6443"), netip.MustParseAddrPort("192.0.2.2:6443")
	s := New(Config{Log: slog.New(slog.DiscardHandler)})
	here, there := net.Pipe()
	c := &proxiedConn{client: here, replica: there, replicaAddr: a}
	s.open[c] = struct{}{}
	gone, now := map[netip.AddrPort]time.Time{}, time.Unix(1000, 0)
	closed := func() bool { return here.SetDeadline(time.Time{}) != nil }
	for i, step := range []struct {
		after  time.Duration
		listed []netip.AddrPort
		next   time.Duration
		closed bool
	}{
		{0, []netip.AddrPort{a, b}, time.Hour, false},
		{time.Second, []netip.AddrPort{b}, defaultDrainTime, false},
		{4 * time.Second, []netip.AddrPort{b}, defaultDrainTime - 4*time.Second, false},
		{time.Hour, nil, time.Hour, false},
		{time.Second, []netip.AddrPort{a, b}, time.Hour, false},
		{time.Second, []netip.AddrPort{b}, defaultDrainTime, false},
		{defaultDrainTime, []netip.AddrPort{b}, time.Hour, true},
	} {
		now = now.Add(step.after)
		if next := s.closeDrained(step.listed, gone, now); next != step.next || closed() != step.closed {
			t.Fatalf("step %d: again in %v, want %v; closed %v, want %v", i, next, step.next, closed(), step.closed)
		}
	}
}
