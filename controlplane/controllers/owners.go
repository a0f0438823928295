package controllers

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
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

// Claims says to whom candidates belong.
type Claims[T api.Object] struct {
	Owned   []T // controlled by the owner and matching its selector
	Adopt   []T // matching, controlled by nobody: to be taken
	Release []T // controlled by the owner but no longer matching: to be let go
}

// SortClaims decides ownership. An owner on its way out takes and releases nothing, and nothing that is going is taken.
func SortClaims[T api.Object](owner api.Object, selector labels.Selector, candidates []T) Claims[T] {
	var c Claims[T]
	leaving := owner.GetDeletionTimestamp() != nil
	for _, obj := range candidates {
		matches := selector.Matches(labels.Set(obj.GetLabels()))
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
// an owner recreated under the same name must not be taken for the old one.
func Claim[O, T api.Object](ctx context.Context, c *client.Client, v *View[T], owner O, ref metav1.OwnerReference, claims Claims[T]) ([]T, error) {
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
		took.SetOwnerReferences(append(took.GetOwnerReferences(), ref))
		took, err := client.Update(ctx, c, took)
		if err != nil {
			return nil, fmt.Errorf("adopting %s for %s: %w", storeKey(obj), storeKey(owner), err)
		}
		v.Wrote(took)
		owned = append(owned, took)
	}
	for _, obj := range claims.Release {
		free := obj.DeepCopyObject().(T)
		free.SetOwnerReferences(WithoutOwners(free.GetOwnerReferences(), owner.GetUID()))
		free, err := client.Update(ctx, c, free)
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
