package proxy

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// The kernel's words for what is read of nftables (linux/netfilter/nf_tables.h).
const (
	nfnlNFTables     = 10
	nftGetRule       = 7
	nftGetElements   = 13
	nftGetGeneration = 16
	nftaTable        = 1 // of rules, and of lists of elements
	nftaName         = 2 // of a rule's chain, and of a list's set
	nftaListElements = 3
	nftaElementKey   = 1
	nftaElementExpr  = 7
	nftaElementExprs = 11
	nftaDataValue    = 1
	nftaExprName     = 1
	nftaExprData     = 2
	nftaCounterPkts  = 2
	nftaGenerationID = 1
)

// ask reads from nftables; each is called with the attributes of each message.
func (f family) ask(operation, flags int, request []*nl.RtAttr, each func(map[uint16][]byte)) error {
	r := nl.NewNetlinkRequest(nfnlNFTables<<8|operation, flags)
	kind := uint8(unix.AF_INET)
	if f.v6 {
		kind = unix.AF_INET6
	}
	r.AddData(&nl.Nfgenmsg{NfgenFamily: kind, Version: nl.NFNETLINK_V0})
	for _, a := range request {
		r.AddData(a)
	}
	return r.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(m []byte) bool {
		if len(m) > nl.SizeofNfgenmsg {
			each(attributes(m[nl.SizeofNfgenmsg:]))
		}
		return true
	})
}

// generation counts the transactions of everybody.
func (f family) generation() (id uint32, err error) {
	err = f.ask(nftGetGeneration, 0, nil, func(a map[uint16][]byte) {
		if v := a[nftaGenerationID]; len(v) == 4 {
			id = binary.BigEndian.Uint32(v)
		}
	})
	return id, err
}

// elements calls each with every element of a set or map of ours.
func (f family) elements(table, set string, each func(element []byte)) error {
	request := []*nl.RtAttr{nl.NewRtAttr(nftaTable, nl.ZeroTerminated(table)), nl.NewRtAttr(nftaName, nl.ZeroTerminated(set))}
	err := f.ask(nftGetElements, unix.NLM_F_DUMP, request, func(a map[uint16][]byte) {
		list, err := nl.ParseRouteAttr(a[nftaListElements])
		if err != nil {
			return
		}
		for _, e := range list {
			each(e.Value)
		}
	})
	if err != nil {
		return fmt.Errorf("reading the elements of %s: %w", set, err)
	}
	return nil
}

// Intact implements Writer. It counts: rules by chain, and elements by map.
func (n *nft) Intact(context.Context) (bool, error) {
	for _, t := range n.tables {
		if !t.built {
			continue
		}
		ok, err := t.intact()
		if errors.Is(err, netlink.ErrDumpInterrupted) || errors.Is(err, unix.EINTR) {
			continue // somebody changes rules now: the next look tells
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return false, err
		}
		if !ok || err != nil {
			return false, nil
		}
	}
	return true, nil
}

func (t *nftTable) intact() (bool, error) {
	now, err := t.generation() // before the look: what comes later is looked at later
	if err != nil {
		return false, err
	}
	if now == t.checked {
		return true, nil
	}
	rules := map[string]int{}
	err = t.ask(nftGetRule, unix.NLM_F_DUMP, []*nl.RtAttr{nl.NewRtAttr(nftaTable, nl.ZeroTerminated(t.table))}, func(a map[uint16][]byte) {
		if cString(a[nftaTable]) == t.table {
			rules[cString(a[nftaName])]++
		}
	})
	if err != nil {
		return false, err
	}
	if len(rules) != len(t.rules) {
		return false, nil
	}
	for name, n := range t.rules {
		if rules[name] != n {
			return false, nil
		}
	}
	for _, m := range t.frame(t.family, t.base).maps {
		count := 0
		if err := t.family.elements(t.table, m.Name, func([]byte) { count++ }); err != nil {
			return false, err
		}
		if count != t.elements[m.Name] {
			return false, nil
		}
	}
	count := 0
	if err := t.family.elements(t.table, setHairpin, func([]byte) { count++ }); err != nil || count != len(t.hairpin) {
		return false, err
	}
	t.checked = now
	return true, nil
}

func cString(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// Connections implements Writer.
func (n *nft) Connections(context.Context) (map[Frontend]uint64, error) {
	out := map[Frontend]uint64{}
	for _, t := range n.tables {
		if !t.built {
			continue
		}
		err := t.family.elements(t.table, setConnections, func(e []byte) {
			if at, count, ok := t.counted(attributes(e)); ok {
				out[at] += count
			}
		})
		if err != nil {
			return out, err
		}
	}
	return out, nil
}

// counted reads an element of the set that counts connections.
func (f family) counted(e map[uint16][]byte) (at Frontend, count uint64, ok bool) {
	key := attributes(e[nftaElementKey])[nftaDataValue]
	n := f.bits / 8
	if len(key) != n+8 { // each part of a key takes whole words
		return at, 0, false
	}
	ip, _ := netip.AddrFromSlice(key[:n])
	at = Frontend{IP: ip, Proto: protocolName(key[n]), Port: int32(binary.BigEndian.Uint16(key[n+4:]))}
	expr := e[nftaElementExpr]
	if list, err := nl.ParseRouteAttr(e[nftaElementExprs]); err == nil && len(list) > 0 {
		expr = list[0].Value
	}
	a := attributes(expr)
	packets := attributes(a[nftaExprData])[nftaCounterPkts]
	if cString(a[nftaExprName]) != "counter" || len(packets) != 8 {
		return at, 0, false
	}
	return at, binary.BigEndian.Uint64(packets), at.Proto != ""
}

func protocolName(number byte) string {
	switch number {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	}
	return ""
}
