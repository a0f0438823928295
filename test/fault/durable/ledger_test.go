package durable

import (
	"context"
	"strings"
	"testing"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// testLedger is a ledger with an in-memory store that has behaved correctly.
type testLedger struct {
	*Ledger
	store *storetest.Memory
	n     int
}

func newTestLedger(t *testing.T) *testLedger {
	b := &testLedger{store: storetest.NewMemory()}
	t.Cleanup(b.store.Close)
	base, err := b.store.Commit(context.Background(),
		raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/base", nil)}})
	if err != nil {
		t.Fatal(err)
	}
	b.Ledger = NewLedger(base)
	return b
}

func (b *testLedger) commitNext(t *testing.T) string {
	t.Helper()
	b.n++
	token, c := b.Next("w", b.n, 40)
	rev, err := b.store.Commit(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	b.Done(token, rev, nil)
	return token
}

// storeContent returns the store's revision, items and events.
func (b *testLedger) storeContent(t *testing.T) (raftstore.Revision, []raftstore.Item, []raftstore.Events) {
	t.Helper()
	list, err := b.store.List(context.Background(), Prefix, raftstore.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w, err := b.store.Watch(context.Background(), Prefix, b.Checked())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	var events []raftstore.Events
	for after := b.Checked(); after < list.Revision; {
		ev := <-w.C()
		events = append(events, ev)
		after = ev.Revision
	}
	return list.Revision, list.Items, events
}

func TestLedgerAcceptsWhatIsRight(t *testing.T) {
	b := newTestLedger(t)
	for range 3 {
		for range 20 {
			b.commitNext(t)
		}
		after := b.Checked()
		now, items, events := b.storeContent(t)
		if err := b.Check(now, items, after, events); err != nil {
			t.Fatal(err)
		}
		if b.Checked() != now || b.Acknowledged() != now {
			t.Errorf("checked %d and acknowledged %d of %d", b.Checked(), b.Acknowledged(), now)
		}
	}
	// A commit with an unknown outcome may or may not have been applied.
	for _, happens := range []bool{true, false} {
		b.n++
		token, c := b.Next("w", b.n, 40)
		if happens {
			if _, err := b.store.Commit(context.Background(), c); err != nil {
				t.Fatal(err)
			}
		}
		b.Done(token, 0, raftstore.ErrOutcomeUnknown)
		now, items, events := b.storeContent(t)
		if err := b.Check(now, items, b.Checked(), events); err != nil {
			t.Errorf("an unknown outcome that happened (%v): %v", happens, err)
		}
	}
}

// Everything that must not be is found.
func TestLedgerFindsWhatIsWrong(t *testing.T) {
	for _, c := range []struct {
		name, want string
		spoil      func(b *testLedger, now *raftstore.Revision, items *[]raftstore.Item, events *[]raftstore.Events)
	}{
		{"last commit lost", "acknowledged at revision 10 and is not in the history",
			func(b *testLedger, now *raftstore.Revision, _ *[]raftstore.Item, events *[]raftstore.Events) {
				*now, *events = 9, (*events)[:8]
			}},
		{"revision goes back", "the store is at revision 9, and was at 10",
			func(b *testLedger, now *raftstore.Revision, _ *[]raftstore.Item, events *[]raftstore.Events) {
				*now, *events = 9, (*events)[:8]
			}},
		{"gap in the history", "revision 5 is followed by 7",
			func(b *testLedger, _ *raftstore.Revision, _ *[]raftstore.Item, events *[]raftstore.Events) {
				*events = append((*events)[:4:4], (*events)[5:]...)
			}},
		{"half a commit", "w-5 is applied without its change of /durable/w/second",
			func(b *testLedger, _ *raftstore.Revision, _ *[]raftstore.Item, events *[]raftstore.Events) {
				(*events)[4].Events = (*events)[4].Events[:2]
			}},
		{"two commits in one", "of which 3 are not its own",
			func(b *testLedger, _ *raftstore.Revision, _ *[]raftstore.Item, events *[]raftstore.Events) {
				(*events)[4].Events = append((*events)[4].Events[:3:3], (*events)[4].Events[:3]...)
			}},
		{"other order", "w-4 was acknowledged at revision 5 and is applied at 6",
			func(b *testLedger, _ *raftstore.Revision, _ *[]raftstore.Item, events *[]raftstore.Events) {
				four, five := atRevision((*events)[3], 6), atRevision((*events)[4], 5)
				(*events)[3], (*events)[4] = five, four
			}},
		{"twice", "w-9 is applied again at revision 11",
			func(b *testLedger, now *raftstore.Revision, _ *[]raftstore.Item, events *[]raftstore.Events) {
				*now = 11
				*events = append(*events, atRevision((*events)[8], 11))
			}},
		{"refused and applied", "was refused and is applied",
			func(b *testLedger, _ *raftstore.Revision, _ *[]raftstore.Item, _ *[]raftstore.Events) {
				b.commits["w-3"].fate = refused
			}},
		{"nobody's", "which no commit did", func(b *testLedger, _ *raftstore.Revision, _ *[]raftstore.Item,
			_ *[]raftstore.Events) {
			delete(b.commits, "w-3")
		}},
		{"item missing", "/durable/w/first of revision 10 is missing",
			func(b *testLedger, _ *raftstore.Revision, items *[]raftstore.Item, _ *[]raftstore.Events) {
				*items = (*items)[1:]
			}},
		{"item of an older revision", "the history says",
			func(b *testLedger, _ *raftstore.Revision, items *[]raftstore.Item, _ *[]raftstore.Events) {
				(*items)[0].Modified--
			}},
		{"item that was deleted", "was deleted or never written",
			func(b *testLedger, _ *raftstore.Revision, items *[]raftstore.Item, _ *[]raftstore.Events) {
				*items = append(*items, raftstore.Item{Key: Prefix + "z"})
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newTestLedger(t)
			for range 9 {
				b.commitNext(t)
			}
			now, items, events := b.storeContent(t)
			c.spoil(b, &now, &items, &events)
			if err := b.Check(now, items, b.base, events); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("found: %v\nwant: %s", err, c.want)
			}
		})
	}
}

// atRevision returns a copy of a revision's events with another revision.
func atRevision(ev raftstore.Events, to raftstore.Revision) raftstore.Events {
	out := raftstore.Events{Revision: to}
	for _, e := range ev.Events {
		e.Item.Modified = to
		out.Events = append(out.Events, e)
	}
	return out
}

// History that was seen once must stay as it was.
func TestLedgerFindsRewrittenHistory(t *testing.T) {
	b := newTestLedger(t)
	for range 5 {
		b.commitNext(t)
	}
	now, items, events := b.storeContent(t)
	if err := b.Check(now, items, b.base, events); err != nil {
		t.Fatal(err)
	}
	if err := b.Check(now, items, 3, events[2:]); err != nil {
		t.Errorf("the same history again: %v", err)
	}
	third, fourth := atRevision(events[2], 5), atRevision(events[3], 4)
	err := b.Check(now, items, 3, []raftstore.Events{fourth, third, events[4]})
	if err == nil || !strings.Contains(err.Error(), "revision 4 was w-3 and is w-4 now") {
		t.Errorf("found: %v", err)
	}
}
