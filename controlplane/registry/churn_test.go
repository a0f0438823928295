package registry

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"weak"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/registry/watchcache"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/internal/wakeup"
)

var (
	configMapGVK = corev1.SchemeGroupVersion.WithKind("ConfigMap")
	widgetGVK    = schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Widget"}
)

var widgets = custom.Resource{Group: "example.com", Kind: "Widget", Plural: "widgets", Singular: "widget",
	Namespaced: true}

// widgetKind returns a new kind of widgets each time, so that its storage is new, too.
func widgetKind() *api.Kind {
	return custom.NewKind(widgets, "v1", true, custom.NewStorage(widgets, "v1"))
}

func widget(name string, size int64) *custom.Object {
	return &custom.Object{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Content: map[string]any{"spec": map[string]any{"size": size}}}
}

// of returns a request for a kind.
func (e *env) of(k *api.Kind, verb api.Verb, obj api.Object) *api.Request {
	req := &api.Request{User: api.User{Name: api.UserController}, Verb: verb, Kind: k, Namespace: "default",
		Name: obj.GetName()}
	if verb == api.VerbCreate || verb == api.VerbUpdate {
		req.Object = obj.DeepCopyObject()
	}
	return req
}

func must[T any](t testing.TB, what string) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		return v
	}
}

// A registered kind is available at once, with the objects stored earlier. When it is dropped, its
// watches get all events and then an Expired error, and requests get NotFound.
func TestAKindComesAndGoes(t *testing.T) {
	e := newEnv(t)
	k := widgetKind()
	if _, err := e.Registry.Create(e.ctx, e.of(k, api.VerbCreate, widget("a", 1)),
		e.admit); !apierrors.IsNotFound(err) {
		t.Fatalf("before it is registered: %v", err)
	}
	for range 2 {
		if err := e.kinds.Register(k); err != nil {
			t.Fatal(err)
		}
		list := must[k8sruntime.Object](t, "list")(e.Registry.List(e.ctx, e.of(k, api.VerbList, &custom.Object{})))
		before := len(list.(*custom.List).Items)
		w := must[watch.Interface](t, "watch")(e.Registry.Watch(e.ctx,
			e.of(k, api.VerbWatch, &custom.Object{}))).(*watchcache.Watcher)
		name := fmt.Sprint("w", before)
		must[k8sruntime.Object](t, "create")(e.Registry.Create(e.ctx,
			e.of(k, api.VerbCreate, widget(name, 1)), e.admit))
		got := must[api.Object](t, "get")(e.Registry.GetObject(e.ctx, e.of(k, api.VerbGet, widget(name, 0))))
		if size := got.(*custom.Object).Content["spec"].(map[string]any)["size"]; size != int64(1) ||
			got.GetGeneration() != 1 {
			t.Fatalf("got %+v", got)
		}
		data := must[[]byte](t, "encode")(e.Encoded(got, k8sruntime.ContentTypeJSON))
		if again := must[[]byte](t, "encode")(e.Encoded(got, k8sruntime.ContentTypeJSON)); &again[0] != &data[0] {
			t.Error("a cached object is encoded twice")
		}
		if err := e.kinds.Drop(k); err != nil {
			t.Fatal(err)
		}
		for i := range before + 1 {
			if ev := e.next(w); ev.Type != watch.Added {
				t.Fatalf("event %d is %s", i, show(ev))
			}
		}
		if ev := e.next(w); show(ev) != "ERROR 410 Expired" {
			t.Fatalf("the watch of a dropped kind ends with %s", show(ev))
		}
		if _, ok := w.Next(e.ctx); ok {
			t.Fatal("and goes on")
		}
		_, err := e.Registry.GetObject(e.ctx, e.of(k, api.VerbGet, widget(name, 0)))
		refused(t, err, 404, metav1.StatusReasonNotFound)
		k = widgetKind()
	}
}

// load simulates other clients.
type load struct {
	e     *env
	fail  func(format string, args ...any)
	calls atomic.Int64
	table *api.Kinds
	// pace keeps the two clients of the permanent kind close to each other; turns does the same for
	// clients of the other kind and its rounds. Otherwise history could be dropped before a slow
	// goroutine has read it.
	pace  [2]chan struct{}
	turns wakeup.Signal
}

const ahead = 40 // of three writes each; 512 changes are kept

func newLoad(e *env, fail func(format string, args ...any)) *load {
	l := &load{e: e, table: e.kinds, fail: fail, turns: make(chan struct{}, ahead)}
	for n := range l.pace {
		l.pace[n] = make(chan struct{}, 2*ahead)
		for range ahead {
			l.pace[n] <- struct{}{}
		}
	}
	return l
}

// round fills turns for the next round.
func (l *load) round() {
	for range ahead {
		l.turns.Send()
	}
}

// may waits for a turn and returns false when ctx has ended.
func may(ctx context.Context, turn <-chan struct{}) bool {
	select {
	case <-turn:
		return true
	case <-ctx.Done():
		return false
	}
}

// builtIn writes, reads, lists and watches a permanent kind: no request may fail.
func (l *load) builtIn(ctx context.Context, n int) {
	e := l.e
	k := l.table.ByGVK(configMapGVK)
	w, err := e.Registry.Watch(ctx, e.of(k, api.VerbWatch, configMap("default", "")))
	if err != nil {
		l.fail("watching config maps: %v", err)
		return
	}
	for i := 0; may(ctx, l.pace[n]); i++ {
		name := fmt.Sprintf("l%d-%d", n, i)
		for _, verb := range []api.Verb{api.VerbCreate, api.VerbGet, api.VerbUpdate, api.VerbList, api.VerbDelete} {
			if err := l.one(ctx, k, verb, configMap("default", name, "k", string(verb))); err != nil &&
				ctx.Err() == nil {
				l.fail("%s of a config map: %v", verb, err)
			}
		}
		for until := false; !until && ctx.Err() == nil; {
			ev, ok := <-w.ResultChan()
			if !ok || ev.Type == watch.Error {
				if ctx.Err() == nil {
					l.fail("the watch of config maps ended with %v", ev.Object)
				}
				return
			}
			o := ev.Object.(api.Object)
			until = ev.Type == watch.Deleted && o.GetName() == name
		}
		l.pace[1-n] <- struct{}{} // never blocks: one was taken before
	}
}

func (l *load) one(ctx context.Context, k *api.Kind, verb api.Verb, obj api.Object) (err error) {
	req := l.e.of(k, verb, obj)
	l.calls.Add(1)
	switch verb {
	case api.VerbCreate:
		_, err = l.e.Registry.Create(ctx, req, l.e.admit)
	case api.VerbUpdate:
		var was api.Object // stored object for the update
		if was, err = l.e.Registry.GetObject(ctx, l.e.of(k, api.VerbGet, obj)); err != nil {
			return err
		}
		req.Object.(api.Object).SetResourceVersion(was.GetResourceVersion())
		_, _, err = l.e.Registry.Update(ctx, req, l.e.admit)
	case api.VerbGet:
		var o api.Object
		if o, err = l.e.Registry.GetObject(ctx, req); err == nil {
			_, err = l.e.Encoded(o, k8sruntime.ContentTypeJSON)
		}
	case api.VerbList:
		req.Name = ""
		_, err = l.e.Registry.List(ctx, req)
	case api.VerbDelete:
		_, _, err = l.e.Registry.Delete(ctx, req, l.e.admit)
	}
	return err
}

// custom does the same with the kind that is registered and dropped; NotFound is the only permitted
// error.
func (l *load) custom(ctx context.Context, n int) {
	for i := 0; ctx.Err() == nil; i++ {
		k := l.table.ByGVK(widgetGVK)
		if k == nil {
			runtime.Gosched()
			continue
		}
		if !may(ctx, l.turns) {
			return
		}
		watching, stop := context.WithCancel(ctx)
		w, err := l.e.Registry.Watch(watching, l.e.of(k, api.VerbWatch, &custom.Object{}))
		if err == nil && i%2 == 0 {
			go func() { // read until the watch ends, which it must
				for range w.ResultChan() {
				}
			}()
		}
		name := fmt.Sprintf("l%d", n)
		for _, verb := range []api.Verb{api.VerbCreate, api.VerbGet, api.VerbUpdate, api.VerbList, api.VerbDelete} {
			err := l.one(ctx, k, verb, widget(name, int64(i)))
			if err != nil && ctx.Err() == nil && !apierrors.IsNotFound(err) && !apierrors.IsAlreadyExists(err) &&
				!apierrors.IsConflict(err) &&
				!apierrors.IsServiceUnavailable(err) { // another kind of the same name was registered
				l.fail("%s of a widget: %v", verb, err)
			}
		}
		stop()
	}
}

// A kind is registered and dropped 1,000 times while it and others are written, read, listed and
// watched. Other kinds are not affected, and nothing of the kind remains.
func TestKindsComeAndGoUnderLoad(t *testing.T) {
	rounds := 1000
	if testing.Short() {
		rounds = 50
	}
	e := newEnv(t, WithHistory(512, 4<<20), func(r *Registry) { r.options.SweepInterval = time.Second })
	if err := e.kinds.Register(widgetKind()); err != nil {
		t.Fatal(err)
	}
	first := e.kinds.ByGVK(widgetGVK)
	must[k8sruntime.Object](t, "create")(e.Registry.Create(e.ctx,
		e.of(first, api.VerbCreate, widget("kept", 1)), e.admit))
	if err := e.kinds.Drop(first); err != nil {
		t.Fatal(err)
	}
	goroutines := runtime.NumGoroutine()

	ctx, stop := context.WithCancel(e.ctx)
	l := newLoad(e, t.Errorf)
	var running sync.WaitGroup
	for n := range 2 {
		running.Go(func() { l.builtIn(ctx, n) })
		running.Go(func() { l.custom(ctx, n) })
	}
	var caches []weak.Pointer[api.Storage]
	for i := range rounds {
		if t.Failed() {
			break
		}
		l.round()
		caches = append(caches, e.comeAndGo(i))
	}
	stop()
	running.Wait()
	t.Logf("%d calls in %d rounds", l.calls.Load(), rounds)
	e.nothingLeft(caches, goroutines)
}

// comeAndGo performs one round. It returns a weak pointer to the cache of the dropped storage.
func (e *env) comeAndGo(i int) weak.Pointer[api.Storage] {
	e.t.Helper()
	k := widgetKind()
	if err := e.kinds.Register(k); err != nil {
		e.t.Fatal(err)
	}
	got, err := e.Registry.GetObject(e.ctx, e.of(k, api.VerbGet, widget("kept", 0)))
	if err != nil {
		e.t.Fatalf("round %d: what was stored before: %v", i, err)
	}
	watchAll := e.of(k, api.VerbWatch, &custom.Object{})
	watchAll.List.ResourceVersion = got.GetResourceVersion()
	watchAll.List.ResourceVersion = "" // from the present state
	w := must[watch.Interface](e.t, "watch")(e.Registry.Watch(e.ctx, watchAll)).(*watchcache.Watcher)
	defer w.Stop()
	name := fmt.Sprint("r", i)
	must[k8sruntime.Object](e.t, "create")(e.Registry.Create(e.ctx, e.of(k, api.VerbCreate, widget(name, 1)), e.admit))
	if _, _, err := e.Registry.Delete(e.ctx, e.of(k, api.VerbDelete, widget(name, 1)), e.admit); err != nil {
		e.t.Fatal(err)
	}
	if err := e.kinds.Drop(k); err != nil {
		e.t.Fatal(err)
	}
	for seen := 0; ; {
		ev := e.next(w)
		if ev.Type == watch.Error {
			if show(ev) != "ERROR 410 Expired" || seen != 2 {
				e.t.Fatalf("round %d: the watch ended with %s after %d events of the object", i, show(ev), seen)
			}
			break
		}
		if ev.Object.(api.Object).GetName() == name && ev.Type != watch.Modified {
			seen++
		}
	}
	return weak.Make(k.Storage)
}

// nothingLeft checks that nothing of the dropped kinds remains in the registry.
func (e *env) nothingLeft(caches []weak.Pointer[api.Storage], goroutines int) {
	e.t.Helper()
	storages, kinds := len(e.kinds.Table().Stored()), 0
	for _, k := range e.kinds.All() {
		if !k.Serving.Virtual {
			kinds++
		}
	}
	err := wait.For(within(e.t, e), 5*time.Millisecond, func() error {
		runtime.GC()
		live := 0
		for _, c := range caches {
			if c.Value() != nil {
				live++
			}
		}
		stats := e.cache.Stats()
		switch {
		case stats.Kinds != kinds || stats.Storages != storages:
			return fmt.Errorf("%d kinds and %d storages, not %d and %d", stats.Kinds, stats.Storages, kinds, storages)
		case live > 0:
			return fmt.Errorf("%d of %d caches are still there", live, len(caches))
		case runtime.NumGoroutine() > goroutines:
			return fmt.Errorf("%d goroutines, there were %d", runtime.NumGoroutine(), goroutines)
		}
		return nil
	})
	stats := e.cache.Stats()
	if stats.Watchers > 0 {
		err = errors.Join(err, fmt.Errorf("%d watches are still known", stats.Watchers))
	}
	if stats.HistoryBytes != stats.AccountedBytes {
		err = errors.Join(err, fmt.Errorf("the history is said to take %d bytes, it takes %d", stats.AccountedBytes,
			stats.HistoryBytes))
	}
	if err != nil {
		e.t.Error(err)
	}
}
