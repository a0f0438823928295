package proxy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
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
func NewFlows() *Flows { return &Flows{gone: picture{}, news: make(chan struct{}, 1)} }

// picture says which addresses may answer what was sent to a UDP frontend: an address and port, or a node port, for
// which the address is the zero one.
type picture map[netip.AddrPort]map[netip.AddrPort]bool

// pictureOf is what a model says of UDP. Pure.
func pictureOf(m Model) picture {
	out := picture{}
	add := func(p Port, fronts []Frontend) {
		if p.Proto != "udp" {
			return
		}
		serving := make(map[netip.AddrPort]bool, len(p.Serving))
		for _, b := range p.Serving {
			serving[netip.AddrPortFrom(b.IP, uint16(b.Port))] = true
		}
		for _, f := range fronts {
			ip := f.IP
			if !ip.IsValid() {
				ip = netip.IPv4Unspecified()
			}
			if at := netip.AddrPortFrom(ip, uint16(f.Port)); out[at] == nil {
				out[at] = serving
			}
		}
	}
	ids := slices.Sorted(maps.Keys(m)) // whose a frontend is, the rules say in this order
	for _, id := range ids {
		add(m[id], m[id].Internal)
	}
	for _, id := range ids {
		add(m[id], m[id].External)
	}
	return out
}

// show tells what the rules say from now on.
func (f *Flows) show(m Model) {
	next := pictureOf(m)
	f.mu.Lock()
	same := f.want != nil && maps.EqualFunc(f.want, next,
		func(a, b map[netip.AddrPort]bool) bool { return maps.Equal(a, b) })
	for front := range f.want {
		if next[front] == nil {
			f.gone[front] = map[netip.AddrPort]bool{}
		}
	}
	f.want = next
	f.mu.Unlock()
	if !same {
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
		serving, ok = s.picture[netip.AddrPortFrom(netip.IPv4Unspecified(), to.Port())]
	}
	return ok && !serving[answers]
}
