package proxy

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"net/netip"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// Constants of the nftables netlink interface (linux/netfilter/nf_tables.h).
const (
	nfnlNFTables     = 10
	nftGetTable      = 1
	nftGetChain      = 4
	nftGetRule       = 7
	nftGetElements   = 13
	nftGetGeneration = 16
	nftaTable        = 1 // of rules and of element lists
	nftaName         = 2 // a rule's chain, or an element list's set
	nftaRuleHandle   = 3
	nftaTableFlags   = 2
	nftaRuleCode     = 4
	nftaChainPolicy  = 5
	nftAccept        = 1
	nftDormant       = 1
	nftaListElements = 3
	nftaElementKey   = 1
	nftaElementExpr  = 7
	nftaElementExprs = 11
	nftaElementData  = 2
	nftaDataValue    = 1
	nftaDataVerdict  = 2
	nftaVerdictCode  = 1
	nftaVerdictChain = 2
	nftGoto          = -4
	nftDrop          = 0
	nftaExprName     = 1
	nftaExprData     = 2
	nftaCounterPkts  = 2
	nftaGenerationID = 1
)

// queryNFTables sends a netlink request to nftables, and calls handle with the attributes of every
// response message.
func (f family) queryNFTables(operation, flags int, request []*nl.RtAttr, handle func(map[uint16][]byte)) error {
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
			handle(netlinkAttributes(m[nl.SizeofNfgenmsg:]))
		}
		return true
	})
}

// rulesetGeneration returns the kernel's ruleset generation, which increases with every nftables
// transaction of any program.
func (f family) rulesetGeneration() (id uint32, err error) {
	err = f.queryNFTables(nftGetGeneration, 0, nil, func(a map[uint16][]byte) {
		if v := a[nftaGenerationID]; len(v) == 4 {
			id = binary.BigEndian.Uint32(v)
		}
	})
	return id, err
}

// forEachElement calls handle with every element of a set or map in the kernel, in netlink
// encoding.
func (f family) forEachElement(table, set string, handle func(element []byte)) error {
	request := []*nl.RtAttr{nl.NewRtAttr(nftaTable, nl.ZeroTerminated(table)),
		nl.NewRtAttr(nftaName, nl.ZeroTerminated(set))}
	err := f.queryNFTables(nftGetElements, unix.NLM_F_DUMP, request, func(a map[uint16][]byte) {
		list, err := nl.ParseRouteAttr(a[nftaListElements])
		if err != nil {
			return
		}
		for _, e := range list {
			handle(e.Value)
		}
	})
	if err != nil {
		return fmt.Errorf("reading the elements of %s: %w", set, err)
	}
	return nil
}

// elementDigest identifies the elements of a set or map, independently of their order.
type elementDigest struct {
	n   int
	sum uint64
}

// addElements returns the digest d after the elements of list were added. sign is 1, or -1 if the
// elements were removed instead.
func (d elementDigest) addElements(list []mapElement, sign int) elementDigest {
	for _, e := range list {
		h := fnv.New64a()
		_, _ = io.WriteString(h, e.key+" : "+e.value)
		d.sum ^= h.Sum64()
	}
	d.n += sign * len(list)
	return d
}

// parseElement returns the key and value of an element of the nftables map m, in the syntax in
// which they were written. e contains the element's netlink attributes.
func (f family) parseElement(m string, e map[uint16][]byte) (out mapElement) {
	key, data := netlinkAttributes(e[nftaElementKey])[nftaDataValue], netlinkAttributes(e[nftaElementData])
	name, nodePort := strings.CutPrefix(m, nodePortPrefix)
	chosen := strings.HasPrefix(name, mapEndpoints) || strings.HasPrefix(name, mapLocalEndpoints)
	var parts []string
	take := func(n int) []byte { // each part of a key is padded to 4 bytes
		if len(key) < n {
			return make([]byte, n)
		}
		part := key[:n]
		key = key[n:]
		return part
	}
	if !nodePort {
		ip, _ := netip.AddrFromSlice(take(f.bits / 8))
		parts = append(parts, ip.String())
	}
	if !chosen {
		parts = append(parts, protocolName(take(4)[0]))
	}
	parts = append(parts, strconv.Itoa(int(binary.BigEndian.Uint16(take(4)))))
	if chosen {
		parts = append(parts, strconv.Itoa(int(binary.NativeEndian.Uint32(take(4)))))
	}
	out.key = strings.Join(parts, " . ")
	if v := data[nftaDataValue]; chosen && len(v) == f.bits/8+4 {
		ip, _ := netip.AddrFromSlice(v[:f.bits/8])
		out.value = ip.String() + " . " + strconv.Itoa(int(binary.BigEndian.Uint16(v[f.bits/8:])))
		return out
	}
	verdict := netlinkAttributes(data[nftaDataVerdict])
	if code := verdict[nftaVerdictCode]; len(code) == 4 {
		switch int32(binary.BigEndian.Uint32(code)) {
		case nftGoto:
			out.value = "goto " + cString(verdict[nftaVerdictChain])
		case nftDrop:
			out.value = "drop"
		}
	}
	return out
}

// Intact reports whether the kernel still has the rules that were written. It compares the rules of
// each chain and the elements of each map. It does not read a table again while the ruleset
// generation is unchanged. It implements Writer.
func (n *nft) Intact(context.Context) (bool, error) {
	for _, t := range n.tables {
		if !t.built {
			continue
		}
		ok, err := t.isIntact()
		if errors.Is(err, netlink.ErrDumpInterrupted) || errors.Is(err, unix.EINTR) {
			continue // rules are changing at this moment; the next check reads them again
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

func (t *nftTable) isIntact() (bool, error) {
	now, err := t.rulesetGeneration() // read first: a change during the comparison is detected by the next check
	if err != nil {
		return false, err
	}
	if now == t.shown.intactGeneration {
		return true, nil
	}
	if ok, err := t.shown.compareChains(t.family, t.table, t.want.rules); !ok || err != nil {
		return false, err
	}
	for _, m := range t.skeleton(t.family, t.base).maps {
		var shown elementDigest
		if err := t.family.forEachElement(t.table, m.Name, func(e []byte) {
			shown = shown.addElements([]mapElement{t.parseElement(m.Name, netlinkAttributes(e))}, 1)
		}); err != nil {
			return false, err
		}
		if shown != t.want.elements[m.Name] {
			return false, nil
		}
	}
	count := 0
	if err := t.family.forEachElement(t.table, setHairpin, func([]byte) { count++ }); err != nil ||
		count != len(t.want.hairpinUses) {
		return false, err
	}
	t.shown.intactGeneration = now
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

// Counts returns the numbers of connections and of unserved packets by frontend, from the table's
// counter sets. It implements Writer.
func (n *nft) Counts(context.Context) (Counts, error) {
	out := newCounts()
	for _, t := range n.tables {
		if !t.built {
			continue
		}
		for set, into := range map[string]map[servicemodel.Frontend]uint64{setConnections: out.Connections,
			setUnserved: out.Unserved} {
			err := t.family.forEachElement(t.table, set, func(e []byte) {
				if at, count, ok := t.parseCounted(netlinkAttributes(e)); ok {
					into[at] += count
				}
			})
			if err != nil {
				return out, err
			}
		}
	}
	return out, nil
}

// parseCounted returns the frontend and the packet count of an element of the sets setConnections
// and setUnserved. e contains the element's netlink attributes. ok is false if it cannot be parsed.
func (f family) parseCounted(e map[uint16][]byte) (at servicemodel.Frontend, count uint64, ok bool) {
	key := netlinkAttributes(e[nftaElementKey])[nftaDataValue]
	n := f.bits / 8
	if len(key) != n+8 { // each part of a key is padded to 4 bytes
		return at, 0, false
	}
	ip, _ := netip.AddrFromSlice(key[:n])
	at = servicemodel.Frontend{IP: ip, Proto: protocolName(key[n]), Port: int32(binary.BigEndian.Uint16(key[n+4:]))}
	expr := e[nftaElementExpr]
	if list, err := nl.ParseRouteAttr(e[nftaElementExprs]); err == nil && len(list) > 0 {
		expr = list[0].Value
	}
	a := netlinkAttributes(expr)
	packets := netlinkAttributes(a[nftaExprData])[nftaCounterPkts]
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
