// Package core describes the kinds of the core API group, except Pod, which is in core/podspec.
package core

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// NamespaceKind returns the definition of the kind Namespace.
func NamespaceKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "Namespace", Plural: "namespaces", Singular: "namespace",
		Short:         []string{"ns"},
		ClusterScoped: true, Rule: validation.ValidateNamespaceName,
	}, func(l *corev1.NamespaceList) *[]corev1.Namespace { return &l.Items })
	// Namespaces cannot be deleted as a collection, because each deletion removes all of a
	// namespace's contents.
	k.Serving.Verbs = []string{"create", "delete", "get", "list", "patch", "update", "watch"}
	k.Writes.Default = builder.Default(func(ns *corev1.Namespace) {
		labelWithName(ns)
		builder.SetDefault(&ns.Status.Phase, corev1.NamespaceActive)
	})
	builder.SeparateStatus(k, func(o *corev1.Namespace) *corev1.NamespaceStatus { return &o.Status },
		builder.Accessors[*corev1.Namespace]{
			Spec: func(ns *corev1.Namespace) any { return ns.Spec },
			CopySpec: func(obj, old *corev1.Namespace) {
				obj.Spec = *old.Spec.DeepCopy()
				labelWithName(obj)
			},
			Status: func(obj, old *corev1.Namespace) {
				obj.Status = corev1.NamespaceStatus{Phase: corev1.NamespaceActive}
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				}
				if obj.DeletionTimestamp != nil {
					obj.Status.Phase = corev1.NamespaceTerminating
				}
			},
		})
	builder.PrepareCreate(k, func(ns *corev1.Namespace) {
		ns.Generation = 0
		// The registry keeps a terminating namespace until spec.finalizers is empty. The namespace
		// controller removes this finalizer through subresource "finalize" when the namespace has
		// no content.
		if !slices.Contains(ns.Spec.Finalizers, corev1.FinalizerKubernetes) {
			ns.Spec.Finalizers = append(ns.Spec.Finalizers, corev1.FinalizerKubernetes)
		}
	})
	builder.AddValidation(k, func(ns *corev1.Namespace) field.ErrorList {
		// As in Kubernetes, these errors have the path of the list and not of the item.
		var errs field.ErrorList
		for _, f := range ns.Spec.Finalizers {
			errs = append(errs, validateSpecFinalizer(f, field.NewPath("spec", "finalizers"))...)
		}
		return errs
	})
	builder.AddStatusValidation(k, func(obj, _ *corev1.Namespace) field.ErrorList {
		return validateNamespacePhase(obj)
	})
	k.Deletion.Prepare = builder.Default(func(ns *corev1.Namespace) { ns.Status.Phase = corev1.NamespaceTerminating })
	builder.PrepareUpdate(k, func(obj, old *corev1.Namespace) {
		// A client that replaces the object with its own manifest must not remove the finalizers
		// that protect the contents.
		obj.Spec.Finalizers = slices.Clone(old.Spec.Finalizers)
	})
	validateMeta := builder.SubresourceMetaValidation(k.GVK)
	builder.AddSubresource(k, "finalize", &api.Subresource{
		Verbs: []string{"update"},
		PrepareUpdate: func(o, was api.Object) {
			obj, old := o.(*corev1.Namespace), was.(*corev1.Namespace)
			obj.Status, obj.Generation = *old.Status.DeepCopy(), old.Generation
			labelWithName(obj)
		},
		ValidateUpdate: func(obj, old api.Object) field.ErrorList {
			errs := validateMeta(obj, old)
			for i, f := range obj.(*corev1.Namespace).Spec.Finalizers {
				errs = append(errs, validateSpecFinalizer(f, field.NewPath("spec", "finalizers").Index(i))...)
			}
			return errs
		},
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Status"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(ns *corev1.Namespace, now time.Time) []any {
		phase := ns.Status.Phase
		if ns.DeletionTimestamp != nil {
			phase = corev1.NamespaceTerminating
		}
		return []any{ns.Name, string(phase), builder.Age(ns, now)}
	})
	k.Lists.Fields = builder.Fields(func(ns *corev1.Namespace) fields.Set {
		return fields.Set{"status.phase": string(ns.Status.Phase)}
	})
	return k
}

// labelWithName sets the label that contains the namespace's name. No request can remove it,
// because policies select namespaces by it.
func labelWithName(ns *corev1.Namespace) {
	if ns.Name == "" || ns.Labels[corev1.LabelMetadataName] == ns.Name {
		return
	}
	if ns.Labels == nil {
		ns.Labels = map[string]string{}
	}
	ns.Labels[corev1.LabelMetadataName] = ns.Name
}

func validateSpecFinalizer(f corev1.FinalizerName, fldPath *field.Path) field.ErrorList {
	name := string(f)
	return append(fieldrules.InvalidErrors(fldPath, name, utilvalidation.IsQualifiedName(name)),
		builder.ValidateFinalizer(name, fldPath)...)
}

// validateNamespacePhase returns an error for a phase that does not match deletionTimestamp. The
// path of the error ends in "Phase", not "phase", as in Kubernetes.
func validateNamespacePhase(ns *corev1.Namespace) field.ErrorList {
	fldPath, phase := field.NewPath("status", "Phase"), ns.Status.Phase
	switch terminating := ns.DeletionTimestamp != nil; {
	case terminating && phase != corev1.NamespaceTerminating:
		return field.ErrorList{field.Invalid(fldPath, phase,
			"may only be 'Terminating' if `deletionTimestamp` is not empty")}
	case !terminating && phase != corev1.NamespaceActive:
		return field.ErrorList{field.Invalid(fldPath, phase, "may only be 'Active' if `deletionTimestamp` is empty")}
	}
	return nil
}
