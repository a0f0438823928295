package garbagecollector_test

import (
	"context"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/namespace"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// gadgetVersions are two kinds of one storage: version v1 is served first, then version v2 in its place.
func gadgetVersions() (v1, v2 *api.Kind) {
	v1 = custom.NewKind(gadgets, "v1", true, custom.NewStorage(gadgets, "v1"))
	v2 = custom.NewKind(gadgets, "v2", true, custom.NewStorage(gadgets, "v2", "v1"))
	for i := range v2.Storage.Known {
		v2.Storage.Known[i].ToHub = func(o api.Object) (api.Object, error) {
			out := o.(*custom.Object).DeepCopy()
			out.APIVersion = "example.com/v2"
			return out, nil
		}
	}
	return v1, v2
}

// droppedVersion is a backend that serves v2 of the gadgets in place of v1 when a controller sends the first request of a
// verb for v1. The request gets the API's answer for a version that is not served: 404.
type droppedVersion struct {
	api.Backend
	kinds  *api.Kinds
	v1, v2 *api.Kind
	verb   api.Verb
	done   chan struct{}
	unseen bool // informers of v1 see no object
}

func (d *droppedVersion) Watch(ctx context.Context, r *api.Request) (watch.Interface, error) {
	if d.unseen && r.Kind == d.v1 {
		return nil, errors.New("the watch is slow")
	}
	return d.Backend.Watch(ctx, r)
}

func (d *droppedVersion) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	if r.User.Name == "admin" || r.Kind != d.v1 || r.Verb != d.verb {
		return d.Backend.Do(ctx, r)
	}
	select {
	case <-d.done:
	default:
		if err := d.kinds.Change([]*api.Kind{d.v1}, []*api.Kind{d.v2}); err != nil {
			return nil, err
		}
		close(d.done)
	}
	for {
		out, err := d.Backend.Do(ctx, r)
		if err != nil || ctx.Err() != nil {
			return out, err
		}
		time.Sleep(time.Millisecond) // virtual: until the registry follows the table
	}
}

// droppedWorld returns a world with the garbage collector and the namespace controller, whose
// gadgets change their version.
func droppedWorld(t *testing.T, verb api.Verb, unseen bool) (*testcluster.Cluster, *droppedVersion) {
	d := &droppedVersion{verb: verb, unseen: unseen, done: make(chan struct{})}
	d.v1, d.v2 = gadgetVersions()
	w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
		WrapBackend: func(b api.Backend) api.Backend { d.Backend = b; return d },
		Controllers: func(c engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{garbagecollector.New(c), namespace.New(c)}
		}})
	d.kinds = w.Admin.Kinds()
	w.Lead(engine.Options{})
	if err := d.kinds.Register(d.v1); err != nil {
		t.Fatal(err)
	}
	return w, d
}

// F71: a 404 of a version that is not served does not count as the absence of an owner: its
// dependents stay, and are collected after the owner is deleted.
func TestOwnerOfADroppedVersionIsNotGone(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, d := droppedWorld(t, api.VerbGet, true)
		owner := createGadget(w, d.v1, "default", "owner", nil)
		configMap(w, "dependent", ofGadget(owner))
		<-d.done
		time.Sleep(time.Minute) // virtual
		if _, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "dependent"); err != nil {
			t.Fatalf("the owner exists, and its dependent was collected: %v", err)
		}
		if _, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbDelete, Kind: d.v2, Namespace: "default",
			Name: "owner"}); err != nil {
			t.Fatal(err)
		}
		w.EventuallyWithin(time.Minute, "the dependent is collected", func() error {
			return testcluster.CheckGone[*corev1.ConfigMap](w, "dependent")
		})
	})
}

// F71: an owner that is deleted with policy Orphan orphans dependents of a kind whose version
// changes meanwhile.
func TestDependentsOfADroppedVersionAreOrphaned(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, d := droppedWorld(t, api.VerbList, false)
		owner := configMap(w, "owner", nil)
		createGadget(w, d.v1, "default", "dependent", ofConfigMap(owner))
		policy := metav1.DeletePropagationOrphan
		if err := client.Delete[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "owner",
			metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
			t.Fatal(err)
		}
		w.EventuallyWithin(time.Minute, "the owner is gone", func() error {
			return testcluster.CheckGone[*corev1.ConfigMap](w, "owner")
		})
		time.Sleep(time.Minute) // virtual
		out, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbGet, Kind: d.v2, Namespace: "default",
			Name: "dependent"})
		if err != nil {
			t.Fatalf("the dependent was to be orphaned: %v", err)
		}
		if refs := out.(api.Object).GetOwnerReferences(); len(refs) > 0 {
			t.Errorf("the dependent still has owners: %v", refs)
		}
	})
}

// F71: an owner in foreground deletion waits for dependents of a kind whose version changes
// meanwhile.
func TestForegroundDeletionWaitsForADroppedVersion(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, d := droppedWorld(t, api.VerbList, true)
		owner := configMap(w, "owner", nil)
		yes := true
		ref := ofConfigMap(owner)
		ref.BlockOwnerDeletion = &yes
		createGadget(w, d.v1, "default", "dependent", ref)
		holdGadget(w, d.v1, "default", "dependent")
		policy := metav1.DeletePropagationForeground
		if err := client.Delete[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "owner",
			metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
			t.Fatal(err)
		}
		<-d.done
		time.Sleep(time.Minute) // virtual
		if _, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "owner"); err != nil {
			t.Fatalf("a dependent with a finalizer exists, and its owner: %v", err)
		}
	})
}

// A namespace waits for objects of a kind whose version changes while its contents are deleted.
func TestNamespaceWaitsForADroppedVersion(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, d := droppedWorld(t, api.VerbList, false)
		w.CreateObject(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "short"}, Spec: corev1.NamespaceSpec{
			Finalizers: []corev1.FinalizerName{corev1.FinalizerKubernetes}}})
		createGadget(w, d.v1, "short", "inside", nil)
		holdGadget(w, d.v1, "short", "inside")
		if err := client.Delete[*corev1.Namespace](w.Ctx, w.Admin, "", "short", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		<-d.done
		time.Sleep(time.Minute) // virtual
		if _, err := client.Get[*corev1.Namespace](w.Ctx, w.Admin, "", "short"); apierrors.IsNotFound(err) {
			t.Fatal("the namespace is gone, and an object with a finalizer was in it")
		}
	})
}

// holdGadget gives a gadget a finalizer.
func holdGadget(w *testcluster.Cluster, k *api.Kind, ns, name string) {
	w.T.Helper()
	got, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbGet, Kind: k, Namespace: ns, Name: name})
	if err != nil {
		w.T.Fatal(err)
	}
	next := got.DeepCopyObject().(api.Object)
	next.SetFinalizers([]string{"example.com/hold"})
	if _, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbUpdate, Kind: k, Namespace: ns, Name: name,
		Object: next}); err != nil {
		w.T.Fatal(err)
	}
}
