package admission

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// ownerReferences lets only those change the owners of an object who may delete it, and only those have an owner wait
// for it who may set the owner's finalizers.
func ownerReferences(c Config) func(ctx context.Context, a *Attempt) error {
	return func(ctx context.Context, a *Attempt) error {
		if a.Whole == nil || a.Operation != api.Create && a.Operation != api.Update || a.Is("pods") && a.Facet == "status" {
			return nil
		}
		var before []metav1.OwnerReference
		if a.Stored != nil {
			before = a.Stored.GetOwnerReferences()
		}
		after := a.Whole.GetOwnerReferences()
		if equality.Semantic.DeepEqual(before, after) {
			return nil
		}
		if a.Stored != nil {
			if ok, why := c.Allowed(ctx, a.User, "delete", a.Kind.GVR(), a.Facet, a.Namespace, a.Name); !ok {
				return forbid(a, a.Whole, fmt.Errorf("cannot set an ownerRef on a resource you can't delete: %s, <nil>", why))
			}
		}
		for i := range after {
			ref := &after[i]
			if !newlyBlocks(ref, before) {
				continue
			}
			gv, err := schema.ParseGroupVersion(ref.APIVersion)
			k := c.Kinds.ByGVK(gv.WithKind(ref.Kind))
			if err != nil || k == nil || k.Hidden {
				return forbid(a, a.Whole, fmt.Errorf("cannot set blockOwnerDeletion in this case because cannot find RESTMapping "+
					"for APIVersion %s Kind %s: no matches for kind %q in version %q", ref.APIVersion, ref.Kind, ref.Kind, ref.APIVersion))
			}
			namespace := a.Namespace
			if !k.Namespaced {
				namespace = ""
			}
			if ok, why := c.Allowed(ctx, a.User, "update", k.GVR(), "finalizers", namespace, ref.Name); !ok {
				return forbid(a, a.Whole, fmt.Errorf(
					"cannot set blockOwnerDeletion if an ownerReference refers to a resource you can't set finalizers on: %s, <nil>", why))
			}
		}
		return nil
	}
}

// newlyBlocks says whether a reference has its owner wait, and did not before.
func newlyBlocks(ref *metav1.OwnerReference, before []metav1.OwnerReference) bool {
	blocks := func(r *metav1.OwnerReference) bool { return r.BlockOwnerDeletion != nil && *r.BlockOwnerDeletion }
	if !blocks(ref) {
		return false
	}
	for i := range before {
		if before[i].UID == ref.UID {
			return !blocks(&before[i])
		}
	}
	return true
}
