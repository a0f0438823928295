package remote_test

import (
	"fmt"
	"testing"

	"keelson.dev/keelson/raftstore"
)

// A revision that is larger than a message may be arrives whole, and what comes
// after it as well.
func TestWatchOfLargeRevision(t *testing.T) {
	c, m := memory(t)
	ctx := withReserve(t, patience)
	const n = 24 // 36 MiB
	var deletes []raftstore.Op
	var last raftstore.Revision
	for i := range n {
		key := fmt.Sprintf("/big/%02d", i)
		rev, err := m.Commit(ctx,
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(key, make([]byte, raftstore.MaxValueBytes))}})
		if err != nil {
			t.Fatal(err)
		}
		deletes, last = append(deletes, raftstore.Delete(key)), rev
	}
	w, err := c.Watch(ctx, "/big/", last)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	for _, ops := range [][]raftstore.Op{deletes, {raftstore.Put("/big/after", nil)}} {
		rev, err := c.Commit(ctx, raftstore.Commit{Ops: ops})
		if err != nil {
			t.Fatal(err)
		}
		ev, open := <-w.C()
		if !open || ev.Revision != rev || len(ev.Events) != len(ops) {
			t.Fatalf("%d events of revision %d, want %d of %d; watch ended: %v", len(ev.Events), ev.Revision,
				len(ops), rev, w.Err())
		}
		for i, e := range ev.Events {
			if e.Item.Key != ops[i].Key || ops[i].Kind == raftstore.OpDelete &&
				(e.Prev == nil || len(e.Prev.Value) != raftstore.MaxValueBytes) {
				t.Errorf("event %d is of %s", i, e.Item.Key)
			}
		}
	}
}
