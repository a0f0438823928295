// Package vip assigns an IPv4 address that several machines of one link share to one of them at a
// time: the leading replica. The API thereby has an address that follows the leader.
//
// The address is added to the interface with the machine's own address, with a lifetime of two
// seconds. It is renewed every half second after the caller has confirmed its leadership. The
// kernel removes an address that is not renewed: a process that hangs or was killed stops
// responding after its lifetime. A process that resumes after a pause must confirm its leadership
// first.
//
// The new holder sends gratuitous ARP, at first at each renewal, because two kernels may respond
// until the previous lifetime is over.
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
	lifetime = 2 * time.Second // whole seconds, the precision of the kernel
	renewal  = 500 * time.Millisecond
	// announcements is the number of renewals with gratuitous ARP. They last longer than the
	// previous holder may respond.
	announcements = 10
	// probing is how long other machines have to respond that they have the address.
	probing   = 120 * time.Millisecond
	probeOnce = 40 * time.Millisecond
)

// ErrTaken is the error when a machine that is not a replica responds for the address.
var ErrTaken = errors.New("another machine has the shared address")

// Address is an IPv4 address that replicas share.
type Address struct {
	IP  netip.Addr // IPv4
	Own netip.Addr // this machine's address; the shared one is added to its interface
	// Peers returns the addresses of the other replicas. One of them may still respond for the
	// shared address.
	Peers func() []netip.Addr
	// Confirm returns nil if a quorum confirms that this replica was the leader during the call.
	Confirm func(ctx context.Context) error
	Log     *slog.Logger
}

// Check parses a shared address and returns an error if it is unsuitable. own is this replica's
// advertised address.
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

// Permitted returns an error that names the permissions that this process lacks: adding the address
// to an interface, and sending ARP.
func Permitted() error {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return permitted(err, effective())
}

// permitted returns the error of Permitted for the result of opening a packet socket and the
// effective capabilities.
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

// effective returns the effective capabilities of this thread as a bit set. If they cannot be read,
// it returns all of them; the operations themselves then fail.
func effective() uint64 {
	var data [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &data[0]); err != nil {
		return ^uint64(0)
	}
	return uint64(data[1].Effective)<<32 | uint64(data[0].Effective)
}

// Clear removes the address from this machine, where a killed replica may have left it.
func (a Address) Clear() error {
	l, _, err := a.link()
	if err != nil {
		return err
	}
	return a.remove(l)
}

// Hold assigns the address to this machine until ctx is done. It fails if another machine has the
// address, and removes the address before it returns. It stays on the caller's thread, which tests
// move into a network namespace.
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

// tenure tracks how long the address has been assigned without a gap. After a gap, another machine
// may have had it, so gratuitous ARP is sent again.
type tenure struct {
	last time.Time
	told int
}

// renewed records a renewal. begins reports whether the address is newly assigned; announce reports
// whether to send gratuitous ARP.
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

// confirmed calls Confirm. It returns an error unless leadership is confirmed within the lifetime
// of the address.
func (a Address) confirmed(ctx context.Context) error {
	asked := time.Now()
	limited, cancel := context.WithTimeout(ctx, lifetime)
	defer cancel()
	if err := a.Confirm(limited); err != nil {
		return err
	}
	if took := time.Since(asked); took > lifetime { // the process was suspended
		return fmt.Errorf("it took %s to be confirmed", took.Round(time.Millisecond))
	}
	return ctx.Err()
}

// link returns the interface with this machine's own address, and its hardware address.
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

// free probes the address and returns ErrTaken if a machine that is not a replica responds.
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

// taken returns ErrTaken if the address has a hardware address that is neither own nor that of a
// peer.
func taken(ip netip.Addr, own string, peers []netip.Addr, found map[netip.Addr]string) error {
	by, answered := found[ip]
	if !answered || by == own {
		return nil
	}
	for _, p := range peers {
		if found[p] == by {
			return nil // the previous leader; its kernel removes the address soon
		}
	}
	return fmt.Errorf("%w: %s is answered for by %s, which is no replica: give --api-address-shared an address that no machine has, or take it off that one", ErrTaken, ip, by)
}
