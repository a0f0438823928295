package forward

import (
	"fmt"
	"testing"
	"time"

	"github.com/miekg/dns"
)

func answer(t testing.TB, lines ...string) *dns.Msg {
	t.Helper()
	m := &dns.Msg{}
	for _, l := range lines {
		rr, err := dns.NewRR(l)
		if err != nil {
			t.Fatal(err)
		}
		m.Answer = append(m.Answer, rr)
	}
	return m
}

// An answer is cached for its TTL within the limits, and returned with its remaining TTL. Then it
// is stale for a while, and then removed.
func TestTimes(t *testing.T) {
	c := NewCache(CacheConfig{Capacity: 10, Denied: 10, MinTTL: 5 * time.Second, MaxTTL: 30 * time.Second,
		MaxDenialTTL: 20 * time.Second, Stale: time.Minute})
	now := time.Unix(1e9, 0)
	long, short, none := Question{Name: "long.", Type: 1}, Question{Name: "short.", Type: 1},
		Question{Name: "none.", Type: 1}
	c.Put(long, answer(t, "long. 3600 IN A 192.0.2.1"), now)
	c.Put(short, answer(t, "short. 1 IN A 192.0.2.1"), now)
	denied := &dns.Msg{}
	denied.Rcode = dns.RcodeNameError
	soa, err := dns.NewRR("example. 900 IN SOA a. b. 1 1 1 1 10")
	if err != nil {
		t.Fatal(err)
	}
	denied.Ns = []dns.RR{soa}
	c.Put(none, denied, now)
	for _, s := range []struct {
		q     Question
		after time.Duration
		ttl   int // -1 = no answer
		stale bool
	}{{long, 0, 30, false}, {long, 12 * time.Second, 18, false}, {long, 31 * time.Second, 0, true},
		{long, 91 * time.Second, -1, false},
		{short, 4 * time.Second, 1, false}, {none, 9 * time.Second, 1, false}, {none, 11 * time.Second, 0, true},
		{Question{Name: "long.", Type: 28}, 0, -1, false}} {
		m, stale := c.GetMessage(s.q, now.Add(s.after))
		ttl := -1
		if m != nil {
			ttl = int(append(m.Answer, m.Ns...)[0].Header().Ttl)
		}
		if ttl != s.ttl || stale != s.stale {
			t.Errorf("%s after %s: %d s, stale %v; want %d, %v", s.q.Name, s.after, ttl, stale, s.ttl, s.stale)
		}
	}
}

// However many queries there are, the cache stays within its bytes, and nonexistent names evict no
// positive answers.
func TestBounds(t *testing.T) {
	c := NewCache(CacheConfig{Bytes: 64 << 10, Capacity: 1 << 20, Denied: 1 << 20, MaxTTL: time.Hour,
		MaxDenialTTL: time.Hour, MinDenialTTL: time.Second})
	now := time.Unix(1e9, 0)
	kept := Question{Name: "kept.", Type: 1}
	c.Put(kept, answer(t, "kept. 60 IN A 192.0.2.1"), now)
	for i := range 10000 {
		m := &dns.Msg{}
		m.Rcode = dns.RcodeNameError
		c.Put(Question{Name: fmt.Sprintf("x%d.example.", i), Type: 1}, m, now)
	}
	if b := c.Bytes(); b > 2*64<<10 {
		t.Errorf("%d bytes are kept", b)
	}
	if m, _ := c.GetMessage(kept, now); m == nil {
		t.Error("what somebody has was pushed out")
	}
	small := NewCache(CacheConfig{Capacity: 3, MaxTTL: time.Hour})
	for i := range 9 {
		small.Put(Question{Name: fmt.Sprint(i)}, answer(t, "a. 60 IN A 192.0.2.1"), now)
	}
	if n, _ := small.Len(); n != 3 {
		t.Errorf("%d answers, want 3", n)
	}
}

// Records that do not belong to the answer are removed from every section; aliases on the way are
// kept.
func TestClean(t *testing.T) {
	m := answer(t, "b.example. 60 IN CNAME c.example.", "a.example. 60 IN CNAME b.example.",
		"c.example. 60 IN A 192.0.2.1", "bank.example. 60 IN A 192.0.2.6")
	m.Extra = answer(t, "a.example. 60 IN A 192.0.2.7").Answer
	m.Ns = answer(t, "example. 60 IN SOA a. b. 1 1 1 1 1", "other. 60 IN SOA a. b. 1 1 1 1 1",
		"bank.example. 60 IN A 192.0.2.6").Answer
	RemoveUnrelated(m, Question{Name: "a.example.", Type: dns.TypeA})
	if len(m.Answer) != 3 || len(m.Extra) != 0 || len(m.Ns) != 1 {
		t.Errorf("%v", m)
	}
}

// No answer of a server causes a panic, and no unrelated records are accepted.
func FuzzAnswer(f *testing.F) {
	m := answer(f, "www.example. 60 IN CNAME a.example.", "a.example. 60 IN A 192.0.2.1")
	m.SetQuestion("www.example.", dns.TypeA)
	m.Response = true
	p, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(p)
	q := Question{Name: "www.example.", Type: dns.TypeA}
	f.Fuzz(func(t *testing.T, p []byte) {
		m := &dns.Msg{}
		if m.Unpack(p) != nil {
			return
		}
		RemoveUnrelated(m, q)
		c := NewCache(CacheConfig{Capacity: 1, Denied: 1, MaxTTL: time.Hour, MaxDenialTTL: time.Hour})
		c.Put(q, m, time.Unix(1e9, 0))
		c.GetMessage(q, time.Unix(1e9, 0))
	})
}
