package builtin

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// ownerReferences returns the plugin OwnerReferencesPermissionEnforcement. To change the owner
// references of an object, a user needs the permission to delete the object. To set
// blockOwnerDeletion, the user needs the permission to update the owner's finalizers.
func ownerReferences(c Config) func(ctx context.Context, a *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		if a.Whole == nil || a.Operation != api.Create && a.Operation != api.Update ||
			a.IsCoreResource("pods") && a.Facet == "status" {
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
			if ok, why := c.Access.Allowed(ctx, a.User, "delete", a.Kind.GVR(), a.Facet, a.Namespace, a.Name); !ok {
				return admission.NewForbidden(a, a.Whole,
					fmt.Errorf("cannot set an ownerRef on a resource you can't delete: %s, <nil>", why))
			}
		}
		return blockingOwners(ctx, c, a, before, after)
	}
}

// blockingOwners rejects owner references that newly set blockOwnerDeletion if the user may not
// update the owner's finalizers. The owners' kinds are not resolved if the user may update the
// finalizers of all resources.
func blockingOwners(ctx context.Context, c Config, a *admission.Attempt, old, after []metav1.OwnerReference) error {
	anything := schema.GroupVersionResource{Group: "*", Version: "*", Resource: "*"}
	for i, asked := 0, false; i < len(after); i++ {
		ref := &after[i]
		if !newlyBlocks(ref, old) {
			continue
		}
		if !asked {
			if ok, _ := c.Access.Allowed(ctx, a.User, "update", anything, "finalizers", "", "*"); ok {
				return nil
			}
			asked = true
		}
		owners, err := ownerResources(ctx, c, ref)
		if err != nil {
			return admission.NewForbidden(a, a.Whole,
				fmt.Errorf("cannot set blockOwnerDeletion in this case because cannot find RESTMapping "+
					"for APIVersion %s Kind %s: %w", ref.APIVersion, ref.Kind, err))
		}
		for _, owner := range owners {
			namespace := a.Namespace
			if !owner.Namespaced {
				namespace = ""
			}
			gvr := schema.GroupVersionResource{Group: owner.Group, Version: owner.Version, Resource: owner.Name}
			if ok, why := c.Access.Allowed(ctx, a.User, "update", gvr, "finalizers", namespace, ref.Name); !ok {
				return admission.NewForbidden(a, a.Whole,
					fmt.Errorf("cannot set blockOwnerDeletion if an ownerReference refers to "+
						"a resource you can't set finalizers on: %s, <nil>", why))
			}
		}
	}
	return nil
}

// ownerResources returns the resources with which this API server serves the kind of an owner. If
// it does not serve the kind, the resources of aggregated API servers are returned.
func ownerResources(ctx context.Context, c Config, ref *metav1.OwnerReference) ([]metav1.APIResource, error) {
	gv, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return nil, err
	}
	gvk := gv.WithKind(ref.Kind)
	if k := c.Kinds.ByGVK(gvk); k != nil && !k.Serving.Hidden {
		return []metav1.APIResource{{Group: gv.Group, Version: gv.Version, Name: k.Resource, Namespaced: k.Namespaced}},
			nil
	}
	if c.Access.AggregatedResources != nil {
		if found := c.Access.AggregatedResources(ctx, gvk); len(found) > 0 {
			return found, nil
		}
	}
	return nil, fmt.Errorf("no matches for kind %q in version %q", ref.Kind, ref.APIVersion)
}

// newlyBlocks reports whether a reference sets blockOwnerDeletion and no reference to the same
// owner in old did.
func newlyBlocks(ref *metav1.OwnerReference, old []metav1.OwnerReference) bool {
	blocks := func(r *metav1.OwnerReference) bool { return r.BlockOwnerDeletion != nil && *r.BlockOwnerDeletion }
	if !blocks(ref) {
		return false
	}
	for i := range old {
		if old[i].UID == ref.UID {
			return !blocks(&old[i])
		}
	}
	return true
}
