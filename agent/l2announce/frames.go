package l2announce

import (
	"encoding/binary"
	"net"
	"net/netip"

	"keelson.dev/keelson/internal/arp"
)

// Neighbor discovery packets are validated byte by byte, according to the RFCs that define them.
// They are short. A library would add packages for sockets and the rest of the protocol.

// Lengths of packets in bytes, without the link-layer header.
const (
	headerLength = 40 // IPv6 header, RFC 8200
	nsLength     = 24 // neighbor solicitation without options, RFC 4861
	naLength     = 32 // neighbor advertisement with the link-layer address option
	maxPacket    = 1500
)

// Protocol numbers of neighbor discovery packets.
const (
	nextICMPv6     = 58
	icmpNS, icmpNA = 135, 136
	optionSource   = 1
	optionTarget   = 2
	flagSolicited  = 0x40
	flagOverride   = 0x20
)

// addressQuery is a parsed ARP request or neighbor solicitation: a request for the MAC address of
// an IP address.
type addressQuery struct {
	target netip.Addr
	from   netip.Addr       // unspecified: duplicate address detection
	mac    net.HardwareAddr // link-layer address for the answer
}

// parseARP parses an ARP request. ok is false if the packet is not a valid request for an address.
func parseARP(b []byte) (q addressQuery, ok bool) {
	p, ok := arp.Parse(b)
	if !ok || p.Operation != arp.Request || p.SenderMAC[0]&1 != 0 || p.Target == p.Sender {
		// a multicast sender, or a gratuitous ARP
		return addressQuery{}, false
	}
	return addressQuery{target: p.Target, from: p.Sender, mac: p.SenderMAC}, true
}

// buildARP returns an ARP packet which states that address is at the MAC address mac. toMAC and
// target are the packet's target fields.
func buildARP(
	operation uint16, mac net.HardwareAddr, address netip.Addr, toMAC net.HardwareAddr, target netip.Addr,
) []byte {
	return arp.Packet{Operation: operation, SenderMAC: mac, Sender: address, TargetMAC: toMAC, Target: target}.Marshal()
}

// parseNS parses an IPv6 packet with a neighbor solicitation. ok is false if the packet is invalid
// according to RFC 4861, section 7.1.1. mac is the source of its frame.
func parseNS(b []byte, mac net.HardwareAddr) (q addressQuery, ok bool) {
	if len(b) < headerLength+nsLength || b[0]>>4 != 6 || b[6] != nextICMPv6 || b[7] != 255 || len(mac) != 6 {
		return addressQuery{}, false
	}
	length := int(binary.BigEndian.Uint16(b[4:]))
	if length < nsLength || headerLength+length > len(b) {
		return addressQuery{}, false
	}
	body := b[headerLength : headerLength+length]
	from, to := netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
	target := netip.AddrFrom16([16]byte(body[8:24]))
	if body[0] != icmpNS || body[1] != 0 || target.IsMulticast() || from.IsMulticast() ||
		icmpv6Checksum(from, to, body) != 0 {
		return addressQuery{}, false
	}
	for rest := body[nsLength:]; len(rest) > 0; {
		if len(rest) < 2 || rest[1] == 0 || int(rest[1])*8 > len(rest) {
			return addressQuery{}, false
		}
		if rest[0] == optionSource && from.IsUnspecified() {
			return addressQuery{}, false
		}
		rest = rest[int(rest[1])*8:]
	}
	if from.IsUnspecified() && to != solicitedNodeGroup(target) || mac[0]&1 != 0 {
		return addressQuery{}, false
	}
	return addressQuery{target: target, from: from, mac: append(net.HardwareAddr(nil), mac...)}, true
}

// buildAdvertisement returns an IPv6 packet with a neighbor advertisement which states that address
// is at the MAC address mac. solicitor is the source of the solicitation. If it is invalid, the
// packet is addressed to all nodes on the link.
func buildAdvertisement(address netip.Addr, mac net.HardwareAddr, solicitor netip.Addr) []byte {
	flags := byte(flagOverride | flagSolicited)
	if !solicitor.IsValid() || solicitor.IsUnspecified() {
		flags, solicitor = flagOverride, allNodes
	}
	b := make([]byte, headerLength+naLength)
	b[0] = 6 << 4
	binary.BigEndian.PutUint16(b[4:], naLength)
	b[6], b[7] = nextICMPv6, 255
	copy(b[8:24], address.AsSlice())
	copy(b[24:40], solicitor.AsSlice())
	body := b[headerLength:]
	body[0], body[4] = icmpNA, flags
	copy(body[8:24], address.AsSlice())
	body[24], body[25] = optionTarget, 1
	copy(body[26:32], mac)
	binary.BigEndian.PutUint16(body[2:], icmpv6Checksum(address, solicitor, body))
	return b
}

// allNodes is the all-nodes multicast group of a link.
var allNodes = netip.MustParseAddr("ff02::1")

// solicitedNodeGroup returns the solicited-node multicast group of an address (RFC 4291, section
// 2.7.1).
func solicitedNodeGroup(a netip.Addr) netip.Addr {
	raw := a.As16()
	return netip.AddrFrom16([16]byte{0: 0xff, 1: 0x02, 11: 1, 12: 0xff, 13: raw[13], 14: raw[14], 15: raw[15]})
}

// groupMAC returns the Ethernet address to which packets to an IPv6 multicast group are sent.
func groupMAC(group netip.Addr) net.HardwareAddr {
	raw := group.As16()
	return net.HardwareAddr{0x33, 0x33, raw[12], raw[13], raw[14], raw[15]}
}

// icmpv6Checksum returns the ICMPv6 checksum (RFC 4443, section 2.3). It returns 0 for a message
// that contains its valid checksum.
func icmpv6Checksum(from, to netip.Addr, body []byte) uint16 {
	sum := uint32(len(body)) + nextICMPv6
	add := func(b []byte) {
		for i := 0; i+1 < len(b); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(b[i:]))
		}
		if len(b)%2 == 1 {
			sum += uint32(b[len(b)-1]) << 8
		}
	}
	a, z := from.As16(), to.As16()
	add(a[:])
	add(z[:])
	add(body)
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
