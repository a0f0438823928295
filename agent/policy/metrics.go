package policy

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Names of the metrics of the Enforcer: dropped packets and bytes per isolated pod, and unmerged
// sets.
const (
	MetricPackets  = "keelson_network_policy_dropped_packets_total"
	MetricBytes    = "keelson_network_policy_dropped_bytes_total"
	metricUnmerged = "keelson_network_policy_unmerged_sets"
)

// dropCount is the number of dropped packets and bytes.
type dropCount struct{ packets, bytes uint64 }

// WriteMetrics writes the numbers of packets and bytes dropped for each isolated pod of the node,
// in the Prometheus text format. A pod has at most two rows, one per direction. The counters are
// read from the kernel on each call.
func (e *Enforcer) WriteMetrics(_ context.Context, to io.Writer) error {
	e.mu.Lock()
	judged, split, owners := len(e.programmed) > 0, e.unmergedSets, maps.Clone(e.owners)
	e.mu.Unlock()
	w := bufio.NewWriter(to)
	fmt.Fprintf(w, "# HELP %s Sets of several address groups that exceeded the limit and were not merged\n# TYPE %s "+
		"gauge\n%s %d\n", metricUnmerged, metricUnmerged, metricUnmerged, split)
	if !judged || e.cfg.Disabled() {
		return w.Flush()
	}
	pods := map[types.UID]*v1.Pod{}
	for _, p := range e.cfg.Objects.Pods() {
		pods[p.UID] = p
	}
	type row struct{ namespace, pod, direction string }
	sums := map[row]dropCount{}
	for _, d := range directions {
		for _, f := range families {
			counts, err := countsOf(droppedSet(d, f))
			if err != nil {
				e.cfg.Log.Debug("the drop counters of network policies cannot be read", "err", err)
				return w.Flush()
			}
			for address, n := range counts {
				if p := pods[owners[address]]; p != nil {
					at := row{p.Namespace, p.Name, map[string]string{"i": "ingress", "e": "egress"}[d.letter]}
					sums[at] = dropCount{sums[at].packets + n.packets, sums[at].bytes + n.bytes}
				}
			}
		}
	}
	rows := slices.SortedFunc(maps.Keys(sums), func(a, b row) int {
		return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.pod, b.pod),
			cmp.Compare(a.direction, b.direction))
	})
	for _, m := range []struct {
		name, help string
		of         func(dropCount) uint64
	}{{MetricPackets, "Packets that the network policies of a pod dropped", func(d dropCount) uint64 {
		return d.packets
	}},
		{MetricBytes, "Bytes of packets that the network policies of a pod dropped", func(d dropCount) uint64 {
			return d.bytes
		}}} {
		fmt.Fprintf(w, "# HELP %s %s\n# TYPE %s counter\n", m.name, m.help, m.name)
		for _, r := range rows {
			fmt.Fprintf(w, "%s{namespace=%q,pod=%q,direction=%q} %d\n", m.name, r.namespace, r.pod,
				r.direction, m.of(sums[r]))
		}
	}
	return w.Flush()
}

// nftaElementExpressions is the attribute in which newer kernels store an element's counter
// (linux/netfilter/nf_tables.h).
const nftaElementExpressions = 11

// countsOf returns the numbers of dropped packets and bytes in the nftables set with this name, by
// pod address. It returns nil without an error while the set is being recreated.
func countsOf(set string) (map[netip.Addr]dropCount, error) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETSETELEM, unix.NLM_F_DUMP)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.NFPROTO_INET, Version: nl.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_TABLE, nl.ZeroTerminated(Table)))
	req.AddData(nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_SET, nl.ZeroTerminated(set)))
	msgs, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if errors.Is(err, unix.ENOENT) { // the set is being recreated
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the elements of %s: %w", set, err)
	}
	out := map[netip.Addr]dropCount{}
	for _, m := range msgs {
		if len(m) < nl.SizeofNfgenmsg {
			continue
		}
		list, err := nl.ParseRouteAttr(netlinkAttributes(m[nl.SizeofNfgenmsg:])[unix.NFTA_SET_ELEM_LIST_ELEMENTS])
		if err != nil {
			return nil, fmt.Errorf("the elements of %s: %w", set, err)
		}
		for _, e := range list {
			a := netlinkAttributes(e.Value)
			address, ok := netip.AddrFromSlice(netlinkAttributes(a[unix.NFTA_SET_ELEM_KEY])[unix.NFTA_DATA_VALUE])
			expr := a[unix.NFTA_SET_ELEM_EXPR]
			if more, err := nl.ParseRouteAttr(a[nftaElementExpressions]); err == nil && len(more) > 0 {
				expr = more[0].Value
			}
			counter := netlinkAttributes(expr)
			if name := bytes.TrimRight(counter[unix.NFTA_EXPR_NAME], "\x00"); !ok || string(name) != "counter" {
				continue
			}
			n := netlinkAttributes(counter[unix.NFTA_EXPR_DATA])
			if p, b := n[unix.NFTA_COUNTER_PACKETS], n[unix.NFTA_COUNTER_BYTES]; len(p) == 8 && len(b) == 8 {
				out[address] = dropCount{binary.BigEndian.Uint64(p), binary.BigEndian.Uint64(b)}
			}
		}
	}
	return out, nil
}

// netlinkAttributes returns the attributes of a message by type, or nil if it cannot be parsed.
func netlinkAttributes(raw []byte) map[uint16][]byte {
	list, err := nl.ParseRouteAttr(raw)
	if err != nil {
		return nil
	}
	out := make(map[uint16][]byte, len(list))
	for _, a := range list {
		out[a.Attr.Type&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER)] = a.Value
	}
	return out
}
