package engine

import (
	"context"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
)

// ControllerIndex indexes objects by the UID of their controller (the owner reference with
// controller: true). Objects without a controller are indexed by OrphansOf(namespace).
const ControllerIndex = "keelson.controller"

// OrphansOf returns the value of ControllerIndex for the objects of a namespace that have no
// controller.
func OrphansOf(namespace string) string { return "orphans/" + namespace }

// IndexControllers adds ControllerIndex to an informer.
func IndexControllers(inf cache.SharedIndexInformer) {
	Index(inf, ControllerIndex, func(o api.Object) []string {
		if ref := metav1.GetControllerOfNoCopy(o); ref != nil {
			return []string{string(ref.UID)}
		}
		return []string{OrphansOf(o.GetNamespace())}
	})
}

// OwnersOf returns a keys function for a Watch. It returns the owners of the given kind that a
// change of an object affects: the controllers of the object before and after the change. For an
// object without a controller these are the owners that would adopt it. selector returns the
// selector of an owner; an owner with a nil or empty selector adopts nothing.
func OwnersOf[O, T api.Object](
	owners cache.SharedIndexInformer, kind schema.GroupKind, selector func(O) labels.Selector,
) func(Change[T]) []Key {
	return func(c Change[T]) []Key {
		var keys []Key
		add := func(o T) (controlled bool) {
			ref := metav1.GetControllerOfNoCopy(o)
			if ref != nil && ref.Kind == kind.Kind && GroupOf(ref) == kind.Group {
				keys = append(keys, Key{Namespace: o.GetNamespace(), Name: ref.Name})
			}
			return ref != nil
		}
		if c.Type == Updated && !hasSameController(c.Old, c.New) {
			add(c.Old)
		}
		if add(c.New) || c.Type == Deleted || len(c.New.GetLabels()) == 0 {
			return keys
		}
		for _, owner := range CachedBy[O](owners, NamespaceIndex, c.New.GetNamespace()) {
			if sel := selector(owner); sel != nil && !sel.Empty() && sel.Matches(labels.Set(c.New.GetLabels())) {
				keys = append(keys, KeyOf(owner))
			}
		}
		return keys
	}
}

// hasSameController reports whether two versions of an object have the same controller. It also
// returns true if neither version has a controller.
func hasSameController(a, b api.Object) bool {
	was, is := metav1.GetControllerOfNoCopy(a), metav1.GetControllerOfNoCopy(b)
	if was == nil || is == nil {
		return was == is
	}
	return was.UID == is.UID
}

// GroupOf returns the API group of an owner reference, regardless of its version. It returns "" for
// an invalid API version.
func GroupOf(ref *metav1.OwnerReference) string {
	gv, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return ""
	}
	return gv.Group
}

// SelectorOf converts the selector of an owner. It returns nil for a selector that is invalid or
// selects everything: such a selector, which validation refuses, must not make the owner adopt a
// whole namespace.
func SelectorOf(s *metav1.LabelSelector) labels.Selector {
	selector, err := metav1.LabelSelectorAsSelector(s)
	if err != nil || selector.Empty() {
		return nil
	}
	return selector
}

// OwnershipDecision is the result of SortByOwnership: the objects that an owner controls, adopts
// and releases.
type OwnershipDecision[T api.Object] struct {
	Owned   []T // controlled by the owner, and matched by its selector
	Adopt   []T // matched by the selector, and without a controller
	Release []T // controlled by the owner, but no longer matched by its selector
}

// SortByOwnership decides which candidates owner controls, adopts and releases. An object is
// matched if it matches selector and passes all filters. An owner that is being deleted adopts and
// releases nothing. An object that is being deleted is not adopted.
func SortByOwnership[T api.Object](
	owner api.Object, selector labels.Selector, candidates []T, filters ...func(T) bool,
) OwnershipDecision[T] {
	var c OwnershipDecision[T]
	leaving := owner.GetDeletionTimestamp() != nil
	for _, obj := range candidates {
		matches := selector.Matches(labels.Set(obj.GetLabels())) &&
			!slices.ContainsFunc(filters, func(passes func(T) bool) bool { return !passes(obj) })
		ref := metav1.GetControllerOfNoCopy(obj)
		switch {
		case ref != nil && ref.UID != owner.GetUID():
		case ref != nil && matches:
			c.Owned = append(c.Owned, obj)
		case ref != nil && !leaving:
			c.Release = append(c.Release, obj)
		case ref == nil && matches && !leaving && obj.GetDeletionTimestamp() == nil &&
			obj.GetNamespace() == owner.GetNamespace():
			c.Adopt = append(c.Adopt, obj)
		}
	}
	return c
}

// ApplyOwnership performs the adoptions and releases of an OwnershipDecision. It returns the
// objects that the owner controls afterwards. Before it adopts an object, it reads the owner from
// the API, because the owner may have been recreated under the same name. Objects that no longer
// exist are skipped. An adopted object gets the given finalizers, and a released object loses them.
func ApplyOwnership[O, T api.Object](
	ctx context.Context, c *client.Client, v *View[T], owner O, ref metav1.OwnerReference, claims OwnershipDecision[T],
	finalizers ...string,
) ([]T, error) {
	owned := claims.Owned
	if len(claims.Adopt) > 0 {
		fresh, err := client.Get[O](ctx, c, owner.GetNamespace(), owner.GetName())
		if err != nil {
			return nil, fmt.Errorf("reading %s before adopting: %w", storeKey(owner), err)
		}
		if fresh.GetUID() != owner.GetUID() || fresh.GetDeletionTimestamp() != nil {
			return nil, RaceError("%s no longer exists or is being deleted: adopting nothing", storeKey(owner))
		}
	}
	for _, obj := range claims.Adopt {
		took := obj.DeepCopyObject().(T)
		took.SetOwnerReferences(append(WithoutOwners(took.GetOwnerReferences(), owner.GetUID()), ref))
		for _, f := range finalizers {
			if !slices.Contains(took.GetFinalizers(), f) {
				took.SetFinalizers(append(took.GetFinalizers(), f))
			}
		}
		took, err := client.Update(ctx, c, took)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("adopting %s for %s: %w", storeKey(obj), storeKey(owner), err)
		}
		v.RecordWrite(took)
		owned = append(owned, took)
	}
	for _, obj := range claims.Release {
		free := obj.DeepCopyObject().(T)
		free.SetOwnerReferences(WithoutOwners(free.GetOwnerReferences(), owner.GetUID()))
		free.SetFinalizers(slices.DeleteFunc(free.GetFinalizers(), func(f string) bool {
			return slices.Contains(finalizers, f)
		}))
		free, err := client.Update(ctx, c, free)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("releasing %s from %s: %w", storeKey(obj), storeKey(owner), err)
		}
		v.RecordWrite(free)
	}
	return owned, nil
}

// WithoutOwners returns those of the owner references refs that do not refer to an object with one
// of the given UIDs.
func WithoutOwners(refs []metav1.OwnerReference, uids ...types.UID) []metav1.OwnerReference {
	var out []metav1.OwnerReference
next:
	for _, r := range refs {
		for _, uid := range uids {
			if r.UID == uid {
				continue next
			}
		}
		out = append(out, r)
	}
	return out
}

// DeleteOnlyUID returns delete options with a UID precondition: they delete o, but not a later
// object of the same name.
func DeleteOnlyUID(o metav1.Object) metav1.DeleteOptions {
	uid := o.GetUID()
	return metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}
}
