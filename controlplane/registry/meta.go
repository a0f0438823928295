package registry

import (
	"math/rand/v2"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// Generated names: the base, truncated so that the name fits a DNS label, and a suffix without
// vowels, so that it forms no words.
const (
	suffixLength   = 5
	suffixAlphabet = "bcdfghjklmnpqrstvwxz2456789"
	maxNameBase    = 63 - suffixLength
)

func nameSuffix(n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = suffixAlphabet[rand.IntN(len(suffixAlphabet))]
	}
	return string(b)
}

func generatedName(base, suffix string) string {
	return base[:min(len(base), maxNameBase)] + suffix
}

// seconds returns t in UTC, truncated to seconds, as in API objects.
func seconds(t time.Time) metav1.Time { return metav1.NewTime(t.UTC().Truncate(time.Second)) }

// initMeta sets the metadata of a new object that only the server may set.
func (r *Registry) initMeta(obj api.Object) {
	obj.SetUID(r.newUID())
	obj.SetCreationTimestamp(seconds(r.now()))
	obj.SetDeletionTimestamp(nil)
	obj.SetDeletionGracePeriodSeconds(nil)
	obj.SetSelfLink("")
	obj.SetGeneration(0)
}

// keepMeta restores the metadata that no update may change.
func keepMeta(obj, old api.Object) {
	obj.SetUID(old.GetUID())
	obj.SetCreationTimestamp(old.GetCreationTimestamp())
	obj.SetDeletionTimestamp(old.GetDeletionTimestamp())
	obj.SetDeletionGracePeriodSeconds(old.GetDeletionGracePeriodSeconds())
	obj.SetGenerateName(old.GetGenerateName())
	obj.SetSelfLink("")
	obj.SetGeneration(old.GetGeneration())
	if obj.GetNamespace() == "" {
		obj.SetNamespace(old.GetNamespace())
	}
}

// nextGeneration increments the generation if anything but metadata and status changed. Kinds
// without a generation or with Uncounted keep it. It returns whether the desired state changed.
func nextGeneration(k *api.Kind, obj, old api.Object) (advanced bool) {
	gen := old.GetGeneration()
	changed := desiredChanged(k, obj, old)
	if gen > 0 && changed && !k.Uncounted {
		gen++
	}
	obj.SetGeneration(gen)
	return changed
}

// desiredChanged reports whether anything but metadata and status differs.
func desiredChanged(k *api.Kind, obj, old api.Object) bool {
	return !equality.Semantic.DeepEqual(k.Bare(obj), k.Bare(old))
}

// keepStatus resets obj to old, except for the status and the metadata that a status update may
// change. It is the default rule of the subresource "status".
func keepStatus(k *api.Kind, obj, old api.Object) {
	next := old.DeepCopyObject().(api.Object)
	k.Ops.SetStatus(next, obj)
	next.SetLabels(obj.GetLabels())
	next.SetAnnotations(obj.GetAnnotations())
	next.SetManagedFields(obj.GetManagedFields())
	next.SetFinalizers(obj.GetFinalizers())
	next.SetOwnerReferences(obj.GetOwnerReferences())
	k.Ops.Assign(obj, next)
}

// traceOnCreate sets the trace annotation of a new object, unless it has one from its owner.
func traceOnCreate(obj api.Object, traceParent string) {
	if traceParent != "" && obj.GetAnnotations()[api.TraceParentAnnotation] == "" {
		setAnnotation(obj, api.TraceParentAnnotation, traceParent)
	}
}

// traceOnUpdate sets the trace annotation if the request changes the desired state. Otherwise it
// keeps the existing annotation of an update that omits it.
func traceOnUpdate(obj, old api.Object, traceParent string, desired bool) {
	had := old.GetAnnotations()[api.TraceParentAnnotation]
	has, mentioned := obj.GetAnnotations()[api.TraceParentAnnotation]
	switch {
	case desired && traceParent != "" && (!mentioned || has == had):
		setAnnotation(obj, api.TraceParentAnnotation, traceParent)
	case !mentioned && had != "":
		setAnnotation(obj, api.TraceParentAnnotation, had)
	}
}

// setAnnotation sets an annotation in a copy of the map, because the map may be shared.
func setAnnotation(obj api.Object, key, value string) {
	next := make(map[string]string, len(obj.GetAnnotations())+1)
	for k, v := range obj.GetAnnotations() {
		next[k] = v
	}
	next[key] = value
	obj.SetAnnotations(next)
}

// sameButTimes reports whether two objects differ only in the times of their managedFields. Such a
// change is not written.
func sameButTimes(k *api.Kind, obj, cur api.Object) bool {
	a, b := obj.GetManagedFields(), cur.GetManagedFields()
	if len(a) == 0 || len(a) != len(b) {
		return false
	}
	for i := range a {
		x := a[i]
		x.Time = b[i].Time
		if !equality.Semantic.DeepEqual(x, b[i]) {
			return false
		}
	}
	o, c := k.Ops.Shallow(obj), k.Ops.Shallow(cur)
	for _, x := range []api.Object{o, c} {
		x.SetManagedFields(nil)
		x.SetResourceVersion("")
		x.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	}
	return equality.Semantic.DeepEqual(o, c)
}

// managerName returns the name of a field manager: the option, or the first part of the user agent.
func managerName(option, userAgent string) string {
	if option != "" {
		return option
	}
	name, _, _ := strings.Cut(userAgent, "/")
	if len(name) > 128 {
		name = name[:128]
	}
	return name
}
