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

// serverChain is the active configuration: the server blocks of a valid Corefile with their caches,
// upstream servers and counters. It answers queries.
type serverChain struct {
	index      *zone.Index
	blocks     []*serverBlock
	byZone     map[string]*serverBlock
	health     bool
	ready      bool
	prometheus bool
	rotation   atomic.Uint32
}

// serverBlock is a server block of the Corefile with its state. It answers queries for names in its
// zones.
type serverBlock struct {
	cfg      corefile.Server
	options  zone.Options
	hosts    *hostsTable
	forwards []*forwardRule
	cache    *forward.Cache
	counts   *zoneCounters
	pending  sync.Map // forward.Question → *pendingQuery

	refreshes sync.WaitGroup // background refreshes of expired answers
}

// forwardRule is a forward plugin of a server block, with its upstream servers.
type forwardRule struct {
	from      string
	except    []string
	forwarder *forward.Forwarder
}

// query is one question in a message from a client.
type query struct {
	owner      string // the name in the client's spelling
	name       string // the name in lower case
	kind       uint16
	do         bool // the client requests DNSSEC records
	cd         bool
	maxRecords int // maximum number of endpoint records in the answer
}

// response is the answer to a query, from which the reply message to the client is built.
type response struct {
	rcode         int
	authoritative bool
	answer        []dns.RR
	ns            []dns.RR
	extra         []dns.RR
	truncated     bool
	plugin        string // plugin that answered
}

// findBlock returns the server block with the longest zone that contains name, and this zone. name
// is in lower case. The block is nil if no zone contains the name.
func (c *serverChain) findBlock(name string) (*serverBlock, string) {
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

// answerQuery answers a query with the plugins of the server block b. If the response is known
// without asking another server, it returns the response. Otherwise it returns a function that
// obtains the response, which may take time and may be called from another goroutine.
func (c *serverChain) answerQuery(b *serverBlock, q query) (response, func(context.Context) response) {
	w := rewrittenQuery{name: q.name, kind: q.kind}
	if len(b.cfg.Rewrites) > 0 {
		w = rewriteQuery(b.cfg.Rewrites, q.name, q.kind)
	}
	changed := w.name != q.name || w.kind != q.kind || len(w.rules) > 0
	inner := q
	inner.name, inner.kind = w.name, w.kind
	if w.name != q.name {
		inner.owner = w.name
	}
	r, later := c.runPlugins(b, inner, 0)
	finish := func(r response) response {
		if changed {
			w.restoreNames(&dns.Msg{Answer: r.answer, Extra: r.extra}, q.owner)
		}
		if b.cfg.Loadbalance && len(r.answer) > 1 && r.plugin == "forward" {
			rotateAddresses(r.answer, c.rotation.Add(1))
		}
		return r
	}
	if later == nil {
		return finish(r), nil
	}
	return response{}, func(ctx context.Context) response { return finish(later(ctx)) }
}

// maxAliases is the maximum number of CNAME records that are followed from one query within the
// cluster.
const maxAliases = 8

// runPlugins runs the plugins of the server block in the order of CoreDNS, until one of them
// answers the query. aliases is the number of CNAMEs followed so far. Like answerQuery, it returns
// the response or a function that obtains it.
func (c *serverChain) runPlugins(b *serverBlock, q query, aliases int) (response, func(context.Context) response) {
	if h := b.cfg.Hosts; h != nil && corefile.LongestZone(h.Zones, q.name) != "" {
		rrs, found := b.hosts.answerHosts(q.owner, q.name, q.kind, h.TTL, h.Reverse)
		if found {
			return response{authoritative: true, answer: rrs, plugin: "hosts"}, nil
		}
		if !h.Fall.Includes(q.name) {
			return response{rcode: dns.RcodeNameError, authoritative: true, plugin: "hosts"}, nil
		}
	}
	if k := b.cfg.Kubernetes; k != nil {
		if r, later, ok := c.queryKubernetes(b, k, q, aliases); ok {
			return r, later
		}
	}
	var best *forwardRule
	for _, f := range b.forwards {
		if corefile.IsInZone(f.from, q.name) && (best == nil || len(f.from) > len(best.from)) &&
			corefile.LongestZone(f.except, q.name) == "" {
			best = f
		}
	}
	if best == nil {
		return response{rcode: dns.RcodeRefused}, nil
	}
	return b.queryUpstream(best, q)
}

// queryKubernetes answers a query from the cluster's zones, with the configuration k of the
// kubernetes plugin. ok is false if these zones have no answer and the next plugin must be run.
func (c *serverChain) queryKubernetes(b *serverBlock, k *corefile.Kubernetes, q query, aliases int) (
	_ response, _ func(context.Context) response, ok bool,
) {
	z := corefile.LongestZone(k.Zones, q.name)
	var a zone.Answer
	if z == "" {
		if z = corefile.LongestZone(k.Reverse, q.name); z == "" {
			return response{}, nil, false
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
			turn = c.rotation.Add(1)
		}
		a = c.index.Answer(&b.options, z, q.owner, q.name, q.kind, turn, q.maxRecords)
	}
	if a.Rcode == dns.RcodeNameError && k.Fall.Includes(q.name) {
		return response{}, nil, false
	}
	r := response{rcode: a.Rcode, authoritative: true, answer: a.Records, extra: a.Extra, truncated: a.Truncated,
		plugin: "kubernetes"}
	if len(r.answer) == 0 {
		r.ns = []dns.RR{zone.SOA(z, b.options.TTL, c.index.Serial())}
	}
	if a.Alias == "" || aliases >= maxAliases {
		return r, nil, true
	}
	// The client wants the address, wherever the alias leads.
	next := q
	next.owner, next.name = a.Alias, a.Alias
	then, later := c.runPlugins(b, next, aliases+1)
	if later == nil {
		return r.withTarget(then), nil, true
	}
	return response{}, func(ctx context.Context) response { return r.withTarget(later(ctx)) }, true
}

// withTarget returns r, a response that ends in a CNAME record, with the records of targetResponse
// appended. targetResponse is the response to the query for the CNAME's target.
func (r response) withTarget(targetResponse response) response {
	if targetResponse.rcode == dns.RcodeRefused { // no plugin for the target: only the alias is known
		return r
	}
	r.rcode, r.ns, r.truncated = targetResponse.rcode, targetResponse.ns, targetResponse.truncated
	r.answer = append(r.answer, targetResponse.answer...)
	return r
}

// pendingQuery is a query to an upstream server. Identical queries wait for its result.
type pendingQuery struct {
	done chan struct{}
	msg  *dns.Msg
	err  error
}

// queryUpstream returns the cached response to a query. If no response is cached, it returns a
// function that queries an upstream server.
func (b *serverBlock) queryUpstream(f *forwardRule, q query) (response, func(context.Context) response) {
	fq := forward.Question{Name: q.name, Type: q.kind, DNSSEC: q.do, CD: q.cd}
	var old *dns.Msg
	if b.cache != nil && corefile.LongestZone(b.cfg.Cache.Zones, q.name) != "" {
		m, stale := b.cache.GetMessage(fq, time.Now())
		if m != nil && !stale {
			b.counts.countHit(m)
			return upstreamResponse(m, q), nil
		}
		if m != nil && !b.cfg.Cache.StaleVerify {
			b.counts.stale.Add(1)
			old = m
		}
		if m == nil {
			b.counts.misses.Add(1)
		}
		if stale && b.cfg.Cache.StaleVerify {
			return response{}, func(ctx context.Context) response {
				fresh, err := b.fetchOnce(ctx, f, fq)
				if err != nil || fresh.Rcode == dns.RcodeServerFailure {
					b.counts.stale.Add(1)
					return upstreamResponse(m, q)
				}
				return upstreamResponse(fresh, q)
			}
		}
	}
	if old != nil { // respond with the expired answer and refresh the cache for the next query
		return response{}, func(ctx context.Context) response {
			if _, busy := b.pending.Load(fq); !busy {
				b.refreshes.Go(func() { _, _ = b.fetchOnce(context.WithoutCancel(ctx), f, fq) })
			}
			return upstreamResponse(old, q)
		}
	}
	return response{}, func(ctx context.Context) response {
		m, err := b.fetchOnce(ctx, f, fq)
		if err != nil {
			b.counts.logFailure(q.name, err)
			return response{rcode: dns.RcodeServerFailure, plugin: "forward"}
		}
		return upstreamResponse(m, q)
	}
}

// fetchOnce queries an upstream server, once for all identical concurrent queries. It returns a
// message that the caller may modify.
func (b *serverBlock) fetchOnce(ctx context.Context, f *forwardRule, q forward.Question) (*dns.Msg, error) {
	c := &pendingQuery{done: make(chan struct{})}
	if other, busy := b.pending.LoadOrStore(q, c); busy {
		c = other.(*pendingQuery)
		select {
		case <-c.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	} else {
		// Check the cache again: another query may have stored its answer between the caller's
		// check and now.
		if c.msg = b.cachedAnswer(q); c.msg == nil {
			c.msg, c.err = f.forwarder.Ask(ctx, q)
			if c.err == nil && b.mayCache(q.Name, c.msg) {
				b.cache.Put(q, c.msg, time.Now())
			}
		}
		b.pending.Delete(q)
		close(c.done)
	}
	if c.err != nil {
		return nil, c.err
	}
	return c.msg.Copy(), nil
}

// cachedAnswer returns the cached answer of a question. It returns nil if the cache contains no
// answer, or if the answer has expired.
func (b *serverBlock) cachedAnswer(q forward.Question) *dns.Msg {
	if b.cache == nil || corefile.LongestZone(b.cfg.Cache.Zones, q.Name) == "" {
		return nil
	}
	if m, stale := b.cache.GetMessage(q, time.Now()); !stale {
		return m
	}
	return nil
}

// mayCache reports whether the Corefile permits caching the answer m for the name.
func (b *serverBlock) mayCache(name string, m *dns.Msg) bool {
	if b.cache == nil || corefile.LongestZone(b.cfg.Cache.Zones, name) == "" {
		return false
	}
	not := b.cfg.Cache.DisabledDenial
	if m.Rcode == dns.RcodeSuccess && len(m.Answer) > 0 {
		not = b.cfg.Cache.Disabled
	}
	return corefile.LongestZone(not, name) == ""
}

// upstreamResponse converts an upstream server's answer to the response to q. The query's name gets
// the client's spelling.
func upstreamResponse(m *dns.Msg, q query) response {
	if q.owner != q.name {
		for _, rr := range m.Answer {
			if h := rr.Header(); h.Name == q.name {
				h.Name = q.owner
			}
		}
	}
	return response{rcode: m.Rcode, answer: m.Answer, ns: m.Ns, plugin: "forward"}
}
