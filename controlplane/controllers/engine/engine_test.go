package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	cachetesting "k8s.io/client-go/tools/cache/testing"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/internal/virtual"
)

// bench is an engine with one controller over a source of ConfigMaps, in virtual time.
type bench struct {
	source   *cachetesting.FakeControllerSource
	informer cache.SharedIndexInformer
	engine   *Engine
	ctx      context.Context
	stop     func()
}

// run calls test inside a bubble with a running informer; c lacks its watch.
func run(t *testing.T, o Options, c *Descriptor, test func(b *bench)) {
	virtual.Test(t, func(t *testing.T) {
		b := &bench{source: cachetesting.NewFakeControllerSource()}
		b.informer = cache.NewSharedIndexInformer(b.source, &corev1.ConfigMap{}, 0, cache.Indexers{})
		if c.Watches == nil {
			c.Watches = []Watch{OnInformer(b.informer, Self[*corev1.ConfigMap])}
		}
		for i := range c.Watches {
			c.Watches[i].Informer = b.informer
		}
		b.engine = NewEngine(Deps{Client: client.New(nil, nil), Log: slog.New(slog.DiscardHandler)}, o, c)
		ctx, cancel := context.WithCancel(t.Context())
		b.ctx = ctx
		go b.informer.Run(ctx.Done())
		virtual.Wait()
		b.stop = b.lead()
		defer func() {
			b.stop()
			cancel()
			b.source.Shutdown()
			virtual.Wait()
		}()
		test(b)
	})
}

// lead starts a leadership; the returned function stops it.
func (b *bench) lead() func() {
	ctx, cancel := context.WithCancel(b.ctx)
	done := make(chan struct{})
	go func() { defer close(done); _ = b.engine.Run(ctx, 1) }()
	virtual.Wait()
	return func() { cancel(); <-done }
}

func object(name, value string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: "u"},
		Data: map[string]string{"v": value}}
}

func fixed(r Reconcile) func(*Term) Reconcile { return func(*Term) Reconcile { return r } }

// F66: a failing key is retried after 5 ms, 10, 20 ... 60 s; success resets the delay.
func TestRetriesBackOff(t *testing.T) {
	var mu sync.Mutex
	var calls []time.Time
	fail := true
	set := func(v bool) {
		mu.Lock()
		defer mu.Unlock()
		fail = v
	}
	take := func() []time.Time {
		mu.Lock()
		defer mu.Unlock()
		taken := calls
		calls = nil
		return taken
	}
	run(t, Options{Resync: 24 * time.Hour},
		&Descriptor{Name: "c", Lead: fixed(func(context.Context, Key) (time.Duration, error) {
			mu.Lock()
			defer mu.Unlock()
			calls = append(calls, time.Now())
			if fail {
				return 0, errors.New("no")
			}
			return 0, nil
		})}, func(b *bench) {
			b.source.Add(object("a", "1"))
			time.Sleep(10 * time.Minute)
			virtual.Wait()
			want := 5 * time.Millisecond
			for tried, i := take(), 1; i < len(tried); i++ {
				if got := tried[i].Sub(tried[i-1]); got != want {
					t.Fatalf("retry %d after %v, want %v", i, got, want)
				}
				want = min(2*want, time.Minute)
			}
			if want != time.Minute {
				t.Fatalf("the delay only grew to %v", want)
			}
			set(false)
			time.Sleep(2 * time.Minute)
			virtual.Wait()
			set(true)
			take()
			b.source.Modify(object("a", "2"))
			time.Sleep(5 * time.Millisecond)
			virtual.Wait()
			if n := len(take()); n != 2 {
				t.Errorf("%d calls 5 ms after a success was followed by a failure", n)
			}
		})
}

// F66: one key is never with two workers, different keys are.
func TestOneWorkerPerKey(t *testing.T) {
	var mu sync.Mutex
	busy := map[Key]int{}
	most, together := 0, 0
	run(t, Options{},
		&Descriptor{Name: "c", Workers: 8, Lead: fixed(func(_ context.Context, k Key) (time.Duration, error) {
			mu.Lock()
			busy[k]++
			most, together = max(most, busy[k]), max(together, len(busy))
			mu.Unlock()
			time.Sleep(time.Millisecond)
			mu.Lock()
			defer mu.Unlock()
			if busy[k]--; busy[k] == 0 {
				delete(busy, k)
			}
			return 0, nil
		})}, func(b *bench) {
			for i := range 5 {
				b.source.Add(object(fmt.Sprint(i), "0"))
			}
			for v := range 200 {
				b.source.Modify(object(fmt.Sprint(v%5), fmt.Sprint(v)))
				time.Sleep(100 * time.Microsecond)
			}
			time.Sleep(time.Second)
		})
	if most != 1 || together < 2 {
		t.Errorf("at most %d workers on one key, %d keys at once", most, together)
	}
}

// F63: changes that come faster than they are worked off are worked off together, and the last state is seen.
func TestQuickChangesAreOneReconcile(t *testing.T) {
	var b *bench
	var seen []string
	run(t, Options{}, &Descriptor{Name: "c", Lead: fixed(func(_ context.Context, k Key) (time.Duration, error) {
		o, _ := Cached[*corev1.ConfigMap](b.informer, k.Namespace, k.Name)
		seen = append(seen, o.Data["v"])
		time.Sleep(time.Second)
		return 0, nil
	})}, func(running *bench) {
		b = running
		b.source.Add(object("a", "0"))
		virtual.Wait()
		for v := range 100 {
			b.source.Modify(object("a", fmt.Sprint(v+1)))
		}
		virtual.Wait()
		time.Sleep(time.Minute)
		virtual.Wait()
	})
	if len(seen) != 2 || seen[1] != "100" {
		t.Errorf("reconciles saw %v", seen)
	}
}

// F65: every change is delivered once, and none after the leadership has ended. F125: the next
// leadership starts with all objects.
func TestDeliveries(t *testing.T) {
	var changes []string
	terms := 0
	c := &Descriptor{Name: "c", Watches: []Watch{OnInformer(nil, func(c Change[*corev1.ConfigMap]) []Key {
		old := ""
		if c.Old != nil {
			old = c.Old.Data["v"]
		}
		changes = append(changes, fmt.Sprintf("%d:%s:%s", c.Type, c.New.Data["v"], old))
		return nil
	})}, Lead: func(*Term) Reconcile {
		terms++
		return func(context.Context, Key) (time.Duration, error) { return 0, nil }
	}}
	run(t, Options{}, c, func(b *bench) {
		b.source.Add(object("a", "1"))
		b.source.Modify(object("a", "2"))
		virtual.Wait()
		b.source.Delete(object("a", "2"))
		virtual.Wait()
		if got := fmt.Sprint(changes); got != "[0:1: 1:2:1 2:2:]" && got != "[0:2: 2:2:]" {
			t.Errorf("changes %s", got)
		}
		b.source.Add(object("b", "3"))
		virtual.Wait()
		b.stop()
		changes = nil
		b.source.Modify(object("b", "4"))
		virtual.Wait()
		if len(changes) != 0 {
			t.Errorf("after the end of leadership: %v", changes)
		}
		b.stop = b.lead()
		virtual.Wait()
		if got := fmt.Sprint(changes); got != "[0:4:]" || terms != 2 {
			t.Errorf("the next leadership began with %s, %d terms", got, terms)
		}
	})
}

// A panic costs one attempt of one key.
func TestPanicIsRetried(t *testing.T) {
	var calls, others atomic.Int64
	run(t, Options{}, &Descriptor{Name: "c", Lead: fixed(func(_ context.Context, k Key) (time.Duration, error) {
		if k.Name != "a" {
			others.Add(1)
			return 0, nil
		}
		if calls.Add(1) == 1 {
			panic("one bad object")
		}
		return 0, nil
	})}, func(b *bench) {
		b.source.Add(object("a", "1"))
		b.source.Add(object("b", "1"))
		time.Sleep(time.Second)
		virtual.Wait()
	})
	if calls.Load() != 2 || others.Load() != 1 {
		t.Errorf("%d calls, %d of the other key", calls.Load(), others.Load())
	}
}

// A reconcile may request another call, and a resync queues everything.
func TestAgainAndResync(t *testing.T) {
	var calls []time.Duration
	var began time.Time
	run(t, Options{Resync: time.Hour},
		&Descriptor{Name: "c", Lead: fixed(func(context.Context, Key) (time.Duration, error) {
			calls = append(calls, time.Since(began))
			if len(calls) == 1 {
				return 30 * time.Second, nil
			}
			return 0, nil
		})}, func(b *bench) {
			began = time.Now()
			b.source.Add(object("a", "1"))
			time.Sleep(90 * time.Minute)
			virtual.Wait()
		})
	if len(calls) != 3 || calls[1] != 30*time.Second || calls[2] != time.Hour {
		t.Errorf("called after %v", calls)
	}
}

// While calls succeed, the concurrency grows; it stops at the first failure. A first call that
// fails is the only call. There are at most twice as many calls as successes, plus one.
func TestSlowStart(t *testing.T) {
	for _, c := range []struct{ n, failAt int }{{0, -1}, {1, -1}, {10, -1}, {1000, -1}, {1000, 0}, {1000, 1}, {1000, 5},
		{3, 2}, {1000, 300}} {
		virtual.Test(t, func(t *testing.T) {
			var made [1000]atomic.Int64
			var calls, succeeded, now, most, late atomic.Int64
			var failed atomic.Bool
			began := time.Now()
			done, err := SlowStart(t.Context(), func() int { return c.n }, func(_ context.Context, i int) error {
				calls.Add(1)
				made[i].Add(1)
				if n := now.Add(1); n > succeeded.Load()+1 {
					t.Errorf("call %d is the %dth at once, and %d have succeeded", i, n, succeeded.Load())
				} else if n > most.Load() {
					most.Store(n)
				}
				if failed.Load() {
					late.Add(1)
				}
				time.Sleep(time.Second + time.Duration(i)*time.Microsecond) // they return one after the other
				defer now.Add(-1)
				if i == c.failAt {
					failed.Store(true)
					return errors.New("no")
				}
				succeeded.Add(1)
				return nil
			})
			if done != int(succeeded.Load()) || (err != nil) != (c.failAt >= 0) || late.Load() > 0 {
				t.Errorf("%d, failing at %d: %d done, %d succeeded, %v, %d began after the failure", c.n, c.failAt,
					done, succeeded.Load(), err, late.Load())
			}
			if c.failAt < 0 && done != c.n || c.failAt >= 0 && int(calls.Load()) > 2*done+1 || done < c.failAt {
				t.Errorf("%d, failing at %d: %d calls, %d done", c.n, c.failAt, calls.Load(), done)
			}
			for i := range made[:calls.Load()] {
				if n := made[i].Load(); n != 1 {
					t.Fatalf("%d, failing at %d: call %d was made %d times", c.n, c.failAt, i, n)
				}
			}
			if c.n == 1000 && c.failAt < 0 && (most.Load() != batchConcurrency || time.Since(began) > 20*time.Second) {
				t.Errorf("%d at once, %v", most.Load(), time.Since(began))
			}
		})
	}
}

// A batch makes each call once, with the concurrency that fills the store's commits.
func TestBatchIsMadeByFew(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		var made [1000]atomic.Int64
		var now, most atomic.Int64
		failed, err := runBatch(t.Context(), 100, len(made), func(_ context.Context, i int) error {
			made[i-100].Add(1)
			for n := now.Add(1); n > most.Load(); {
				most.Store(n)
			}
			time.Sleep(time.Second)
			now.Add(-1)
			return nil
		})
		if failed != 0 || err != nil || most.Load() > batchConcurrency || most.Load() < batchConcurrency/2 {
			t.Errorf("%d failed, %v, %d at once", failed, err, most.Load())
		}
		for i := range made {
			if n := made[i].Load(); n != 1 {
				t.Fatalf("call %d was made %d times", i, n)
			}
		}
	})
}

// The wanted number is read again between two batches.
func TestBatchesLookAgain(t *testing.T) {
	var calls atomic.Int64
	do := func(context.Context, int) error { calls.Add(1); return nil }
	enough := func() int {
		if calls.Load() >= 2000 {
			return 1
		}
		return 1_000_000
	}
	if done, err := SlowStart(t.Context(), enough, do); err != nil || done < 2000 || done > 2500 {
		t.Errorf("slow start: %d calls after no more than 2000 were wanted, %v", done, err)
	}
	calls.Store(0)
	if err := InBatches(t.Context(), enough, do); err != nil || calls.Load() != 2000 {
		t.Errorf("batches: %d calls, %v", calls.Load(), err)
	}
	// A call that always fails does not prevent the other calls.
	calls.Store(0)
	err := InBatches(t.Context(), func() int { return 1200 }, func(_ context.Context, i int) error {
		calls.Add(1)
		if i == 3 {
			return errors.New("no")
		}
		return nil
	})
	if err == nil || calls.Load() != 1200 {
		t.Errorf("batches with a failure: %d calls, %v", calls.Load(), err)
	}
}
