// Package vip assigns a virtual IPv4 address, which several machines of one link share, to one of
// these machines at a time: that of the leading replica. The API thereby has an address that
// follows the leader.
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
	lifetime = 2 * time.Second // lifetime of the address in the kernel, which counts whole seconds
	renewal  = 500 * time.Millisecond
	// announcements is the number of renewals after which gratuitous ARP is sent. When the last is
	// sent, the address on the previous holder's interface has expired.
	announcements = 10
	// probing is for how long Hold sends ARP probes for the address and waits for replies of other
	// machines. probeOnce is the time between two probes.
	probing   = 120 * time.Millisecond
	probeOnce = 40 * time.Millisecond
)

// ErrTaken is returned by Hold if a machine that is not a replica answers ARP probes for the shared
// address.
var ErrTaken = errors.New("another machine has the shared address")

// Address is a virtual IPv4 address that the replicas share. Its methods assign the address to this
// machine and remove it.
type Address struct {
	IP  netip.Addr // the shared IPv4 address
	Own netip.Addr // this machine's own address; the shared address is added to the interface with this address
	// Peers returns the addresses of the other replicas. The previous leader may still answer ARP
	// requests for the shared address.
	Peers func() []netip.Addr
	// Confirm returns nil if a quorum has confirmed, during the call, that this replica is the
	// leader.
	Confirm func(ctx context.Context) error
	Log     *slog.Logger
}

// ParseAddress parses the shared address ip. It returns an error if the address is unsuitable, such
// as a loopback address. advertised is this replica's own address.
func ParseAddress(ip, advertised string) (netip.Addr, error) {
	a, err := netip.ParseAddr(ip)
	switch {
	case err != nil, !a.Is4(), a.IsUnspecified(), a.IsLoopback(), a.IsMulticast(), a.IsLinkLocalUnicast():
		return netip.Addr{},
			fmt.Errorf("--api-address-shared %q: specify an IPv4 address of the replicas' link that no machine uses",
				ip)
	case ip == advertised:
		return netip.Addr{},
			fmt.Errorf("--api-address-shared %s is this replica's own --advertise-address: specify an address that no "+
				"machine uses", ip)
	}
	return a, nil
}

// CheckPermissions returns an error if this process may not add an address to an interface or send
// ARP packets. The error names the missing permissions.
func CheckPermissions() error {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return missingPermissions(err, effectiveCapabilities())
}

// missingPermissions returns the error of CheckPermissions. socketErr is the result of opening a
// packet socket, and capabilities are the effective capabilities.
func missingPermissions(socketErr error, capabilities uint64) error {
	var missing []string
	if socketErr != nil {
		missing = append(missing,
			fmt.Sprintf("to open a packet socket (%v: CAP_NET_RAW, and AF_PACKET where systemd restricts families)",
				socketErr))
	}
	if capabilities&(1<<unix.CAP_NET_ADMIN) == 0 {
		missing = append(missing, "to change addresses (CAP_NET_ADMIN)")
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("the replica has no permission %s: run install.sh again, which grants "+
		"keelson-controlplane.service what the settings require, "+
		"or set in the unit CapabilityBoundingSet=CAP_NET_ADMIN CAP_NET_RAW and RestrictAddressFamilies=AF_PACKET",
		strings.Join(missing, " and "))
}

// effectiveCapabilities returns the effective capabilities of this thread as a bit set. If they
// cannot be read, it returns a set of all capabilities, and the operations themselves fail later.
func effectiveCapabilities() uint64 {
	var data [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &data[0]); err != nil {
		return ^uint64(0)
	}
	return uint64(data[1].Effective)<<32 | uint64(data[0].Effective)
}

// RemoveStale removes the shared address from this machine, where a replica that was killed may
// have left it.
func (a Address) RemoveStale() error {
	l, _, err := a.findInterface()
	if err != nil {
		return err
	}
	return a.removeAddress(l)
}

// Hold assigns the shared address to this machine until ctx ends, and removes it before it returns.
// It returns ErrTaken if a machine that is not a replica has the address. Hold works in the network
// namespace of the calling thread.
func (a Address) Hold(ctx context.Context) (err error) {
	l, mac, err := a.findInterface()
	if err != nil {
		return err
	}
	s, err := openSocket(l.Attrs().Index)
	if err != nil {
		return fmt.Errorf("preparing to announce %s: %w: the replica needs CAP_NET_RAW and CAP_NET_ADMIN", a.IP, err)
	}
	defer s.closeSocket()
	if err := a.checkUnused(ctx, s, mac); err != nil {
		return err
	}
	defer func() {
		if gone := a.removeAddress(l); gone != nil {
			err = errors.Join(err, gone)
		}
	}()
	every := time.NewTicker(renewal)
	defer every.Stop()
	var had tenure
	for {
		if err := a.confirmLeadership(ctx); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			a.Log.Warn("the shared address is not renewed", "address", a.IP, "err", err)
		} else if err := a.renewAddress(l); err != nil {
			return err
		} else {
			isNew, announce := had.recordRenewal(time.Now())
			if isNew {
				a.Log.Info("the shared address is assigned to this replica", "address", a.IP, "link", l.Attrs().Name)
			}
			if announce {
				s.sendAnnouncement(mac, a.IP)
			}
		}
		select {
		case <-ctx.Done():
			a.Log.Info("the shared address is removed from this replica", "address", a.IP)
			return ctx.Err()
		case <-every.C:
		}
	}
}

// tenure is the uninterrupted time for which this machine has had the shared address. After an
// interruption, another machine may have had the address, so gratuitous ARP is sent again.
type tenure struct {
	last      time.Time
	announced int
}

// recordRenewal records that the address was renewed at the time now. isNew reports whether this
// machine did not have the address before. announce reports whether to send gratuitous ARP.
func (t *tenure) recordRenewal(now time.Time) (isNew, announce bool) {
	if isNew = now.Sub(t.last) > lifetime; isNew {
		t.announced = 0
	}
	t.last = now
	if announce = t.announced < announcements; announce {
		t.announced++
	}
	return isNew, announce
}

// confirmLeadership returns nil if a.Confirm has confirmed this replica's leadership within the
// lifetime of the address.
func (a Address) confirmLeadership(ctx context.Context) error {
	asked := time.Now()
	limited, cancel := context.WithTimeout(ctx, lifetime)
	defer cancel()
	if err := a.Confirm(limited); err != nil {
		return err
	}
	if took := time.Since(asked); took > lifetime { // the process was suspended
		return fmt.Errorf("confirming the leadership took %s", took.Round(time.Millisecond))
	}
	return ctx.Err()
}

// findInterface returns the network interface that has the address a.Own, and the hardware address
// of the interface.
func (a Address) findInterface() (netlink.Link, net.HardwareAddr, error) {
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
	return nil, nil, fmt.Errorf("no interface with ARP has --advertise-address %s, which a shared address requires",
		a.Own)
}

func (a Address) netlinkAddr() *netlink.Addr {
	return &netlink.Addr{IPNet: &net.IPNet{IP: a.IP.AsSlice(), Mask: net.CIDRMask(32, 32)},
		ValidLft: int(lifetime.Seconds()), PreferedLft: int(lifetime.Seconds())}
}

func (a Address) renewAddress(l netlink.Link) error {
	if err := netlink.AddrReplace(l, a.netlinkAddr()); err != nil {
		return fmt.Errorf("adding %s to %s: %w: the replica needs CAP_NET_ADMIN", a.IP, l.Attrs().Name, err)
	}
	return nil
}

func (a Address) removeAddress(l netlink.Link) error {
	if err := netlink.AddrDel(l, a.netlinkAddr()); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) &&
		!errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing %s from %s: %w", a.IP, l.Attrs().Name, err)
	}
	return nil
}

// checkUnused sends ARP probes for the shared address. It returns ErrTaken if a machine that is not
// a replica answers. ownMAC is the hardware address of this machine.
func (a Address) checkUnused(ctx context.Context, s *socket, ownMAC net.HardwareAddr) error {
	peers := a.Peers()
	found := map[netip.Addr]string{}
	for end := time.Now().Add(probing); time.Now().Before(end) && ctx.Err() == nil; {
		for _, ip := range append(slices.Clone(peers), a.IP) {
			s.sendProbe(ownMAC, ip)
		}
		s.receiveFor(min(probeOnce, time.Until(end)), func(ip netip.Addr, mac net.HardwareAddr) {
			found[ip] = mac.String()
		})
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return checkHolder(a.IP, ownMAC.String(), peers, found)
}

// checkHolder returns ErrTaken if a machine that is not a replica has the address ip. found maps IP
// addresses to the hardware addresses that have answered for them. ownMAC is the hardware address
// of this machine, and peers are the addresses of the other replicas.
func checkHolder(ip netip.Addr, ownMAC string, peers []netip.Addr, found map[netip.Addr]string) error {
	by, answered := found[ip]
	if !answered || by == ownMAC {
		return nil
	}
	for _, p := range peers {
		if found[p] == by {
			return nil // the previous leader; its kernel removes the address soon
		}
	}
	return fmt.Errorf("%w: %s responds for %s and is not a replica: set --api-address-shared to an address that no "+
		"machine uses, or remove the address from that machine", ErrTaken, ip, by)
}
