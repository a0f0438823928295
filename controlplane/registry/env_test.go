package registry

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
	"keelson.dev/keelson/controlplane/registry/fieldowners"
	"keelson.dev/keelson/controlplane/registry/watchcache"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// env is a registry that runs over a store in memory.
type env struct {
	*Registry
	t     testing.TB
	store *storetest.Memory
	ctx   context.Context
	admit Admission
	user  api.User
}

func newEnv(t testing.TB, opts ...Option) *env {
	t.Helper()
	store := storetest.NewMemory()
	return startEnv(t, store, store, opts...)
}

// startEnv runs a registry over s, which is mem or a wrapper of it.
func startEnv(t testing.TB, mem *storetest.Memory, s raftstore.Store, opts ...Option) *env {
	t.Helper()
	return runEnv(t, mem, New(s, kinds.All(), opts...))
}

// startEnvWith runs a registry with its own table of kinds.
func startEnvWith(t testing.TB, mem *storetest.Memory, table *api.Kinds) *env {
	t.Helper()
	return runEnv(t, mem, New(mem, table))
}

func runEnv(t testing.TB, mem *storetest.Memory, r *Registry) *env {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, raftstore.ErrClosed) {
			t.Errorf("Run: %v", err)
		}
		mem.Close()
	})
	<-r.Ready()
	return &env{Registry: r, t: t, store: mem, ctx: ctx, admit: Stages{Validating: kindstest.ValidateAttempt},
		user: api.User{Name: "alice", Groups: []string{api.GroupMasters}}}
}

// request returns a request for the kind of obj.
func (e *env) request(verb api.Verb, obj api.Object) *api.Request {
	e.t.Helper()
	k := e.kinds.ByType(obj)
	if k == nil {
		e.t.Fatalf("%T is no kind", obj)
	}
	return &api.Request{User: e.user, Verb: verb, Kind: k, Namespace: obj.GetNamespace(), Name: obj.GetName(),
		Client: api.ClientInfo{UserAgent: "kubectl/v1.37 (linux)"}}
}

func (e *env) tryCreate(obj api.Object) (api.Object, error) {
	req := e.request(api.VerbCreate, obj)
	req.Object = obj.DeepCopyObject()
	out, err := e.Registry.Create(e.ctx, req, e.admit)
	if err != nil {
		return nil, err
	}
	return out.(api.Object), nil
}

func (e *env) create(obj api.Object) api.Object {
	e.t.Helper()
	out, err := e.tryCreate(obj)
	if err != nil {
		e.t.Fatalf("create %s/%s: %v", obj.GetNamespace(), obj.GetName(), err)
	}
	return out
}

func (e *env) tryUpdate(obj api.Object, subresource string) (api.Object, error) {
	req := e.request(api.VerbUpdate, obj)
	req.Object, req.Subresource = obj.DeepCopyObject(), subresource
	out, _, err := e.Registry.Update(e.ctx, req, e.admit)
	if err != nil {
		return nil, err
	}
	return out.(api.Object), nil
}

func (e *env) update(obj api.Object, subresource string) api.Object {
	e.t.Helper()
	out, err := e.tryUpdate(obj, subresource)
	if err != nil {
		e.t.Fatalf("update %s/%s: %v", obj.GetNamespace(), obj.GetName(), err)
	}
	return out
}

func (e *env) tryDelete(obj api.Object, o metav1.DeleteOptions) (api.Object, bool, error) {
	req := e.request(api.VerbDelete, obj)
	req.Delete = o
	out, gone, err := e.Registry.Delete(e.ctx, req, e.admit)
	if err != nil {
		return nil, false, err
	}
	return out.(api.Object), gone, nil
}

func (e *env) delete(obj api.Object, o metav1.DeleteOptions) (api.Object, bool) {
	e.t.Helper()
	out, gone, err := e.tryDelete(obj, o)
	if err != nil {
		e.t.Fatalf("delete %s/%s: %v", obj.GetNamespace(), obj.GetName(), err)
	}
	return out, gone
}

func (e *env) get(obj api.Object) (api.Object, error) {
	return e.Registry.GetObject(e.ctx, e.request(api.VerbGet, obj))
}

func (e *env) list(like api.Object, o metav1.ListOptions) (*api.ObjectList, error) {
	req := e.request(api.VerbList, like)
	req.List, req.Internal.Pointers = o, true
	out, err := e.Registry.List(e.ctx, req)
	if err != nil {
		return nil, err
	}
	return out.(*api.ObjectList), nil
}

func (e *env) watch(like api.Object, o metav1.ListOptions) *watchcache.Watcher {
	e.t.Helper()
	req := e.request(api.VerbWatch, like)
	req.List = o
	w, err := e.Registry.Watch(e.ctx, req)
	if err != nil {
		e.t.Fatalf("watch: %v", err)
	}
	e.t.Cleanup(w.Stop)
	return w.(*watchcache.Watcher)
}

// next waits for one event.
func (e *env) next(w *watchcache.Watcher) watch.Event {
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

// The field types of managedFields in the store: Kubernetes' own, and the short form.
const (
	longFieldsType  = "FieldsV1"
	shortFieldsType = "K1"
)

// fieldManager returns the field manager of a kind for a subresource.
func fieldManager(r *Registry, k *api.Kind, subresource string) (*managedfields.FieldManager, error) {
	s := r.cache.ByKind(k)
	return r.fields.Manager(&s.Fields, k, subresource)
}

func newObjectTracker(r *Registry, k *api.Kind) *fieldowners.NewObjectTracker {
	return r.fields.NewObjects(&r.cache.ByKind(k).Fields, k)
}

// revisionOf returns the revision of an object.
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
