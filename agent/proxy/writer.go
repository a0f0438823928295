package proxy

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
)

// Mode names what Service rules are written in.
type Mode string

// The modes of --proxy-mode.
const (
	ModeNFTables Mode = "nftables"
	ModeIPTables Mode = "iptables"
	ModeIPVS     Mode = "ipvs"
	ModeNone     Mode = "none" // somebody else makes Services reachable
)

// ParseMode reads the name of a mode.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case ModeNFTables, ModeIPTables, ModeIPVS, ModeNone:
		return m, nil
	}
	return "", fmt.Errorf("%q: want nftables, iptables, ipvs or none", s)
}

// Base is what the rules need to know besides Services.
type Base struct {
	ServiceCIDRs []netip.Prefix // an address in them that no Service has is refused
	// PodCIDRs are the cluster's pods: their traffic to the world takes the node's address. Empty: somebody else
	// attaches pods and sees to it.
	PodCIDRs []netip.Prefix
	// NodePorts are the addresses of the node at which node ports are served; empty: all but loopback.
	NodePorts []netip.Prefix
}

func (b Base) equal(c Base) bool {
	return slices.Equal(b.ServiceCIDRs, c.ServiceCIDRs) && slices.Equal(b.PodCIDRs, c.PodCIDRs) &&
		slices.Equal(b.NodePorts, c.NodePorts)
}

// Writer expresses Ports in the kernel. One goroutine uses it.
type Writer interface {
	// Check says in one sentence why this machine cannot do it, and what helps.
	Check(ctx context.Context) error
	// Sync makes the kernel show these ports and nothing else of ours, whatever it shows now. Connections live on, and
	// clients stay with their backends. After an error the kernel shows what it showed, or part of the new.
	Sync(ctx context.Context, base Base, ports iter.Seq[*Port]) error
	// Apply makes the changes; the kernel shows what Sync and Apply made it show before. After an error only Sync helps.
	Apply(ctx context.Context, changes []Change) error
	// Intact says whether the kernel still shows that: firewalls that are reloaded flush more than their own rules.
	Intact(ctx context.Context) (bool, error)
	// Clean takes everything of ours away. It may be called at any time, and where there is nothing.
	Clean(ctx context.Context) error
	// Counts reads what was counted since the rules were made.
	Counts(ctx context.Context) (Counts, error)
}

// Counts are what a node counted, by where the clients knocked.
type Counts struct {
	Connections map[Frontend]uint64 // for which a backend was chosen
	Unserved    map[Frontend]uint64 // packets that would have begun one, and met no backend
}

func newCounts() Counts { return Counts{map[Frontend]uint64{}, map[Frontend]uint64{}} }

// NewWriter returns the writer of a mode.
func NewWriter(m Mode) (Writer, error) {
	switch m {
	case ModeNFTables:
		return newNFT(), nil
	case ModeIPTables:
		return newIPTables(), nil
	case ModeIPVS:
		return newIPVS(), nil
	}
	return nil, fmt.Errorf("mode %s writes no rules", m)
}

// cleanOthers removes what the writers of other modes left. What cannot be looked at is not there.
func cleanOthers(ctx context.Context, m Mode) error {
	var errs []error
	for _, other := range []Mode{ModeNFTables, ModeIPTables, ModeIPVS} {
		if other == m {
			continue
		}
		w, err := NewWriter(other)
		if err == nil && w.Check(ctx) == nil {
			err = w.Clean(ctx)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("removing the rules of mode %s: %w", other, err))
		}
	}
	return errors.Join(errs...)
}

// family is an address family in the words of nft and iptables.
type family struct {
	v6       bool
	ip       string // "ip", "ip6"
	addr     string // nft's type of addresses
	loopback string
	bits     int
}

var (
	ipv4 = family{ip: "ip", addr: "ipv4_addr", loopback: "127.0.0.0/8", bits: 32}
	ipv6 = family{v6: true, ip: "ip6", addr: "ipv6_addr", loopback: "::1", bits: 128}
)

// of are the prefixes of the family.
func (f family) of(all []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range all {
		if p.Addr().Is6() == f.v6 {
			out = append(out, p)
		}
	}
	return out
}

// wanted says whether the base alone calls for the family.
func (f family) wanted(b Base) bool {
	return !f.v6 || len(f.of(b.ServiceCIDRs)) > 0 || len(f.of(b.PodCIDRs)) > 0
}

// ports are those of the family.
func (f family) ports(all iter.Seq[*Port]) iter.Seq[*Port] {
	return func(yield func(*Port) bool) {
		for p := range all {
			if p.V6 == f.v6 && !yield(p) {
				return
			}
		}
	}
}

// changes are those of the family.
func (f family) changes(all []Change) []Change {
	var out []Change
	for _, c := range all {
		if p := c.New; p != nil && p.V6 == f.v6 || p == nil && c.Old.V6 == f.v6 {
			out = append(out, c)
		}
	}
	return out
}

// added are the ports that changes bring.
func added(changes []Change) iter.Seq[*Port] {
	return func(yield func(*Port) bool) {
		for _, c := range changes {
			if c.New != nil && !yield(c.New) {
				return
			}
		}
	}
}

// target is a backend in the words of nft and iptables.
func (b Backend) target() string { return netip.AddrPortFrom(b.IP, uint16(b.Port)).String() }

// comment is a name as rules may carry it: names of objects have no other characters, and rules have little room.
func comment(name string) string {
	keep := func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-./:_", r) {
			return r
		}
		return -1
	}
	name = strings.Map(keep, name)
	return name[:min(len(name), 120)]
}
