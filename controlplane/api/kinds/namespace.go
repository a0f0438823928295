package kinds

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

func namespaceKind() *api.Kind {
	k := newKind(names{
		gv: corev1.SchemeGroupVersion, kind: "Namespace", plural: "namespaces", singular: "namespace", short: []string{"ns"},
		global: true, rule: validation.ValidateNamespaceName,
	}, func(l *corev1.NamespaceList) *[]corev1.Namespace { return &l.Items })
	// Namespaces are not deleted by the dozen: each takes everything in it along.
	k.Verbs = []string{"create", "delete", "get", "list", "patch", "update", "watch"}
	k.Default = defaults(func(ns *corev1.Namespace) {
		// Selectors of policies find a namespace by this label, so nobody may leave it out.
		if ns.Name != "" {
			if ns.Labels == nil {
				ns.Labels = map[string]string{}
			}
			ns.Labels[corev1.LabelMetadataName] = ns.Name
		}
		setDefault(&ns.Status.Phase, corev1.NamespaceActive)
	})
	hasStatus(k, func(o *corev1.Namespace) *corev1.NamespaceStatus { return &o.Status }, halves[*corev1.Namespace]{
		spec: func(ns *corev1.Namespace) any { return ns.Spec },
		keep: func(obj, old *corev1.Namespace) { obj.Spec = *old.Spec.DeepCopy() },
		status: func(obj, old *corev1.Namespace) {
			obj.Status = corev1.NamespaceStatus{Phase: corev1.NamespaceActive}
			if old != nil {
				obj.Status = *old.Status.DeepCopy()
			}
			if obj.DeletionTimestamp != nil {
				obj.Status.Phase = corev1.NamespaceTerminating
			}
		},
	})
	prepare(k, func(ns *corev1.Namespace) {
		ns.Generation = 0
		// The registry keeps a namespace until the namespace controller has
		// emptied it and written this away through subresource "finalize".
		ns.Spec.Finalizers = []corev1.FinalizerName{corev1.FinalizerKubernetes}
	})
	k.PrepareDelete = defaults(func(ns *corev1.Namespace) { ns.Status.Phase = corev1.NamespaceTerminating })
	prepareUpdate(k, func(obj, old *corev1.Namespace) {
		// A client that replaces the object with its own manifest must not take
		// away what protects the contents.
		obj.Spec.Finalizers = slices.Clone(old.Spec.Finalizers)
	})
	addSub(k, "finalize", &api.Subresource{
		Verbs: []string{"update"},
		PrepareUpdate: func(o, was api.Object) {
			obj, old := o.(*corev1.Namespace), was.(*corev1.Namespace)
			want, version := obj.Spec.Finalizers, obj.ResourceVersion
			*obj = *old.DeepCopy()
			obj.Spec.Finalizers, obj.ResourceVersion = want, version
		},
		ValidateUpdate: func(obj, old api.Object) field.ErrorList {
			return append(metaUpdate(obj, old), validateNamespaceFinalizers(obj.(*corev1.Namespace))...)
		},
	})
	k.Columns = columns(nameCol, col("Status"), ageCol)
	k.Row = row(func(ns *corev1.Namespace, now time.Time) []any {
		phase := ns.Status.Phase
		if ns.DeletionTimestamp != nil {
			phase = corev1.NamespaceTerminating
		}
		return []any{ns.Name, string(phase), age(ns, now)}
	})
	k.Fields = fieldsOf(func(ns *corev1.Namespace) fields.Set {
		return fields.Set{"status.phase": string(ns.Status.Phase)}
	})
	return k
}

// validateNamespaceFinalizers judges spec.finalizers. As in Kubernetes, its errors name the list, not the entry.
func validateNamespaceFinalizers(ns *corev1.Namespace) field.ErrorList {
	at := field.NewPath("spec", "finalizers")
	var errs field.ErrorList
	for _, f := range ns.Spec.Finalizers {
		name := string(f)
		errs = append(errs, invalid(at, name, utilvalidation.IsQualifiedName(name))...)
		errs = append(errs, validateFinalizer(name, at)...)
	}
	return errs
}
