package proxy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"sync"

	"keelson.dev/keelson/agent/proxy/servicemodel"
	"keelson.dev/keelson/internal/wakeup"
)

// StaleFlowCleaner deletes the conntrack entries of UDP flows to endpoints that no longer exist.
// The kernel cannot detect the end of a UDP flow. A client that keeps sending from one port would
// otherwise be directed to the removed endpoint for as long as it sends.
type StaleFlowCleaner struct {
	mu      sync.Mutex
	current udpServers
	removed udpServers // previous frontends with flows that are not deleted yet
	changed wakeup.Signal
}

// NewStaleFlowCleaner returns a cleaner without any frontends. Set it as Proxy.Flows, and the Proxy
// notifies it of changed rules.
func NewStaleFlowCleaner() *StaleFlowCleaner {
	return &StaleFlowCleaner{current: udpServers{}, removed: udpServers{}, changed: wakeup.New()}
}

// udpServers maps each UDP frontend, an address and a port, to the endpoints that may serve it. A
// node port has the unspecified address.
type udpServers map[netip.AddrPort]map[netip.AddrPort]bool

// addPort adds the frontends of a UDP Port, with the endpoints that may serve them.
func (p udpServers) addPort(port *servicemodel.Port) {
	serving := make(map[netip.AddrPort]bool, len(port.Backends.Serving))
	for _, b := range port.Backends.Serving {
		serving[netip.AddrPortFrom(b.IP, uint16(b.Port))] = true
	}
	for _, f := range frontendAddrs(port) {
		p[f] = serving
	}
}

// frontendAddrs returns the address and port of each frontend of a Port.
func frontendAddrs(p *servicemodel.Port) []netip.AddrPort {
	var out []netip.AddrPort
	for _, list := range [][]servicemodel.Frontend{p.Internal, p.External} {
		for _, f := range list {
			out = append(out, netip.AddrPortFrom(f.IP, uint16(f.Port)))
		}
	}
	return out
}

// rulesChanged records the changed UDP frontends and their current endpoints, and wakes Run.
// changes are the changes of Service rules that were just written.
func (f *StaleFlowCleaner) rulesChanged(changes []servicemodel.Change) {
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
	f.changed.Send()
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

// deleteStale deletes the conntrack entries of stale UDP flows. A flow to a recorded frontend is
// stale if its replies do not come from a current endpoint of the frontend. After an error, the
// removed frontends remain recorded for the next call.
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

// staleFlows is a filter for conntrack entries. It selects a UDP flow to a frontend if the replies
// of the flow do not come from an endpoint of the frontend.
type staleFlows struct {
	servers       udpServers
	nodeAddresses map[netip.Addr]bool
}

func (s staleFlows) isStale(destination, replySource netip.AddrPort) bool {
	serving, ok := s.servers[destination]
	if !ok && s.nodeAddresses[destination.Addr()] {
		nodePortIP := netip.IPv4Unspecified()
		if destination.Addr().Is6() {
			nodePortIP = netip.IPv6Unspecified()
		}
		serving, ok = s.servers[netip.AddrPortFrom(nodePortIP, destination.Port())]
	}
	return ok && !serving[replySource]
}
