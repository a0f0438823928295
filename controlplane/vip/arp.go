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

// packet builds ARP that tells of from at mac, and asks for to or tells it.
func packet(operation uint16, mac net.HardwareAddr, from netip.Addr, toMAC net.HardwareAddr, to netip.Addr) []byte {
	b := make([]byte, 8, arpLength)
	binary.BigEndian.PutUint16(b[0:], 1)
	binary.BigEndian.PutUint16(b[2:], unix.ETH_P_IP)
	b[4], b[5] = 6, 4
	binary.BigEndian.PutUint16(b[6:], operation)
	b = append(append(b, mac...), from.AsSlice()...)
	return append(append(b, toMAC...), to.AsSlice()...)
}

// parse reads who says to have which address. ok is false for what is no ARP of Ethernet and IPv4.
func parse(b []byte) (ip netip.Addr, mac net.HardwareAddr, ok bool) {
	if len(b) < arpLength || binary.BigEndian.Uint16(b[0:]) != 1 || binary.BigEndian.Uint16(b[2:]) != unix.ETH_P_IP || b[4] != 6 || b[5] != 4 {
		return ip, nil, false
	}
	ip = netip.AddrFrom4([4]byte(b[14:18]))
	return ip, append(net.HardwareAddr(nil), b[8:14]...), !ip.IsUnspecified() && b[8]&1 == 0
}

// socket speaks ARP on one interface.
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

// send writes to everybody on the link; what it does not take now is repeated by whoever sends.
func (s *socket) send(b []byte) {
	at := &unix.SockaddrLinklayer{Protocol: arpProtocol(), Ifindex: s.index, Halen: 6}
	copy(at.Addr[:], everybody)
	_ = unix.Sendto(s.fd, b, unix.MSG_DONTWAIT, at)
}

// ask asks who has an address, as one who has none (RFC 5227).
func (s *socket) ask(mac net.HardwareAddr, ip netip.Addr) {
	s.send(packet(arpRequest, mac, netip.IPv4Unspecified(), make(net.HardwareAddr, 6), ip))
}

// announce tells that an address is here, in both forms of that: not all hosts heed both.
func (s *socket) announce(mac net.HardwareAddr, ip netip.Addr) {
	s.send(packet(arpRequest, mac, ip, make(net.HardwareAddr, 6), ip))
	s.send(packet(arpReply, mac, ip, everybody, ip))
}

// listen hands over what is said for a time.
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
