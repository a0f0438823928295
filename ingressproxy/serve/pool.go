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

// pool is the endpoints of one route.Pool, and what is known of each.
type pool struct {
	route.Pool
	transport *http.Transport
	endpoints []*endpoint
}

// endpoint keeps its place in memory from table to table.
type endpoint struct {
	addr    netip.AddrPort
	pending atomic.Int64
	// failures is how many connections failed one after the other; none is tried before until (nanoseconds since 1970)
	// while there are other endpoints.
	failures atomic.Int32
	until    atomic.Int64
}

// renewed is the pool as a new table has it; p may be nil.
func (p *pool) renewed(now route.Pool, transport *http.Transport) *pool {
	next := &pool{Pool: now, transport: transport, endpoints: make([]*endpoint, 0, len(now.Endpoints))}
	known := map[netip.AddrPort]*endpoint{}
	if p != nil {
		for _, e := range p.endpoints {
			known[e.addr] = e
		}
	}
	for _, addr := range now.Endpoints {
		e := known[addr]
		if e == nil {
			e = &endpoint{addr: addr}
		}
		next.endpoints = append(next.endpoints, e)
	}
	return next
}

func (p *pool) scheme() string {
	if p.Protocol == route.TLS {
		return "https"
	}
	return "http"
}

// pick chooses an endpoint that was not tried: of two at random the one with less to do, or by the client where the pool
// says so. Those that refused connections lately are passed over while there are others.
func (p *pool) pick(client netip.Addr, tried []*endpoint, now time.Time) *endpoint {
	if len(p.endpoints) == 0 {
		return nil
	}
	usable := func(e *endpoint) bool { return e.until.Load() <= now.UnixNano() && !slices.Contains(tried, e) }
	untried := func(e *endpoint) bool { return !slices.Contains(tried, e) }
	for _, fits := range []func(*endpoint) bool{usable, untried} {
		if p.ByClient {
			if e := p.byClient(client, fits); e != nil {
				return e
			}
			continue
		}
		first := p.from(rand.IntN(len(p.endpoints)), fits)
		if first == nil {
			continue
		}
		if other := p.from(rand.IntN(len(p.endpoints)), fits); other.pending.Load() < first.pending.Load() {
			return other
		}
		return first
	}
	return nil
}

// from is the first that fits, beginning at a place.
func (p *pool) from(place int, fits func(*endpoint) bool) *endpoint {
	for i := range p.endpoints {
		if e := p.endpoints[(place+i)%len(p.endpoints)]; fits(e) {
			return e
		}
	}
	return nil
}

// seed must be the same for all replicas of the proxy, so that a client keeps its endpoint whichever of them it meets.
const seed = 0x6b65656c736f6e

// byClient is rendezvous hashing: an endpoint that comes or goes moves only the clients that are its own.
func (p *pool) byClient(client netip.Addr, fits func(*endpoint) bool) (best *endpoint) {
	var top uint64
	for _, e := range p.endpoints {
		if !fits(e) {
			continue
		}
		h := uint64(seed)
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

// longest is how long an endpoint that refuses connections is passed over at most.
const longest = 30 * time.Second

func (e *endpoint) failed(now time.Time) {
	n := min(e.failures.Add(1), 7)
	e.until.Store(now.Add(min(longest, 250*time.Millisecond<<n)).UnixNano())
}

func (e *endpoint) works() {
	if e.failures.Load() != 0 {
		e.failures.Store(0)
		e.until.Store(0)
	}
}
