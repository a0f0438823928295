package vip

import (
	"encoding/binary"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/arp"
)

var broadcastMAC = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// parsePacket returns the IP and hardware address of the sender of an ARP packet. ok is false
// unless b is an ARP packet for Ethernet and IPv4 with a valid sender.
func parsePacket(b []byte) (ip netip.Addr, mac net.HardwareAddr, ok bool) {
	p, ok := arp.Parse(b)
	if !ok || p.Sender.IsUnspecified() || p.SenderMAC[0]&1 != 0 {
		return netip.Addr{}, nil, false
	}
	return p.Sender, p.SenderMAC, true
}

// socket sends and receives ARP packets on one network interface.
type socket struct{ fd, index int }

func openSocket(index int) (*socket, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	s := &socket{fd, index}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: arpProtocol(), Ifindex: index}); err != nil {
		s.closeSocket()
		return nil, err
	}
	return s, nil
}

func arpProtocol() uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ARP))
}

func (s *socket) closeSocket() { _ = unix.Close(s.fd) }

// sendPacket broadcasts an ARP packet on the interface. It ignores errors, because callers send
// repeatedly.
func (s *socket) sendPacket(p arp.Packet) {
	at := &unix.SockaddrLinklayer{Protocol: arpProtocol(), Ifindex: s.index, Halen: 6}
	copy(at.Addr[:], broadcastMAC)
	_ = unix.Sendto(s.fd, p.Marshal(), unix.MSG_DONTWAIT, at)
}

// sendProbe sends an ARP probe for ip (RFC 5227): a request without a sender address. mac is the
// hardware address of the interface.
func (s *socket) sendProbe(mac net.HardwareAddr, ip netip.Addr) {
	s.sendPacket(arp.Packet{
		Operation: arp.Request, SenderMAC: mac, Sender: netip.IPv4Unspecified(),
		TargetMAC: make(net.HardwareAddr, 6), Target: ip,
	})
}

// sendAnnouncement sends a gratuitous ARP request and a gratuitous ARP reply, which announce that
// mac has the address ip. Some hosts process only one of the two.
func (s *socket) sendAnnouncement(mac net.HardwareAddr, ip netip.Addr) {
	p := arp.Packet{Operation: arp.Request, SenderMAC: mac, Sender: ip,
		TargetMAC: make(net.HardwareAddr, 6), Target: ip}
	s.sendPacket(p)
	p.Operation, p.TargetMAC = arp.Reply, broadcastMAC
	s.sendPacket(p)
}

// receiveFor receives ARP packets for the given duration. It calls receive with the IP and hardware
// address of each sender.
func (s *socket) receiveFor(duration time.Duration, receive func(netip.Addr, net.HardwareAddr)) {
	b := make([]byte, 128)
	for end := time.Now().Add(duration); ; {
		left := time.Until(end)
		if left <= 0 {
			return
		}
		fds := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, max(1, int(left.Milliseconds()))); err != nil && err != unix.EINTR {
			return
		}
		if n, _, err := unix.Recvfrom(s.fd, b, 0); err == nil {
			if ip, mac, ok := parsePacket(b[:n]); ok {
				receive(ip, mac)
			}
		}
	}
}
