package kinds

import (
	"context"
	"math/rand"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/randfill"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

var t0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// load reads an object and defaults it, as the pipeline does before it validates.
func load[P api.Object](t *testing.T, text string) P {
	t.Helper()
	var zero P
	k := All().ByType(zero)
	o := k.New()
	if err := yaml.UnmarshalStrict([]byte(text), o); err != nil {
		t.Fatalf("%v in:\n%s", err, text)
	}
	if o.GetNamespace() == "" && k.Namespaced {
		o.SetNamespace("default")
	}
	if k.Default != nil {
		k.Default(o)
	}
	return o.(P)
}

func TestTableIsWhole(t *testing.T) {
	scheme := api.Scheme()
	ks := All()
	for _, k := range ks.All() {
		t.Run(k.GVK.Kind, func(t *testing.T) {
			o := k.New()
			gvks, _, err := scheme.ObjectKinds(o)
			if err != nil || gvks[0] != k.GVK {
				t.Errorf("the scheme knows %T as %v, %v; want %v", o, gvks, err, k.GVK)
			}
			if ks.ByType(o) != k || ks.ByGVK(k.GVK) != k || ks.ByResource(k.GVR()) != k {
				t.Error("not found by its type, GVK and resource")
			}
			if k.Singular == "" || k.Resource == "" {
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
			if k.Virtual {
				return
			}
			if gvks, _, err := scheme.ObjectKinds(k.NewList()); err != nil || gvks[0] != k.ListGVK() {
				t.Errorf("list: %v, %v; want %v", gvks, err, k.ListGVK())
			}
			if got := len(k.Row(o, t0)); got != len(k.Columns) {
				t.Errorf("%d cells for %d columns", got, len(k.Columns))
			}
			named := false
			for _, c := range k.Columns {
				named = named || c.Format == "name"
			}
			if !named {
				t.Error("no column has format name")
			}
			if k.Validate == nil || k.ValidateUpdate == nil {
				t.Error("nothing validates it")
			}
		})
	}
	if ks.ByType((*corev1.Pod)(nil)).Resource != "pods" || ks.ByType(corev1.Pod{}).Resource != "pods" || ks.ByType(7) != nil || ks.ByType(nil) != nil {
		t.Error("ByType does not take nil pointers, values and strangers")
	}
}

// filler makes random objects: every field, also nonsense, is possible.
func filler(seed int64) *randfill.Filler {
	return randfill.New().RandSource(rand.NewSource(seed)).NilChance(0.4).NumElements(0, 3).MaxDepth(14).Funcs(
		func(q *resource.Quantity, c randfill.Continue) {
			*q = *resource.NewMilliQuantity(c.Int63n(5000)-500, resource.DecimalSI)
		},
		func(x *metav1.Time, c randfill.Continue) {
			*x = metav1.NewTime(t0.Add(-time.Duration(c.Int63n(int64(time.Hour)))))
		},
		func(x *metav1.MicroTime, c randfill.Continue) { *x = metav1.NewMicroTime(t0) },
		func(x *intstr.IntOrString, c randfill.Continue) { *x = intstr.FromInt32(int32(c.Intn(70000))) },
		func(x *runtime.RawExtension, _ randfill.Continue) {},
		func(x *metav1.FieldsV1, _ randfill.Continue) {},
		func(x *storagev1.VolumeAttachmentSource, c randfill.Continue) {},
		func(x *corev1.ServiceType, c randfill.Continue) {
			*x = []corev1.ServiceType{"", "ClusterIP", "NodePort", "LoadBalancer", "ExternalName", "Other"}[c.Intn(6)]
		},
	)
}

// What is defaulted once stays as it is when defaulted again, and none of the
// functions of a kind panics at any object: both halves of an API server must be
// able to trust that.
func TestAnyObject(t *testing.T) {
	for _, k := range All().All() {
		if k.Virtual {
			continue
		}
		t.Run(k.GVK.Kind, func(t *testing.T) {
			for seed := range int64(60) {
				obj, old := k.New(), k.New()
				filler(seed).Fill(obj)
				filler(seed + 1000).Fill(old)
				if k.Default != nil {
					k.Default(obj)
					k.Default(old)
					again := obj.DeepCopyObject().(api.Object)
					if k.Default(again); !fieldrules.SemanticEqual(again, obj) {
						t.Fatalf("seed %d: defaulting twice is not defaulting once", seed)
					}
				}
				before := old.DeepCopyObject()
				tryAll(k, obj.DeepCopyObject().(api.Object), old)
				if !fieldrules.SemanticEqual(before, old) {
					t.Fatalf("seed %d: the stored object was changed", seed)
				}
				tryAll(k, k.New(), old) // never defaulted
			}
		})
	}
}

func tryAll(k *api.Kind, obj, old api.Object) {
	k.Validate(obj)
	k.ValidateUpdate(obj, old)
	k.Row(obj, t0)
	stored := obj
	if k.Conversion != nil {
		stored, _ = k.Conversion.To(context.Background(), obj)
	}
	if k.Fields != nil {
		k.Fields(stored)
	}
	if k.Reservations != nil {
		k.Reservations(obj)
	}
	if k.GracePeriod != nil {
		k.GracePeriod(obj, nil)
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
	if k.PrepareUpdate != nil {
		k.PrepareUpdate(obj, old)
	}
	if k.PrepareCreate != nil {
		k.PrepareCreate(obj)
	}
}

// A mutation of what update functions made must not reach the stored object.
func TestUpdateSharesNothingWithStored(t *testing.T) {
	k := All().ByType((*corev1.Pod)(nil))
	old := load[*corev1.Pod](t, podText)
	old.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady}}
	obj := old.DeepCopy()
	k.PrepareUpdate(obj, old)
	obj.Status.Conditions[0].Type = "Changed"
	k.Subresources["status"].PrepareUpdate(obj, old)
	obj.Spec.Containers[0].Image = "changed"
	if old.Status.Conditions[0].Type != corev1.PodReady || old.Spec.Containers[0].Image == "changed" {
		t.Error("the stored object was changed")
	}
}

const podText = `
metadata: {name: web}
spec:
  containers:
  - {name: web, image: nginx}
`
