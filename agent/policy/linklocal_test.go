package policy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/testenv/space"
)

// linkLocal returns the link-local address of an interface.
func (r *rig) linkLocal(t *testing.T, link string) netip.Addr {
	t.Helper()
	var found netip.Addr
	must(t, space.In(r.node, func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		list, err := netlink.AddrList(l, netlink.FAMILY_V6)
		for _, a := range list {
			if ip, ok := netip.AddrFromSlice(a.IP); ok && ip.IsLinkLocalUnicast() {
				found = ip
			}
		}
		return err
	}))
	if !found.IsValid() {
		t.Fatalf("%s has no link-local address", link)
	}
	return found
}

// A pod cannot reach its node through link-local IPv6 addresses, which no policy can name. This
// holds with and without IPv6 in the cluster, and whether or not policies select the pod. Neighbor
// discovery works, and the node's other addresses are reachable.
func TestNodeByLinkLocal(t *testing.T) {
	r := settled(t)
	for _, p := range r.places[:4] {
		p.addresses = p.addresses[:1] // an IPv4 cluster, whose nodes and pods nevertheless have link-local addresses
	}
	r.putPods()
	r.put(denyAll("a"))
	r.start(t, nil)
	node := r.linkLocal(t, bridge)
	for _, p := range []*place{r.places[0], r.places[2]} { // isolated, and without policies
		must(t, r.e.Guard(t.Context(), p.object(), p.strings()))
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		// The pod's own link-local address is tentative for a while, during which the pod does not
		// resolve the node's address.
		must(t, space.In(p.ns, func() error {
			return wait.For(ctx, 10*time.Millisecond, func() error { return refused(node) })
		}))
	}
	free := r.places[2]
	must(t, space.In(free.ns, func() error {
		c, err := (&net.Dialer{Timeout: patience}).Dial("tcp4", fmt.Sprintf("10.88.0.1:%d", testPorts[0]))
		if err == nil {
			c.Close()
		}
		return err
	}))
}

// refused returns nil if the neighbor with this link-local address of eth0 has sent its hardware
// address and nothing else.
func refused(node netip.Addr) error {
	c, err := (&net.Dialer{Timeout: time.Second}).Dial("tcp6", fmt.Sprintf("[%s%%eth0]:%d", node, testPorts[0]))
	if err == nil {
		c.Close()
		return fmt.Errorf("%s is reached", node)
	}
	if failed, ok := errors.AsType[net.Error](err); !ok || !failed.Timeout() {
		return fmt.Errorf("%w, want no answer", err)
	}
	l, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	found, err := netlink.NeighList(l.Attrs().Index, netlink.FAMILY_V6)
	if slices.ContainsFunc(found, func(n netlink.Neigh) bool {
		return n.IP.String() == node.String() && len(n.HardwareAddr) == 6
	}) {
		return nil
	}
	return errors.Join(err, fmt.Errorf("the hardware address of %s is not found: %v", node, found))
}
