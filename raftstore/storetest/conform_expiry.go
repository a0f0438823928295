package storetest

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
)

var expiryParts = []part{
	{"Expiry", expiry},
	{"ExpiryRenewed", expiryRenewed},
	{"ExpiryOfMany", expiryOfMany},
}

// expiry: a key goes when its time has come, unless a put without one came
// before. On a busy machine that put may come too late: then both keys get more time.
func expiry(t *testing.T, s Subject) {
	c := call(t, s)
	for ttl := 60 * time.Millisecond; !expiresUnlessPut(c, ttl); ttl *= 2 {
		t.Logf("the put came later than %v", ttl)
	}
}

// expiresUnlessPut reports whether the put came in time.
func expiresUnlessPut(c caller, ttl time.Duration) bool {
	c.t.Helper()
	under := fmt.Sprintf("/t/%d/", ttl)
	put, kept := raftstore.Put(under+"short", []byte("x")), raftstore.Put(under+"kept", []byte("x"))
	put.TTL, kept.TTL = ttl, ttl
	first := c.commit(put, kept)
	w := c.watch(under, first)
	c.commit(raftstore.Put(under+"kept", []byte("y"))) // without TTL: stays
	if it := c.value(under+"kept", "y"); it.Created != first {
		return false
	}
	c.next(w)
	ev := c.next(w)
	if len(ev.Events) != 1 || ev.Events[0].Kind != raftstore.EventDelete || ev.Events[0].Item.Key != under+"short" {
		c.t.Errorf("expiry: %+v", ev)
	}
	c.absent(under + "short")
	c.value(under+"kept", "y")
	return true
}

// expiryRenewed: each put sets the time anew, and until it has come the key is
// like any other.
func expiryRenewed(t *testing.T, s Subject) {
	c := call(t, s)
	lease := func(ttl time.Duration) raftstore.Op {
		op := raftstore.Put("/lease", []byte("held"))
		op.TTL = ttl
		return op
	}
	began := time.Now()
	c.commit(lease(40 * time.Millisecond))
	rev := c.commit(lease(time.Hour))
	it := c.value("/lease", "held")
	if left := time.UnixMilli(it.Expires).Sub(began); left < 59*time.Minute || left > 61*time.Minute {
		t.Errorf("expires in %s, want an hour", left)
	}
	// Another key that was put later than the lease's first time shows that it has passed.
	op := raftstore.Put("/later", nil)
	op.TTL = 60 * time.Millisecond
	w := c.watch("/later", 0)
	c.commit(op)
	for c.next(w).Events[0].Kind != raftstore.EventDelete {
	}
	if it := c.value("/lease", "held"); it.Modified != rev {
		t.Errorf("renewed lease is %+v", it)
	}
	w = c.watch("/lease", 0)
	short := lease(30 * time.Millisecond)
	short.If.Revision = rev
	put := c.commit(short)
	if ev := c.next(w); ev.Revision != put || ev.Events[0].Item.Expires == 0 {
		t.Errorf("put with TTL: %+v", ev)
	}
	ev := c.next(w)
	if ev.Events[0].Kind != raftstore.EventDelete || ev.Events[0].Prev == nil || ev.Events[0].Prev.Modified != put || time.Now().Before(began.Add(30*time.Millisecond)) {
		t.Errorf("expiry: %+v", ev)
	}
	c.conflict("/lease", raftstore.Update("/lease", nil, put))
	c.commit(raftstore.Create("/lease", []byte("next")))
	if it := c.value("/lease", "next"); it.Expires != 0 || it.Created <= put {
		t.Errorf("lease taken anew without TTL: %+v", it)
	}
}

// expiryOfMany: keys that expire together are deleted whole, each once; past
// states show them.
func expiryOfMany(t *testing.T, s Subject) {
	c := call(t, s)
	const n = 40
	w := c.watch("/m/", 0)
	var ops []raftstore.Op
	for i := range n {
		op := raftstore.Put(fmt.Sprintf("/m/%02d", i), nil)
		op.TTL = 50 * time.Millisecond
		ops = append(ops, op)
	}
	put := c.commit(ops...)
	c.next(w)
	gone := make(map[string]bool)
	for len(gone) < n {
		for _, ev := range c.next(w).Events {
			if ev.Kind != raftstore.EventDelete || gone[ev.Item.Key] {
				t.Fatalf("event %+v", ev)
			}
			gone[ev.Item.Key] = true
		}
	}
	if l := c.list("/m/", raftstore.ListOptions{}); len(l.Items) != 0 {
		t.Errorf("%d keys are left", len(l.Items))
	}
	if l := c.list("/m/", raftstore.ListOptions{At: put}); len(l.Items) != n || l.Items[0].Expires == 0 {
		t.Errorf("%d keys in the past, want %d", len(l.Items), n)
	}
	if _, _, err := s.Store.Get(c.ctx, "/m/00", raftstore.ReadOptions{}); !errors.Is(err, raftstore.ErrNotFound) {
		t.Errorf("get of an expired key: %v", err)
	}
}
