// Package arp encodes and decodes ARP packets for Ethernet and IPv4 (RFC 826), without the
// link-layer header.
package arp

import (
	"encoding/binary"
	"net"
	"net/netip"
)

// Length is the length of a packet in bytes.
const Length = 28

// Operations of a Packet.
const (
	Request = 1
	Reply   = 2
)

const (
	hardwareEthernet = 1
	protocolIPv4     = 0x0800
	macLength        = 6
	addressLength    = 4
)

// Packet is an ARP packet. Both MAC addresses have 6 bytes, and both IP addresses are IPv4.
type Packet struct {
	Operation uint16
	SenderMAC net.HardwareAddr
	Sender    netip.Addr
	TargetMAC net.HardwareAddr
	Target    netip.Addr
}

// Marshal returns the packet in its wire form of Length bytes.
func (p Packet) Marshal() []byte {
	b := make([]byte, Length)
	binary.BigEndian.PutUint16(b[0:], hardwareEthernet)
	binary.BigEndian.PutUint16(b[2:], protocolIPv4)
	b[4], b[5] = macLength, addressLength
	binary.BigEndian.PutUint16(b[6:], p.Operation)
	copy(b[8:14], p.SenderMAC)
	copy(b[14:18], p.Sender.AsSlice())
	copy(b[18:24], p.TargetMAC)
	copy(b[24:28], p.Target.AsSlice())
	return b
}

// Parse decodes a packet. ok is false if b is shorter than Length, or is not ARP for Ethernet and
// IPv4. Bytes behind the packet are ignored, because Ethernet pads short frames. The result shares
// no memory with b.
func Parse(b []byte) (p Packet, ok bool) {
	if len(b) < Length || binary.BigEndian.Uint16(b[0:]) != hardwareEthernet ||
		binary.BigEndian.Uint16(b[2:]) != protocolIPv4 ||
		b[4] != macLength || b[5] != addressLength {
		return Packet{}, false
	}
	return Packet{
		Operation: binary.BigEndian.Uint16(b[6:]),
		SenderMAC: append(net.HardwareAddr(nil), b[8:14]...), Sender: netip.AddrFrom4([4]byte(b[14:18])),
		TargetMAC: append(net.HardwareAddr(nil), b[18:24]...), Target: netip.AddrFrom4([4]byte(b[24:28])),
	}, true
}
