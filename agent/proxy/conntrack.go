package proxy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Limits for deleting conntrack entries. The kernel may hold hundreds of thousands of entries.
// deleteStaleFlows therefore collects and deletes stale entries in rounds.
const (
	flowsPerRound = 1024
	sweepRounds   = 64
)

// deleteStaleFlows deletes the conntrack entries of the stale flows that s selects, in the current
// network namespace.
func deleteStaleFlows(s staleFlows) error {
	families := map[uint8]bool{}
	for at := range s.servers {
		family := uint8(unix.AF_INET)
		if at.Addr().Is6() {
			family = unix.AF_INET6
		}
		families[family] = true
	}
	for family := range families {
		if err := s.deleteFamily(family); err != nil {
			return err
		}
	}
	return nil
}

func (s staleFlows) deleteFamily(family uint8) error {
	for range sweepRounds {
		found, more, err := s.findStaleFlows(family)
		if err != nil {
			return err
		}
		for _, flow := range found {
			r := conntrackRequest(family, nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK)
			r.AddRawData(flow)
			if _, err := r.Execute(unix.NETLINK_NETFILTER, 0); err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
		}
		if !more {
			return nil
		}
	}
	return nil // the table changes faster than it can be read; the flows of the first rounds are deleted
}

// findStaleFlows returns at most flowsPerRound stale flows of an address family, in the kernel's
// encoding of conntrack entries. more reports whether further stale flows may exist.
func (s staleFlows) findStaleFlows(family uint8) (found [][]byte, more bool, err error) {
	err = conntrackRequest(family, nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP).ExecuteIter(unix.NETLINK_NETFILTER, 0,
		func(m []byte) bool {
			if len(m) < nl.SizeofNfgenmsg {
				return true
			}
			flow := m[nl.SizeofNfgenmsg:]
			if to, answers, ok := udpFlow(flow); ok && s.isStale(to, answers) {
				found = append(found, bytes.Clone(flow))
			}
			more = len(found) == flowsPerRound
			return !more
		})
	if errors.Is(err, netlink.ErrDumpInterrupted) {
		more, err = true, nil
	}
	return found, more, err
}

func conntrackRequest(family uint8, operation, flags int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(int(netlink.ConntrackTable)<<8|operation, flags)
	r.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	return r
}

// udpFlow parses a conntrack entry of a UDP flow. destination is the destination of the first
// packet (a frontend), and replySource is the source of the replies (an endpoint). ok is false if
// the entry is not for UDP.
func udpFlow(flow []byte) (destination, replySource netip.AddrPort, ok bool) {
	tuples := netlinkAttributes(flow)
	_, destination, okTo := udpTuple(tuples[nl.CTA_TUPLE_ORIG])
	replySource, _, okAnswers := udpTuple(tuples[nl.CTA_TUPLE_REPLY])
	return destination, replySource, okTo && okAnswers
}

// udpTuple parses one direction (tuple) of a conntrack entry, and returns its source and
// destination. ok is false if the entry is not for UDP.
func udpTuple(tuple []byte) (source, destination netip.AddrPort, ok bool) {
	parts := netlinkAttributes(tuple)
	ips, proto := netlinkAttributes(parts[nl.CTA_TUPLE_IP]), netlinkAttributes(parts[nl.CTA_TUPLE_PROTO])
	if n := proto[nl.CTA_PROTO_NUM]; len(n) != 1 || n[0] != unix.IPPROTO_UDP {
		return source, destination, false
	}
	end := func(v4, v6, port uint16) (netip.AddrPort, bool) {
		raw := ips[v4]
		if raw == nil {
			raw = ips[v6]
		}
		ip, ok := netip.AddrFromSlice(raw)
		if p := proto[port]; ok && len(p) == 2 {
			return netip.AddrPortFrom(ip, binary.BigEndian.Uint16(p)), true
		}
		return netip.AddrPort{}, false
	}
	source, okSource := end(nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC, nl.CTA_PROTO_SRC_PORT)
	destination, okDestination := end(nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST, nl.CTA_PROTO_DST_PORT)
	return source, destination, okSource && okDestination
}

// netlinkAttributes returns the netlink attributes in b by type. It returns no attributes if b is
// malformed.
func netlinkAttributes(b []byte) map[uint16][]byte {
	out := map[uint16][]byte{}
	list, err := nl.ParseRouteAttr(b)
	if err != nil {
		return out
	}
	for _, a := range list {
		out[a.Attr.Type&nl.NLA_TYPE_MASK] = a.Value
	}
	return out
}
