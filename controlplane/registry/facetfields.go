package registry

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/managedfields"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"keelson.dev/keelson/controlplane/api"
)

// A subresource with its own type (scale) shows one field of its object: the number of replicas.
// The ownership of that field is stored in the object's managedFields, and translated to and from
// the managedFields of the scale.

// facetPaths returns the path in the object of the field that the subresource shows.
func facetPaths(k *api.Kind, s *api.Subresource) managedfields.ResourcePathMappings {
	at := fieldpath.MakePathOrDie("spec", "replicas")
	if s.Replicas != nil {
		at = nil
		for _, name := range s.Replicas {
			at = append(at, fieldpath.PathElement{FieldName: &name})
		}
	}
	return managedfields.ResourcePathMappings{k.GVK.GroupVersion().String(): at}
}

// facetBody returns the subresource's view of obj, with the translated managedFields.
func facetBody(k *api.Kind, s *api.Subresource, obj api.Object) (api.Object, error) {
	body, ok := s.View(obj).DeepCopyObject().(api.Object)
	if !ok {
		return nil, fmt.Errorf("a %T has no managedFields", s.View(obj))
	}
	entries, err := managedfields.NewScaleHandler(obj.GetManagedFields(), k.GVK.GroupVersion(), facetPaths(k, s)).ToSubresource()
	if err != nil {
		return nil, fmt.Errorf("reading managedFields: %w", err)
	}
	body.SetManagedFields(entries)
	return body, nil
}

// ownFacet writes the managedFields of a subresource's body into the object. before is the object's
// previous entries.
func ownFacet(k *api.Kind, s *api.Subresource, obj api.Object, before []metav1.ManagedFieldsEntry, body api.Object) error {
	entries, err := managedfields.NewScaleHandler(before, k.GVK.GroupVersion(), facetPaths(k, s)).ToParent(body.GetManagedFields())
	if err != nil {
		return fmt.Errorf("writing managedFields: %w", err)
	}
	obj.SetManagedFields(entries)
	return nil
}

// trackFacet records in managedFields the field that a write to a subresource changed.
func (w *write) trackFacet(s *api.Subresource, subresource string, obj, old api.Object) {
	obj.SetManagedFields(old.GetManagedFields())
	track := func() error {
		fm, err := w.r.fields.of(w.served, subresource)
		if err != nil {
			return err
		}
		before, err := facetBody(w.req.Kind, s, old)
		if err != nil {
			return err
		}
		after, err := facetBody(w.req.Kind, s, obj)
		if err != nil {
			return err
		}
		fm.UpdateNoErrors(before, after, w.manager)
		return ownFacet(w.req.Kind, s, obj, old.GetManagedFields(), after)
	}
	if err := track(); err != nil {
		w.r.log.Error("fields are not tracked", "kind", w.req.Kind.GVK.String(), "subresource", subresource, "error", err)
	}
}

// applyToFacet performs a server-side apply to a subresource with its own type.
func (w *write) applyToFacet(ctx context.Context, f facet) (runtime.Object, error) {
	s := w.req.Kind.Subresources[f.name]
	intent, err := w.intent(s.GVK)
	if err != nil {
		return nil, err
	}
	data, err := intent.MarshalJSON()
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	if strict, err := kjson.UnmarshalStrict(data, s.New()); err != nil || len(strict) > 0 {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("the %s that is applied cannot be read: %v", s.GVK.Kind, errors.Join(append(strict, err)...)))
	}
	fm, err := w.r.fields.of(w.served, f.name)
	if err != nil {
		return nil, statusError(err, describe(w.req))
	}
	w.applied = true
	stored, _, err := w.change(ctx, w.updateStep(f, func(cur current) (proposal, error) {
		live, err := facetBody(w.req.Kind, s, cur.obj)
		if err != nil {
			return proposal{}, err
		}
		body, err := w.applyTo(fm, live, intent)
		if err != nil {
			return proposal{}, err
		}
		p, err := w.proposeBody(f, cur, body)
		if err != nil {
			return proposal{}, err
		}
		return p, ownFacet(w.req.Kind, s, p.obj, cur.obj.GetManagedFields(), body)
	}))
	if err != nil {
		return nil, err
	}
	return f.view(stored), nil
}
