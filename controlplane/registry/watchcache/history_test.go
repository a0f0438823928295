package watchcache

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"weak"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/raftstore"
)

// A cached encoding is freed with its version of the object.
func TestEncodingsKeepNoOldVersions(t *testing.T) {
	e := newEnv(t, withHistory(1, 1<<20))
	old := func() weak.Pointer[Entry] {
		if err := e.WaitFor(e.ctx, revisionOf(t, e.create(configMap("default", "a")))); err != nil {
			t.Fatal(err)
		}
		sc := e.ByKind(e.kinds.ByType(&corev1.ConfigMap{}))
		obj := sc.Current(storedform.ObjectKey(sc.Kind, "default", "a")).Object
		if _, err := e.reader.Encoded(obj, k8sruntime.ContentTypeJSON); err != nil {
			t.Fatal(err)
		}
		return weak.Make(sc.encodingOwnerOf(obj).entry)
	}()
	if old.Value() == nil {
		t.Fatal("the version is gone while it is current")
	}
	for i := range 4 {
		e.update(configMap("default", "a", "n", fmt.Sprint(i)), "")
	}
	await.Until(within(t, e), t, await.Patience, time.Millisecond, "the release of the old version", func() error {
		if runtime.GC(); old.Value() != nil {
			return errors.New("an encoding keeps a version of four updates ago")
		}
		return nil
	})
}

// Old history is dropped even if no change happens any more.
func TestHistoryIsForgottenByAge(t *testing.T) {
	e := newEnv(t, withHistoryAge(20*time.Millisecond))
	first := e.create(configMap("default", "a"))
	last := e.update(configMap("default", "a", "n", "1"), "")
	await.Until(within(t, e), t, await.Patience, time.Millisecond, "the removal of old history", func() error {
		w := e.watch(configMap("default", ""), metav1.ListOptions{ResourceVersion: first.GetResourceVersion()})
		if got := show(e.next(w)); got != "ERROR 410 Expired" {
			return fmt.Errorf("a watch from before the last change got %s", got)
		}
		return nil
	})
	sc := e.ByKind(e.kinds.ByType(&corev1.ConfigMap{})).storage
	sc.mu.RLock()
	if n := len(sc.historyEntries) + len(sc.history.events); n != 0 || sc.history.bytes != 0 {
		t.Errorf("%d versions and %d bytes of history are left", n, sc.history.bytes)
	}
	sc.mu.RUnlock()
	// A watch from the newest revision has lost nothing.
	w := e.watch(configMap("default", ""), metav1.ListOptions{ResourceVersion: last.GetResourceVersion()})
	next := e.update(configMap("default", "a", "n", "2"), "")
	if got := show(e.next(w)); got != "MODIFIED a@"+next.GetResourceVersion() {
		t.Errorf("a watch from the last change got %s", got)
	}
}

// The history of all kinds together is bounded: the largest is trimmed, and a small one stays.
func TestHistoryOfAllKindsIsBounded(t *testing.T) {
	const limit = 1 << 20
	e := newEnv(t, withHistory(16384, limit))
	small := e.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"}})
	e.update(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"},
		StringData: map[string]string{"k": "v"}}, "")
	for i := range 200 {
		e.create(configMap("default", fmt.Sprint("c", i), "v", strings.Repeat("x", 10_000)))
	}
	if err := e.WaitFor(e.ctx, e.store.Applied()); err != nil {
		t.Fatal(err)
	}
	var sum int64
	for _, sc := range e.routes.Load().byStorage {
		sc.mu.RLock()
		for _, ev := range sc.history.events {
			sum += ev.encodedSize() + ev.cur.size
		}
		sc.mu.RUnlock()
	}
	if sum != e.history.bytes.Load() || sum > limit || sum < limit/2 {
		t.Errorf("history takes %d bytes, is counted as %d, the limit is %d", sum, e.history.bytes.Load(), limit)
	}
	w := e.watch(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default"}},
		metav1.ListOptions{ResourceVersion: small.GetResourceVersion()})
	if got := show(e.next(w)); !strings.HasPrefix(got, "MODIFIED s@") {
		t.Errorf("the history of a kind with few changes was taken: %s", got)
	}
}

// podHistory returns the storage of pods; packAll drops all decoded history.
func (e *env) podHistory() *storageCache {
	return e.ByKind(e.kinds.ByType(&corev1.Pod{})).storage
}

func (e *env) packAll() { e.podHistory().dropOld(time.Time{}, time.Now().Add(time.Hour)) }

// told reads the events of a watch up to a revision, including their objects.
func (e *env) told(w *Watcher, upTo raftstore.Revision) (all []string) {
	ctx, cancel := context.WithTimeout(e.ctx, time.Minute)
	defer cancel()
	for w.after < upTo || len(w.queue) > 0 {
		if len(w.queue) == 0 {
			if !w.readHistory(ctx) {
				e.t.Errorf("the history ends at %d, want %d", w.after, upTo)
				return all
			}
			continue
		}
		ev, ok := w.Next(ctx)
		if !ok {
			e.t.Error("the watch ended")
			return all
		}
		data, err := e.reader.Encoded(ev.Object, k8sruntime.ContentTypeJSON)
		if err != nil {
			e.t.Error(err)
		}
		all = append(all, string(ev.Type)+" "+string(data))
	}
	return all
}

// F75, P21: compressed history yields the same events, from every start revision, under repeated
// compression, with and without memory for decoded events.
func TestPackedHistoryIsToldAsItWas(t *testing.T) {
	for _, room := range []int64{DefaultHistoryBytes, 0} {
		e := newEnv(t)
		random := rand.New(rand.NewPCG(3, 4))
		all := selections()
		begun := revisionOf(t, e.create(configMap("a", "first"))) // 0 would mean the present state
		from := func(s selection, rev raftstore.Revision) *Watcher {
			s.o.ResourceVersion = storedform.FormatRevision(rev)
			return e.watch(pod(s.namespace, ""), s.o)
		}
		live := make([]*Watcher, len(all))
		want := make([][]string, len(all))
		for i, s := range all {
			live[i] = from(s, begun)
		}
		have := map[string]*corev1.Pod{}
		revisions := []raftstore.Revision{begun}
		before := make([][]int, len(all)) // number of events before each revision
		for step := range 150 {
			changeSomePod(e, random, have, step)
			at := e.store.Applied()
			if err := e.WaitFor(e.ctx, at); err != nil {
				t.Fatal(err)
			}
			for i := range all {
				before[i] = append(before[i], len(want[i]))
				want[i] = append(want[i], e.told(live[i], at)...)
			}
			revisions = append(revisions, at)
		}
		last := revisions[len(revisions)-1]
		if room == 0 {
			e.history.decoded.Add(1 << 40) // as if others used the whole budget
		}
		e.packAll()
		if sc := e.podHistory(); sc.history.decoded != 0 {
			t.Fatalf("%d bytes are decoded after all was packed", sc.history.decoded)
		}
		var readers sync.WaitGroup
		for reader := range 3 {
			random := rand.New(rand.NewPCG(5, uint64(reader)))
			readers.Go(func() {
				for range 100 {
					i, n := random.IntN(len(all)), random.IntN(len(revisions)-1)
					w := from(all[i], revisions[n])
					if got, want := e.told(w, last), want[i][before[i][n]:]; !slices.Equal(got, want) {
						t.Errorf("%s from %d: told\n%s\nit was\n%s", all[i], revisions[n], strings.Join(got, "\n"),
							strings.Join(want, "\n"))
					}
					w.Stop()
					if random.IntN(20) == 0 {
						e.packAll()
					}
				}
			})
		}
		readers.Wait()
		sc := e.podHistory()
		var bytes, decoded int64
		seen := map[*objectState]bool{}
		for _, ev := range sc.history.events {
			bytes += ev.encodedSize()
			for _, m := range []*objectState{ev.cur, ev.prev} {
				if m != nil && !seen[m] {
					seen[m], decoded = true, decoded+m.size
				}
			}
		}
		if sc.history.decoded != decoded || sc.history.bytes != bytes+decoded || (room == 0 && decoded != 0) {
			t.Errorf("counted %d bytes, %d of them decoded; there are %d and %d", sc.history.bytes, sc.history.decoded,
				bytes+decoded, decoded)
		}
	}
}

// Successive watches from the past keep no more decoded history than the budget allows.
func TestWatchesOfThePastAreBounded(t *testing.T) {
	const limit = 2 << 20
	e := newEnv(t, withHistory(0, limit))
	begun := e.create(configMap("default", "first"))
	for i := range 400 {
		e.create(configMap("default", fmt.Sprint("c", i), "v", strings.Repeat("x", 3_000)))
		if err := e.WaitFor(e.ctx, e.store.Applied()); err != nil {
			t.Fatal(err)
		}
		if got := e.history.bytes.Load(); got > limit {
			t.Fatalf("%d bytes of history, the limit is %d", got, limit)
		}
	}
	var watches []*Watcher
	for range 20 {
		w := e.watch(configMap("default", ""), metav1.ListOptions{ResourceVersion: begun.GetResourceVersion()})
		for range 400 {
			if got := show(e.next(w)); !strings.HasPrefix(got, "ADDED c") {
				t.Fatal(got)
			}
		}
		watches = append(watches, w)
		if live, kept := e.history.decoded.Load(), e.history.bytes.Load(); live > limit/4 || kept > limit {
			t.Errorf("%d bytes of history, of which %d are decoded; the limit is %d", kept, live, limit)
		}
	}
	runtime.KeepAlive(watches)
}

// The size estimate of a compressed event is right. The history of a replica with 4 GiB holds 75
// seconds of 800 pod changes per second.
func TestHistoryCoversChurn(t *testing.T) {
	const pods, changes = 100, 20
	e := newEnv(t, withHistory(0, 1<<40), withHistoryAge(time.Hour))
	heap := func() int64 {
		var s runtime.MemStats
		runtime.GC()
		runtime.GC() // frees the contents of pools, too
		runtime.ReadMemStats(&s)
		return int64(s.HeapAlloc)
	}
	for i := range pods {
		p := pod("default", fmt.Sprint("p", i))
		// the typical size of a pod with its status
		p.Annotations = map[string]string{"what": strings.Repeat("x", 1_500)}
		for n := range changes {
			p = p.DeepCopy()
			if p.Labels = map[string]string{"n": fmt.Sprint(n)}; n == 0 {
				p = e.create(p).(*corev1.Pod)
			} else {
				p = e.update(p, "").(*corev1.Pod)
			}
		}
	}
	if err := e.WaitFor(e.ctx, e.store.Applied()); err != nil {
		t.Fatal(err)
	}
	sc := e.podHistory()
	decoded := heap()
	e.packAll()
	packed, counted, events := heap(), sc.history.bytes, int64(len(sc.history.events))
	sc.dropOld(time.Now().Add(time.Hour), time.Time{})
	gone := heap()
	if events != pods*changes {
		t.Fatalf("%d events, want %d", events, pods*changes)
	}
	t.Logf("an event takes %d bytes while it is new and %d when it is packed, counted as %d", (decoded-gone)/events,
		(packed-gone)/events, counted/events)
	if taken := packed - gone; taken > counted*11/10 {
		t.Errorf("%d packed events take %d bytes, counted as %d", events, taken, counted)
	}
	if within := HistoryBytesFor(4 << 30); counted/events*75*800 > within {
		t.Errorf("75 s of 800 changes a second take %d bytes, a replica with 4 GiB has %d for them",
			counted/events*75*800, within)
	}
}

func revisionOf(t testing.TB, obj metav1.Object) raftstore.Revision {
	t.Helper()
	n, err := strconv.ParseUint(obj.GetResourceVersion(), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return raftstore.Revision(n)
}

// within returns a context with a timeout that no test should reach.
func within(t testing.TB, e *env) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(e.ctx, time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// BenchmarkResume measures a watch that starts before 10,000 changes of pods on 1,000 nodes, for
// one node or for all.
func BenchmarkResume(b *testing.B) {
	e := newEnv(b)
	begun := e.create(configMap("default", "first"))
	for i := range 10_000 {
		p := pod("default", fmt.Sprint("p", i))
		p.Spec.NodeName = fmt.Sprint("n", i%1000)
		e.create(p)
	}
	if err := e.WaitFor(e.ctx, e.store.Applied()); err != nil {
		b.Fatal(err)
	}
	e.packAll()
	for _, c := range []struct {
		name, selector string
		events         int
	}{{"OfANode", "spec.nodeName=n7", 10}, {"OfAll", "", 10_000}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				w := e.watch(pod("", ""), metav1.ListOptions{ResourceVersion: begun.GetResourceVersion(),
					FieldSelector: c.selector})
				for range c.events {
					e.next(w)
				}
				w.Stop()
			}
		})
	}
}
