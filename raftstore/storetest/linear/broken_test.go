package linear_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
	"keelson.dev/keelson/raftstore/storetest/linear"
)

// broken is a store that breaks its word in one way, now and then.
type broken struct {
	raftstore.Store
	commit func(ctx context.Context, s raftstore.Store, c raftstore.Commit) (raftstore.Revision, error)
	get    func(ctx context.Context, s raftstore.Store, key string,
		o raftstore.ReadOptions) (raftstore.Item, raftstore.Revision, error)
	list func(ctx context.Context, s raftstore.Store, prefix string, o raftstore.ListOptions) (raftstore.List, error)
	// watch returns what becomes of a delivery.
	watch func(ev raftstore.Events) []raftstore.Events
}

func (b *broken) Commit(ctx context.Context, c raftstore.Commit) (raftstore.Revision, error) {
	// The first and the last commit must succeed, or there is nothing to check.
	if b.commit != nil && !strings.Contains(c.Ops[0].Key, "~") {
		return b.commit(ctx, b.Store, c)
	}
	return b.Store.Commit(ctx, c)
}

func (b *broken) Get(ctx context.Context, key string, o raftstore.ReadOptions) (
	raftstore.Item, raftstore.Revision, error,
) {
	if b.get != nil {
		return b.get(ctx, b.Store, key, o)
	}
	return b.Store.Get(ctx, key, o)
}

func (b *broken) List(ctx context.Context, prefix string, o raftstore.ListOptions) (raftstore.List, error) {
	if b.list != nil {
		return b.list(ctx, b.Store, prefix, o)
	}
	return b.Store.List(ctx, prefix, o)
}

func (b *broken) Watch(ctx context.Context, prefix string, after raftstore.Revision) (raftstore.Watcher, error) {
	w, err := b.Store.Watch(ctx, prefix, after)
	if err != nil || b.watch == nil {
		return w, err
	}
	bw := &brokenWatcher{Watcher: w, c: make(chan raftstore.Events)}
	go func() {
		defer close(bw.c)
		for ev := range w.C() {
			for _, ev := range b.watch(ev) {
				select {
				case bw.c <- ev:
				case <-ctx.Done():
				}
			}
		}
	}()
	return bw, nil
}

type brokenWatcher struct {
	raftstore.Watcher
	c chan raftstore.Events
}

func (w *brokenWatcher) C() <-chan raftstore.Events { return w.c }

// sometimes is true for one call in n.
func sometimes(n int) bool { return rand.IntN(n) == 0 }

// breach is one way of breaking the contract, and what the checker must call it.
type breach struct {
	want  linear.Kind
	spoil func(b *broken)
}

// brokenReads are ways of reading wrongly.
func brokenReads() map[string]breach {
	return map[string]breach{
		"stale read": {linear.StaleRead, func(b *broken) {
			var mu sync.Mutex
			type answer struct {
				it  raftstore.Item
				rev raftstore.Revision
				err error
			}
			old := make(map[string]answer)
			b.get = func(ctx context.Context, s raftstore.Store, key string,
				o raftstore.ReadOptions) (raftstore.Item, raftstore.Revision, error) {
				mu.Lock()
				defer mu.Unlock()
				if a, ok := old[key]; ok && sometimes(10) {
					return a.it, a.rev, a.err
				}
				it, rev, err := s.Get(ctx, key, o)
				old[key] = answer{it, rev, err}
				return it, rev, err
			}
		}},
		"stale value at the present revision": {linear.Linear, func(b *broken) {
			var old sync.Map
			b.get = func(ctx context.Context, s raftstore.Store, key string,
				o raftstore.ReadOptions) (raftstore.Item, raftstore.Revision, error) {
				it, rev, err := s.Get(ctx, key, o)
				if was, ok := old.Swap(key, it); ok && err == nil && sometimes(4) {
					return was.(raftstore.Item), rev, err
				}
				return it, rev, err
			}
		}},
		"a local read that goes back": {linear.WentBack, func(b *broken) {
			b.get = func(ctx context.Context, s raftstore.Store, key string,
				o raftstore.ReadOptions) (raftstore.Item, raftstore.Revision, error) {
				it, rev, err := s.Get(ctx, key, o)
				if o.Local && sometimes(2) && rev > 20 {
					l, _ := s.List(ctx, key, raftstore.ListOptions{At: rev - 20})
					for _, it := range l.Items {
						if it.Key == key {
							return it, rev - 20, nil
						}
					}
					return raftstore.Item{}, rev - 20, raftstore.ErrNotFound
				}
				return it, rev, err
			}
		}},
		"list of two moments": {linear.TornList, func(b *broken) {
			b.list = func(ctx context.Context, s raftstore.Store, prefix string,
				o raftstore.ListOptions) (raftstore.List, error) {
				l, err := s.List(ctx, prefix, o)
				if err != nil || o.Limit != 0 || len(l.Items) < 4 || l.Revision < 10 || !sometimes(2) {
					return l, err
				}
				o.At = l.Revision - 5
				was, err := s.List(ctx, prefix, o)
				if half := len(l.Items) / 2; err == nil && len(was.Items) > half {
					l.Items = append(l.Items[:half:half], was.Items[half:]...)
				}
				return l, nil
			}
		}},
	}
}

// brokenWrites are ways of writing wrongly.
func brokenWrites() map[string]breach {
	return map[string]breach{
		"lost write": {linear.LostWrite, func(b *broken) {
			b.commit = func(ctx context.Context, s raftstore.Store, c raftstore.Commit) (raftstore.Revision, error) {
				if sometimes(20) && c.Fence == 0 {
					return s.Applied() + 1, nil
				}
				return s.Commit(ctx, c)
			}
		}},
		"double apply": {linear.Doubled, func(b *broken) {
			b.commit = func(ctx context.Context, s raftstore.Store, c raftstore.Commit) (raftstore.Revision, error) {
				rev, err := s.Commit(ctx, c)
				if err == nil && sometimes(20) {
					_, _ = s.Commit(ctx, c)
				}
				return rev, err
			}
		}},
		"refused and applied": {linear.Resurrected, func(b *broken) {
			b.commit = func(ctx context.Context, s raftstore.Store, c raftstore.Commit) (raftstore.Revision, error) {
				rev, err := s.Commit(ctx, c)
				if err == nil && sometimes(20) {
					return 0, raftstore.ErrUnavailable
				}
				return rev, err
			}
		}},
		"half a commit": {linear.Torn, func(b *broken) {
			b.commit = func(ctx context.Context, s raftstore.Store, c raftstore.Commit) (raftstore.Revision, error) {
				if len(c.Ops) > 1 && sometimes(4) {
					c.Ops = c.Ops[:1]
				}
				return s.Commit(ctx, c)
			}
		}},
		"precondition ignored": {linear.Broken, func(b *broken) {
			b.commit = func(ctx context.Context, s raftstore.Store, c raftstore.Commit) (raftstore.Revision, error) {
				if sometimes(4) {
					c.Ops = append([]raftstore.Op(nil), c.Ops...)
					for i := range c.Ops {
						c.Ops[i].If = raftstore.Precondition{}
					}
				}
				return s.Commit(ctx, c)
			}
		}},
		"lost TTL": {linear.Expiry, func(b *broken) {
			b.commit = func(ctx context.Context, s raftstore.Store, c raftstore.Commit) (raftstore.Revision, error) {
				if c.Ops[0].TTL > 0 {
					c.Ops = []raftstore.Op{raftstore.Put(c.Ops[0].Key, c.Ops[0].Value)}
					c.Ops[0].TTL = time.Hour
				}
				return s.Commit(ctx, c)
			}
		}},
		"an error of its own": {linear.Untyped, func(b *broken) {
			b.commit = func(ctx context.Context, s raftstore.Store, c raftstore.Commit) (raftstore.Revision, error) {
				if sometimes(20) {
					return 0, errors.New("out of sorts")
				}
				return s.Commit(ctx, c)
			}
		}},
	}
}

// brokenWatches are ways of watching wrongly.
func brokenWatches() map[string]breach {
	return map[string]breach{
		"watch gap": {linear.WatchGap, func(b *broken) {
			b.watch = func(ev raftstore.Events) []raftstore.Events {
				if sometimes(20) {
					return nil
				}
				return []raftstore.Events{ev}
			}
		}},
		"watch repeats": {linear.WatchRepeat, func(b *broken) {
			b.watch = func(ev raftstore.Events) []raftstore.Events {
				if sometimes(20) {
					return []raftstore.Events{ev, ev}
				}
				return []raftstore.Events{ev}
			}
		}},
		"watch shows part of a revision": {linear.WatchDiffer, func(b *broken) {
			b.watch = func(ev raftstore.Events) []raftstore.Events {
				if len(ev.Events) > 1 && sometimes(4) {
					ev.Events = ev.Events[1:]
				}
				return []raftstore.Events{ev}
			}
		}},
		"progress told too soon": {linear.WatchGap, func(b *broken) {
			b.watch = func(ev raftstore.Events) []raftstore.Events {
				if sometimes(20) {
					return []raftstore.Events{{Revision: ev.Revision}}
				}
				return []raftstore.Events{ev}
			}
		}},
	}
}

// The checker is worth something only if it finds what is wrong.
func TestCheckerFindsWhatIsBroken(t *testing.T) {
	breaches := brokenReads()
	maps.Copy(breaches, brokenWrites())
	maps.Copy(breaches, brokenWatches())
	for name, c := range breaches {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := storetest.NewMemory()
			defer m.Close()
			b := &broken{Store: m}
			c.spoil(b)
			rep := work(t, linear.Door{Name: "memory", Store: b}, 1, func(w *linear.Workload) bool {
				return w.Calls() > 800
			})
			if !rep.Has(c.want) {
				t.Errorf("the checker does not find %q: %v\n%v", c.want, rep, rep.Err())
			}
		})
	}
}

// A watch that falls silent is found at the end.
func TestCheckerFindsSilentWatch(t *testing.T) {
	m := storetest.NewMemory()
	defer m.Close()
	var silent atomic.Bool
	b := &broken{Store: m, watch: func(ev raftstore.Events) []raftstore.Events {
		if silent.Load() {
			return nil
		}
		return []raftstore.Events{ev}
	}}
	d := linear.Door{Name: "memory", Store: b}
	w, err := linear.Start(t.Context(), linear.Options{TTL: 20 * time.Millisecond}, func() (linear.Door, bool) {
		return d, true
	})
	if err != nil {
		t.Fatal(err)
	}
	silent.Store(true)
	w.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if rep := w.Settle(ctx, d); !rep.Has(linear.WatchStuck) {
		t.Errorf("the checker does not find it: %v", rep.Err())
	}
}

// A store that was restored from an older copy assigns the same revisions a second time.
func TestCheckerFindsRevisionGoingBack(t *testing.T) {
	ctx := t.Context()
	before, after := storetest.NewMemory(), storetest.NewMemory()
	defer before.Close()
	defer after.Close()
	rec, err := linear.NewRecorder(ctx, before, "/linear/")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := after.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/linear/~begin", nil)}}); err !=
		nil {
		t.Fatal(err)
	}
	f := rec.Follow(1, "/linear/")
	put := func(s raftstore.Store, n int) {
		t.Helper()
		if _, err := rec.Through(linear.Door{Name: "r", Store: s}).Commit(ctx,
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/linear/k/1", fmt.Append(nil, n))}}); err != nil {
			t.Fatal(err)
		}
	}
	watch := func(s raftstore.Store, upTo raftstore.Revision) {
		t.Helper()
		if err := f.Watch(ctx, linear.Door{Name: "r", Store: s}, func(rev raftstore.Revision) bool {
			return rev >= upTo
		}); err != nil {
			t.Fatal(err)
		}
	}
	for n := range 5 {
		put(before, n)
	}
	watch(before, 6)
	if err := rec.Check(linear.CheckOptions{}).Err(); err != nil {
		t.Fatalf("the checker accuses a good store: %v", err)
	}
	put(after, 100)
	for n := range 6 {
		put(after, 101+n)
	}
	watch(after, 8)
	if rep := rec.Check(linear.CheckOptions{}); !rep.Has(linear.WentBack) && !rep.Has(linear.LostWrite) {
		t.Errorf("the checker does not find it: %v", rep.Err())
	}
}

// A commit of a leadership that is over, after one of the next.
func TestCheckerFindsIgnoredFence(t *testing.T) {
	ctx := t.Context()
	m := storetest.NewMemory()
	defer m.Close()
	d := linear.Door{Name: "memory", Store: &broken{Store: m,
		commit: func(ctx context.Context, s raftstore.Store, c raftstore.Commit) (raftstore.Revision, error) {
			c.Fence = 0
			return s.Commit(ctx, c)
		}}}
	rec, err := linear.NewRecorder(ctx, m, "/linear/")
	if err != nil {
		t.Fatal(err)
	}
	var last raftstore.Revision
	for n, fence := range []raftstore.Fence{1, 2, 2, 1} {
		if last, err = rec.Through(d).Commit(ctx,
			raftstore.Commit{Fence: fence, Ops: []raftstore.Op{raftstore.Put("/linear/led",
				fmt.Append(nil, n))}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := rec.Follow(1, "/linear/").Watch(ctx, d, func(rev raftstore.Revision) bool {
		return rev >= last
	}); err != nil {
		t.Fatal(err)
	}
	if rep := rec.Check(linear.CheckOptions{}); !rep.Has(linear.Unfenced) || len(rep.Violations) != 1 {
		t.Errorf("the checker finds: %v", rep.Err())
	}
}
