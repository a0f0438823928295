package watchcache

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// F72 F73: every event carries the whole object and its revision.
func TestWatchDeliversWholeObjects(t *testing.T) {
	e := newEnv(t)
	w := e.watch(configMap("default", ""), metav1.ListOptions{})
	made := e.create(configMap("default", "a", "k", "1"))
	changed := e.update(configMap("default", "a", "k", "2"), "")
	gone, _ := e.delete(configMap("default", "a"), metav1.DeleteOptions{})
	e.create(configMap("other", "b"))
	for i, want := range []struct {
		kind  watch.EventType
		rv    string
		value string
	}{
		{watch.Added, made.GetResourceVersion(), "1"},
		{watch.Modified, changed.GetResourceVersion(), "2"},
		{watch.Deleted, gone.GetResourceVersion(), "2"},
	} {
		ev := e.next(w)
		cm := ev.Object.(*corev1.ConfigMap)
		if ev.Type != want.kind || cm.ResourceVersion != want.rv || cm.Data["k"] != want.value ||
			cm.UID != made.GetUID() {
			t.Fatalf("event %d is %s with data %v, want %s at %s with %s", i, show(ev), cm.Data, want.kind,
				want.rv, want.value)
		}
	}
	if gone.GetResourceVersion() == changed.GetResourceVersion() {
		t.Fatal("a deletion has the revision of the last update")
	}
}

func TestWatchSelectorsAddAndDelete(t *testing.T) {
	e := newEnv(t)
	w := e.watch(configMap("default", ""), metav1.ListOptions{LabelSelector: "tier=web"})
	label := func(tier string) *corev1.ConfigMap {
		cm := configMap("default", "a", "tier", tier)
		cm.Labels = map[string]string{"tier": tier}
		return cm
	}
	e.create(label("db"))
	in := e.update(label("web"), "")
	out := e.update(label("db"), "")
	e.delete(label("db"), metav1.DeleteOptions{})
	if got := show(e.next(w)); got != "ADDED a@"+in.GetResourceVersion() {
		t.Fatalf("beginning to match gave %s", got)
	}
	ev := e.next(w)
	if got := show(ev); got != "DELETED a@"+out.GetResourceVersion() {
		t.Fatalf("ceasing to match gave %s", got)
	}
	if tier := ev.Object.(*corev1.ConfigMap).Data["tier"]; tier != "web" {
		t.Fatalf("the deleted object is that of tier %q, not the last that matched", tier)
	}
	e.create(func() *corev1.ConfigMap { cm := label("web"); cm.Name = "b"; return cm }())
	if ev := e.next(w); ev.Type != watch.Added || ev.Object.(api.Object).GetName() != "b" {
		t.Fatalf("an object that did not match gave %s", show(ev))
	}
}

func TestWatchByNameAndBadSelectors(t *testing.T) {
	e := newEnv(t)
	w := e.watch(configMap("default", ""), metav1.ListOptions{FieldSelector: "metadata.name=b"})
	e.create(configMap("default", "a"))
	b := e.create(configMap("default", "b"))
	if got := show(e.next(w)); got != "ADDED b@"+b.GetResourceVersion() {
		t.Fatalf("got %s", got)
	}
	for _, o := range []metav1.ListOptions{
		{FieldSelector: "spec.none=1"}, {LabelSelector: "a in"}, {FieldSelector: "nonsense"}, {ResourceVersion: "x"},
	} {
		req := e.request(api.VerbWatch, configMap("default", ""))
		req.List = o
		_, err := e.reader.Watch(e.ctx, req)
		if err == nil {
			t.Fatalf("%+v was accepted", o)
		}
		refused(t, err, 400, metav1.StatusReasonBadRequest)
	}
}

func TestWatchStartsWithThePresentState(t *testing.T) {
	e := newEnv(t)
	for _, n := range []string{"b", "a", "c"} {
		e.create(configMap("default", n))
	}
	last := e.store.Applied()
	yes := true
	streaming := e.watch(configMap("default", ""), metav1.ListOptions{SendInitialEvents: &yes,
		ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan, AllowWatchBookmarks: true})
	legacy := e.watch(configMap("default", ""), metav1.ListOptions{ResourceVersion: "0"})
	for _, name := range []string{"a", "b", "c"} {
		for _, w := range []*Watcher{streaming, legacy} {
			if ev := e.next(w); ev.Type != watch.Added || ev.Object.(api.Object).GetName() != name {
				t.Fatalf("got %s, want %s", show(ev), name)
			}
		}
	}
	ev := e.next(streaming)
	mark := ev.Object.(*corev1.ConfigMap)
	if ev.Type != watch.Bookmark || mark.Annotations[metav1.InitialEventsAnnotationKey] != "true" ||
		mark.ResourceVersion != storedform.FormatRevision(last) {
		t.Fatalf("the end of the initial events is %s with %v", show(ev), mark.Annotations)
	}
	d := e.create(configMap("default", "d"))
	for _, w := range []*Watcher{streaming, legacy} {
		if got := show(e.next(w)); got != "ADDED d@"+d.GetResourceVersion() {
			t.Fatalf("live event %s", got)
		}
	}
	no := false
	live := e.watch(configMap("default", ""),
		metav1.ListOptions{SendInitialEvents: &no, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan})
	f := e.create(configMap("default", "f"))
	if got := show(e.next(live)); got != "ADDED f@"+f.GetResourceVersion() {
		t.Fatalf("without initial events the first is %s", got)
	}
}

// F76: a watch from a revision without history gets a 410 event.
func TestWatchFromTooOldRevision(t *testing.T) {
	e := newEnv(t, withHistory(3, 1<<20))
	first := e.create(configMap("default", "a", "n", "0"))
	for i := range 10 {
		e.update(configMap("default", "a", "n", fmt.Sprint(i+1)), "")
	}
	w := e.watch(configMap("default", ""), metav1.ListOptions{ResourceVersion: first.GetResourceVersion()})
	if got := show(e.next(w)); got != "ERROR 410 Expired" {
		t.Fatalf("got %s", got)
	}
	if ev, ok := w.Next(e.ctx); ok {
		t.Fatalf("the watch went on with %s", show(ev))
	}
	list, err := e.list(configMap("default", ""), metav1.ListOptions{}) // the new list afterwards
	if err != nil || len(list.Items) != 1 {
		t.Fatalf("relist: %v, %v", list, err)
	}
	w = e.watch(configMap("default", ""), metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	next := e.update(configMap("default", "a", "n", "last"), "")
	if got := show(e.next(w)); got != "MODIFIED a@"+next.GetResourceVersion() {
		t.Fatalf("after the relist: %s", got)
	}
}

// F76: a watch from a revision that the store has not reached, for example after a restore, gets
// 410 as well. Otherwise it would skip all events until the store has passed that revision.
func TestWatchFromTheFuture(t *testing.T) {
	e := newEnv(t)
	e.create(configMap("default", "a", "n", "0"))
	list, err := e.list(configMap("default", ""), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	now, err := storedform.ParseRevision(list.ResourceVersion)
	if err != nil {
		t.Fatal(err)
	}
	for _, ahead := range []raftstore.Revision{1, 3, 1 << 40} {
		w := e.watch(configMap("default", ""),
			metav1.ListOptions{ResourceVersion: storedform.FormatRevision(now + ahead), AllowWatchBookmarks: true})
		if len(w.queue) == 0 {
			t.Fatalf("a watch from %d beyond the store's revision has begun", ahead)
		}
		if got := show(e.next(w)); got != "ERROR 410 Expired" {
			t.Errorf("a watch from %d beyond the store's revision gave %s", ahead, got)
		}
		if ev, ok := w.Next(e.ctx); ok {
			t.Errorf("the watch went on with %s", show(ev))
		}
	}
	w := e.watch(configMap("default", ""), metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	next := e.update(configMap("default", "a", "n", "1"), "")
	if got := show(e.next(w)); got != "MODIFIED a@"+next.GetResourceVersion() {
		t.Errorf("a watch from the store's revision gave %s", got)
	}
}

// A watcher that does not read is disconnected and delays no other.
func TestSlowWatcherIsCutOff(t *testing.T) {
	e := newEnv(t, withHistory(8, 1<<20))
	slow := e.watch(configMap("default", ""), metav1.ListOptions{})
	ch := slow.ResultChan()
	e.create(configMap("default", "a"))
	for i := range 500 {
		e.update(configMap("default", "a", "n", fmt.Sprint(i)), "")
	}
	var last watch.Event
	n := 0
	for ev := range ch {
		last = ev
		n++
	}
	if got := show(last); got != "ERROR 410 Expired" || n > 2*watchChunk {
		t.Fatalf("after %d events the watch ended with %s", n, got)
	}
}

// F75: a watch delivers exactly the committed history, across any number of interruptions.
func TestWatchAcrossReconnectsIsTheHistory(t *testing.T) {
	e := newEnv(t)
	const writers, writes = 4, 150
	// A watch from revision 0 would start with the present state.
	start := e.create(configMap("other", "first")).GetResourceVersion()
	committed := make(chan string, writers*writes)
	var wg sync.WaitGroup
	for n := range writers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(n)))
			name := fmt.Sprintf("w%d", n)
			exists := false
			for i := range writes {
				switch {
				case !exists:
					committed <- "ADDED " + name + "@" +
						e.create(configMap("default", name, "i", fmt.Sprint(i))).GetResourceVersion()
					exists = true
				case rnd.IntN(4) == 0:
					gone, _ := e.delete(configMap("default", name), metav1.DeleteOptions{})
					committed <- "DELETED " + name + "@" + gone.GetResourceVersion()
					exists = false
				default:
					committed <- "MODIFIED " + name + "@" +
						e.update(configMap("default", name, "i", fmt.Sprint(i)), "").GetResourceVersion()
				}
			}
		})
	}

	seen := make(map[string]bool)
	rv, rnd, cuts := start, rand.New(rand.NewPCG(2, 2)), 0
	var previous uint64
	for len(seen) < writers*writes {
		w := e.watch(configMap("default", ""), metav1.ListOptions{ResourceVersion: rv})
		for range 1 + rnd.IntN(8) {
			if len(seen) == writers*writes {
				break
			}
			ev := e.next(w)
			id := show(ev)
			if seen[id] {
				t.Fatalf("%s was delivered twice", id)
			}
			seen[id] = true
			rv = ev.Object.(api.Object).GetResourceVersion()
			var now uint64
			if _, err := fmt.Sscan(rv, &now); err != nil || now <= previous {
				t.Fatalf("%s came after revision %d", id, previous)
			}
			previous = now
		}
		w.Stop()
		cuts++
	}
	wg.Wait()
	close(committed)
	for id := range committed {
		if !seen[id] {
			t.Fatalf("%s was never delivered", id)
		}
	}
	if cuts < 100 {
		t.Fatalf("the stream was cut %d times only", cuts)
	}
}

func TestBookmarksAndTimeout(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		store := storetest.NewMemory()
		c := New(store, kinds.All(), Options{})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.Run(ctx) }()
		defer func() { cancel(); <-ended; store.Close() }()
		<-c.Ready()
		e := &env{Cache: c, reader: NewReader(c), t: t, store: store, ctx: ctx}

		e.create(configMap("default", "a"))
		timeout := int64(150)
		w := e.watch(configMap("default", ""), metav1.ListOptions{AllowWatchBookmarks: true, TimeoutSeconds: &timeout})
		began := time.Now()
		var got []string
		for {
			ev, ok := w.Next(ctx)
			if !ok {
				break
			}
			got = append(got, show(ev))
			if len(got) == 1 { // a change of another kind increases the revision
				e.create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"}})
			}
		}
		if want := []string{"ADDED a@1", "BOOKMARK @2", "BOOKMARK @2", "BOOKMARK @2"}; fmt.Sprint(got) !=
			fmt.Sprint(want) {
			t.Fatalf("got %q, want %q", got, want)
		}
		if lasted := time.Since(began); lasted != 150*time.Second {
			t.Fatalf("the watch lasted %v", lasted)
		}
	})
}

func TestWatchEndsWithItsContextAndRegistry(t *testing.T) {
	e := newEnv(t)
	ctx, cancel := context.WithCancel(e.ctx)
	req := e.request(api.VerbWatch, configMap("default", ""))
	w, err := e.reader.Watch(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	for range w.ResultChan() {
		t.Fatal("an event after the end")
	}
	w, err = e.reader.Watch(ctx, req) // with a cancelled context
	if err == nil {
		for range w.ResultChan() {
			t.Fatal("an event of a watch that never was")
		}
	}
	_, err = e.reader.Watch(e.ctx, &api.Request{Verb: api.VerbWatch, Kind: e.kinds.ByType(&corev1.ConfigMap{}),
		List: metav1.ListOptions{ResourceVersionMatch: metav1.ResourceVersionMatchExact, ResourceVersion: "1"}})
	if !apierrors.IsInvalid(err) {
		t.Fatalf("got %v", err)
	}
}

// All watchers of a change get the same bytes.
func TestEncodedIsSharedByWatchers(t *testing.T) {
	e := newEnv(t)
	one := e.watch(configMap("default", ""), metav1.ListOptions{})
	two := e.watch(configMap("default", ""), metav1.ListOptions{})
	e.create(configMap("default", "a", "k", "1"))
	e.update(configMap("default", "a", "k", "2"), "") // the first version is now history
	for _, media := range []string{"application/json", "application/vnd.kubernetes.protobuf"} {
		a, b := e.next(one).Object, e.next(two).Object
		first, err := e.reader.Encoded(a, media)
		if err != nil {
			t.Fatal(err)
		}
		second, err := e.reader.Encoded(b, media)
		if err != nil {
			t.Fatal(err)
		}
		if &first[0] != &second[0] {
			t.Fatalf("%s was encoded twice", media)
		}
	}
	if _, err := e.reader.Encoded(configMap("default", "a"), "text/html"); !apierrors.IsNotAcceptable(err) {
		t.Fatalf("got %v", err)
	}
}

func TestEncodingsAreBounded(t *testing.T) {
	var c encodings
	for i := range 100 {
		c.cacheEncoding(encodingOwner{entry: &Entry{key: fmt.Sprint(i)}}, mediaJSON, make([]byte, maxEncodedBytes/10))
	}
	if c.bytes > maxEncodedBytes || len(c.queue) > 10 {
		t.Fatalf("%d encodings with %d bytes are kept", len(c.queue), c.bytes)
	}
}

// F75: a watcher can continue on a restarted replica.
func TestRestartKeepsHistory(t *testing.T) {
	e := newEnv(t)
	k := e.kinds.ByType(&corev1.ConfigMap{})
	codec := e.ByKind(k).Codec()
	var from raftstore.Revision
	for i := range replayRevisions + 100 { // written directly to the store: the API is not under test
		cm := configMap("default", "a", "n", fmt.Sprint(i))
		value, err := codec.Encode(cm)
		if err != nil {
			t.Fatal(err)
		}
		rev, err := e.store.Commit(e.ctx,
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/registry/configmaps/default/a", value)}})
		if err != nil {
			t.Fatal(err)
		}
		if i == replayRevisions {
			from = rev
		}
	}
	restarted := startEnvWith(t, e.store, e.kinds)
	if got, want := restarted.Revision(), e.store.Applied(); got != want {
		t.Fatalf("ready at revision %d, the store is at %d", got, want)
	}
	w := restarted.watch(configMap("default", ""), metav1.ListOptions{ResourceVersion: storedform.FormatRevision(from)})
	for i := range 99 {
		if got, want := show(restarted.next(w)), fmt.Sprintf("MODIFIED a@%d", int(from)+i+1); got != want {
			t.Fatalf("got %s, want %s", got, want)
		}
	}
}

// F75: the same with a young store, and with a store that has less history than a starting cache
// loads. Dropped history is reported as expired.
func TestRestartKeepsWhatHistoryThereIs(t *testing.T) {
	for name, given := range map[string]struct{ compacted, from raftstore.Revision }{
		"a young store":    {0, 1},
		"a shorter memory": {137, 137},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			for i := range 200 {
				if i == 0 {
					e.create(configMap("default", "a"))
				} else {
					e.update(configMap("default", "a", "n", fmt.Sprint(i)), "")
				}
			}
			e.store.Compact(given.compacted)
			restarted := startEnvWith(t, e.store, e.kinds)
			w := restarted.watch(configMap("default", ""),
				metav1.ListOptions{ResourceVersion: storedform.FormatRevision(given.from)})
			for rev := given.from + 1; rev <= e.store.Applied(); rev++ {
				if got, want := show(restarted.next(w)), fmt.Sprintf("MODIFIED a@%d", rev); got != want {
					t.Fatalf("got %s, want %s", got, want)
				}
			}
			if given.compacted == 0 {
				return
			}
			w = restarted.watch(configMap("default", ""),
				metav1.ListOptions{ResourceVersion: storedform.FormatRevision(given.from - 1)})
			if got := show(restarted.next(w)); got != "ERROR 410 Expired" {
				t.Errorf("a watch from before what is left got %s", got)
			}
		})
	}
}

// reopening is a store with watches that a test can end.
type reopening struct {
	raftstore.Store
	mu   sync.Mutex
	last raftstore.Watcher
}

func (s *reopening) Watch(ctx context.Context, prefix string, after raftstore.Revision) (raftstore.Watcher, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w, err := s.Store.Watch(ctx, prefix, after)
	s.last = w
	return w, err
}

func (s *reopening) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last.Stop()
}

// F76: when the store's watch ends, the cache resumes it. If the history is gone, too, the cache
// reloads, and watchers get Expired.
func TestCacheSurvivesTheLossOfItsWatch(t *testing.T) {
	mem := storetest.NewMemory()
	s := &reopening{Store: mem}
	e := startEnv(t, mem, s)
	first := e.create(configMap("default", "first"))
	w := e.watch(configMap("default", ""), metav1.ListOptions{ResourceVersion: first.GetResourceVersion()})
	for i := range 5 {
		s.cut()
		made := e.create(configMap("default", fmt.Sprint("c", i)))
		if got, want := show(e.next(w)), fmt.Sprintf("ADDED c%d@%s", i, made.GetResourceVersion()); got != want {
			t.Fatalf("got %s, want %s", got, want)
		}
	}
	// The lock keeps the cache from watching again before the history is gone.
	s.mu.Lock()
	s.last.Stop()
	cm := configMap("default", "unseen")
	value, err := e.ByKind(e.kinds.ByType(cm)).Codec().Encode(cm)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := mem.Commit(e.ctx,
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/registry/configmaps/default/unseen", value)}}); err !=
			nil {
			t.Fatal(err)
		}
	}
	mem.Compact(mem.Applied())
	s.mu.Unlock()
	if got, err := e.get(configMap("default", "unseen")); err != nil || got.GetName() != "unseen" {
		t.Fatalf("after the reload: %v, %v", got, err)
	}
	if got := show(e.next(w)); got != "ERROR 410 Expired" {
		t.Fatalf("the watcher was told %s", got)
	}
}
