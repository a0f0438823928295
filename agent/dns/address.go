package dns

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/knftables"
)

// Table is the name of the nftables table of the agent's DNS server.
const Table = "keelson-dns"

// addressHolder maintains the DNS server's addresses on the node's loopback device, and the
// nftables rules that exempt DNS from connection tracking.
//
// A query and its answer are only two packets, so tracking would cost one entry per query. Tracking
// has also lost queries that a client sends twice at the same time.
//
// A record on disk lists the addresses. With it, a later agent process removes addresses that are
// no longer wanted. The addresses remain when the agent exits.
type addressHolder struct {
	file string // record of the addresses; deleted by a reboot, like the loopback addresses
	nft  knftables.Interface
	have []netip.Addr
	read bool
}

// setAddresses sets the addresses of the DNS server to want: it adds and removes addresses of the
// loopback device, and writes the nftables rules for them.
func (h *addressHolder) setAddresses(ctx context.Context, want []netip.Addr) error {
	if err := h.readRecord(); err != nil {
		return err
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("finding the loopback device: %w", err)
	}
	// The record is written before addresses are added and after they are removed. It therefore
	// never lacks an address.
	all := slices.Clone(h.have)
	for _, a := range want {
		if !slices.Contains(all, a) {
			all = append(all, a)
		}
	}
	if err := h.writeRecord(all); err != nil {
		return err
	}
	for _, a := range want {
		if err := netlink.AddrAdd(lo, hostAddress(a)); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("adding %s to finding the loopback device: %w", a, err)
		}
	}
	for _, a := range all {
		if !slices.Contains(want, a) {
			if err := netlink.AddrDel(lo, hostAddress(a)); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
				return fmt.Errorf("removing %s from finding the loopback device: %w", a, err)
			}
		}
	}
	if err := h.writeRules(ctx, want); err != nil {
		return err
	}
	return h.writeRecord(want)
}

func hostAddress(a netip.Addr) *netlink.Addr {
	return &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())},
		Scope: unix.RT_SCOPE_HOST}
}

// readRecord reads the record of the addresses that an earlier agent process added. Only the first
// call reads the file. A damaged record counts as empty.
func (h *addressHolder) readRecord() error {
	if h.read {
		return nil
	}
	raw, err := os.ReadFile(h.file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the record of the DNS server's addresses: %w", err)
	}
	if err == nil {
		// A damaged record was left by a crash. Its addresses are added again if they are wanted;
		// others remain until the next reboot.
		_ = json.Unmarshal(raw, &h.have)
	}
	h.read = true
	return nil
}

func (h *addressHolder) writeRecord(all []netip.Addr) error {
	if slices.Equal(all, h.have) {
		return nil
	}
	raw, err := json.Marshal(all)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(h.file), 0o755); err != nil {
		return fmt.Errorf("the record of the DNS server's addresses: %w", err)
	}
	if err := os.WriteFile(h.file, raw, 0o644); err != nil {
		return fmt.Errorf("the record of the DNS server's addresses: %w", err)
	}
	h.have = slices.Clone(all)
	return nil
}

// writeRules replaces the nftables table with the rules for the addresses. While no agent runs, the
// rules drop ICMP "port unreachable" messages. A client that receives such a message fails at once;
// without it, the client retries soon.
func (h *addressHolder) writeRules(ctx context.Context, addresses []netip.Addr) error {
	if h.nft == nil {
		nft, err := knftables.New(knftables.InetFamily, Table)
		if err != nil {
			return fmt.Errorf("DNS without connection tracking needs nftables: %w: install nft and a kernel "+
				"with nf_tables", err)
		}
		h.nft = nft
	}
	tx := h.nft.NewTransaction()
	tx.Add(&knftables.Table{})
	tx.Delete(&knftables.Table{})
	tx.Add(&knftables.Table{Comment: knftables.PtrTo("cluster DNS on this node")})
	for _, family := range []string{"ip", "ip6"} {
		set := "servers-" + family
		kind := map[string]string{"ip": "ipv4_addr", "ip6": "ipv6_addr"}[family]
		tx.Add(&knftables.Set{Name: set, Type: kind})
		for _, a := range addresses {
			if a.Is4() == (family == "ip") {
				tx.Add(&knftables.Element{Set: set, Key: []string{a.String()}})
			}
		}
	}
	for chain, hook := range map[string]knftables.BaseChainHook{"in": knftables.PreroutingHook,
		"out": knftables.OutputHook} {
		tx.Add(&knftables.Chain{Name: chain, Type: knftables.PtrTo(knftables.FilterType), Hook: knftables.PtrTo(hook),
			Priority: knftables.PtrTo(knftables.RawPriority)})
		for _, family := range []string{"ip", "ip6"} {
			for _, rule := range []string{
				family + " daddr @servers-" + family + " udp dport 53 notrack",
				family + " daddr @servers-" + family + " tcp dport 53 notrack",
				family + " saddr @servers-" + family + " udp sport 53 notrack",
				family + " saddr @servers-" + family + " tcp sport 53 notrack",
			} {
				tx.Add(&knftables.Rule{Chain: chain, Rule: rule})
			}
		}
	}
	tx.Add(&knftables.Rule{Chain: "out",
		Rule: "ip saddr @servers-ip icmp type destination-unreachable icmp code port-unreachable drop"})
	tx.Add(&knftables.Rule{Chain: "out",
		Rule: "ip6 saddr @servers-ip6 icmpv6 type destination-unreachable icmpv6 code port-unreachable drop"})
	if err := h.nft.Run(ctx, tx); err != nil {
		return fmt.Errorf("writing the rules that exempt DNS from connection tracking: %w", err)
	}
	return nil
}

// hasRules reports whether the nftables table still has its rules. Reloading a firewall may flush
// the rules of all programs.
func (h *addressHolder) hasRules(ctx context.Context) bool {
	if h.nft == nil {
		return true
	}
	chains, err := h.nft.List(ctx, "chains")
	return err == nil && slices.Contains(chains, "in")
}
