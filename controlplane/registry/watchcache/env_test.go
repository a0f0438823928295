package watchcache

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// option changes the settings of a cache.
type option func(*Options)

func withHistory(events int, bytes int64) option {
	return func(o *Options) { o.HistoryEvents, o.HistoryBytes = events, bytes }
}

func withHistoryAge(d time.Duration) option {
	return func(o *Options) { o.HistoryAge = d }
}

// env is a cache over a store in memory. Its create, update and delete write to the store directly,
// without admission.
type env struct {
	*Cache
	reader Reader
	t      testing.TB
	store  *storetest.Memory
	ctx    context.Context
}

func newEnv(t testing.TB, opts ...option) *env {
	t.Helper()
	store := storetest.NewMemory()
	return startEnv(t, store, store, opts...)
}

// startEnv runs a cache over s, which is mem or a wrapper of it.
func startEnv(t testing.TB, mem *storetest.Memory, s raftstore.Store, opts ...option) *env {
	t.Helper()
	var options Options
	for _, o := range opts {
		o(&options)
	}
	return runEnv(t, mem, New(s, kinds.All(), options))
}

// startEnvWith runs a cache with its own table of kinds.
func startEnvWith(t testing.TB, mem *storetest.Memory, table *api.Kinds) *env {
	t.Helper()
	return runEnv(t, mem, New(mem, table, Options{}))
}

func runEnv(t testing.TB, mem *storetest.Memory, c *Cache) *env {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, raftstore.ErrClosed) {
			t.Errorf("Run: %v", err)
		}
		mem.Close()
	})
	<-c.Ready()
	return &env{Cache: c, reader: NewReader(c), t: t, store: mem, ctx: ctx}
}

// request returns a request for the kind of obj.
func (e *env) request(verb api.Verb, obj api.Object) *api.Request {
	e.t.Helper()
	k := e.kinds.ByType(obj)
	if k == nil {
		e.t.Fatalf("%T is no kind", obj)
	}
	return &api.Request{User: api.User{Name: "alice"}, Verb: verb, Kind: k, Namespace: obj.GetNamespace(),
		Name: obj.GetName()}
}

// commit writes an object with an operation that op returns for its key and stored form.
func (e *env) commit(obj api.Object, op func(key string, value []byte) raftstore.Op) api.Object {
	e.t.Helper()
	out, err := e.tryCommit(obj, op)
	if err != nil {
		e.t.Fatalf("writing %s/%s: %v", obj.GetNamespace(), obj.GetName(), err)
	}
	return out
}

func (e *env) tryCommit(obj api.Object, op func(key string, value []byte) raftstore.Op) (api.Object, error) {
	out := obj.DeepCopyObject().(api.Object)
	k := e.kinds.ByType(out)
	k.SetTypeMeta(out)
	out.SetResourceVersion("")
	if out.GetUID() == "" {
		out.SetUID(types.UID("uid of " + out.GetNamespace() + "/" + out.GetName())) // the same in every write
	}
	value, err := storedform.NewCodec(k.Storage).Encode(out)
	if err != nil {
		return nil, err
	}
	key := k.Storage.Prefix + storedform.ObjectKey(k, out.GetNamespace(), out.GetName())
	rev, err := e.store.Commit(e.ctx, raftstore.Commit{Ops: []raftstore.Op{op(key, value)}})
	if err != nil {
		return nil, err
	}
	out.SetResourceVersion(storedform.FormatRevision(rev))
	return out, nil
}

func (e *env) create(obj api.Object) api.Object {
	e.t.Helper()
	return e.commit(obj, raftstore.Create)
}

// update replaces an object. The subresource is ignored.
func (e *env) update(obj api.Object, _ string) api.Object {
	e.t.Helper()
	return e.commit(obj, raftstore.Put)
}

func (e *env) delete(obj api.Object, _ metav1.DeleteOptions) (api.Object, bool) {
	e.t.Helper()
	return e.commit(obj, func(key string, _ []byte) raftstore.Op { return raftstore.Delete(key) }), true
}

// modify changes a copy of the current object.
func (e *env) modify(obj api.Object, change func(obj api.Object)) api.Object {
	e.t.Helper()
	current, err := e.get(obj)
	if err != nil {
		e.t.Fatal(err)
	}
	next := current.DeepCopyObject().(api.Object)
	change(next)
	return e.update(next, "")
}

func (e *env) get(obj api.Object) (api.Object, error) {
	return e.reader.GetObject(e.ctx, e.request(api.VerbGet, obj))
}

func (e *env) list(like api.Object, o metav1.ListOptions) (*api.ObjectList, error) {
	req := e.request(api.VerbList, like)
	req.List, req.Internal.Pointers = o, true
	out, err := e.reader.List(e.ctx, req)
	if err != nil {
		return nil, err
	}
	return out.(*api.ObjectList), nil
}

func (e *env) watch(like api.Object, o metav1.ListOptions) *Watcher {
	e.t.Helper()
	req := e.request(api.VerbWatch, like)
	req.List = o
	w, err := e.reader.Watch(e.ctx, req)
	if err != nil {
		e.t.Fatalf("watch: %v", err)
	}
	e.t.Cleanup(w.Stop)
	return w.(*Watcher)
}

// next waits for one event.
func (e *env) next(w *Watcher) watch.Event {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.ctx, time.Minute)
	defer cancel()
	ev, ok := w.Next(ctx)
	if !ok {
		e.t.Fatal("the watch gave no event")
	}
	return ev
}

// show formats an event as "ADDED a@7".
func show(ev watch.Event) string {
	if s, ok := ev.Object.(*metav1.Status); ok {
		return fmt.Sprintf("%s %d %s", ev.Type, s.Code, s.Reason)
	}
	o := ev.Object.(api.Object)
	return fmt.Sprintf("%s %s@%s", ev.Type, o.GetName(), o.GetResourceVersion())
}

func configMap(namespace, name string, data ...string) *corev1.ConfigMap {
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	for i := 0; i+1 < len(data); i += 2 {
		if cm.Data == nil {
			cm.Data = map[string]string{}
		}
		cm.Data[data[i]] = data[i+1]
	}
	return cm
}

func pod(namespace, name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": "hello"}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "main", Image: "registry.lab/hello:1",
			Ports: []corev1.ContainerPort{{ContainerPort: 8080}},
			Env:   []corev1.EnvVar{{Name: "A", Value: "1"}, {Name: "B", Value: "2"}},
		}}},
	}
}

// refused checks an error's code and reason.
func refused(t testing.TB, err error, code int32, reason metav1.StatusReason) *metav1.Status {
	t.Helper()
	s, ok := err.(apierrors.APIStatus)
	if !ok {
		t.Fatalf("got %v, want a status %d %s", err, code, reason)
	}
	status := s.Status()
	if status.Code != code || status.Reason != reason {
		t.Fatalf("got %d %s (%s), want %d %s", status.Code, status.Reason, status.Message, code, reason)
	}
	return &status
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
