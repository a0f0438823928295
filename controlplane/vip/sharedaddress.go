// Package vip gives a machine an address that several machines of one link share, one of which has it at a time:
// the replica that leads, so that the API has an address that follows it.
//
// The address is added to the interface of the machine's own one with a lifetime of two seconds, which is renewed every half
// second after the caller has confirmed that it still leads. The kernel takes it away from whoever does not renew it: a
// process that hangs or was killed answers no more after that, and one that goes on after a pause has to be confirmed first.
// Whoever takes the address tells the link by gratuitous ARP, at first with every renewal, for until the lifetime is over two
// kernels may answer.
package vip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	lifetime = 2 * time.Second // whole seconds: the kernel counts no less
	renewal  = 500 * time.Millisecond
	// announcements are how often the link is told at renewals: for longer than the one of before may answer.
	announcements = 10
	// probing is how long others have to say that they have the address.
	probing   = 120 * time.Millisecond
	probeOnce = 40 * time.Millisecond
)

// ErrTaken says that a machine that is no replica answers for the address.
var ErrTaken = errors.New("another machine has the shared address")

// Address is one that replicas share.
type Address struct {
	IP  netip.Addr // IPv4
	Own netip.Addr // this machine's; the shared one goes to its interface
	// Peers are the addresses of the other replicas: one of them may still answer for the shared one.
	Peers func() []netip.Addr
	// Confirm returns nil when this replica led a moment ago, as a majority says.
	Confirm func(ctx context.Context) error
	Log     *slog.Logger
}

// Check says what is wrong with a shared address.
func Check(ip, own string) (netip.Addr, error) {
	a, err := netip.ParseAddr(ip)
	switch {
	case err != nil, !a.Is4(), a.IsUnspecified(), a.IsLoopback(), a.IsMulticast(), a.IsLinkLocalUnicast():
		return netip.Addr{}, fmt.Errorf("--api-address-shared %q: give an IPv4 address of the replicas' link that no machine has", ip)
	case ip == own:
		return netip.Addr{}, fmt.Errorf("--api-address-shared %s is this replica's own --advertise-address: give one that no machine has", ip)
	}
	return a, nil
}

// Permitted says what this process lacks to share an address: it has to add it to an interface, and to speak ARP there.
func Permitted() error {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return permitted(err, effective())
}

// permitted judges whether a packet socket was refused, and which capabilities are in effect.
func permitted(packet error, capabilities uint64) error {
	var missing []string
	if packet != nil {
		missing = append(missing, fmt.Sprintf("to open a packet socket (%v: CAP_NET_RAW, and AF_PACKET where systemd restricts families)", packet))
	}
	if capabilities&(1<<unix.CAP_NET_ADMIN) == 0 {
		missing = append(missing, "to change addresses (CAP_NET_ADMIN)")
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("the replica has no right %s: run install.sh again, which gives keelson-controlplane.service what the settings need, "+
		"or give the unit CapabilityBoundingSet=CAP_NET_ADMIN CAP_NET_RAW and RestrictAddressFamilies=AF_PACKET", strings.Join(missing, " and "))
}

// effective are the capabilities of this thread, a bit each; all when the kernel does not say: then it refuses by itself.
func effective() uint64 {
	var data [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &data[0]); err != nil {
		return ^uint64(0)
	}
	return uint64(data[1].Effective)<<32 | uint64(data[0].Effective)
}

// Clear takes the address off this machine, where a replica that was killed may have left it.
func (a Address) Clear() error {
	l, _, err := a.link()
	if err != nil {
		return err
	}
	return a.remove(l)
}

// Hold has the address until ctx ends, or fails when somebody else has it. Nothing of it is left when it returns.
// It stays on the caller's thread, which tests put into a namespace.
func (a Address) Hold(ctx context.Context) (err error) {
	l, mac, err := a.link()
	if err != nil {
		return err
	}
	s, err := open(l.Attrs().Index)
	if err != nil {
		return fmt.Errorf("preparing to announce %s: %w: the replica needs CAP_NET_RAW and CAP_NET_ADMIN", a.IP, err)
	}
	defer s.close()
	if err := a.free(ctx, s, mac); err != nil {
		return err
	}
	defer func() {
		if gone := a.remove(l); gone != nil {
			err = errors.Join(err, gone)
		}
	}()
	every := time.NewTicker(renewal)
	defer every.Stop()
	var had tenure
	for {
		if err := a.confirmed(ctx); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			a.Log.Warn("the shared address is not renewed", "address", a.IP, "err", err)
		} else if err := a.renew(l); err != nil {
			return err
		} else {
			begins, announce := had.renewed(time.Now())
			if begins {
				a.Log.Info("has the shared address", "address", a.IP, "link", l.Attrs().Name)
			}
			if announce {
				s.announce(mac, a.IP)
			}
		}
		select {
		case <-ctx.Done():
			a.Log.Info("gives the shared address up", "address", a.IP)
			return ctx.Err()
		case <-every.C:
		}
	}
}

// tenure is for how long the address has been here without a gap: after one, another machine may have been asked for, and the
// link is told anew.
type tenure struct {
	last time.Time
	told int
}

// renewed says whether the address is here anew, and whether the link is to be told.
func (t *tenure) renewed(now time.Time) (begins, announce bool) {
	if begins = now.Sub(t.last) > lifetime; begins {
		t.told = 0
	}
	t.last = now
	if announce = t.told < announcements; announce {
		t.told++
	}
	return begins, announce
}

// confirmed asks whether this replica leads, for no longer than the address lives.
func (a Address) confirmed(ctx context.Context) error {
	asked := time.Now()
	limited, cancel := context.WithTimeout(ctx, lifetime)
	defer cancel()
	if err := a.Confirm(limited); err != nil {
		return err
	}
	if took := time.Since(asked); took > lifetime { // the process was frozen meanwhile
		return fmt.Errorf("it took %s to be confirmed", took.Round(time.Millisecond))
	}
	return ctx.Err()
}

// link is the interface that has this machine's own address.
func (a Address) link() (netlink.Link, net.HardwareAddr, error) {
	links, err := netlink.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, nil, fmt.Errorf("listing interfaces: %w", err)
	}
	for _, l := range links {
		at := l.Attrs()
		addrs, err := netlink.AddrList(l, netlink.FAMILY_V4)
		if err != nil || at.Flags&net.FlagLoopback != 0 || len(at.HardwareAddr) != 6 {
			continue
		}
		for _, have := range addrs {
			if ip, ok := netip.AddrFromSlice(have.IP.To4()); ok && ip == a.Own {
				return l, at.HardwareAddr, nil
			}
		}
	}
	return nil, nil, fmt.Errorf("no interface on which others ask by ARP has --advertise-address %s: a shared address needs one", a.Own)
}

func (a Address) entry() *netlink.Addr {
	return &netlink.Addr{IPNet: &net.IPNet{IP: a.IP.AsSlice(), Mask: net.CIDRMask(32, 32)}, ValidLft: int(lifetime.Seconds()), PreferedLft: int(lifetime.Seconds())}
}

func (a Address) renew(l netlink.Link) error {
	if err := netlink.AddrReplace(l, a.entry()); err != nil {
		return fmt.Errorf("adding %s to %s: %w: the replica needs CAP_NET_ADMIN", a.IP, l.Attrs().Name, err)
	}
	return nil
}

func (a Address) remove(l netlink.Link) error {
	if err := netlink.AddrDel(l, a.entry()); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("taking %s off %s: %w", a.IP, l.Attrs().Name, err)
	}
	return nil
}

// free fails when a machine that is no replica answers for the address.
func (a Address) free(ctx context.Context, s *socket, own net.HardwareAddr) error {
	peers := a.Peers()
	found := map[netip.Addr]string{}
	for end := time.Now().Add(probing); time.Now().Before(end) && ctx.Err() == nil; {
		for _, ip := range append(slices.Clone(peers), a.IP) {
			s.ask(own, ip)
		}
		s.listen(min(probeOnce, time.Until(end)), func(ip netip.Addr, mac net.HardwareAddr) { found[ip] = mac.String() })
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return taken(a.IP, own.String(), peers, found)
}

// taken judges who has answered for which address, by hardware addresses.
func taken(ip netip.Addr, own string, peers []netip.Addr, found map[netip.Addr]string) error {
	by, answered := found[ip]
	if !answered || by == own {
		return nil
	}
	for _, p := range peers {
		if found[p] == by {
			return nil // it led before, and its kernel forgets the address soon
		}
	}
	return fmt.Errorf("%w: %s is answered for by %s, which is no replica: give --api-address-shared an address that no machine has, or take it off that one", ErrTaken, ip, by)
}
