package forward

import (
	"container/list"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// CacheConfig sets the limits of a Cache.
type CacheConfig struct {
	Bytes                      int64 // memory for positive and for negative answers, in bytes each; 0 = 8 MiB
	Capacity, Denied           int   // number of positive and negative answers; 0 = no such answers are cached
	MinTTL, MaxTTL             time.Duration
	MinDenialTTL, MaxDenialTTL time.Duration
	ServFail                   time.Duration
	Stale                      time.Duration // how long an expired answer is kept
}

// Cache caches the answers of upstream servers. Positive and negative answers are in separate
// parts, so that queries for nonexistent names cannot evict positive answers. It is safe for
// concurrent use.
type Cache struct {
	cfg      CacheConfig
	mu       sync.Mutex
	positive cachePart
	negative cachePart
}

type cachePart struct {
	bytes    int64
	capacity int
	by       map[Question]*list.Element
	order    list.List // contains *cacheEntry, most recently used first
}

type cacheEntry struct {
	q      Question
	packed []byte
	at     time.Time
	until  time.Time
}

// memoryCost returns the approximate memory of a cache entry in bytes, including its map and list
// elements.
func (s *cacheEntry) memoryCost() int64 { return int64(len(s.packed)+len(s.q.Name)) + 256 }

const defaultBytes = 8 << 20

// NewCache returns an empty cache.
func NewCache(cfg CacheConfig) *Cache {
	if cfg.Bytes == 0 {
		cfg.Bytes = defaultBytes
	}
	c := &Cache{cfg: cfg}
	c.positive = cachePart{capacity: cfg.Capacity, by: map[Question]*list.Element{}}
	c.negative = cachePart{capacity: cfg.Denied, by: map[Question]*list.Element{}}
	return c
}

// GetMessage returns the cached answer to a question with its remaining TTL, or nil. stale reports
// whether the answer has expired.
func (c *Cache) GetMessage(q Question, now time.Time) (m *dns.Msg, stale bool) {
	c.mu.Lock()
	s := c.positive.findEntry(q)
	if s == nil || now.After(s.until) {
		if n := c.negative.findEntry(q); n != nil && (s == nil || n.until.After(s.until)) {
			s = n
		}
	}
	c.mu.Unlock()
	if s == nil || now.After(s.until.Add(c.cfg.Stale)) {
		return nil, false
	}
	m = &dns.Msg{}
	if err := m.Unpack(s.packed); err != nil {
		return nil, false
	}
	left := uint32(max(0, s.until.Sub(now)/time.Second))
	setTTL(m, func(uint32) uint32 { return left })
	return m, now.After(s.until)
}

func (p *cachePart) findEntry(q Question) *cacheEntry {
	e := p.by[q]
	if e == nil {
		return nil
	}
	p.order.MoveToFront(e)
	return e.Value.(*cacheEntry)
}

// Put caches an answer for its TTL, within the limits of CacheConfig. It also sets the TTLs of the
// records in m to the cached TTL.
func (c *Cache) Put(q Question, m *dns.Msg, now time.Time) {
	if m.Truncated {
		return
	}
	p, life := &c.positive, clampTTL(minTTL(m.Answer), c.cfg.MinTTL, c.cfg.MaxTTL)
	switch {
	case m.Rcode == dns.RcodeSuccess && len(m.Answer) > 0:
	case m.Rcode == dns.RcodeNameError || m.Rcode == dns.RcodeSuccess:
		p, life = &c.negative, clampTTL(denialTTL(m), c.cfg.MinDenialTTL, c.cfg.MaxDenialTTL)
	case m.Rcode == dns.RcodeServerFailure:
		p, life = &c.negative, c.cfg.ServFail
	default:
		return
	}
	if p.capacity == 0 || life <= 0 {
		return
	}
	seconds := uint32(life / time.Second)
	setTTL(m, func(uint32) uint32 { return seconds })
	packed, err := m.Pack()
	if err != nil {
		return
	}
	s := &cacheEntry{q, packed, now, now.Add(life)}
	if s.memoryCost() > c.cfg.Bytes/16 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p.storeEntry(s, c.cfg.Bytes)
}

func (p *cachePart) storeEntry(s *cacheEntry, bytes int64) {
	if e := p.by[s.q]; e != nil {
		p.removeEntry(e)
	}
	p.by[s.q] = p.order.PushFront(s)
	p.bytes += s.memoryCost()
	for p.bytes > bytes || p.order.Len() > p.capacity {
		p.removeEntry(p.order.Back())
	}
}

func (p *cachePart) removeEntry(e *list.Element) {
	s := p.order.Remove(e).(*cacheEntry)
	p.bytes -= s.memoryCost()
	delete(p.by, s.q)
}

// Len returns the numbers of positive and negative answers in the cache.
func (c *Cache) Len() (positive, negative int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.positive.order.Len(), c.negative.order.Len()
}

// Bytes returns the estimated memory of all cache entries.
func (c *Cache) Bytes() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.positive.bytes + c.negative.bytes
}

func clampTTL(t, least, most time.Duration) time.Duration { return min(max(t, least), most) }

// minTTL returns the smallest TTL of the resource records.
func minTTL(rrs []dns.RR) time.Duration {
	least := uint32(1 << 31)
	for _, rr := range rrs {
		least = min(least, rr.Header().Ttl)
	}
	if len(rrs) == 0 {
		least = 0
	}
	return time.Duration(least) * time.Second
}

// denialTTL returns the TTL of a negative answer according to the zone's SOA record (RFC 2308).
func denialTTL(m *dns.Msg) time.Duration {
	for _, rr := range m.Ns {
		if soa, ok := rr.(*dns.SOA); ok {
			return time.Duration(min(soa.Hdr.Ttl, soa.Minttl)) * time.Second
		}
	}
	return 0
}

// setTTL replaces the TTL of each record in the message by the result of newTTL for that TTL.
func setTTL(m *dns.Msg, newTTL func(uint32) uint32) {
	for _, section := range [][]dns.RR{m.Answer, m.Ns, m.Extra} {
		for _, rr := range section {
			if h := rr.Header(); h.Rrtype != dns.TypeOPT {
				h.Ttl = newTTL(h.Ttl)
			}
		}
	}
}
