package garbagecollector_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/namespace"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
)

// collecting is a world in which the garbage collector and the namespace controller run; runs counts reconciles.
func collecting(t *testing.T) (w *testcluster.Cluster, runs *atomic.Int64) {
	runs = &atomic.Int64{}
	w = testcluster.New(t, testcluster.Options{
		Controllers: func(d engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{garbagecollector.New(d), namespace.New(d)}
		},
		ChangeController: func(c *engine.Descriptor) {
			lead := c.Lead
			c.Lead = func(t *engine.Term) engine.Reconcile {
				reconcile := lead(t)
				return func(ctx context.Context, key engine.Key) (time.Duration, error) {
					runs.Add(1)
					return reconcile(ctx, key)
				}
			}
		},
	})
	w.Lead(engine.Options{})
	return w, runs
}

// ring creates n ConfigMaps in ns, each owned by the next, and the last by the first.
func ring(w *testcluster.Cluster, ns string, n int) {
	w.T.Helper()
	maps := make([]*corev1.ConfigMap, n)
	for i := range maps {
		name := fmt.Sprintf("m%d", i)
		w.CreateObject(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}})
		m, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, ns, name)
		if err != nil {
			w.T.Fatal(err)
		}
		maps[i] = m.DeepCopy()
	}
	for i, m := range maps {
		m.OwnerReferences = []metav1.OwnerReference{ownedBy(maps[(i+1)%n])}
		if _, err := client.Update(w.Ctx, w.Admin, m); err != nil {
			w.T.Fatal(err)
		}
	}
}

// ownedBy refers to a ConfigMap that waits for its dependent.
func ownedBy(m *corev1.ConfigMap) metav1.OwnerReference {
	yes := true
	return metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: m.Name, UID: m.UID,
		BlockOwnerDeletion: &yes}
}

func gone(w *testcluster.Cluster, ns string) error {
	left, err := client.List[*corev1.ConfigMap](w.Ctx, w.Admin, ns, metav1.ListOptions{})
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("%d objects are still there", len(left))
	}
	return err
}

// F71: circles of any length are collected, by deletions of one member and of the namespace.
func TestCircularOwners(t *testing.T) {
	w, _ := collecting(t)
	for _, n := range []int{1, 2, 3, 7} {
		for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationBackground,
			metav1.DeletePropagationForeground} {
			t.Run(fmt.Sprintf("%d %s", n, policy), func(t *testing.T) {
				ring(w, "default", n)
				if err := client.Delete[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "m0",
					metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
					t.Fatal(err)
				}
				w.Eventually("collecting the circle", func() error { return gone(w, "default") })
			})
		}
	}
	t.Run("namespace", func(t *testing.T) {
		w.CreateObject(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "doomed"}})
		ring(w, "doomed", 3)
		foreground := metav1.DeletePropagationForeground
		if err := client.Delete[*corev1.ConfigMap](w.Ctx, w.Admin, "doomed", "m1",
			metav1.DeleteOptions{PropagationPolicy: &foreground}); err != nil {
			t.Fatal(err)
		}
		if err := client.Delete[*corev1.Namespace](w.Ctx, w.Admin, "", "doomed", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.Eventually("the namespace goes", func() error {
			list, err := client.List[*corev1.Namespace](w.Ctx, w.Admin, "", metav1.ListOptions{})
			for _, n := range list {
				if n.Name == "doomed" {
					err = fmt.Errorf("the namespace is in phase %s", n.Status.Phase)
				}
			}
			return err
		})
	})
}

// A circle that waits for something does not keep the collector busy meanwhile.
func TestWaitingCircleIsQuiet(t *testing.T) {
	w, runs := collecting(t)
	ring(w, "default", 4)
	m, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "m0")
	if err != nil {
		t.Fatal(err)
	}
	w.CreateObject(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "held",
		Finalizers:      []string{"example.com/hold"},
		OwnerReferences: []metav1.OwnerReference{ownedBy(m)}}})
	foreground := metav1.DeletePropagationForeground
	if err := client.Delete[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "m0",
		metav1.DeleteOptions{PropagationPolicy: &foreground}); err != nil {
		t.Fatal(err)
	}
	w.Eventually("all members being deleted", func() error {
		list, err := client.List[*corev1.ConfigMap](w.Ctx, w.Admin, "default", metav1.ListOptions{})
		for _, m := range list {
			if m.DeletionTimestamp == nil {
				err = fmt.Errorf("%s is not", m.Name)
			}
		}
		if err == nil && len(list) != 4 {
			t.Fatalf("%d members are left while one has a dependent", len(list))
		}
		return err
	})
	before := runs.Load()
	for i := range 20 { // time passes: each of these passes through the collector
		name := fmt.Sprintf("other%d", i)
		w.CreateObject(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "never",
				UID: "never"}}}})
		w.Eventually("collecting another", func() error {
			if _, err := client.Get[*corev1.Secret](w.Ctx, w.Admin, "default", name); err == nil {
				return fmt.Errorf("%s is still there", name)
			}
			return nil
		})
	}
	if n := runs.Load() - before; n > 300 {
		t.Errorf("%d reconciles while 20 objects were made and collected", n)
	}
	s, err := client.Get[*corev1.Secret](w.Ctx, w.Admin, "default", "held")
	if err != nil {
		t.Fatal(err)
	}
	s = s.DeepCopy()
	s.Finalizers = nil
	if _, err := client.Update(w.Ctx, w.Admin, s); err != nil {
		t.Fatal(err)
	}
	w.Eventually("collecting the circle", func() error { return gone(w, "default") })
}

// A reference with an owner's UID under another name has no effect on that owner.
func TestMisnamedOwner(t *testing.T) {
	w, _ := collecting(t)
	w.CreateObject(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "owner"}})
	owner, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "owner")
	if err != nil {
		t.Fatal(err)
	}
	misnamed := ownedBy(owner)
	misnamed.Name = "another"
	w.CreateObject(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "misnamed",
		OwnerReferences: []metav1.OwnerReference{misnamed}}})
	w.Eventually("collecting what nobody owns", func() error {
		if _, err := client.Get[*corev1.Secret](w.Ctx, w.Admin, "default", "misnamed"); err == nil {
			return fmt.Errorf("it is still there")
		}
		return nil
	})
	w.CreateObject(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "owned",
		OwnerReferences: []metav1.OwnerReference{ownedBy(owner), misnamed}}})
	w.Eventually("letting go of the misnamed owner", func() error {
		s, err := client.Get[*corev1.Secret](w.Ctx, w.Admin, "default", "owned")
		if err != nil {
			t.Fatalf("an object whose owner exists: %v", err)
		}
		if len(s.OwnerReferences) == 0 {
			t.Fatal("it lost the owner that exists as well")
		}
		if len(s.OwnerReferences) == 2 {
			return fmt.Errorf("still owned by %v", s.OwnerReferences)
		}
		return nil
	})
}

// A dependent that is in the API but not yet cached still blocks a foreground deletion.
func TestForegroundAsksTheAPI(t *testing.T) {
	w, _ := collecting(t)
	w.CreateObject(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "owner"}})
	owner, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "owner")
	if err != nil {
		t.Fatal(err)
	}
	secrets := w.Admin.Kinds().ByType(&corev1.Secret{})
	w.Calls.Late.Store(&testcluster.LateObject{Kind: secrets, Admin: w.Admin,
		Object: &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "unseen", Finalizers: []string{"example.com/hold"},
			OwnerReferences: []metav1.OwnerReference{ownedBy(owner)}}}})
	foreground := metav1.DeletePropagationForeground
	if err := client.Delete[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "owner",
		metav1.DeleteOptions{PropagationPolicy: &foreground}); err != nil {
		t.Fatal(err)
	}
	w.Eventually("deleting the dependent", func() error {
		if _, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "owner"); err != nil {
			t.Fatalf("the owner went before its dependent: %v", err)
		}
		s, err := client.Get[*corev1.Secret](w.Ctx, w.Admin, "default", "unseen")
		if err == nil && s.DeletionTimestamp == nil {
			err = fmt.Errorf("it is not being deleted")
		}
		return err
	})
}
