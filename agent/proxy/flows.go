package proxy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"sync"
)

// StaleFlowCleaner deletes the conntrack entries of UDP flows to endpoints that no longer exist.
// UDP has no connection end that the kernel could detect. A client that keeps sending from one port
// would otherwise be directed to the removed endpoint for as long as it sends.
type StaleFlowCleaner struct {
	mu      sync.Mutex
	current udpServers
	removed udpServers // removed frontends with flows that are not deleted yet
	changed chan struct{}
}

// NewStaleFlowCleaner returns a cleaner that watches no frontends yet. The Proxy reports changed
// rules to it.
func NewStaleFlowCleaner() *StaleFlowCleaner {
	return &StaleFlowCleaner{current: udpServers{}, removed: udpServers{}, changed: make(chan struct{}, 1)}
}

// udpServers maps a UDP frontend to the endpoints that may answer it. The frontend is an address
// and a port; a node port has the unspecified address.
type udpServers map[netip.AddrPort]map[netip.AddrPort]bool

// addPort adds the UDP frontends of a Port, with the endpoints that may answer them.
func (p udpServers) addPort(port *Port) {
	serving := make(map[netip.AddrPort]bool, len(port.Serving))
	for _, b := range port.Serving {
		serving[netip.AddrPortFrom(b.IP, uint16(b.Port))] = true
	}
	for _, f := range frontendAddrs(port) {
		p[f] = serving
	}
}

// frontendAddrs returns the address and port of each frontend of a Port.
func frontendAddrs(p *Port) []netip.AddrPort {
	var out []netip.AddrPort
	for _, list := range [][]Frontend{p.Internal, p.External} {
		for _, f := range list {
			out = append(out, netip.AddrPortFrom(f.IP, uint16(f.Port)))
		}
	}
	return out
}

// rulesChanged records which UDP frontends and endpoints the changes of Service rules affect, and
// wakes Run.
func (f *StaleFlowCleaner) rulesChanged(changes []Change) {
	news := false
	f.mu.Lock()
	for _, c := range changes {
		if c.Old != nil && c.Old.Proto == "udp" {
			news = true
			for _, front := range frontendAddrs(c.Old) {
				delete(f.current, front)
				f.removed[front] = map[netip.AddrPort]bool{}
			}
		}
	}
	for _, c := range changes { // a frontend that one Service released may now belong to another
		if c.New != nil && c.New.Proto == "udp" {
			news = true
			f.current.addPort(c.New)
		}
	}
	for front := range f.removed {
		if f.current[front] != nil {
			delete(f.removed, front)
		}
	}
	f.mu.Unlock()
	if news {
		f.signalChange()
	}
}

func (f *StaleFlowCleaner) signalChange() {
	select {
	case f.changed <- struct{}{}:
	default:
	}
}

// Run deletes stale flows whenever the rules of a UDP Service have changed, until ctx ends or the
// kernel returns an error. The next Run retries the flows that could not be deleted.
func (f *StaleFlowCleaner) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.changed:
		}
		if err := f.deleteStale(); err != nil {
			f.signalChange()
			return err
		}
	}
}

// deleteStale deletes the conntrack entries of UDP flows to recorded frontends that none of their
// current endpoints answers.
func (f *StaleFlowCleaner) deleteStale() error {
	f.mu.Lock()
	gone := f.removed
	f.removed = udpServers{}
	all := maps.Clone(gone)
	maps.Copy(all, f.current)
	f.mu.Unlock()
	if len(all) == 0 {
		return nil
	}
	err := deleteFlows(all)
	if err != nil {
		f.mu.Lock()
		maps.Copy(f.removed, gone)
		f.mu.Unlock()
	}
	return err
}

func deleteFlows(p udpServers) error {
	own, err := interfaceAddresses()
	if err != nil {
		return fmt.Errorf("deleting UDP flows to removed endpoints: %w", err)
	}
	if err := deleteStaleFlows(staleFlows{p, own}); err != nil {
		return fmt.Errorf("deleting UDP flows to removed endpoints: %w: "+
			"the kernel needs nf_conntrack_netlink (modprobe nf_conntrack_netlink)", err)
	}
	return nil
}

// interfaceAddresses returns the addresses at which the node serves node ports: all addresses of
// its interfaces except loopback.
func interfaceAddresses() (map[netip.Addr]bool, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, errors.Join(errors.New("listing the node's addresses"), err)
	}
	out := map[netip.Addr]bool{}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && !p.Addr().IsLoopback() {
			out[p.Addr().Unmap()] = true
		}
	}
	return out, nil
}

// staleFlows selects the UDP flows to a frontend that none of its endpoints answers.
type staleFlows struct {
	servers       udpServers
	nodeAddresses map[netip.Addr]bool
}

func (s staleFlows) isStale(to, answers netip.AddrPort) bool {
	serving, ok := s.servers[to]
	if !ok && s.nodeAddresses[to.Addr()] {
		nodePortIP := netip.IPv4Unspecified()
		if to.Addr().Is6() {
			nodePortIP = netip.IPv6Unspecified()
		}
		serving, ok = s.servers[netip.AddrPortFrom(nodePortIP, to.Port())]
	}
	return ok && !serving[answers]
}
