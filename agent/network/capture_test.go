package network

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// packet is a packet that passed an interface.
type packet struct {
	from, to  netip.Addr
	length    int
	fragment  bool
	tunnelled int  // bytes of the VXLAN packet; 0: not tunneled
	port      int  // UDP destination port
	chatter   bool // neighbor discovery, multicast or ICMP
	arp       bool
}

// capture records the packets that pass interfaces until its result is called. If the result is
// given an address, it first waits for a packet to this address: a packet may have to wait for
// address resolution.
func (m *machine) capture(names ...string) func(last ...string) []packet {
	m.t.Helper()
	var fd int
	m.in(func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
		if err == nil {
			err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 20000})
		}
		return err
	})
	wanted := map[int]bool{}
	for _, n := range names {
		wanted[m.link(n).Attrs().Index] = true
	}
	var ended atomic.Pointer[[]string]
	out := make(chan []packet, 1)
	go func() {
		var all []packet
		var deadline time.Time
		await := func(last []string) bool {
			if len(last) == 0 || slices.ContainsFunc(all, func(p packet) bool {
				return p.to.IsValid() && p.to.String() == last[0]
			}) {
				return false
			}
			if deadline.IsZero() {
				deadline = time.Now().Add(time.Minute)
			}
			return time.Now().Before(deadline)
		}
		buf := make([]byte, 65536)
		for {
			n, from, err := unix.Recvfrom(fd, buf, 0)
			if last := ended.Load(); err != nil && last != nil && !await(*last) { // no packets are pending
				break
			}
			if ll, ok := from.(*unix.SockaddrLinklayer); err == nil && ok && wanted[ll.Ifindex] {
				all = append(all, read(buf[:n], htons(ll.Protocol)))
			}
		}
		unix.Close(fd)
		out <- all
	}()
	return func(last ...string) []packet {
		ended.Store(&last)
		return <-out
	}
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

func read(b []byte, protocol uint16) packet {
	p := packet{length: len(b)}
	var next byte
	var payload []byte
	switch {
	case protocol == unix.ETH_P_IP && len(b) >= 20:
		p.from, _ = netip.AddrFromSlice(b[12:16])
		p.to, _ = netip.AddrFromSlice(b[16:20])
		p.fragment = binary.BigEndian.Uint16(b[6:])&0x3fff != 0
		next, payload = b[9], b[int(b[0]&15)*4:]
	case protocol == unix.ETH_P_IPV6 && len(b) >= 40:
		p.from, _ = netip.AddrFromSlice(b[8:24])
		p.to, _ = netip.AddrFromSlice(b[24:40])
		next, payload = b[6], b[40:]
		p.fragment = next == 44
	case protocol == unix.ETH_P_ARP && len(b) >= 28:
		p.to, _ = netip.AddrFromSlice(b[24:28])
		p.arp, p.chatter = true, true
		return p
	default:
		p.chatter = true
		return p
	}
	p.chatter = next == unix.IPPROTO_ICMPV6 || next == unix.IPPROTO_ICMP || p.to.IsMulticast() || next == 0
	if next == unix.IPPROTO_UDP && len(payload) >= 8 {
		if p.port = int(binary.BigEndian.Uint16(payload[2:])); p.port == tunnelPort {
			p.tunnelled = len(payload) - 8
		}
	}
	return p
}
