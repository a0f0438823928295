package proxy

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/knftables"
)

// in runs f on a thread inside ns, which is given up afterwards.
func in(ns netns.NsHandle, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if err := netns.Set(ns); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

func newNS(t *testing.T) netns.NsHandle {
	t.Helper()
	var ns netns.NsHandle
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		var err error
		if ns, err = netns.New(); err == nil {
			var lo netlink.Link
			if lo, err = netlink.LinkByName("lo"); err == nil {
				err = netlink.LinkSetUp(lo)
			}
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatalf("making a namespace: %v", err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

func addr(t *testing.T, ns netns.NsHandle, link, cidr, gateway string) {
	t.Helper()
	if err := in(ns, func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(cidr)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(l, a); err != nil {
			return err
		}
		if err := netlink.LinkSetUp(l); err != nil || gateway == "" {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(gateway)})
	}); err != nil {
		t.Fatalf("%s %s: %v", link, cidr, err)
	}
}

// pod makes a namespace joined to node by a cable, with a server that answers its own name.
func pod(t *testing.T, node netns.NsHandle, name, ip, gateway string) netns.NsHandle {
	t.Helper()
	ns := newNS(t)
	if err := in(node, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(ns))})
	}); err != nil {
		t.Fatal(err)
	}
	addr(t, node, name, gateway+"/30", "")
	addr(t, ns, "eth0", ip+"/30", gateway)
	var ln net.Listener
	if err := in(ns, func() (err error) { ln, err = net.Listen("tcp4", "0.0.0.0:8080"); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			fmt.Fprintf(c, "%s %s", name, c.RemoteAddr().(*net.TCPAddr).IP)
			c.Close()
		}
	}()
	return ns
}

func ask(ns netns.NsHandle, address string) (answer string, err error) {
	err = in(ns, func() error {
		c, err := (&net.Dialer{Timeout: 3 * time.Second}).Dial("tcp4", address)
		if err != nil {
			return err
		}
		defer c.Close()
		raw, err := io.ReadAll(c)
		answer = string(raw)
		return err
	})
	return answer, err
}

// F117: the rules do in the kernel what the model says: cluster address from the
// host and from a pod, a pod reaching itself, node port with the source changed,
// refusal without backends.
func TestKernel(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root for network namespaces")
	}
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("needs nft")
	}
	node := newNS(t)
	a := pod(t, node, "a", "10.244.0.2", "10.244.0.1")
	pod(t, node, "b", "10.244.0.6", "10.244.0.5")
	outside := newNS(t)
	if err := in(node, func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
			return err
		}
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "up"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(outside))})
	}); err != nil {
		t.Fatal(err)
	}
	addr(t, node, "up", "10.89.0.101/24", "")
	addr(t, outside, "eth0", "10.89.0.7/24", "")

	p := &Proxy{Node: "w1", NodeIP: netip.MustParseAddr("10.89.0.101")}
	cidr, pods := netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("10.244.0.0/16")
	services := []*v1.Service{service("web", "10.96.0.10", 30080), service("self", "10.96.0.11", 0), service("none", "10.96.0.12", 0)}
	parts := []*discoveryv1.EndpointSlice{
		slice("web", endpoint("10.244.0.2", "w1", true, true, false), endpoint("10.244.0.6", "w1", true, true, false)),
		slice("self", endpoint("10.244.0.2", "w1", true, true, false)),
	}
	if err := in(node, func() error {
		if err := p.route(cidr); err != nil {
			return err
		}
		nft, err := knftables.New(knftables.IPv4Family, Table)
		if err != nil {
			return err
		}
		tx := nft.NewTransaction()
		base(tx, cidr, pods)
		change(tx, ruleset{}, render(Compute(services, parts, "w1")))
		return nft.Run(context.Background(), tx)
	}); err != nil {
		t.Fatal(err)
	}

	seen := map[string]bool{}
	for range 40 {
		got, err := ask(node, "10.96.0.10:80")
		if err != nil {
			t.Fatalf("host to Service: %v", err)
		}
		seen[strings.Fields(got)[0]] = true
	}
	if !seen["a"] || !seen["b"] {
		t.Errorf("40 connections reached %v, want both pods", seen)
	}
	if got, err := ask(a, "10.96.0.11:80"); err != nil || !strings.HasPrefix(got, "a ") {
		t.Errorf("pod to itself through a Service: %q, %v", got, err)
	}
	if got, err := ask(outside, "10.89.0.101:30080"); err != nil {
		t.Errorf("outside to node port: %v", err)
	} else if strings.Contains(got, "10.89.0.7") {
		t.Errorf("the pod saw the client's address %q: replies could take another way", got)
	}
	// A server beyond the cluster has no route to pods: it must see the node's address.
	var ln net.Listener
	if err := in(outside, func() (err error) { ln, err = net.Listen("tcp4", "10.89.0.7:8080"); return err }); err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		if c, err := ln.Accept(); err == nil {
			fmt.Fprint(c, c.RemoteAddr().(*net.TCPAddr).IP)
			c.Close()
		}
	}()
	if got, err := ask(a, "10.89.0.7:8080"); err != nil || got != "10.89.0.101" {
		t.Errorf("pod to a server beyond the cluster: seen as %q, %v", got, err)
	}
	for _, ns := range []netns.NsHandle{node, a} {
		if _, err := ask(ns, "10.96.0.12:80"); err == nil || !strings.Contains(err.Error(), "refused") {
			t.Errorf("a Service without backends answered %v, want connection refused", err)
		}
	}
}
