package proposals

import (
	"testing"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// A batch sets out at once when none is under way, and beside others only when
// enough has gathered; filled tells of it just then.
func TestQueueGathers(t *testing.T) {
	for name, c := range map[string]struct {
		underWay, items, bytes int // how many wait, of which size
		want                   int // how many of them go
	}{
		"nothing waits":               {},
		"one alone":                   {items: 1, want: 1},
		"some alone":                  {items: worthOps - 1, want: worthOps - 1},
		"few beside another":          {underWay: 1, items: worthOps - 1},
		"enough beside another":       {underWay: 1, items: worthOps, want: worthOps},
		"enough beside two":           {underWay: 2, items: worthOps, want: worthOps},
		"a large one beside another":  {underWay: 1, items: 1, bytes: worthBytes, want: 1},
		"any number beside the most":  {underWay: InFlight, items: 2 * worthOps},
		"any size beside the most":    {underWay: InFlight, items: 2, bytes: worthBytes},
		"more than one batch can be":  {items: BatchOps + 1, want: BatchOps},
		"more bytes than a batch has": {items: 3, bytes: batchBytes / 2, want: 1},
	} {
		var q Queue
		q.Initialize()
		if got := q.TakeBatch(c.underWay); len(got) != 0 {
			t.Fatalf("%s: %d taken from an empty queue", name, len(got))
		}
		told := func() bool {
			select {
			case <-q.Filled:
				return true
			default:
				return false
			}
		}
		for i := range c.items {
			q.Enqueue(NewItem(&storev1.Proposal{Ops: []*storev1.Op{{Value: make([]byte, c.bytes)}}}))
			if worth := q.TakeBatch(c.underWay); told() != (len(worth) > 0) {
				t.Errorf("%s: with %d waiting %d go; told of it: %v", name, i+1, len(worth), !told())
			} else if len(worth) > 0 {
				q.Enqueue(worth...) // all of them wait on
				told()
				for _, it := range worth {
					it.state.Store(itemWaiting)
				}
			}
		}
		if got := q.TakeBatch(c.underWay); len(got) != c.want {
			t.Errorf("%s: %d taken, want %d", name, len(got), c.want)
		}
	}
}

// What has been given up is not sent, and does not stay in the count.
func TestQueueForgetsAbandoned(t *testing.T) {
	var q Queue
	q.Initialize()
	items := make([]*Item, worthOps)
	for i := range items {
		items[i] = NewItem(&storev1.Proposal{Ops: []*storev1.Op{{Value: make([]byte, worthBytes)}}})
	}
	q.Enqueue(items...)
	for _, it := range items[1:] {
		if !it.Withdraw() {
			t.Fatal("an item that waits cannot be given up")
		}
	}
	if got := q.TakeBatch(1); len(got) != 1 || got[0] != items[0] {
		t.Fatalf("%d taken, want the one that is not given up", len(got))
	}
	if q.size != 0 || len(q.Items) != 0 {
		t.Errorf("%d items of %d bytes are left", len(q.Items), q.size)
	}
	q.Enqueue(NewItem(&storev1.Proposal{}))
	if got := q.TakeBatch(1); len(got) != 0 {
		t.Error("one small proposal went beside another batch")
	}
}

// A queue that is drained refuses what waits and what comes.
func TestQueueDrained(t *testing.T) {
	var q Queue
	q.Initialize()
	before, after := NewItem(&storev1.Proposal{}), NewItem(&storev1.Proposal{})
	q.Enqueue(before)
	q.RefuseAll()
	q.Enqueue(after)
	for _, it := range []*Item{before, after} {
		select {
		case res := <-it.Done:
			if res.Err != ErrNotProposed {
				t.Errorf("refused with %v", res.Err)
			}
		default:
			t.Error("an item of a drained queue has no answer")
		}
	}
}
