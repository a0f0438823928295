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

// Flows deletes the conntrack entries of UDP flows to endpoints that no longer exist. UDP has no
// connection end that the kernel could detect. A client that keeps sending from one port would
// otherwise be directed to the removed endpoint for as long as it sends.
type Flows struct {
	mu   sync.Mutex
	want picture
	gone picture // frontends that were removed and whose flows have not been deleted yet
	news chan struct{}
}

// NewFlows returns a cleaner without frontends.
func NewFlows() *Flows { return &Flows{want: picture{}, gone: picture{}, news: make(chan struct{}, 1)} }

// picture maps a UDP frontend to the endpoints that may answer it. The frontend is an address and a
// port; a node port has the unspecified address.
type picture map[netip.AddrPort]map[netip.AddrPort]bool

// take adds the frontends and endpoints of a UDP Port.
func (p picture) take(port *Port) {
	serving := make(map[netip.AddrPort]bool, len(port.Serving))
	for _, b := range port.Serving {
		serving[netip.AddrPortFrom(b.IP, uint16(b.Port))] = true
	}
	for _, f := range fronts(port) {
		p[f] = serving
	}
}

// fronts returns the addresses and ports of all frontends of a Port.
func fronts(p *Port) []netip.AddrPort {
	var out []netip.AddrPort
	for _, list := range [][]Frontend{p.Internal, p.External} {
		for _, f := range list {
			out = append(out, netip.AddrPortFrom(f.IP, uint16(f.Port)))
		}
	}
	return out
}

// show records changes of the Service rules.
func (f *Flows) show(changes []Change) {
	news := false
	f.mu.Lock()
	for _, c := range changes {
		if c.Old != nil && c.Old.Proto == "udp" {
			news = true
			for _, front := range fronts(c.Old) {
				delete(f.want, front)
				f.gone[front] = map[netip.AddrPort]bool{}
			}
		}
	}
	for _, c := range changes { // a frontend that one Service released may now belong to another
		if c.New != nil && c.New.Proto == "udp" {
			news = true
			f.want.take(c.New)
		}
	}
	for front := range f.gone {
		if f.want[front] != nil {
			delete(f.gone, front)
		}
	}
	f.mu.Unlock()
	if news {
		f.wake()
	}
}

func (f *Flows) wake() {
	select {
	case f.news <- struct{}{}:
	default:
	}
}

// Run deletes stale flows whenever the rules of a UDP Service have changed, until ctx ends or the
// kernel returns an error. The next Run retries the flows that could not be deleted.
func (f *Flows) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.news:
		}
		if err := f.forget(); err != nil {
			f.wake()
			return err
		}
	}
}

// forget deletes the stale flows that the kernel currently holds.
func (f *Flows) forget() error {
	f.mu.Lock()
	gone := f.gone
	f.gone = picture{}
	all := maps.Clone(gone)
	maps.Copy(all, f.want)
	f.mu.Unlock()
	if len(all) == 0 {
		return nil
	}
	err := forget(all)
	if err != nil {
		f.mu.Lock()
		maps.Copy(f.gone, gone)
		f.mu.Unlock()
	}
	return err
}

func forget(p picture) error {
	own, err := ownAddresses()
	if err != nil {
		return fmt.Errorf("deleting UDP flows to removed endpoints: %w", err)
	}
	if err := sweep(staleFlows{p, own}); err != nil {
		return fmt.Errorf("deleting UDP flows to removed endpoints: %w: "+
			"the kernel needs nf_conntrack_netlink (modprobe nf_conntrack_netlink)", err)
	}
	return nil
}

// ownAddresses returns the addresses at which node ports are served: all interface addresses except
// loopback.
func ownAddresses() (map[netip.Addr]bool, error) {
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

// staleFlows finds the flows to a frontend that are not answered by one of its endpoints.
type staleFlows struct {
	picture picture
	own     map[netip.Addr]bool
}

func (s staleFlows) stale(to, answers netip.AddrPort) bool {
	serving, ok := s.picture[to]
	if !ok && s.own[to.Addr()] {
		any := netip.IPv4Unspecified()
		if to.Addr().Is6() {
			any = netip.IPv6Unspecified()
		}
		serving, ok = s.picture[netip.AddrPortFrom(any, to.Port())]
	}
	return ok && !serving[answers]
}
