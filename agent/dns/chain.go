package dns

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"keelson.dev/keelson/agent/dns/corefile"
	"keelson.dev/keelson/agent/dns/forward"
	"keelson.dev/keelson/agent/dns/zone"
)

// chain is an active Corefile: its server blocks with their state.
type chain struct {
	index  *zone.Index
	blocks []*block
	byZone map[string]*block
	health bool
	ready  bool
	prom   bool
	turn   atomic.Uint32
}

// block is a server block of the Corefile.
type block struct {
	cfg      corefile.Server
	options  zone.Options
	hosts    *hostsTable
	forwards []*route
	cache    *forward.Cache
	counts   *counts
	calls    sync.Map // forward.Question → *call

	refreshes sync.WaitGroup // background refreshes of expired answers
}

// route is a forward plugin of a server block.
type route struct {
	from   string
	except []string
	to     *forward.Forwarder
}

// ask is one question of a client.
type ask struct {
	owner string // the name in the client's spelling
	name  string // in lower case
	kind  uint16
	do    bool // the client requests DNSSEC records
	cd    bool
	most  int // maximum number of endpoint records in the answer
}

// result is an answer before it is placed in the client's message.
type result struct {
	rcode         int
	authoritative bool
	answer        []dns.RR
	ns            []dns.RR
	extra         []dns.RR
	cut           bool
	from          string // from that answered
}

// find returns the server block of a lower-case name and its zone. The block is nil if there is
// none.
func (c *chain) find(name string) (*block, string) {
	for at := 0; ; {
		if b := c.byZone[name[at:]]; b != nil {
			return b, name[at:]
		}
		i := strings.IndexByte(name[at:], '.')
		if i < 0 || at+i+1 >= len(name) {
			break
		}
		at += i + 1
	}
	return c.byZone["."], "."
}

// answer returns the response if it is known locally. Otherwise it returns a function that obtains
// the response, which takes time and may be called from another goroutine.
func (c *chain) answer(b *block, q ask) (result, func(context.Context) result) {
	w := rewritten{name: q.name, kind: q.kind}
	if len(b.cfg.Rewrites) > 0 {
		w = rewrite(b.cfg.Rewrites, q.name, q.kind)
	}
	changed := w.name != q.name || w.kind != q.kind || len(w.rules) > 0
	inner := q
	inner.name, inner.kind = w.name, w.kind
	if w.name != q.name {
		inner.owner = w.name
	}
	r, later := c.plugins(b, inner, 0)
	finish := func(r result) result {
		if changed {
			w.back(&dns.Msg{Answer: r.answer, Extra: r.extra}, q.owner)
		}
		if b.cfg.Loadbalance && len(r.answer) > 1 && r.from == "forward" {
			turned(r.answer, c.turn.Add(1))
		}
		return r
	}
	if later == nil {
		return finish(r), nil
	}
	return result{}, func(ctx context.Context) result { return finish(later(ctx)) }
}

// maxAliases is the maximum number of aliases that are followed within the cluster.
const maxAliases = 8

// plugins runs the block's plugins in the order of CoreDNS.
func (c *chain) plugins(b *block, q ask, aliases int) (result, func(context.Context) result) {
	if h := b.cfg.Hosts; h != nil && corefile.Matches(h.Zones, q.name) != "" {
		rrs, found := b.hosts.answer(q.owner, q.name, q.kind, h.TTL, h.Reverse)
		if found {
			return result{authoritative: true, answer: rrs, from: "hosts"}, nil
		}
		if !h.Fall.Through(q.name) {
			return result{rcode: dns.RcodeNameError, authoritative: true, from: "hosts"}, nil
		}
	}
	if k := b.cfg.Kubernetes; k != nil {
		if r, later, ok := c.kubernetes(b, k, q, aliases); ok {
			return r, later
		}
	}
	var best *route
	for _, f := range b.forwards {
		if corefile.In(f.from, q.name) && (best == nil || len(f.from) > len(best.from)) && corefile.Matches(f.except, q.name) == "" {
			best = f
		}
	}
	if best == nil {
		return result{rcode: dns.RcodeRefused}, nil
	}
	return b.elsewhere(best, q)
}

// kubernetes answers from the cluster's zones. ok is false if the next plugin must be run.
func (c *chain) kubernetes(b *block, k *corefile.Kubernetes, q ask, aliases int) (_ result, _ func(context.Context) result, ok bool) {
	z := corefile.Matches(k.Zones, q.name)
	var a zone.Answer
	if z == "" {
		if z = corefile.Matches(k.Reverse, q.name); z == "" {
			return result{}, nil, false
		}
		found := false
		if a, found = c.index.Reverse(&b.options, k.Zones[0], q.owner, q.name, q.kind); !found {
			a.Rcode = dns.RcodeNameError
			if q.name == z {
				a.Rcode = dns.RcodeSuccess
			}
		}
	} else {
		turn := uint32(0)
		if b.cfg.Loadbalance {
			turn = c.turn.Add(1)
		}
		a = c.index.Answer(&b.options, z, q.owner, q.name, q.kind, turn, q.most)
	}
	if a.Rcode == dns.RcodeNameError && k.Fall.Through(q.name) {
		return result{}, nil, false
	}
	r := result{rcode: a.Rcode, authoritative: true, answer: a.Records, extra: a.Extra, cut: a.Cut, from: "kubernetes"}
	if len(r.answer) == 0 {
		r.ns = []dns.RR{zone.SOA(z, b.options.TTL, c.index.Serial())}
	}
	if a.Alias == "" || aliases >= maxAliases {
		return r, nil, true
	}
	// The client wants the address, wherever the alias leads.
	next := q
	next.owner, next.name = a.Alias, a.Alias
	then, later := c.plugins(b, next, aliases+1)
	if later == nil {
		return r.followed(then), nil, true
	}
	return result{}, func(ctx context.Context) result { return r.followed(later(ctx)) }, true
}

// followed returns the alias response with the records of the alias's target appended.
func (r result) followed(then result) result {
	if then.rcode == dns.RcodeRefused { // no plugin for the target: only the alias is known
		return r
	}
	r.rcode, r.ns, r.cut = then.rcode, then.ns, then.cut
	r.answer = append(r.answer, then.answer...)
	return r
}

// call is a query to an upstream server. Identical queries wait for its result.
type call struct {
	done chan struct{}
	m    *dns.Msg
	err  error
}

// elsewhere answers from the cache or by querying an upstream server.
func (b *block) elsewhere(f *route, q ask) (result, func(context.Context) result) {
	fq := forward.Question{Name: q.name, Type: q.kind, DNSSEC: q.do, CD: q.cd}
	var old *dns.Msg
	if b.cache != nil && corefile.Matches(b.cfg.Cache.Zones, q.name) != "" {
		m, stale := b.cache.Get(fq, time.Now())
		if m != nil && !stale {
			b.counts.hit(m)
			return forwarded(m, q), nil
		}
		if m != nil && !b.cfg.Cache.StaleVerify {
			b.counts.stale.Add(1)
			old = m
		}
		if m == nil {
			b.counts.misses.Add(1)
		}
		if stale && b.cfg.Cache.StaleVerify {
			return result{}, func(ctx context.Context) result {
				fresh, err := b.fetch(ctx, f, fq)
				if err != nil || fresh.Rcode == dns.RcodeServerFailure {
					b.counts.stale.Add(1)
					return forwarded(m, q)
				}
				return forwarded(fresh, q)
			}
		}
	}
	if old != nil { // respond with the expired answer and refresh the cache for the next query
		return result{}, func(ctx context.Context) result {
			if _, busy := b.calls.Load(fq); !busy {
				b.refreshes.Go(func() { _, _ = b.fetch(context.WithoutCancel(ctx), f, fq) })
			}
			return forwarded(old, q)
		}
	}
	return result{}, func(ctx context.Context) result {
		m, err := b.fetch(ctx, f, fq)
		if err != nil {
			b.counts.failed(q.name, err)
			return result{rcode: dns.RcodeServerFailure, from: "forward"}
		}
		return forwarded(m, q)
	}
}

// fetch queries an upstream server, once for all identical concurrent queries. The caller owns the
// returned message.
func (b *block) fetch(ctx context.Context, f *route, q forward.Question) (*dns.Msg, error) {
	c := &call{done: make(chan struct{})}
	if other, busy := b.calls.LoadOrStore(q, c); busy {
		c = other.(*call)
		select {
		case <-c.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	} else {
		// Check the cache again: another query may have stored its answer between the caller's
		// check and now.
		if c.m = b.fresh(q); c.m == nil {
			c.m, c.err = f.to.Ask(ctx, q)
			if c.err == nil && b.keeps(q.Name, c.m) {
				b.cache.Put(q, c.m, time.Now())
			}
		}
		b.calls.Delete(q)
		close(c.done)
	}
	if c.err != nil {
		return nil, c.err
	}
	return c.m.Copy(), nil
}

// fresh returns the cached answer of a question. It returns nil if there is none or if it has
// expired.
func (b *block) fresh(q forward.Question) *dns.Msg {
	if b.cache == nil || corefile.Matches(b.cfg.Cache.Zones, q.Name) == "" {
		return nil
	}
	if m, stale := b.cache.Get(q, time.Now()); !stale {
		return m
	}
	return nil
}

// keeps reports whether the answer may be cached.
func (b *block) keeps(name string, m *dns.Msg) bool {
	if b.cache == nil || corefile.Matches(b.cfg.Cache.Zones, name) == "" {
		return false
	}
	not := b.cfg.Cache.DisabledDenial
	if m.Rcode == dns.RcodeSuccess && len(m.Answer) > 0 {
		not = b.cfg.Cache.Disabled
	}
	return corefile.Matches(not, name) == ""
}

// forwarded returns an upstream server's answer as a response, with the name in the client's
// spelling.
func forwarded(m *dns.Msg, q ask) result {
	if q.owner != q.name {
		for _, rr := range m.Answer {
			if h := rr.Header(); h.Name == q.name {
				h.Name = q.owner
			}
		}
	}
	return result{rcode: m.Rcode, answer: m.Answer, ns: m.Ns, from: "forward"}
}
