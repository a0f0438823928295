package garbagecollector_test

import (
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/namespace"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

var gadgets = custom.Resource{Group: "example.com", Kind: "Gadget", Plural: "gadgets", Singular: "gadget",
	Namespaced: true}

func gadgetKind() *api.Kind {
	return custom.NewKind(gadgets, "v1", true, custom.NewStorage(gadgets, "v1"))
}

// createGadget stores a gadget, with an owner unless that is nil.
func createGadget(w *testcluster.Cluster, k *api.Kind, ns, name string, owner *metav1.OwnerReference) api.Object {
	w.T.Helper()
	o := &custom.Object{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
	if owner != nil {
		o.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	out, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbCreate, Kind: k, Namespace: ns, Object: o})
	if err != nil {
		w.T.Fatal(err)
	}
	return out.(api.Object)
}

func gadgetGone(w *testcluster.Cluster, k *api.Kind, ns, name string) error {
	_, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbGet, Kind: k, Namespace: ns, Name: name})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return fmt.Errorf("%s/%s: %w", ns, name, errors.Join(err, errors.New("is there")))
}

func ofGadget(o api.Object) *metav1.OwnerReference {
	yes := true
	return &metav1.OwnerReference{APIVersion: "example.com/v1", Kind: "Gadget", Name: o.GetName(), UID: o.GetUID(),
		BlockOwnerDeletion: &yes}
}

func ofConfigMap(o *corev1.ConfigMap) *metav1.OwnerReference {
	return &metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: o.Name, UID: o.UID}
}

func configMap(w *testcluster.Cluster, name string, owner *metav1.OwnerReference) *corev1.ConfigMap {
	w.T.Helper()
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	if owner != nil {
		cm.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	made, err := client.Create(w.Ctx, w.Admin, cm)
	if err != nil {
		w.T.Fatal(err)
	}
	return made
}

// ofEveryKind returns a world with the controllers that watch every kind.
func ofEveryKind(t *testing.T) *testcluster.Cluster {
	w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
		Controllers: func(d engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{garbagecollector.New(d), namespace.New(d)}
		}})
	w.Lead(engine.Options{})
	return w
}

// collects checks that a gadget is deleted with its owner.
func collects(w *testcluster.Cluster, k *api.Kind) {
	w.T.Helper()
	owner := configMap(w, "owner", nil)
	createGadget(w, k, "default", "owned", ofConfigMap(owner))
	if err := client.Delete[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "owner", metav1.DeleteOptions{}); err != nil {
		w.T.Fatal(err)
	}
	w.Eventually("the owned gadget goes", func() error { return gadgetGone(w, k, "default", "owned") })
}

// A kind that is registered during a leadership is collected, as owner and as dependent, and is
// deleted with its namespace.
func TestNewKindsAreCollected(t *testing.T) {
	w := ofEveryKind(t)
	k := gadgetKind()
	if err := w.Admin.Kinds().Register(k); err != nil {
		t.Fatal(err)
	}
	collects(w, k)
	for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationForeground,
		metav1.DeletePropagationBackground} {
		boss := createGadget(w, k, "default", "boss", nil)
		configMap(w, "member", ofGadget(boss))
		createGadget(w, k, "default", "member", ofGadget(boss))
		_, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbDelete, Kind: k, Namespace: "default", Name: "boss",
			Delete: metav1.DeleteOptions{PropagationPolicy: &policy}})
		if err != nil {
			t.Fatal(err)
		}
		w.Eventually("all go, "+string(policy), func() error {
			_, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "member")
			if !apierrors.IsNotFound(err) {
				return fmt.Errorf("the config map: %v", err)
			}
			return errors.Join(gadgetGone(w, k, "default", "member"), gadgetGone(w, k, "default", "boss"))
		})
	}

	w.CreateObject(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "short"}})
	createGadget(w, k, "short", "inside", nil)
	if err := client.Delete[*corev1.Namespace](w.Ctx, w.Admin, "", "short", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.Eventually("the namespace goes", func() error {
		_, err := client.Get[*corev1.Namespace](w.Ctx, w.Admin, "", "short")
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("the namespace: %v", err)
		}
		return gadgetGone(w, k, "short", "inside")
	})
}

// The first object of a kind may be deleted before the kind has an informer: its dependents are
// still collected.
func TestFirstOwnersThatGoAtOnce(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := ofEveryKind(t)
		var all []string
		for i := range 200 {
			of := custom.Resource{Group: "example.com", Kind: fmt.Sprint("Fleeting", i),
				Plural: fmt.Sprint("fleeting", i), Singular: fmt.Sprint("fleeting", i), Namespaced: true}
			k := custom.NewKind(of, "v1", true, custom.NewStorage(of, "v1"))
			k.Serving.Definition = of.Plural + ".example.com" // its informer starts with its first object
			if err := w.Admin.Kinds().Register(k); err != nil {
				t.Fatal(err)
			}
			owner := createGadget(w, k, "default", "a", nil)
			configMap(w, of.Plural, &metav1.OwnerReference{APIVersion: "example.com/v1", Kind: of.Kind, Name: "a",
				UID: owner.GetUID()})
			if _, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbDelete, Kind: k, Namespace: "default",
				Name: "a"}); err != nil {
				t.Fatal(err)
			}
			all = append(all, of.Plural)
		}
		for _, name := range all {
			w.EventuallyWithin(time.Minute, name+" goes", func() error {
				return testcluster.CheckGone[*corev1.ConfigMap](w, name)
			})
		}
	})
}

// goroutines returns the number of goroutines once it has been stable for a while.
func goroutines(w *testcluster.Cluster) int {
	w.T.Helper()
	if err := w.Informers.WaitForSync(w.Ctx); err != nil {
		w.T.Fatal(err)
	}
	last, looks := 0, 0
	w.EventuallyWithin(30*time.Second, "everything runs", func() error {
		if n := runtime.NumGoroutine(); n != last {
			last, looks = n, 0
		}
		if looks++; looks < 100 {
			return fmt.Errorf("%d goroutines, for %d looks", last, looks)
		}
		return nil
	})
	return last
}

// Informers and handlers are removed with their kind, however often the kind is registered. Its
// dependents are collected while it exists, and left alone while it does not.
func TestKindsComeAndGoUnderControllers(t *testing.T) {
	w := ofEveryKind(t)
	first := gadgetKind()
	if err := w.Admin.Kinds().Register(first); err != nil {
		t.Fatal(err)
	}
	boss := createGadget(w, first, "default", "boss", nil)
	configMap(w, "member", ofGadget(boss))
	collects(w, first)
	goroutines := goroutines(w) // with all controllers and the gadget kind
	if err := w.Admin.Kinds().Drop(first); err != nil {
		t.Fatal(err)
	}
	rounds := 1000
	if testing.Short() {
		rounds = 50
	}
	for i := range rounds {
		k := gadgetKind()
		if err := w.Admin.Kinds().Register(k); err != nil {
			t.Fatal(err)
		}
		if i%10 == 0 { // with an informer that has been seen to work
			collects(w, k)
		}
		if err := w.Admin.Kinds().Drop(k); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Informers.WaitForSync(w.Ctx); err != nil {
		t.Error(err)
	}
	if _, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "member"); err != nil {
		t.Errorf("what a gadget owns, while there are none: %v", err)
	}
	w.Eventually("nothing is left", func() error {
		if n := runtime.NumGoroutine(); n > goroutines {
			return fmt.Errorf("%d goroutines, there were %d", n, goroutines)
		}
		return nil
	})
}
