package nodegateway

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/peer"
)

// How many joins of one source may fail, and how many sources are remembered.
const (
	failedJoins      = 10
	failedJoinsEvery = 3 * time.Second // and one more so often
	failedSources    = 4096

	refusalLines = 5 // of the log; the others are counted
	refusalEvery = 10 * time.Second
)

// refusals bounds what joins that fail may cost: looks into the store, per
// source, and lines of the log, in all. Nobody is kept from joining for what
// another source does.
type refusals struct {
	log *slog.Logger

	mu       sync.Mutex
	sources  map[netip.Addr]*rate.Limiter
	lines    *rate.Limiter
	unlogged int
}

func newRefusals(log *slog.Logger) *refusals {
	return &refusals{log: log, sources: map[netip.Addr]*rate.Limiter{},
		lines: rate.NewLimiter(rate.Every(refusalEvery), refusalLines)}
}

// exhausted says that so many joins of the source have failed that its next one is not looked at.
func (r *refusals) exhausted(source netip.Addr, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.sources[source]
	return l != nil && l.TokensAt(now) < 1
}

// note takes a failed join down, and logs it when it is one of few.
func (r *refusals) note(source netip.Addr, now time.Time, why string, attrs ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.sources[source]
	if l == nil {
		r.forget(now)
		l = rate.NewLimiter(rate.Every(failedJoinsEvery), failedJoins)
		r.sources[source] = l
	}
	l.AllowN(now, 1)
	if !r.lines.AllowN(now, 1) {
		r.unlogged++
		return
	}
	r.log.Warn("join refused: "+why, append(attrs, "source", source, "more since the last line", r.unlogged)...)
	r.unlogged = 0
}

// forget makes room for a source: those that have failed little lately go first.
func (r *refusals) forget(now time.Time) {
	if len(r.sources) < failedSources {
		return
	}
	for a, l := range r.sources {
		if l.TokensAt(now) >= failedJoins {
			delete(r.sources, a)
		}
	}
	for a := range r.sources { // any: an attacker with so many addresses is not held up by this
		if len(r.sources) < failedSources {
			return
		}
		delete(r.sources, a)
	}
}

// sourceOf is the address that a call came from.
func sourceOf(ctx context.Context) netip.Addr {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return netip.Addr{}
	}
	host, _, err := net.SplitHostPort(p.Addr.String())
	if err != nil {
		return netip.Addr{}
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		return netip.Addr{}
	}
	a = a.Unmap().WithZone("")
	if a.Is6() {
		subnet, _ := a.Prefix(64) // it is an IPv6 address
		return subnet.Addr()
	}
	return a
}
