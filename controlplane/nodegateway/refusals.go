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

// Limits for failed joins per source address, and for the number of tracked sources.
const (
	failedJoins      = 10
	failedJoinsEvery = 3 * time.Second // interval after which one more failed join is allowed
	failedSources    = 4096

	refusalLines = 5 // log lines at once; further ones are counted
	refusalEvery = 10 * time.Second
)

// refusals limits the cost of failed joins: store reads per source address, and log lines in total.
// Failures of one source do not block joins from another.
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

// exhausted reports whether the source has no failed joins left; its next join is refused without a
// check.
func (r *refusals) exhausted(source netip.Addr, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.sources[source]
	return l != nil && l.TokensAt(now) < 1
}

// note records a failed join and logs it, subject to the rate limit.
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

// forget makes room for a new source. Sources without recent failures are dropped first.
func (r *refusals) forget(now time.Time) {
	if len(r.sources) < failedSources {
		return
	}
	for a, l := range r.sources {
		if l.TokensAt(now) >= failedJoins {
			delete(r.sources, a)
		}
	}
	for a := range r.sources { // then any source: an attacker with that many addresses cannot be limited this way
		if len(r.sources) < failedSources {
			return
		}
		delete(r.sources, a)
	}
}

// sourceOf returns the source of a call: an IPv4 address or an IPv6 /64 prefix.
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
		subnet, _ := a.Prefix(64) // cannot fail for an IPv6 address
		return subnet.Addr()
	}
	return a
}
