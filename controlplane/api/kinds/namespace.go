package kinds

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"keelson.dev/keelson/controlplane/api"
)

// NamespaceFinalizer is in spec.finalizers, as in Kubernetes, and in
// metadata.finalizers, where the registry's ordinary rule for finalizers lets it
// keep a namespace until the namespace controller has emptied it. Writing empty
// spec.finalizers through subresource "finalize" takes both away.
const NamespaceFinalizer = string(corev1.FinalizerKubernetes)

func namespaceKind() *api.Kind {
	k := newKind[corev1.Namespace, corev1.NamespaceList](names{
		gv: corev1.SchemeGroupVersion, kind: "Namespace", plural: "namespaces", singular: "namespace", short: []string{"ns"},
		global: true, rule: validation.ValidateNamespaceName,
	})
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
	hasStatus(k, halves[*corev1.Namespace]{
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
		ns.Spec.Finalizers = []corev1.FinalizerName{corev1.FinalizerKubernetes}
		holdNamespace(ns)
	})
	k.PrepareDelete = defaults(func(ns *corev1.Namespace) { ns.Status.Phase = corev1.NamespaceTerminating })
	prepareUpdate(k, func(obj, old *corev1.Namespace) {
		obj.Spec.Finalizers = slices.Clone(old.Spec.Finalizers)
		if obj.DeletionTimestamp == nil {
			// A client that replaces the object with its own manifest must not
			// take away what protects the contents.
			holdNamespace(obj)
		}
	})
	addSub(k, "finalize", &api.Subresource{
		Verbs: []string{"update"},
		PrepareUpdate: func(o, was api.Object) {
			obj, old := o.(*corev1.Namespace), was.(*corev1.Namespace)
			want := obj.Spec.Finalizers
			*obj = *old.DeepCopy()
			obj.Spec.Finalizers = want
			if len(want) == 0 && obj.DeletionTimestamp != nil {
				obj.Finalizers = slices.DeleteFunc(obj.Finalizers, func(f string) bool { return f == NamespaceFinalizer })
			}
		},
		ValidateUpdate: metaUpdate,
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

func holdNamespace(o metav1.Object) {
	if f := o.GetFinalizers(); !slices.Contains(f, NamespaceFinalizer) {
		o.SetFinalizers(append(slices.Clone(f), NamespaceFinalizer))
	}
}
