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

// Flows forgets the UDP flows that lead to endpoints which are gone. UDP has no end that the kernel could see: a client
// that keeps sending from one port would be taken to the dead endpoint for as long as it sends.
type Flows struct {
	mu   sync.Mutex
	want picture
	gone picture // frontends that no longer are, until their flows have been forgotten
	news chan struct{}
}

// NewFlows returns Flows that know of nothing yet.
func NewFlows() *Flows { return &Flows{want: picture{}, gone: picture{}, news: make(chan struct{}, 1)} }

// picture says which addresses may answer what was sent to a UDP frontend: an address and port, or a node port, for
// which the address is the zero one.
type picture map[netip.AddrPort]map[netip.AddrPort]bool

// take adds what a Port says of UDP.
func (p picture) take(port *Port) {
	serving := make(map[netip.AddrPort]bool, len(port.Serving))
	for _, b := range port.Serving {
		serving[netip.AddrPortFrom(b.IP, uint16(b.Port))] = true
	}
	for _, f := range fronts(port) {
		p[f] = serving
	}
}

// fronts are where a Port is knocked at.
func fronts(p *Port) []netip.AddrPort {
	var out []netip.AddrPort
	for _, list := range [][]Frontend{p.Internal, p.External} {
		for _, f := range list {
			out = append(out, netip.AddrPortFrom(f.IP, uint16(f.Port)))
		}
	}
	return out
}

// show tells what changed in what the rules say.
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
	for _, c := range changes { // what one Service leaves another may take
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

// Run forgets flows whenever the rules of a UDP Service have changed, and once at the start, until ctx ends or the
// kernel refuses; what was to be forgotten then is left for the next Run.
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

// forget deletes the stale flows that the kernel has now.
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
		return fmt.Errorf("forgetting UDP flows to gone endpoints: %w", err)
	}
	if err := sweep(staleFlows{p, own}); err != nil {
		return fmt.Errorf("forgetting UDP flows to gone endpoints: %w: "+
			"the kernel needs nf_conntrack_netlink (modprobe nf_conntrack_netlink)", err)
	}
	return nil
}

// ownAddresses are those on which node ports are served.
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

// staleFlows finds what was sent to a frontend and is answered by none of its endpoints.
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
