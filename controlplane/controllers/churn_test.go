package controllers_test

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
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/namespace"
	"keelson.dev/keelson/internal/virtual"
)

var gadgets = custom.Resource{Group: "example.com", Kind: "Gadget", Plural: "gadgets", Singular: "gadget", Namespaced: true}

func gadgetKind() *api.Kind {
	return custom.NewKind(gadgets, "v1", true, custom.NewStorage(gadgets, "v1"))
}

// createGadget stores a gadget, with an owner unless that is nil.
func (w *world) createGadget(k *api.Kind, ns, name string, owner *metav1.OwnerReference) api.Object {
	w.t.Helper()
	o := &custom.Object{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
	if owner != nil {
		o.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	out, err := w.admin.Do(w.ctx, &api.Request{Verb: api.VerbCreate, Kind: k, Namespace: ns, Object: o})
	if err != nil {
		w.t.Fatal(err)
	}
	return out.(api.Object)
}

func (w *world) gadgetGone(k *api.Kind, ns, name string) error {
	_, err := w.admin.Do(w.ctx, &api.Request{Verb: api.VerbGet, Kind: k, Namespace: ns, Name: name})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return fmt.Errorf("%s/%s: %w", ns, name, errors.Join(err, errors.New("is there")))
}

func ofGadget(o api.Object) *metav1.OwnerReference {
	yes := true
	return &metav1.OwnerReference{APIVersion: "example.com/v1", Kind: "Gadget", Name: o.GetName(), UID: o.GetUID(), BlockOwnerDeletion: &yes}
}

func ofConfigMap(o *corev1.ConfigMap) *metav1.OwnerReference {
	return &metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: o.Name, UID: o.UID}
}

func (w *world) configMap(name string, owner *metav1.OwnerReference) *corev1.ConfigMap {
	w.t.Helper()
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	if owner != nil {
		cm.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	made, err := client.Create(w.ctx, w.admin, cm)
	if err != nil {
		w.t.Fatal(err)
	}
	return made
}

// ofEveryKind returns a world with the controllers that watch every kind.
func ofEveryKind(t *testing.T) *world {
	w := newWorld(t, options{quiet: true, only: func(d controllers.Deps) []*controllers.Controller {
		return []*controllers.Controller{garbagecollector.New(d), namespace.New(d)}
	}})
	w.lead(controllers.Options{})
	return w
}

// collects checks that a gadget is deleted with its owner.
func (w *world) collects(k *api.Kind) {
	w.t.Helper()
	owner := w.configMap("owner", nil)
	w.createGadget(k, "default", "owned", ofConfigMap(owner))
	if err := client.Delete[*corev1.ConfigMap](w.ctx, w.admin, "default", "owner", metav1.DeleteOptions{}); err != nil {
		w.t.Fatal(err)
	}
	w.eventually("the owned gadget goes", func() error { return w.gadgetGone(k, "default", "owned") })
}

// A kind that is registered during a leadership is collected, as owner and as dependent, and is
// deleted with its namespace.
func TestNewKindsAreCollected(t *testing.T) {
	w := ofEveryKind(t)
	k := gadgetKind()
	if err := w.admin.Kinds().Register(k); err != nil {
		t.Fatal(err)
	}
	w.collects(k)
	for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationForeground, metav1.DeletePropagationBackground} {
		boss := w.createGadget(k, "default", "boss", nil)
		w.configMap("member", ofGadget(boss))
		w.createGadget(k, "default", "member", ofGadget(boss))
		_, err := w.admin.Do(w.ctx, &api.Request{Verb: api.VerbDelete, Kind: k, Namespace: "default", Name: "boss",
			Delete: metav1.DeleteOptions{PropagationPolicy: &policy}})
		if err != nil {
			t.Fatal(err)
		}
		w.eventually("all go, "+string(policy), func() error {
			_, err := client.Get[*corev1.ConfigMap](w.ctx, w.admin, "default", "member")
			if !apierrors.IsNotFound(err) {
				return fmt.Errorf("the config map: %v", err)
			}
			return errors.Join(w.gadgetGone(k, "default", "member"), w.gadgetGone(k, "default", "boss"))
		})
	}

	w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "short"}})
	w.createGadget(k, "short", "inside", nil)
	if err := client.Delete[*corev1.Namespace](w.ctx, w.admin, "", "short", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.eventually("the namespace goes", func() error {
		_, err := client.Get[*corev1.Namespace](w.ctx, w.admin, "", "short")
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("the namespace: %v", err)
		}
		return w.gadgetGone(k, "short", "inside")
	})
}

// The first object of a kind may be deleted before the kind has an informer: its dependents are
// still collected.
func TestFirstOwnersThatGoAtOnce(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := ofEveryKind(t)
		var all []string
		for i := range 200 {
			of := custom.Resource{Group: "example.com", Kind: fmt.Sprint("Fleeting", i), Plural: fmt.Sprint("fleeting", i), Singular: fmt.Sprint("fleeting", i), Namespaced: true}
			k := custom.NewKind(of, "v1", true, custom.NewStorage(of, "v1"))
			k.Definition = of.Plural + ".example.com" // its informer starts with its first object
			if err := w.admin.Kinds().Register(k); err != nil {
				t.Fatal(err)
			}
			owner := w.createGadget(k, "default", "a", nil)
			w.configMap(of.Plural, &metav1.OwnerReference{APIVersion: "example.com/v1", Kind: of.Kind, Name: "a", UID: owner.GetUID()})
			if _, err := w.admin.Do(w.ctx, &api.Request{Verb: api.VerbDelete, Kind: k, Namespace: "default", Name: "a"}); err != nil {
				t.Fatal(err)
			}
			all = append(all, of.Plural)
		}
		for _, name := range all {
			w.within(time.Minute, name+" goes", func() error { return gone[*corev1.ConfigMap](w, name) })
		}
	})
}

// goroutines returns the number of goroutines once it has been stable for a while.
func (w *world) goroutines() int {
	w.t.Helper()
	if err := w.informers.WaitForSync(w.ctx); err != nil {
		w.t.Fatal(err)
	}
	last, looks := 0, 0
	w.within(30*time.Second, "everything runs", func() error {
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
	if err := w.admin.Kinds().Register(first); err != nil {
		t.Fatal(err)
	}
	boss := w.createGadget(first, "default", "boss", nil)
	w.configMap("member", ofGadget(boss))
	w.collects(first)
	goroutines := w.goroutines() // with all controllers and the gadget kind
	if err := w.admin.Kinds().Drop(first); err != nil {
		t.Fatal(err)
	}
	rounds := 1000
	if testing.Short() {
		rounds = 50
	}
	for i := range rounds {
		k := gadgetKind()
		if err := w.admin.Kinds().Register(k); err != nil {
			t.Fatal(err)
		}
		if i%10 == 0 { // with an informer that has been seen to work
			w.collects(k)
		}
		if err := w.admin.Kinds().Drop(k); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.informers.WaitForSync(w.ctx); err != nil {
		t.Error(err)
	}
	if _, err := client.Get[*corev1.ConfigMap](w.ctx, w.admin, "default", "member"); err != nil {
		t.Errorf("what a gadget owns, while there are none: %v", err)
	}
	w.eventually("nothing is left", func() error {
		if n := runtime.NumGoroutine(); n > goroutines {
			return fmt.Errorf("%d goroutines, there were %d", n, goroutines)
		}
		return nil
	})
}
