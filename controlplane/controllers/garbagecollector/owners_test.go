package garbagecollector_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// ownership is a graph of objects of several kinds, in a namespace and above, that own each other.
type ownership struct {
	w       *testcluster.Cluster
	random  *rand.Rand
	objects []api.Object  // by number
	owners  map[int][]int // owners of each object, by number; absentOwner and strangeOwner stand for no object
	steps   []string      // printed with a failure
	missing bool          // some owners were never there
}

const (
	absentOwner  = -1 // is not there
	strangeOwner = -2 // cannot be judged, so that its dependents stay
)

// grow creates a number of objects with random owners while the collector is stopped.
func (o *ownership) grow(round, n int) {
	for i := range n {
		meta := metav1.ObjectMeta{Name: fmt.Sprintf("r%d-%d", round, i), Namespace: "default"}
		var obj api.Object
		switch o.random.IntN(4) {
		case 0:
			meta.Namespace = ""
			obj = &rbacv1.ClusterRole{ObjectMeta: meta}
		case 1:
			obj = &corev1.Secret{ObjectMeta: meta}
		default:
			obj = &corev1.ConfigMap{ObjectMeta: meta}
		}
		o.w.CreateObject(obj)
		o.objects = append(o.objects, o.fetch(obj))
	}
	for i, obj := range o.objects {
		var refs []metav1.OwnerReference
		for range o.random.IntN(4) {
			ref, owner := o.reference(obj)
			refs = append(refs, ref)
			o.owners[i] = append(o.owners[i], owner)
			if o.random.IntN(6) == 0 { // duplicate reference, sometimes with other fields
				again := ref
				again.BlockOwnerDeletion = nil
				refs = append(refs, again)
			}
		}
		if len(refs) == 0 {
			continue
		}
		next := obj.DeepCopyObject().(api.Object)
		next.SetOwnerReferences(refs)
		if _, err := o.w.Admin.Do(o.w.Ctx, &api.Request{Verb: api.VerbUpdate, Kind: o.w.Admin.Kinds().ByType(obj),
			Namespace: obj.GetNamespace(),
			Name:      obj.GetName(), Object: next}); err != nil {
			o.w.T.Fatal(err)
		}
		o.objects[i] = o.fetch(obj)
		o.steps = append(o.steps, fmt.Sprintf("%T %d owned by %v", obj, i, o.owners[i]))
	}
}

// reference returns a reference to a random owner, or to an owner that is absent in one of several
// ways, and that owner's number.
func (o *ownership) reference(of api.Object) (metav1.OwnerReference, int) {
	n := o.random.IntN(len(o.objects))
	owner := o.objects[n]
	gvk := o.w.Admin.Kinds().ByType(owner).GVK
	block := o.random.IntN(2) == 0
	ref := metav1.OwnerReference{APIVersion: gvk.GroupVersion().String(), Kind: gvk.Kind, Name: owner.GetName(),
		UID: owner.GetUID(), BlockOwnerDeletion: &block}
	if of.GetNamespace() == "" && owner.GetNamespace() != "" {
		return ref, strangeOwner // a cluster-scoped object cannot have a namespaced owner
	}
	if !o.missing {
		return ref, n
	}
	switch o.random.IntN(12) {
	case 0:
		ref.UID = types.UID("other-" + string(ref.UID)) // an owner of this name was there before
		return ref, absentOwner
	case 1:
		ref.Name += "x" // nothing has this name
		return ref, absentOwner
	case 2:
		if of.GetNamespace() != "" {
			ref.APIVersion, ref.Kind = "v1", "ServiceAccount" // nothing of this kind has the name
			return ref, absentOwner
		}
	case 3:
		ref.Kind = "Unheard"
		return ref, strangeOwner
	}
	return ref, n
}

func (o *ownership) fetch(obj api.Object) api.Object {
	o.w.T.Helper()
	got, err := o.w.Admin.Do(o.w.Ctx, &api.Request{Verb: api.VerbGet, Kind: o.w.Admin.Kinds().ByType(obj),
		Namespace: obj.GetNamespace(), Name: obj.GetName()})
	if err != nil {
		o.w.T.Fatal(err)
	}
	return got.(api.Object)
}

func (o *ownership) delete(n int, policy metav1.DeletionPropagation) {
	o.w.T.Helper()
	obj := o.objects[n]
	o.steps = append(o.steps, fmt.Sprintf("%s deletion of %d", policy, n))
	_, err := o.w.Admin.Do(o.w.Ctx, &api.Request{Verb: api.VerbDelete, Kind: o.w.Admin.Kinds().ByType(obj),
		Namespace: obj.GetNamespace(),
		Name:      obj.GetName(), Delete: metav1.DeleteOptions{PropagationPolicy: &policy}})
	if err != nil && !apierrors.IsNotFound(err) {
		o.w.T.Fatal(err)
	}
}

// left are the numbers of the objects that are still there.
func (o *ownership) left() (out []int) {
	for i, obj := range o.objects {
		if _, err := o.w.Admin.Do(o.w.Ctx, &api.Request{Verb: api.VerbGet, Kind: o.w.Admin.Kinds().ByType(obj),
			Namespace: obj.GetNamespace(), Name: obj.GetName()}); err == nil {
			out = append(out, i)
		}
	}
	return out
}

// want returns the objects that stay after deletions, computed slowly from the whole graph at once.
func (o *ownership) want(gone map[int]bool) (out []int) {
	there := map[int]bool{}
	for i := range o.objects {
		there[i] = !gone[i]
	}
	for changed := true; changed; {
		changed = false
		above := o.above(there)
		for i := range o.objects {
			lost, held := false, false
			for j := range o.objects { // i and the members of its circle
				if j != i && !(above[i][j] && above[j][i]) {
					continue
				}
				for _, owner := range o.owners[j] {
					absent := owner == absentOwner || owner >= 0 && !there[owner]
					lost = lost || absent
					held = held || owner == strangeOwner || !absent && owner != i && !above[owner][i]
				}
			}
			if there[i] && lost && !held {
				there[i], changed = false, true
			}
		}
	}
	for i := range o.objects {
		if there[i] {
			out = append(out, i)
		}
	}
	return out
}

// above returns the direct and indirect owners of each object.
func (o *ownership) above(there map[int]bool) map[int]map[int]bool {
	out := map[int]map[int]bool{}
	for i := range o.objects {
		out[i] = map[int]bool{}
		for _, owner := range o.owners[i] {
			if owner >= 0 && there[i] && there[owner] {
				out[i][owner] = true
			}
		}
	}
	for b := range o.objects {
		for a := range o.objects {
			if out[a][b] {
				maps.Copy(out[a], out[b])
			}
		}
	}
	return out
}

// F71: random graphs over kinds, with circles, owners that are absent in every way, and duplicate
// references, end as the slow twin computes, through deletions of all policies and changes of
// leader.
func TestRandomOwners(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
			Controllers: func(d engine.Deps) []*engine.Descriptor {
				return []*engine.Descriptor{garbagecollector.New(d)}
			}})
		var settled []*ownership
		var stay [][]int
		for round := range 80 {
			o := &ownership{w: w, random: rand.New(rand.NewPCG(uint64(round), 7)), owners: map[int][]int{},
				missing: round%2 == 0}
			o.grow(round, 1+o.random.IntN(8))
			gone := map[int]bool{}
			if !o.missing { // the result of an orphan deletion otherwise depends on the order
				n := o.random.IntN(len(o.objects))
				o.delete(n, metav1.DeletePropagationOrphan)
				gone[n] = true
				for i := range o.owners {
					o.owners[i] = slices.DeleteFunc(o.owners[i], func(owner int) bool { return owner == n })
				}
			}
			stop := w.Lead(engine.Options{})
			if !o.missing {
				o.settles(round, gone)
			}
			for range o.random.IntN(4) {
				n := o.random.IntN(len(o.objects))
				gone[n] = true
				o.delete(n, []metav1.DeletionPropagation{metav1.DeletePropagationBackground,
					metav1.DeletePropagationForeground}[o.random.IntN(2)])
				if o.random.IntN(3) == 0 {
					stop()
					stop = w.Lead(engine.Options{})
				}
			}
			stay = append(stay, o.settles(round, gone))
			settled = append(settled, o)
			stop()
		}
		for round, o := range settled {
			if left := o.left(); !slices.Equal(left, stay[round]) {
				t.Errorf("round %d settled with %v, and has %v in the end", round, stay[round], left)
			}
		}
	})
}

// settles waits until only the objects remain that the twin computes.
func (o *ownership) settles(round int, gone map[int]bool) (want []int) {
	o.w.T.Helper()
	want = o.want(gone)
	o.w.Eventually(fmt.Sprintf("round %d\n%s\n", round, strings.Join(o.steps, "\n")), func() error {
		if left := o.left(); !slices.Equal(left, want) {
			return fmt.Errorf("%v are left, want %v", left, want)
		}
		return nil
	})
	return want
}

// The collector takes a lost reference out of a definition that it has in the light form, without its schemas: they stay.
func TestOwnersOfPackedDefinitions(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{Controllers: func(d engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{garbagecollector.New(d)}
		}})
		w.CreateObject(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "owner"}})
		found, err := w.Admin.Do(w.Ctx,
			&api.Request{Verb: api.VerbGet, Kind: w.Admin.Kinds().ByType(&corev1.Namespace{}), Name: "owner"})
		if err != nil {
			t.Fatal(err)
		}
		props := map[string]apiextensionsv1.JSONSchemaProps{}
		for i := range 60 {
			props[fmt.Sprintf("field%d", i)] = apiextensionsv1.JSONSchemaProps{Type: "string",
				Description: fmt.Sprintf("This text says what field %d is for.", i)}
		}
		c := &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: "as.example.com",
			OwnerReferences: []metav1.OwnerReference{
				{APIVersion: "v1", Kind: "Namespace", Name: "owner", UID: found.(api.Object).GetUID()},
				{APIVersion: "v1", Kind: "Namespace", Name: "absent", UID: "1"},
			}}}
		c.Spec = apiextensionsv1.CustomResourceDefinitionSpec{Group: "example.com",
			Scope: apiextensionsv1.ClusterScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "as", Kind: "A"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{Name: "v1", Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{
					OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", Properties: props}}}}}
		w.CreateObject(c)
		cached := client.Informer[*apiextensionsv1.CustomResourceDefinition](w.Informers)
		w.Eventually("the definition is seen", func() error {
			if all := engine.CachedAll[*apiextensionsv1.CustomResourceDefinition](cached); len(all) != 1 {
				return fmt.Errorf("%d definitions", len(all))
			} else if s := all[0].Spec.Versions[0].Schema.OpenAPIV3Schema; len(s.Properties) > 0 {
				t.Fatalf("it is not in the light form, which this test is about: %v", s)
			}
			return nil
		})
		w.Lead(engine.Options{})
		w.Eventually("the lost reference is taken out", func() error {
			got, err := client.Get[*apiextensionsv1.CustomResourceDefinition](w.Ctx, w.Admin, "", c.Name)
			if err != nil {
				return err
			}
			if s := got.Spec.Versions[0].Schema.OpenAPIV3Schema; s.Properties["field59"].Description !=
				"This text says what field 59 is for." {
				t.Fatalf("the schema became %v", s)
			}
			if refs := got.OwnerReferences; len(refs) != 1 || refs[0].Name != "owner" {
				return fmt.Errorf("owners: %v", refs)
			}
			return nil
		})
	})
}
