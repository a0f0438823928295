package l2announce

import (
	"bytes"
	"net"
	"net/netip"
	"testing"

	"keelson.dev/keelson/internal/arp"
)

var (
	macA = net.HardwareAddr{2, 0, 0, 0, 0, 0xa}
	macB = net.HardwareAddr{2, 0, 0, 0, 0, 0xb}
)

// solicitation builds a neighbor solicitation as a host sends it.
func solicitation(target, from netip.Addr, options ...byte) []byte {
	to := solicitedNodeGroup(target)
	body := append(make([]byte, nsLength), options...)
	body[0] = icmpNS
	copy(body[8:24], target.AsSlice())
	sum := icmpv6Checksum(from, to, body)
	body[2], body[3] = byte(sum>>8), byte(sum)
	b := make([]byte, headerLength)
	b[0], b[4], b[5], b[6], b[7] = 6<<4, byte(len(body)>>8), byte(len(body)), nextICMPv6, 255
	copy(b[8:24], from.AsSlice())
	copy(b[24:40], to.AsSlice())
	return append(b, body...)
}

// F117: requests are parsed, and packets that only resemble requests are not.
func TestQuestions(t *testing.T) {
	vip, asker := netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("192.0.2.1")
	q, ok := parseARP(buildARP(arp.Request, macA, asker, make(net.HardwareAddr, 6), vip))
	if !ok || q.target != vip || q.from != asker || q.mac.String() != macA.String() {
		t.Errorf("ARP: %+v %v", q, ok)
	}
	vip6, asker6 := netip.MustParseAddr("2001:db8::10"), netip.MustParseAddr("2001:db8::1")
	good := solicitation(vip6, asker6, optionSource, 1, 2, 0, 0, 0, 0, 0xa)
	if q, ok = parseNS(good, macA); !ok || q.target != vip6 || q.from != asker6 {
		t.Errorf("NS: %+v %v", q, ok)
	}
	if q, ok = parseNS(solicitation(vip6, netip.IPv6Unspecified()), macA); !ok || !q.from.IsUnspecified() {
		t.Errorf("NS of who wants the address: %+v %v", q, ok)
	}
	changed := func(b []byte, at int, to byte) []byte { b = bytes.Clone(b); b[at] = to; return b }
	request := buildARP(arp.Request, macA, asker, make(net.HardwareAddr, 6), vip)
	for name, b := range map[string][]byte{
		"short": request[:27], "a reply": changed(request, 7, 2), "other hardware": changed(request, 1, 6),
		"other protocol":          changed(request, 3, 1),
		"long hardware addresses": changed(request, 4, 8), "a group that asks": changed(request, 8, 3),
		"an announcement": buildARP(arp.Request, macA, vip, macB, vip),
	} {
		if _, ok := parseARP(b); ok {
			t.Errorf("ARP, %s, was taken for a question", name)
		}
	}
	for name, b := range map[string][]byte{
		"short": good[:63], "version 4": changed(good, 0, 4<<4), "a router's hop limit": changed(good, 7, 254),
		"TCP":               changed(good, 6, 6),
		"longer than it is": changed(good, 5, 200), "shorter than it is": changed(good, 5, 8),
		"a wrong checksum":         changed(good, 42, good[42]+1),
		"an option without length": solicitation(vip6, asker6, optionSource, 0, 0, 0, 0, 0, 0, 0),
		"an option beyond the end": solicitation(vip6, asker6, optionSource, 2, 0, 0, 0, 0, 0, 0),
		"who has no address and tells it": solicitation(vip6, netip.IPv6Unspecified(), optionSource, 1, 2,
			0, 0, 0, 0, 0xa),
		"a group": solicitation(netip.MustParseAddr("ff02::5"), asker6),
		"another code, with its checksum changed": changed(changed(good, 41, 1), 43, good[43]-1),
	} {
		if _, ok := parseNS(b, macA); ok {
			t.Errorf("NS, %s, was taken for a question", name)
		}
	}
}

// F117: arbitrary packets are parsed without reading beyond their end, and every packet that is
// parsed as a request has a valid answer.
func FuzzFrames(f *testing.F) {
	f.Add(buildARP(arp.Request, macA, netip.MustParseAddr("192.0.2.1"), macB, netip.MustParseAddr("192.0.2.10")))
	f.Add(solicitation(netip.MustParseAddr("2001:db8::10"), netip.MustParseAddr("2001:db8::1"), optionSource, 1, 2,
		0, 0, 0, 0, 0xa))
	f.Add(solicitation(netip.MustParseAddr("2001:db8::10"), netip.IPv6Unspecified()))
	f.Fuzz(func(t *testing.T, b []byte) {
		if q, ok := parseARP(b); ok &&
			(!q.target.Is4() || len(buildARP(arp.Reply, macB, q.target, q.mac, q.from)) != arp.Length) {
			t.Errorf("%+v", q)
		}
		if q, ok := parseNS(b, macA); ok {
			a := buildAdvertisement(q.target, macB, q.from)
			from, to := netip.AddrFrom16([16]byte(a[8:24])), netip.AddrFrom16([16]byte(a[24:40]))
			if from != q.target || icmpv6Checksum(from, to, a[headerLength:]) != 0 || to.IsUnspecified() {
				t.Errorf("%+v is answered with %x", q, a)
			}
		}
	})
}
