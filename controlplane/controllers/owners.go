package controllers

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

// ControllerIndex finds objects by the UID of their controlling owner, and those
// without one under OrphansOf(namespace).
const ControllerIndex = "keelson.controller"

// OrphansOf is the value of ControllerIndex under which a namespace's uncontrolled objects stand.
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

// OwnersOf maps the change of an object to the owners of one kind that it concerns: its controller before and after,
// or, when it has none, those that would adopt it. selector is that of an owner; nothing is adopted by an owner
// without one.
func OwnersOf[O, T api.Object](owners cache.SharedIndexInformer, kind schema.GroupKind, selector func(O) labels.Selector) func(Change[T]) []Key {
	return func(c Change[T]) []Key {
		var keys []Key
		add := func(o T) (controlled bool) {
			ref := metav1.GetControllerOfNoCopy(o)
			if ref != nil && ref.Kind == kind.Kind && GroupOf(ref) == kind.Group {
				keys = append(keys, Key{Namespace: o.GetNamespace(), Name: ref.Name})
			}
			return ref != nil
		}
		if c.Type == Updated && !sameController(c.Old, c.New) {
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

// sameController says whether two states of an object have the same controller, or none.
func sameController(a, b api.Object) bool {
	was, is := metav1.GetControllerOfNoCopy(a), metav1.GetControllerOfNoCopy(b)
	if was == nil || is == nil {
		return was == is
	}
	return was.UID == is.UID
}

// GroupOf is the API group of an owner, in whatever version it is referred to.
func GroupOf(ref *metav1.OwnerReference) string {
	gv, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return ""
	}
	return gv.Group
}

// SelectorOf is the selector of an owner; nil for one that is not valid or selects everything, which validation
// refuses: it must not claim a whole namespace.
func SelectorOf(s *metav1.LabelSelector) labels.Selector {
	selector, err := metav1.LabelSelectorAsSelector(s)
	if err != nil || selector.Empty() {
		return nil
	}
	return selector
}

// Claims says to whom candidates belong.
type Claims[T api.Object] struct {
	Owned   []T // controlled by the owner and matching its selector
	Adopt   []T // matching, controlled by nobody: to be taken
	Release []T // controlled by the owner but no longer matching: to be let go
}

// SortClaims decides ownership: an object matches if it has the selector's labels and passes all filters. An owner that is
// being deleted adopts and releases nothing, and no object that is being deleted is adopted.
func SortClaims[T api.Object](owner api.Object, selector labels.Selector, candidates []T, filters ...func(T) bool) Claims[T] {
	var c Claims[T]
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
		case ref == nil && matches && !leaving && obj.GetDeletionTimestamp() == nil && obj.GetNamespace() == owner.GetNamespace():
			c.Adopt = append(c.Adopt, obj)
		}
	}
	return c
}

// Claim performs what SortClaims decided and returns what the owner controls afterwards.
// Before it adopts it asks the API, not the cache, whether the owner is still there: T of
// an owner recreated under the same name must not be taken for the old one. An object that is gone is neither adopted nor
// released. An adopted object gets the finalizers too, and a released object loses them.
func Claim[O, T api.Object](
	ctx context.Context, c *client.Client, v *View[T], owner O, ref metav1.OwnerReference, claims Claims[T], finalizers ...string,
) ([]T, error) {
	owned := claims.Owned
	if len(claims.Adopt) > 0 {
		fresh, err := client.Get[O](ctx, c, owner.GetNamespace(), owner.GetName())
		if err != nil {
			return nil, fmt.Errorf("reading %s before adopting: %w", storeKey(owner), err)
		}
		if fresh.GetUID() != owner.GetUID() || fresh.GetDeletionTimestamp() != nil {
			return nil, Race("%s is gone or going, adopting nothing", storeKey(owner))
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
		v.Wrote(took)
		owned = append(owned, took)
	}
	for _, obj := range claims.Release {
		free := obj.DeepCopyObject().(T)
		free.SetOwnerReferences(WithoutOwners(free.GetOwnerReferences(), owner.GetUID()))
		free.SetFinalizers(slices.DeleteFunc(free.GetFinalizers(), func(f string) bool { return slices.Contains(finalizers, f) }))
		free, err := client.Update(ctx, c, free)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("releasing %s from %s: %w", storeKey(obj), storeKey(owner), err)
		}
		v.Wrote(free)
	}
	return owned, nil
}

// WithoutOwners returns refs without those to the UIDs.
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

// ByUID is the precondition that makes a deletion hit the object that was looked
// at, not one that took its name since.
func ByUID(o metav1.Object) metav1.DeleteOptions {
	uid := o.GetUID()
	return metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}
}
