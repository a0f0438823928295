package network

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/cni"
	"keelson.dev/keelson/internal/wait"
)

const frameLimit = 20 * time.Second // for a frame that must arrive

// station is a sandbox with a raw socket on its eth0.
type station struct {
	agent.NetworkRequest
	*host
	fd    int
	index int
	mac   net.HardwareAddr
	four  netip.Addr
	six   netip.Addr
	local netip.Addr
}

// dual makes h attach pods with addresses of both families.
func (h *host) dual(exempt ...string) {
	c := h.Network.cfg
	c.SourceExempt = exempt
	c.PodCIDRs = func() []netip.Prefix {
		return []netip.Prefix{netip.MustParsePrefix("10.244.3.0/24"), netip.MustParsePrefix("fd00:10:244:3::/64")}
	}
	h.Network = New(c)
}

// station attaches a sandbox.
func (h *host) station(namespace string) *station {
	h.Helper()
	s := &station{NetworkRequest: h.sandbox(), host: h}
	s.Namespace = namespace
	st, err := h.Add(h.Context(), s.NetworkRequest)
	if err != nil {
		h.fail("%v", err)
	}
	s.mac, err = net.ParseMAC(st.MAC)
	if err != nil || len(st.IPs) != 2 {
		h.fail("attached as %+v: %v", st, err)
	}
	s.four, s.six = netip.MustParseAddr(st.IPs[0]), netip.MustParseAddr(st.IPs[1])
	s.local, _ = linkLocal(st.MAC)
	s.enter(func() error {
		link, err := netlink.LinkByName(ifName)
		if err != nil {
			return err
		}
		s.index = link.Attrs().Index
		s.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
		if err != nil {
			return err
		}
		limit := unix.NsecToTimeval(frameLimit.Nanoseconds())
		return errors.Join(unix.Bind(s.fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: s.index}),
			unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit))
	})
	h.Cleanup(func() { unix.Close(s.fd) })
	return s
}

// enter runs f on the host's thread, in the sandbox's namespace.
func (s *station) enter(f func() error) {
	s.Helper()
	back, err := netns.Get()
	if err != nil {
		s.fail("%v", err)
	}
	defer back.Close()
	inside, err := netns.GetFromPath(s.NetNS)
	if err != nil {
		s.fail("%v", err)
	}
	defer inside.Close()
	if err := netns.Set(inside); err != nil {
		s.fail("%v", err)
	}
	failed := f()
	if err := errors.Join(failed, netns.Set(back)); err != nil {
		s.fail("in %s: %v", s.SandboxID, err)
	}
}

func (s *station) send(frame []byte) {
	s.Helper()
	if err := unix.Sendto(s.fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: s.index, Halen: 6}); err != nil {
		s.fail("sending a frame: %v", err)
	}
}

// reaches reports whether a frame of s arrives at another station. A permitted datagram follows the
// frame; if it arrives first, the frame was dropped.
func (s *station) reaches(to *station, frame []byte) (arrived bool) {
	s.Helper()
	s.seq++
	last := fmt.Sprintf("last %d", s.seq)
	s.send(frame)
	s.send(udpFrame(to.mac, s.mac, s.four, to.four, last))
	for buffer := make([]byte, 2048); ; {
		n, _, err := unix.Recvfrom(to.fd, buffer, 0)
		if err != nil {
			s.fail("the datagram that may be sent does not arrive: %v", err)
		}
		got := buffer[:n]
		switch {
		case n < 14 || bytes.Equal(got[6:12], to.mac): // sent by the receiver as an answer
		case bytes.HasSuffix(got, []byte(last)):
			return arrived
		case bytes.HasSuffix(frame, got[14:]) || bytes.HasPrefix(got[14:], frame[14:]): // a VLAN tag may be missing
			arrived = true
		}
	}
}

func ethernet(to, from net.HardwareAddr, kind uint16, payload []byte) []byte {
	out := append(append([]byte{}, to...), from...)
	return append(binary.BigEndian.AppendUint16(out, kind), payload...)
}

func checksum(parts ...[]byte) uint16 {
	var sum uint32
	for _, b := range parts {
		for i := 0; i < len(b); i += 2 {
			word := uint32(b[i]) << 8
			if i+1 < len(b) {
				word |= uint32(b[i+1])
			}
			sum += word
		}
	}
	for sum>>16 != 0 {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// udpPacket returns an IP packet with a datagram to the discard port.
func udpPacket(from, to netip.Addr, text string) []byte {
	udp := []byte{0x12, 0x34, 0, 9, 0, byte(8 + len(text)), 0, 0}
	udp = append(udp, text...)
	if from.Is6() {
		return packet6(from, to, unix.IPPROTO_UDP, 64, udp, 6)
	}
	ip := []byte{0x45, 0, 0, byte(20 + len(udp)), 0, 1, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
	ip = append(append(ip, from.AsSlice()...), to.AsSlice()...)
	binary.BigEndian.PutUint16(ip[10:], checksum(ip))
	return append(ip, udp...)
}

// packet6 returns an IPv6 packet whose payload has its checksum at offset sum.
func packet6(from, to netip.Addr, proto, hops byte, payload []byte, sum int) []byte {
	ip := append(append([]byte{0x60, 0, 0, 0, 0, byte(len(payload)), proto, hops}, from.AsSlice()...), to.AsSlice()...)
	pseudo := append(append([]byte{}, ip[8:]...), 0, 0, 0, byte(len(payload)), 0, 0, 0, proto)
	binary.BigEndian.PutUint16(payload[sum:], checksum(pseudo, payload))
	return append(ip, payload...)
}

func udpFrame(to, from net.HardwareAddr, src, dst netip.Addr, text string) []byte {
	kind := uint16(unix.ETH_P_IP)
	if src.Is6() {
		kind = unix.ETH_P_IPV6
	}
	return ethernet(to, from, kind, udpPacket(src, dst, text))
}

func arpFrame(to, from net.HardwareAddr, op byte, sender net.HardwareAddr, address, target netip.Addr) []byte {
	b := append([]byte{0, 1, 8, 0, 6, 4, 0, op}, sender...)
	b = append(append(append(b, address.AsSlice()...), make([]byte, 6)...), target.AsSlice()...)
	return ethernet(to, from, unix.ETH_P_ARP, append(b, "marked"...))
}

// icmp6 returns a frame with an ICMPv6 message of neighbor discovery: type, target and the sender's hardware address.
func icmp6(to, from net.HardwareAddr, src, dst netip.Addr, kind byte, body []byte) []byte {
	message := append([]byte{kind, 0, 0, 0}, body...)
	return ethernet(to, from, unix.ETH_P_IPV6, packet6(src, dst, unix.IPPROTO_ICMPV6, 255, message, 2))
}

func neighbor(target netip.Addr, option byte, mac net.HardwareAddr) []byte {
	body := append([]byte{0x20, 0, 0, 0}, target.AsSlice()...)
	if mac != nil {
		body = append(append(body, option, 1), mac...)
	}
	return body
}

// F107: a pod can send only with its own hardware address and its own IP addresses. Packets with
// the addresses of another pod, of the node or unused ones do not arrive: IP of both families, ARP
// and neighbor discovery, with and without a VLAN tag.
func TestPodsSendAsThemselves(t *testing.T) {
	onHost(t, func(h *host) {
		h.dual("routers")
		a, b, other, router := h.station("default"), h.station("default"), h.station("default"), h.station("routers")
		unused := netip.MustParseAddr("10.244.3.99")
		gateway := netip.MustParseAddr("10.244.3.1")
		zero, none := netip.IPv4Unspecified(), netip.IPv6Unspecified()
		tagged := func(frame []byte, vlan uint16) []byte {
			inner := append([]byte{byte(vlan >> 8), byte(vlan)}, frame[12:]...)
			return ethernet(frame[:6], frame[6:12], unix.ETH_P_8021Q, inner)
		}
		advert := make([]byte, 12)
		for name, c := range map[string]struct {
			frame []byte
			want  bool
		}{
			"IPv4 of its own": {udpFrame(b.mac, a.mac, a.four, b.four, "marked"), true},
			"IPv6 of its own": {udpFrame(b.mac, a.mac, a.six, b.six, "marked"), true},
			"link-local of its own": {icmp6(b.mac, a.mac, a.local, b.local, 135,
				neighbor(b.local, 1, a.mac)), true},
			"IPv4 of another pod":              {udpFrame(b.mac, a.mac, other.four, b.four, "marked"), false},
			"IPv4 of the gateway":              {udpFrame(b.mac, a.mac, gateway, b.four, "marked"), false},
			"IPv4 of nobody":                   {udpFrame(b.mac, a.mac, unused, b.four, "marked"), false},
			"IPv4 without address":             {udpFrame(b.mac, a.mac, zero, b.four, "marked"), false},
			"IPv4 of another pod with its MAC": {udpFrame(b.mac, other.mac, other.four, b.four, "marked"), false},
			"its IPv4 with another pod's MAC":  {udpFrame(b.mac, other.mac, a.four, b.four, "marked"), false},
			"IPv6 of another pod":              {udpFrame(b.mac, a.mac, other.six, b.six, "marked"), false},
			"link-local of another pod":        {udpFrame(b.mac, a.mac, other.local, b.local, "marked"), false},
			"IPv6 without address":             {udpFrame(b.mac, a.mac, none, b.six, "marked"), false},
			"IPv4 of another pod in VLAN 0": {tagged(udpFrame(b.mac, a.mac, other.four, b.four, "marked"), 0),
				false},
			"IPv4 of its own in VLAN 7": {tagged(udpFrame(b.mac, a.mac, a.four, b.four, "marked"), 7), false},
			"ethertype of MPLS": {ethernet(b.mac, a.mac, 0x8847, append(make([]byte, 60), "marked"...)),
				false},
			"reverse ARP": {ethernet(b.mac, a.mac, 0x8035, append(make([]byte, 60), "marked"...)),
				false},
			"ARP request of its own":      {arpFrame(b.mac, a.mac, 1, a.mac, a.four, b.four), true},
			"ARP probe":                   {arpFrame(b.mac, a.mac, 1, a.mac, zero, a.four), true},
			"ARP reply of nobody":         {arpFrame(b.mac, a.mac, 2, a.mac, zero, b.four), false},
			"ARP reply for the gateway":   {arpFrame(b.mac, a.mac, 2, a.mac, gateway, b.four), false},
			"ARP request for the gateway": {arpFrame(b.mac, a.mac, 1, a.mac, gateway, b.four), false},
			"ARP with another's MAC":      {arpFrame(b.mac, a.mac, 2, other.mac, a.four, b.four), false},
			"advertisement of its own": {icmp6(b.mac, a.mac, a.six, b.six, 136, neighbor(a.six, 2, a.mac)),
				true},
			"advertisement for another pod": {icmp6(b.mac, a.mac, a.six, b.six, 136, neighbor(other.six, 2, a.mac)),
				false},
			"advertisement by a link-local": {icmp6(b.mac, a.mac, a.local, b.six, 136,
				neighbor(other.six, 2, a.mac)), false},
			"solicitation as another pod": {icmp6(b.mac, a.mac, other.six, b.six, 135, neighbor(b.six, 1, a.mac)),
				false},
			"duplicate detection of its own": {icmp6(b.mac, a.mac, none, b.six, 135, neighbor(a.six, 0, nil)), true},
			"duplicate detection for another": {icmp6(b.mac, a.mac, none, b.six, 135, neighbor(b.six, 0, nil)),
				false},
			"router advertisement": {icmp6(b.mac, a.mac, a.local, b.local, 134, advert), false},
			"redirect": {icmp6(b.mac, a.mac, a.local, b.local, 137,
				append(make([]byte, 4), make([]byte, 32)...)), false},
			"IPv6 of another by its link-local": {udpFrame(b.mac, a.mac, other.local, b.six, "marked"), false},
		} {
			if got := a.reaches(b, c.frame); got != c.want {
				t.Errorf("%s: arrives %v, want %v", name, got, c.want)
			}
		}
		// A pod of an exempt namespace may send from any address; other pods cannot send with that
		// pod's addresses.
		if !router.reaches(b, udpFrame(b.mac, router.mac, unused, b.four, "marked")) {
			t.Error("a pod of an exempt namespace cannot send under another address")
		}
		virtual := net.HardwareAddr{0, 0, 0x5e, 0, 1, 7}
		if !router.reaches(b, arpFrame(b.mac, virtual, 2, virtual, unused, b.four)) {
			t.Error("a pod of an exempt namespace cannot send under a virtual hardware address")
		}
		if a.reaches(b, udpFrame(b.mac, a.mac, router.four, b.four, "marked")) {
			t.Error("a pod sends under the address of a pod of an exempt namespace")
		}
		h.forwarding(t, a, router)
	})
}

// forwarding checks the bridge's forwarding entries: each pod has one sticky entry, and none is
// learned from a checked pod.
func (h *host) forwarding(t *testing.T, checked, exempt *station) {
	t.Helper()
	foreign := net.HardwareAddr{2, 0xaa, 0, 0, 0, 1}
	checked.send(ethernet(exempt.mac, foreign, 0x88b5, make([]byte, 46)))
	exempt.send(udpFrame(checked.mac, checked.mac, exempt.four, checked.four, "marked"))
	if !exempt.reaches(checked, udpFrame(checked.mac, exempt.mac, exempt.four, checked.four, "marked")) {
		t.Error("a pod is not reached any more after another pod sent under its hardware address")
	}
	bridge, err := netlink.LinkByName(cni.Bridge)
	if err != nil {
		h.fail("%v", err)
	}
	entries, err := netlink.NeighList(0, unix.AF_BRIDGE)
	if err != nil {
		h.fail("%v", err)
	}
	found := map[string]bool{}
	for _, e := range entries {
		if e.MasterIndex != bridge.Attrs().Index {
			continue
		}
		if e.HardwareAddr.String() == foreign.String() {
			t.Errorf("the bridge learned %s of a pod that is checked", foreign)
		}
		if e.State&netlink.NUD_NOARP != 0 {
			found[e.HardwareAddr.String()] = true
		}
	}
	for _, s := range []*station{checked, exempt} {
		if !found[s.mac.String()] {
			t.Errorf("the bridge has no static entry for %s among %v", s.mac, found)
		}
	}
}

// senderState returns the listing of the table by nft.
func (h *host) senderState() string {
	out, err := exec.Command("nft", "list", "table", "bridge", SenderTable).CombinedOutput()
	if err != nil {
		return ""
	}
	return string(out)
}

// F107: the sender check belongs to the pod: another agent process takes it over, repairs changes
// by other programs, and removes it with the pod.
func TestSendersAreKept(t *testing.T) {
	onHost(t, func(h *host) {
		h.dual()
		a, b := h.station("default"), h.station("default")
		spoofed := udpFrame(b.mac, a.mac, netip.MustParseAddr("10.244.3.77"), b.four, "marked")
		if a.reaches(b, spoofed) {
			t.Fatal("a pod sends under another address")
		}
		// The next process starts from the records alone, and changes nothing.
		before, _, err := listSenders(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		h.Network = New(h.Network.cfg)
		if _, err := h.Add(t.Context(), a.NetworkRequest); err != nil {
			t.Fatal(err)
		}
		if err := h.senders.syncTable(t.Context()); err != nil {
			t.Fatal(err)
		}
		if after, _, err := listSenders(t.Context()); err != nil || sendersDiffer(after, before) != nil {
			t.Errorf("after a restart the table has %v, before %v: %v", after, before, err)
		}
		for name, damage := range map[string][]string{
			"flushed ruleset": {"flush", "ruleset"},
			"flushed set":     {"flush", "set", "bridge", SenderTable, setPorts},
			"more elements": {"add", "element", "bridge", SenderTable, setAddresses4, "{", h.portOfStation(a), ".",
				"10.244.3.77", "}"},
			"flushed chain": {"flush", "chain", "bridge", SenderTable, "from-4"},
			"first rule":    {"insert", "rule", "bridge", SenderTable, "from-pod", "accept"},
		} {
			// A check before the damage, as the running agent makes one every few seconds.
			if err := h.senders.checkTable(t.Context()); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command("nft", damage...).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v: %s", name, err, out)
			}
			if err := errors.Join(h.senders.checkTable(t.Context()), h.senders.syncTable(t.Context())); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if a.reaches(b, spoofed) {
				t.Errorf("%s: a pod sends under another address after the repair", name)
			}
		}
		if err := h.Del(t.Context(), a.NetworkRequest); err != nil {
			t.Fatal(err)
		}
		if err := h.senders.syncTable(t.Context()); err != nil {
			t.Fatal(err)
		}
		if left := h.senderState(); strings.Contains(left, a.mac.String()) || !strings.Contains(left, b.mac.String()) {
			t.Errorf("after the end of one of two pods the table is\n%s", left)
		}
		if err := removeSenders(t.Context()); err != nil {
			t.Fatal(err)
		}
		if left := h.senderState(); left != "" {
			t.Errorf("the table was not removed:\n%s", left)
		}
	})
}

// portOfStation returns the host's end of a station's veth pair.
func (h *host) portOfStation(s *station) string {
	for _, p := range h.recordedPorts() {
		if p.MAC == s.mac.String() {
			return p.Name
		}
	}
	h.fail("no record names the port of %s", s.SandboxID)
	return ""
}

// F107: the running check repairs the table without a call, and its rules remain when it ends.
func TestSendersAreRepairedWhileTheyRun(t *testing.T) {
	onHost(t, func(h *host) {
		h.dual()
		a := h.station("default")
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		ns, err := netns.Get()
		if err != nil {
			h.fail("%v", err)
		}
		defer ns.Close()
		go onThread(ns, func() { ended <- h.MaintainSenderCheck(ctx) })
		if out, err := exec.Command("nft", "flush", "ruleset").CombinedOutput(); err != nil {
			h.fail("%v: %s", err, out)
		}
		waiting, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := wait.For(waiting, 50*time.Millisecond, func() error {
			if now := h.senderState(); !strings.Contains(now, a.mac.String()) {
				return fmt.Errorf("the table is %q", now)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		stop()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("the check ended with %v", err)
		}
		if h.senderState() == "" {
			t.Error("the rules are gone with the process")
		}
	})
}

// F107: the node's bridge ignores redirects and router advertisements of pods.
func TestBridgeIgnoresRedirects(t *testing.T) {
	onHost(t, func(h *host) {
		h.dual()
		h.station("default")
		for _, name := range []string{"ipv4/conf/%s/accept_redirects", "ipv6/conf/%s/accept_redirects",
			"ipv6/conf/%s/accept_ra"} {
			path := "/proc/sys/net/" + fmt.Sprintf(name, cni.Bridge)
			if raw, err := os.ReadFile(path); err != nil || strings.TrimSpace(string(raw)) != "0" {
				t.Errorf("%s is %q, %v", path, raw, err)
			}
		}
	})
}

// F109: if all namespaces are exempt, or with another network's configuration, the table does not
// exist.
func TestSendersOfOthersAreNotChecked(t *testing.T) {
	onHost(t, func(h *host) {
		h.dual("*")
		h.station("default")
		if left := h.senderState(); left != "" {
			t.Errorf("with all namespaces exempt the table is\n%s", left)
		}
		conf := `{"cniVersion":"1.0.0","name":"theirs","plugins":[{"type":"bridge","bridge":"theirs0","isGateway":true,
			"ipam":{"type":"host-local","dataDir":"` + filepath.Join(h.dir, "theirs") +
			`","ranges":[[{"subnet":"10.9.0.0/24"}]]}}]}`
		if err := os.WriteFile(filepath.Join(h.Network.cfg.ConfDir, "10-theirs.conflist"), []byte(conf), 0o644); err !=
			nil {
			h.fail("%v", err)
		}
		c := h.Network.cfg
		c.SourceExempt, c.Log = nil, slog.New(slog.DiscardHandler)
		h.Network = New(c)
		if _, err := h.Add(t.Context(), h.sandbox()); err != nil {
			h.fail("%v", err)
		}
		if left := h.senderState(); left != "" {
			t.Errorf("with another network's configuration the table is\n%s", left)
		}
	})
}

// onThread runs f on a new thread in a network namespace.
func onThread(ns netns.NsHandle, f func()) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := netns.Set(ns); err != nil {
		panic(err)
	}
	f()
}
