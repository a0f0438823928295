package serve

import (
	"math/rand/v2"
	"net/http"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"keelson.dev/keelson/ingressproxy/route"
)

// pool holds the endpoints of a route.Pool and the failure state of each endpoint.
type pool struct {
	route.Pool
	transport *http.Transport
	endpoints []*endpoint
}

// endpoint is the state of one endpoint of a pool. It is kept when the table is replaced.
type endpoint struct {
	addr    netip.AddrPort
	pending atomic.Int64
	// failures is the number of consecutive failed connections. Until avoidUntil (Unix time in
	// nanoseconds), the endpoint is used only if there is no other endpoint.
	failures   atomic.Int32
	avoidUntil atomic.Int64
}

// updatedPool returns a pool for updated, the new version of p. Endpoints that are in both keep
// their failure state. p may be nil.
func (p *pool) updatedPool(updated route.Pool, transport *http.Transport) *pool {
	next := &pool{Pool: updated, transport: transport, endpoints: make([]*endpoint, 0, len(updated.Endpoints))}
	known := map[netip.AddrPort]*endpoint{}
	if p != nil {
		for _, e := range p.endpoints {
			known[e.addr] = e
		}
	}
	for _, addr := range updated.Endpoints {
		e := known[addr]
		if e == nil {
			e = &endpoint{addr: addr}
		}
		next.endpoints = append(next.endpoints, e)
	}
	return next
}

func (p *pool) backendScheme() string {
	if p.Protocol == route.TLS {
		return "https"
	}
	return "http"
}

// pickEndpoint returns an endpoint for a request, or nil if all are in tried. If the pool has
// client affinity, a hash of the client address selects the endpoint. Otherwise it is the less busy
// of two random endpoints. Endpoints that recently refused connections are used only if there are
// no other endpoints.
func (p *pool) pickEndpoint(client netip.Addr, tried []*endpoint, now time.Time) *endpoint {
	if len(p.endpoints) == 0 {
		return nil
	}
	usable := func(e *endpoint) bool { return e.avoidUntil.Load() <= now.UnixNano() && !slices.Contains(tried, e) }
	untried := func(e *endpoint) bool { return !slices.Contains(tried, e) }
	for _, fits := range []func(*endpoint) bool{usable, untried} {
		if p.ByClient {
			if e := p.endpointForClient(client, fits); e != nil {
				return e
			}
			continue
		}
		first := p.firstFitting(rand.IntN(len(p.endpoints)), fits)
		if first == nil {
			continue
		}
		if other := p.firstFitting(rand.IntN(len(p.endpoints)), fits); other.pending.Load() < first.pending.Load() {
			return other
		}
		return first
	}
	return nil
}

// firstFitting returns the first endpoint for which fits returns true. The search begins at index
// start and wraps around. It returns nil if fits returns false for all endpoints.
func (p *pool) firstFitting(start int, fits func(*endpoint) bool) *endpoint {
	for i := range p.endpoints {
		if e := p.endpoints[(start+i)%len(p.endpoints)]; fits(e) {
			return e
		}
	}
	return nil
}

// affinitySeed is the seed of the hash in endpointForClient. It must be equal in all replicas of
// the proxy, so that they select the same endpoint for a client.
const affinitySeed = 0x6b65656c736f6e

// endpointForClient returns the endpoint for a client address among those for which fits returns
// true. It uses rendezvous hashing: adding or removing an endpoint moves only the clients of that
// endpoint.
func (p *pool) endpointForClient(client netip.Addr, fits func(*endpoint) bool) (best *endpoint) {
	var top uint64
	for _, e := range p.endpoints {
		if !fits(e) {
			continue
		}
		h := uint64(affinitySeed)
		for _, b := range append(client.AsSlice(), e.addr.String()...) {
			h = (h ^ uint64(b)) * 0x100000001b3
		}
		h ^= h >> 33
		h *= 0xff51afd7ed558ccd
		h ^= h >> 33
		if best == nil || h > top {
			best, top = e, h
		}
	}
	return best
}

// maxAvoidance is the longest time for which an endpoint that refuses connections is avoided.
const maxAvoidance = 30 * time.Second

func (e *endpoint) recordDialFailure(now time.Time) {
	n := min(e.failures.Add(1), 7)
	e.avoidUntil.Store(now.Add(min(maxAvoidance, 250*time.Millisecond<<n)).UnixNano())
}

func (e *endpoint) clearFailures() {
	if e.failures.Load() != 0 {
		e.failures.Store(0)
		e.avoidUntil.Store(0)
	}
}
