package registry

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// lifecycle returns the namespace admission: no creation in a missing or terminating namespace.
func lifecycle(e *env) Stages {
	namespaces := e.kinds.ByType(&corev1.Namespace{})
	return Stages{Validating: kindstest.ValidateAttempt, Mutating: func(ctx context.Context, a *api.Attempt) error {
		if !a.CreatesObject() || !a.Kind.Namespaced {
			return nil
		}
		ns := e.cached(namespaces, a.Namespace)
		if ns == nil { // the cache may lag behind
			if _, err := e.cache.Refresh(ctx); err != nil {
				return err
			}
			ns = e.cached(namespaces, a.Namespace)
		}
		if ns == nil {
			return apierrors.NewNotFound(corev1.Resource("namespaces"), a.Namespace)
		}
		if ns.GetDeletionTimestamp() != nil {
			return apierrors.NewForbidden(a.Kind.GroupResource(), a.Name,
				fmt.Errorf("namespace %s is being terminated", a.Namespace))
		}
		a.Require(api.Check{Ref: api.Ref{Kind: namespaces, Name: a.Namespace}, Seen: ns})
		return nil
	}}
}

// cached returns an object from the cache, or nil.
func (e *env) cached(k *api.Kind, key string) api.Object {
	if entry := e.cache.ByKind(k).Current(key); entry != nil {
		return entry.Object
	}
	return nil
}

func namespace(name string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// An object that admission has permitted is not created if its namespace was marked for deletion in
// the meantime.
func TestCreateLosesAgainstNamespaceDeletion(t *testing.T) {
	e := newEnv(t)
	e.create(namespace("a"))
	inner := lifecycle(e)
	var once sync.Once
	e.admit = Stages{Validating: kindstest.ValidateAttempt, Mutating: func(ctx context.Context, a *api.Attempt) error {
		err := inner.Mutate(ctx, a)
		if a.Kind.Namespaced {
			once.Do(func() { // between admission and commit
				if _, _, err := e.tryDelete(namespace("a"), metav1.DeleteOptions{}); err != nil {
					t.Error(err)
				}
			})
		}
		return err
	}}
	if _, err := e.tryCreate(configMap("a", "late")); !apierrors.IsForbidden(err) {
		t.Errorf("created in a namespace that is being terminated: %v", err)
	}
	if list, err := e.list(configMap("a", ""), metav1.ListOptions{}); err != nil || len(list.Items) != 0 {
		t.Errorf("the namespace holds %v, %v", list, err)
	}
}

// Other changes of the namespace do not block a creation.
func TestCreateBesideNamespaceUpdates(t *testing.T) {
	e := newEnv(t)
	e.create(namespace("a"))
	e.admit = lifecycle(e)
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := range 100 {
			ns := namespace("a")
			ns.Annotations = map[string]string{"n": fmt.Sprint(i)}
			e.update(ns, "")
		}
	})
	for i := range 100 {
		e.create(configMap("a", fmt.Sprint("c", i)))
	}
	wg.Wait()
}

// A terminating namespace that was found empty stays empty.
func TestNamespaceFoundEmptyStaysEmpty(t *testing.T) {
	e := newEnv(t)
	e.admit = lifecycle(e)
	for round := range 30 {
		name := fmt.Sprint("ns", round)
		e.create(namespace(name))
		var made atomic.Int64
		var wg sync.WaitGroup
		started := make(chan struct{}, 8)
		for n := range 8 {
			wg.Go(func() {
				for i := 0; ; i++ {
					_, err := e.tryCreate(configMap(name, fmt.Sprintf("c%d-%d", n, i)))
					if i == 0 {
						started <- struct{}{}
					}
					if err != nil {
						if !apierrors.IsForbidden(err) && !apierrors.IsNotFound(err) {
							t.Errorf("creating in %s: %v", name, err)
						}
						return
					}
					made.Add(1)
				}
			})
		}
		for range 8 {
			<-started
		}
		if _, _, err := e.tryDelete(namespace(name), metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		all := e.request(api.VerbDeleteCollection, configMap(name, ""))
		if _, err := e.Registry.DeleteCollection(e.ctx, all, e.admit); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if list, err := e.list(configMap(name, ""), metav1.ListOptions{}); err != nil || len(list.Items) != 0 {
			t.Fatalf("of %d objects %d came into %s after it was emptied (%v)", made.Load(), len(list.Items), name, err)
		}
	}
}
