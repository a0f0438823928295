package matching

import (
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// RestoreImmutable restores the fields of next that webhooks and policies may not change: the
// metadata that the server sets, and the status if it is a subresource. It returns an error if the
// name or namespace in next differs from old.
func (v Versions) RestoreImmutable(a *Attempt, gvk schema.GroupVersionKind, next, old runtime.Object) error {
	to, ok := next.(metav1.Object)
	from, same := old.(metav1.Object)
	if !ok || !same {
		return nil // no metadata, such as the options of a connect
	}
	if errs := identityChanges(to, from); len(errs) > 0 {
		return apierrors.NewInvalid(gvk.GroupKind(), from.GetName(), errs)
	}
	to.SetGenerateName(from.GetGenerateName())
	to.SetUID(from.GetUID())
	to.SetResourceVersion(from.GetResourceVersion())
	to.SetGeneration(from.GetGeneration())
	to.SetSelfLink(from.GetSelfLink())
	to.SetCreationTimestamp(from.GetCreationTimestamp())
	to.SetDeletionTimestamp(from.GetDeletionTimestamp())
	to.SetDeletionGracePeriodSeconds(from.GetDeletionGracePeriodSeconds())
	to.SetManagedFields(from.GetManagedFields())
	k := v.Kinds.ByGVK(gvk)
	if k == nil || a.Subresource != "" || k.Type.Ops.SetStatus == nil || k.Subresources["status"] == nil {
		return nil
	}
	if kept, ok := old.(api.Object); ok {
		k.Type.Ops.SetStatus(next.(api.Object), kept)
	}
	return nil
}

func identityChanges(target, source metav1.Object) (errs field.ErrorList) {
	meta := field.NewPath("metadata")
	if target.GetName() != source.GetName() {
		errs = append(errs, field.Invalid(meta.Child("name"), api.Truncate(target.GetName(), 256),
			"field is immutable"))
	}
	if target.GetNamespace() != source.GetNamespace() {
		errs = append(errs, field.Invalid(meta.Child("namespace"), api.Truncate(target.GetNamespace(), 256),
			"field is immutable"))
	}
	return errs
}

// Of converts an admission attempt to the form that webhooks and policies receive.
func Of(a *api.Attempt) *Attempt {
	out := &Attempt{
		User: a.User, Operation: a.Operation, Kind: a.BodyKind(), Resource: a.Kind.GVR(), Subresource: a.Facet,
		Namespace: a.Namespace, Name: a.Name, Object: a.Object, Old: a.OldObject, Options: a.Options(),
		DryRun: a.DryRun,
	}
	out.Leads = a.Request != nil && a.Request.Internal.Fence != 0
	if out.isNamespace() {
		out.Namespace = out.Name
	}
	return out
}
