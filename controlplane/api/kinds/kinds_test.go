package kinds_test

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestTableIsWhole(t *testing.T) {
	scheme := api.Scheme()
	ks := kinds.All()
	for _, k := range ks.All() {
		t.Run(k.GVK.Kind, func(t *testing.T) {
			o := k.Type.New()
			gvks, _, err := scheme.ObjectKinds(o)
			if err != nil || gvks[0] != k.GVK {
				t.Errorf("the scheme knows %T as %v, %v; want %v", o, gvks, err, k.GVK)
			}
			if ks.ByType(o) != k || ks.ByGVK(k.GVK) != k || ks.ByResource(k.GVR()) != k {
				t.Error("not found by its type, GVK and resource")
			}
			if k.Naming.Singular == "" || k.Resource == "" {
				t.Error("it lacks a name")
			}
			for name, s := range k.Subresources {
				if len(s.Verbs) == 0 {
					t.Errorf("%s has no verbs", name)
				}
				if (s.View == nil) != (s.Merge == nil) {
					t.Errorf("%s has one of View and Merge", name)
				}
			}
			if k.Serving.Virtual {
				return
			}
			if gvks, _, err := scheme.ObjectKinds(k.Type.NewList()); err != nil || gvks[0] != k.ListGVK() {
				t.Errorf("list: %v, %v; want %v", gvks, err, k.ListGVK())
			}
			if got := len(k.Lists.Row(o, kindstest.Now)); got != len(k.Lists.Columns) {
				t.Errorf("%d cells for %d columns", got, len(k.Lists.Columns))
			}
			named := false
			for _, c := range k.Lists.Columns {
				named = named || c.Format == "name"
			}
			if !named {
				t.Error("no column has format name")
			}
			if k.Validation.Object == nil || k.Validation.Update == nil {
				t.Error("nothing validates it")
			}
		})
	}
	if ks.ByType((*corev1.Pod)(nil)).Resource != "pods" || ks.ByType(corev1.Pod{}).Resource != "pods" ||
		ks.ByType(7) != nil || ks.ByType(nil) != nil {
		t.Error("ByType does not take nil pointers, values and strangers")
	}
}

// What is defaulted once stays as it is when defaulted again, and none of the
// functions of a kind panics at any object: both halves of an API server must be
// able to trust that.
func TestAnyObject(t *testing.T) {
	for _, k := range kinds.All().All() {
		if k.Serving.Virtual {
			continue
		}
		t.Run(k.GVK.Kind, func(t *testing.T) {
			for seed := range int64(60) {
				obj, old := k.Type.New(), k.Type.New()
				kindstest.NewFiller(seed).Fill(obj)
				kindstest.NewFiller(seed + 1000).Fill(old)
				if k.Writes.Default != nil {
					k.Writes.Default(obj)
					k.Writes.Default(old)
					again := obj.DeepCopyObject().(api.Object)
					if k.Writes.Default(again); !fieldrules.SemanticEqual(again, obj) {
						t.Fatalf("seed %d: defaulting twice is not defaulting once", seed)
					}
				}
				before := old.DeepCopyObject()
				tryAll(k, obj.DeepCopyObject().(api.Object), old)
				if !fieldrules.SemanticEqual(before, old) {
					t.Fatalf("seed %d: the stored object was changed", seed)
				}
				tryAll(k, k.Type.New(), old) // never defaulted
			}
		})
	}
}

func tryAll(k *api.Kind, obj, old api.Object) {
	k.Validation.Object(obj)
	k.Validation.Update(obj, old)
	k.Lists.Row(obj, kindstest.Now)
	stored := obj
	if k.Conversion != nil {
		stored, _ = k.Conversion.To(context.Background(), obj)
	}
	if k.Lists.Fields != nil {
		k.Lists.Fields(stored)
	}
	if k.Commit.Reservations != nil {
		k.Commit.Reservations(obj)
	}
	if k.Deletion.GracePeriod != nil {
		k.Deletion.GracePeriod(obj, nil)
	}
	for _, name := range fieldrules.SortedKeys(k.Subresources) {
		s := k.Subresources[name]
		if s.PrepareUpdate != nil {
			o := obj.DeepCopyObject().(api.Object)
			s.PrepareUpdate(o, old)
			s.ValidateUpdate(o, old)
		}
		if s.View != nil {
			_ = s.Merge(obj, s.View(obj))
		}
	}
	if k.Writes.PrepareUpdate != nil {
		k.Writes.PrepareUpdate(obj, old)
	}
	if k.Writes.PrepareCreate != nil {
		k.Writes.PrepareCreate(obj)
	}
}

// A mutation of what update functions made must not reach the stored object.
func TestUpdateSharesNothingWithStored(t *testing.T) {
	k := kinds.All().ByType((*corev1.Pod)(nil))
	old := kindstest.Load[*corev1.Pod](t, kindstest.PodText)
	old.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady}}
	obj := old.DeepCopy()
	k.Writes.PrepareUpdate(obj, old)
	obj.Status.Conditions[0].Type = "Changed"
	k.Subresources["status"].PrepareUpdate(obj, old)
	obj.Spec.Containers[0].Image = "changed"
	if old.Status.Conditions[0].Type != corev1.PodReady || old.Spec.Containers[0].Image == "changed" {
		t.Error("the stored object was changed")
	}
}
