package accept

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

// Limits of failed joins per source address, and of the number of tracked sources.
const (
	maxFailedJoins     = 10
	failedJoinInterval = 3 * time.Second // interval after which another failed join is allowed
	maxFailedSources   = 4096

	maxRefusalLines = 5 // number of log lines without a pause; further lines are only counted
	refusalInterval = 10 * time.Second
)

// refusals limits the cost of failed joins: reads of the store per source address, and log lines in
// total. The failures of one source do not block joins from other sources.
type refusals struct {
	log *slog.Logger

	mu       sync.Mutex
	sources  map[netip.Addr]*rate.Limiter
	lines    *rate.Limiter
	unlogged int
}

func newRefusals(log *slog.Logger) *refusals {
	return &refusals{log: log, sources: map[netip.Addr]*rate.Limiter{},
		lines: rate.NewLimiter(rate.Every(refusalInterval), maxRefusalLines)}
}

// isExhausted reports whether the source has used up its failed joins. Its next join is then
// refused without a check.
func (r *refusals) isExhausted(source netip.Addr, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.sources[source]
	return l != nil && l.TokensAt(now) < 1
}

// recordRefusal records a failed join of the source, and logs it unless too many lines were logged.
func (r *refusals) recordRefusal(source netip.Addr, now time.Time, reason string, attrs ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.sources[source]
	if l == nil {
		r.evictSources(now)
		l = rate.NewLimiter(rate.Every(failedJoinInterval), maxFailedJoins)
		r.sources[source] = l
	}
	l.AllowN(now, 1)
	if !r.lines.AllowN(now, 1) {
		r.unlogged++
		return
	}
	r.log.Warn("join refused: "+reason, append(attrs, "source", source, "more since the last line", r.unlogged)...)
	r.unlogged = 0
}

// evictSources deletes tracked sources so that a new source can be added. Sources without recent
// failures are deleted first.
func (r *refusals) evictSources(now time.Time) {
	if len(r.sources) < maxFailedSources {
		return
	}
	for a, l := range r.sources {
		if l.TokensAt(now) >= maxFailedJoins {
			delete(r.sources, a)
		}
	}
	for a := range r.sources { // then any source: an attacker with so many addresses cannot be limited by address
		if len(r.sources) < maxFailedSources {
			return
		}
		delete(r.sources, a)
	}
}

// callerSource returns the source of a call: an IPv4 address or an IPv6 /64 prefix.
func callerSource(ctx context.Context) netip.Addr {
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
		subnet, _ := a.Prefix(64) // never fails for an IPv6 address
		return subnet.Addr()
	}
	return a
}
