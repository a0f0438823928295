package storetest

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
)

var expiryParts = []part{
	{"Expiry", checkExpiry},
	{"ExpiryRenewed", expiryRenewed},
	{"ExpiryOfMany", expiryOfMany},
}

// checkExpiry checks that a key expires after its TTL, unless a put without TTL replaces it before.
// On a busy machine that put may be late; the test is then repeated with a longer TTL.
func checkExpiry(t *testing.T, s Subject) {
	c := newCaller(t, s)
	for ttl := 60 * time.Millisecond; !expiresUnlessPut(c, ttl); ttl *= 2 {
		t.Logf("the put was later than %v", ttl)
	}
}

// expiresUnlessPut runs the test of checkExpiry with one TTL. It returns false if the put without
// TTL was too late, so that the test must be repeated.
func expiresUnlessPut(c caller, ttl time.Duration) bool {
	c.t.Helper()
	under := fmt.Sprintf("/t/%d/", ttl)
	put, kept := raftstore.Put(under+"short", []byte("x")), raftstore.Put(under+"kept", []byte("x"))
	put.TTL, kept.TTL = ttl, ttl
	first := c.mustCommit(put, kept)
	w := c.mustWatch(under, first)
	c.mustCommit(raftstore.Put(under+"kept", []byte("y"))) // a put without TTL: the key does not expire
	if it := c.mustHaveValue(under+"kept", "y"); it.Created != first {
		return false
	}
	c.nextEvents(w)
	ev := c.nextEvents(w)
	if len(ev.Events) != 1 || ev.Events[0].Kind != raftstore.EventDelete || ev.Events[0].Item.Key != under+"short" {
		c.t.Errorf("expiry: %+v", ev)
	}
	c.mustBeAbsent(under + "short")
	c.mustHaveValue(under+"kept", "y")
	return true
}

// expiryRenewed checks that each put resets the TTL, and that a key with a TTL behaves like any
// other key until it expires.
func expiryRenewed(t *testing.T, s Subject) {
	c := newCaller(t, s)
	lease := func(ttl time.Duration) raftstore.Op {
		op := raftstore.Put("/lease", []byte("held"))
		op.TTL = ttl
		return op
	}
	began := time.Now()
	c.mustCommit(lease(40 * time.Millisecond))
	rev := c.mustCommit(lease(time.Hour))
	it := c.mustHaveValue("/lease", "held")
	if left := time.UnixMilli(it.Expires).Sub(began); left < 59*time.Minute || left > 61*time.Minute {
		t.Errorf("expires in %s, want an hour", left)
	}
	// Another key shows when the first TTL of the lease has passed: it is put later and with a
	// longer TTL.
	op := raftstore.Put("/later", nil)
	op.TTL = 60 * time.Millisecond
	w := c.mustWatch("/later", 0)
	c.mustCommit(op)
	for c.nextEvents(w).Events[0].Kind != raftstore.EventDelete {
	}
	if it := c.mustHaveValue("/lease", "held"); it.Modified != rev {
		t.Errorf("renewed lease is %+v", it)
	}
	w = c.mustWatch("/lease", 0)
	short := lease(30 * time.Millisecond)
	short.If.Revision = rev
	put := c.mustCommit(short)
	if ev := c.nextEvents(w); ev.Revision != put || ev.Events[0].Item.Expires == 0 {
		t.Errorf("put with TTL: %+v", ev)
	}
	ev := c.nextEvents(w)
	if ev.Events[0].Kind != raftstore.EventDelete || ev.Events[0].Prev == nil || ev.Events[0].Prev.Modified != put ||
		time.Now().Before(began.Add(30*time.Millisecond)) {
		t.Errorf("expiry: %+v", ev)
	}
	c.mustConflict("/lease", raftstore.Update("/lease", nil, put))
	c.mustCommit(raftstore.Create("/lease", []byte("next")))
	if it := c.mustHaveValue("/lease", "next"); it.Expires != 0 || it.Created <= put {
		t.Errorf("lease put again without TTL: %+v", it)
	}
}

// expiryOfMany checks that keys which expire together are all deleted, each exactly once, and that
// reads at past revisions still return them.
func expiryOfMany(t *testing.T, s Subject) {
	c := newCaller(t, s)
	const n = 40
	w := c.mustWatch("/m/", 0)
	var ops []raftstore.Op
	for i := range n {
		op := raftstore.Put(fmt.Sprintf("/m/%02d", i), nil)
		op.TTL = 50 * time.Millisecond
		ops = append(ops, op)
	}
	put := c.mustCommit(ops...)
	c.nextEvents(w)
	gone := make(map[string]bool)
	for len(gone) < n {
		for _, ev := range c.nextEvents(w).Events {
			if ev.Kind != raftstore.EventDelete || gone[ev.Item.Key] {
				t.Fatalf("event %+v", ev)
			}
			gone[ev.Item.Key] = true
		}
	}
	if l := c.mustList("/m/", raftstore.ListOptions{}); len(l.Items) != 0 {
		t.Errorf("%d keys are left", len(l.Items))
	}
	if l := c.mustList("/m/", raftstore.ListOptions{At: put}); len(l.Items) != n || l.Items[0].Expires == 0 {
		t.Errorf("%d keys in the past, want %d", len(l.Items), n)
	}
	if _, _, err := s.Store.Get(c.ctx, "/m/00", raftstore.ReadOptions{}); !errors.Is(err, raftstore.ErrNotFound) {
		t.Errorf("get of an expired key: %v", err)
	}
}
