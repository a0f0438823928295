package l2announce

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/arp"
)

// Limits for the rate of packets that are read from a link. They are above the normal rate of
// address resolution. Further packets wait in the kernel, which drops those that do not fit; hosts
// retry.
const (
	readsAtOnce = 500
	readsWindow = 50 * time.Millisecond
)

// announcerLink answers address resolution requests on one network interface.
//
// Goroutines: one reader per socket, which ends when the socket is closed.
type announcerLink struct {
	name  string
	index int
	mac   net.HardwareAddr
	log   *slog.Logger

	arp, ndp    *os.File // raw sockets; each is nil until an address of its family is added
	groupSocket int      // socket that is a member of the multicast groups; -1 = none
	groupUsers  map[netip.Addr]int

	held    atomic.Pointer[map[netip.Addr]bool]
	readers sync.WaitGroup
}

func newLink(name string, index int, mac net.HardwareAddr, log *slog.Logger) *announcerLink {
	l := &announcerLink{name: name, index: index, mac: mac, log: log.With("link", name), groupSocket: -1,
		groupUsers: map[netip.Addr]int{}}
	l.held.Store(&map[netip.Addr]bool{})
	return l
}

// setAddresses sets the addresses for which the interface answers requests. If the sockets for an
// address cannot be opened, requests for this address are not answered until the next call.
func (l *announcerLink) setAddresses(ctx context.Context, want map[netip.Addr]bool) error {
	before, held := *l.held.Load(), make(map[netip.Addr]bool, len(want))
	var errs []error
	for a := range want {
		if !before[a] {
			if err := l.openFor(ctx, a); err != nil {
				errs = append(errs, fmt.Errorf("announcing %s on %s: %w", a, l.name, err))
				continue
			}
		}
		held[a] = true
	}
	l.held.Store(&held)
	for a := range before {
		if !want[a] && a.Is6() {
			l.leaveGroup(solicitedNodeGroup(a))
		}
	}
	return errors.Join(errs...)
}

// isHeld reports whether requests for the address are answered on this interface.
func (l *announcerLink) isHeld(a netip.Addr) bool { return (*l.held.Load())[a] }

// openFor opens the sockets that are required to answer requests for the address, if they are not
// open. For IPv6, it also joins the address's multicast group.
func (l *announcerLink) openFor(ctx context.Context, a netip.Addr) (err error) {
	if a.Is4() {
		if l.arp == nil {
			if l.arp, err = openRawSocket(l.index, unix.ETH_P_ARP, arpFilter); err == nil {
				l.readers.Go(func() { l.readPackets(ctx, l.arp, l.answerARP) })
			}
		}
		return err
	}
	if l.ndp == nil {
		if l.ndp, err = openRawSocket(l.index, unix.ETH_P_IPV6, nsFilter); err != nil {
			return err
		}
		l.readers.Go(func() { l.readPackets(ctx, l.ndp, l.answerNS) })
	}
	return l.joinGroup(solicitedNodeGroup(a))
}

// joinGroup joins a multicast group on the interface. The interface then receives the group's
// packets, and snooping switches forward them.
func (l *announcerLink) joinGroup(group netip.Addr) error {
	if l.groupUsers[group] > 0 {
		l.groupUsers[group]++
		return nil
	}
	if l.groupSocket < 0 {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("creating the socket for multicast groups: %w", err)
		}
		l.groupSocket = fd
	}
	err := unix.SetsockoptIPv6Mreq(l.groupSocket, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP,
		&unix.IPv6Mreq{Multiaddr: group.As16(), Interface: uint32(l.index)})
	if err != nil && !errors.Is(err, unix.EADDRINUSE) {
		return fmt.Errorf("joining group %s: %w", group, err)
	}
	l.groupUsers[group] = 1
	return nil
}

func (l *announcerLink) leaveGroup(group netip.Addr) {
	if l.groupUsers[group]--; l.groupUsers[group] > 0 {
		return
	}
	delete(l.groupUsers, group)
	if l.groupSocket >= 0 { // fails if the interface no longer exists, which is harmless
		_ = unix.SetsockoptIPv6Mreq(l.groupSocket, unix.IPPROTO_IPV6, unix.IPV6_LEAVE_GROUP,
			&unix.IPv6Mreq{Multiaddr: group.As16(), Interface: uint32(l.index)})
	}
}

// shutDown closes the sockets of the link and waits until their readers have ended.
func (l *announcerLink) shutDown() {
	for _, f := range []*os.File{l.arp, l.ndp} {
		if f != nil {
			f.Close()
		}
	}
	if l.groupSocket >= 0 {
		unix.Close(l.groupSocket)
	}
	l.readers.Wait()
}

// openRawSocket opens a packet socket with a packet filter, for one EtherType on the interface with
// this index. The kernel adds and removes the link-layer header.
func openRawSocket(index int, protocol uint16, filter []bpf.Instruction) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("creating a raw socket: %w", err)
	}
	f := os.NewFile(uintptr(fd), "packets")
	raw, err := bpf.Assemble(filter)
	if err == nil {
		program := make([]unix.SockFilter, len(raw))
		for i, r := range raw {
			program[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
		}
		err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
	}
	if err == nil { // bind after the filter is attached, so that the socket receives no unfiltered packets
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: bigEndian(protocol), Ifindex: index})
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("preparing a raw socket: %w", err)
	}
	return f, nil
}

func bigEndian(n uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, n))
}

// Socket filters that accept only requests from other hosts. The agent is not woken for other
// packets.
var (
	arpFilter = []bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtType},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.PACKET_OUTGOING, SkipTrue: 3},
		bpf.LoadAbsolute{Off: 6, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: arp.Request, SkipTrue: 1},
		bpf.RetConstant{Val: maxPacket},
		bpf.RetConstant{Val: 0},
	}
	nsFilter = []bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtType},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.PACKET_OUTGOING, SkipTrue: 5},
		bpf.LoadAbsolute{Off: 6, Size: 2}, // next header and hop limit
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: nextICMPv6<<8 | 255, SkipTrue: 3},
		bpf.LoadAbsolute{Off: headerLength, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: icmpNS, SkipTrue: 1},
		bpf.RetConstant{Val: maxPacket},
		bpf.RetConstant{Val: 0},
	}
)

// readPackets reads packets from the socket f until the socket is closed. It calls answer with each
// packet and its source MAC address.
func (l *announcerLink) readPackets(ctx context.Context, f *os.File, answer func(packet []byte, mac net.HardwareAddr)) {
	conn, err := f.SyscallConn()
	if err != nil {
		return
	}
	buf := make([]byte, maxPacket)
	began, reads := time.Now(), 0
	for {
		var n int
		var from unix.Sockaddr
		var failed error
		err := conn.Read(func(fd uintptr) bool {
			n, from, failed = unix.Recvfrom(int(fd), buf, 0)
			return !errors.Is(failed, unix.EAGAIN)
		})
		if err != nil || ctx.Err() != nil {
			return
		}
		if reads++; reads > readsAtOnce {
			rest := time.NewTimer(time.Until(began.Add(readsWindow)))
			select {
			case <-rest.C:
			case <-ctx.Done():
				rest.Stop()
				return
			}
		}
		if time.Since(began) >= readsWindow {
			began, reads = time.Now(), 0
		}
		switch {
		case failed == nil:
			if at, ok := from.(*unix.SockaddrLinklayer); ok && at.Halen == 6 {
				answer(buf[:n], net.HardwareAddr(at.Addr[:6]))
			}
		case errors.Is(failed, unix.ENXIO) || errors.Is(failed, unix.EBADF):
			return
		default:
			// for example, the interface is down; the next check detects it. Such a read counts
			// toward the rate limit.
		}
	}
}

func (l *announcerLink) answerARP(packet []byte, _ net.HardwareAddr) {
	if q, ok := parseARP(packet); ok && (*l.held.Load())[q.target] {
		l.sendPacket(l.arp, unix.ETH_P_ARP, buildARP(arp.Reply, l.mac, q.target, q.mac, q.from), q.mac)
	}
}

func (l *announcerLink) answerNS(packet []byte, mac net.HardwareAddr) {
	q, ok := parseNS(packet, mac)
	if !ok || !(*l.held.Load())[q.target] {
		return
	}
	to := q.mac
	if q.from.IsUnspecified() {
		to = groupMAC(allNodes)
	}
	l.sendPacket(l.ndp, unix.ETH_P_IPV6, buildAdvertisement(q.target, l.mac, q.from), to)
}

// announceAddress announces an address to all hosts on the link. For IPv4 it sends two forms of ARP
// announcements, because some hosts accept only one of them.
func (l *announcerLink) announceAddress(a netip.Addr) {
	if a.Is6() {
		l.sendPacket(l.ndp, unix.ETH_P_IPV6, buildAdvertisement(a, l.mac, netip.Addr{}), groupMAC(allNodes))
		return
	}
	everybody := net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	l.sendPacket(l.arp, unix.ETH_P_ARP, buildARP(arp.Request, l.mac, a, make(net.HardwareAddr, 6), a), everybody)
	l.sendPacket(l.arp, unix.ETH_P_ARP, buildARP(arp.Reply, l.mac, a, everybody, a), everybody)
}

// sendPacket sends a packet of an EtherType protocol to a MAC address. It ignores all errors,
// because hosts repeat their requests.
func (l *announcerLink) sendPacket(f *os.File, protocol uint16, packet []byte, destination net.HardwareAddr) {
	if f == nil {
		return
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return
	}
	at := &unix.SockaddrLinklayer{Protocol: bigEndian(protocol), Ifindex: l.index, Halen: 6}
	copy(at.Addr[:], destination)
	err = conn.Control(func(fd uintptr) {
		if err := unix.Sendto(int(fd), packet, unix.MSG_DONTWAIT, at); err != nil {
			l.log.Debug("a packet was not sent", "err", err)
		}
	})
	if err != nil {
		l.log.Debug("a packet was not sent", "err", err)
	}
}
