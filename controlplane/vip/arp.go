package vip

import (
	"encoding/binary"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

const (
	arpLength  = 28 // RFC 826, for Ethernet and IPv4
	arpRequest = 1
	arpReply   = 2
)

var everybody = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// packet returns an ARP packet with the sender mac and from, and the target toMAC and to.
func packet(operation uint16, mac net.HardwareAddr, from netip.Addr, toMAC net.HardwareAddr, to netip.Addr) []byte {
	b := make([]byte, 8, arpLength)
	binary.BigEndian.PutUint16(b[0:], 1)
	binary.BigEndian.PutUint16(b[2:], unix.ETH_P_IP)
	b[4], b[5] = 6, 4
	binary.BigEndian.PutUint16(b[6:], operation)
	b = append(append(b, mac...), from.AsSlice()...)
	return append(append(b, toMAC...), to.AsSlice()...)
}

// parse returns the sender's addresses in an ARP packet. ok is false unless it is ARP for Ethernet
// and IPv4 with a valid sender.
func parse(b []byte) (ip netip.Addr, mac net.HardwareAddr, ok bool) {
	if len(b) < arpLength || binary.BigEndian.Uint16(b[0:]) != 1 || binary.BigEndian.Uint16(b[2:]) != unix.ETH_P_IP || b[4] != 6 || b[5] != 4 {
		return ip, nil, false
	}
	ip = netip.AddrFrom4([4]byte(b[14:18]))
	return ip, append(net.HardwareAddr(nil), b[8:14]...), !ip.IsUnspecified() && b[8]&1 == 0
}

// socket sends and receives ARP packets on one interface.
type socket struct{ fd, index int }

func open(index int) (*socket, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	s := &socket{fd, index}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: arpProtocol(), Ifindex: index}); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func arpProtocol() uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ARP))
}

func (s *socket) close() { _ = unix.Close(s.fd) }

// send broadcasts a packet on the link. Errors are ignored, because callers send repeatedly.
func (s *socket) send(b []byte) {
	at := &unix.SockaddrLinklayer{Protocol: arpProtocol(), Ifindex: s.index, Halen: 6}
	copy(at.Addr[:], everybody)
	_ = unix.Sendto(s.fd, b, unix.MSG_DONTWAIT, at)
}

// ask sends an ARP probe for an address (RFC 5227): a request without a sender address.
func (s *socket) ask(mac net.HardwareAddr, ip netip.Addr) {
	s.send(packet(arpRequest, mac, netip.IPv4Unspecified(), make(net.HardwareAddr, 6), ip))
}

// announce sends a gratuitous ARP request and reply for the address; some hosts process only one of
// the two.
func (s *socket) announce(mac net.HardwareAddr, ip netip.Addr) {
	s.send(packet(arpRequest, mac, ip, make(net.HardwareAddr, 6), ip))
	s.send(packet(arpReply, mac, ip, everybody, ip))
}

// listen calls heard with the sender of each ARP packet that arrives during the given time.
func (s *socket) listen(during time.Duration, heard func(netip.Addr, net.HardwareAddr)) {
	b := make([]byte, 128)
	for end := time.Now().Add(during); ; {
		left := time.Until(end)
		if left <= 0 {
			return
		}
		fds := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, max(1, int(left.Milliseconds()))); err != nil && err != unix.EINTR {
			return
		}
		if n, _, err := unix.Recvfrom(s.fd, b, 0); err == nil {
			if ip, mac, ok := parse(b[:n]); ok {
				heard(ip, mac)
			}
		}
	}
}
