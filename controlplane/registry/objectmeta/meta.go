// Package objectmeta implements the rules for object metadata that only the server sets, and for
// generated names.
package objectmeta

import (
	"math/rand/v2"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

// A generated name consists of a base, truncated so that the name fits a DNS label, and a suffix.
// The suffix has no vowels, so that it forms no words.
const (
	SuffixLength   = 5
	suffixAlphabet = "bcdfghjklmnpqrstvwxz2456789"
	maxNameBase    = 63 - SuffixLength
)

// RandomSuffix returns a random suffix of n characters.
func RandomSuffix(n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = suffixAlphabet[rand.IntN(len(suffixAlphabet))]
	}
	return string(b)
}

// GenerateName returns base, truncated if necessary, followed by suffix.
func GenerateName(base, suffix string) string {
	return base[:min(len(base), maxNameBase)] + suffix
}

// ToSeconds returns t in UTC, truncated to whole seconds, which is the precision of timestamps in
// API objects.
func ToSeconds(t time.Time) metav1.Time { return metav1.NewTime(t.UTC().Truncate(time.Second)) }

// InitMeta sets the UID and creation timestamp of a new object, and clears the other metadata that
// only the server may set.
func InitMeta(obj api.Object, uid types.UID, created time.Time) {
	obj.SetUID(uid)
	obj.SetCreationTimestamp(ToSeconds(created))
	obj.SetDeletionTimestamp(nil)
	obj.SetDeletionGracePeriodSeconds(nil)
	obj.SetSelfLink("")
	obj.SetGeneration(0)
}

// KeepMeta copies the metadata that an update cannot change, such as the UID and the creation
// timestamp, from the stored object to obj.
func KeepMeta(obj, stored api.Object) {
	obj.SetUID(stored.GetUID())
	obj.SetCreationTimestamp(stored.GetCreationTimestamp())
	obj.SetDeletionTimestamp(stored.GetDeletionTimestamp())
	obj.SetDeletionGracePeriodSeconds(stored.GetDeletionGracePeriodSeconds())
	obj.SetGenerateName(stored.GetGenerateName())
	obj.SetSelfLink("")
	obj.SetGeneration(stored.GetGeneration())
	if obj.GetNamespace() == "" {
		obj.SetNamespace(stored.GetNamespace())
	}
}

// AdvanceGeneration sets the generation of obj: that of old, plus one if anything but metadata and
// status differs. It returns whether anything but metadata and status differs. A generation of 0
// stays 0, and kinds with Writes.Uncounted keep the generation of old.
func AdvanceGeneration(k *api.Kind, obj, old api.Object) (advanced bool) {
	gen := old.GetGeneration()
	changed := isDesiredStateChanged(k, obj, old)
	if gen > 0 && changed && !k.Writes.Uncounted {
		gen++
	}
	obj.SetGeneration(gen)
	return changed
}

// isDesiredStateChanged reports whether obj and old differ in anything but metadata and status.
func isDesiredStateChanged(k *api.Kind, obj, old api.Object) bool {
	return !equality.Semantic.DeepEqual(k.DesiredState(obj), k.DesiredState(old))
}

// KeepAllButStatus resets obj to the stored object, except for the status and the metadata that a
// status update may change, such as labels and annotations. It is the default rule of the
// subresource "status".
func KeepAllButStatus(k *api.Kind, obj, stored api.Object) {
	next := stored.DeepCopyObject().(api.Object)
	k.Type.Ops.SetStatus(next, obj)
	next.SetLabels(obj.GetLabels())
	next.SetAnnotations(obj.GetAnnotations())
	next.SetManagedFields(obj.GetManagedFields())
	next.SetFinalizers(obj.GetFinalizers())
	next.SetOwnerReferences(obj.GetOwnerReferences())
	k.Type.Ops.Assign(obj, next)
}

// SetTraceOnCreate sets the trace annotation of a new object to traceParent, unless the object
// already has the annotation, for example from its owner.
func SetTraceOnCreate(obj api.Object, traceParent string) {
	if traceParent != "" && obj.GetAnnotations()[api.TraceParentAnnotation] == "" {
		setAnnotation(obj, api.TraceParentAnnotation, traceParent)
	}
}

// SetTraceOnUpdate sets the trace annotation of obj to traceParent if the request changes the
// desired state. It does not replace a value that the update itself sets. Otherwise, it keeps the
// annotation of old if the update omits it.
func SetTraceOnUpdate(obj, old api.Object, traceParent string, desiredChanged bool) {
	stored := old.GetAnnotations()[api.TraceParentAnnotation]
	given, present := obj.GetAnnotations()[api.TraceParentAnnotation]
	switch {
	case desiredChanged && traceParent != "" && (!present || given == stored):
		setAnnotation(obj, api.TraceParentAnnotation, traceParent)
	case !present && stored != "":
		setAnnotation(obj, api.TraceParentAnnotation, stored)
	}
}

// setAnnotation sets an annotation of obj. It replaces the annotation map with a copy, because
// other objects may share the map.
func setAnnotation(obj api.Object, key, value string) {
	next := make(map[string]string, len(obj.GetAnnotations())+1)
	for k, v := range obj.GetAnnotations() {
		next[k] = v
	}
	next[key] = value
	obj.SetAnnotations(next)
}

// IsSameButTimes reports whether two objects are equal except for the times in their managedFields.
// It returns false for an object without managedFields. An update that changes only these times is
// not written.
func IsSameButTimes(k *api.Kind, obj, stored api.Object) bool {
	a, b := obj.GetManagedFields(), stored.GetManagedFields()
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
	o, c := k.Type.Ops.Shallow(obj), k.Type.Ops.Shallow(stored)
	for _, x := range []api.Object{o, c} {
		x.SetManagedFields(nil)
		x.SetResourceVersion("")
		x.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	}
	return equality.Semantic.DeepEqual(o, c)
}

// FieldManagerName returns the name of a request's field manager: the fieldManager option, or the
// first part of the user agent if the option is empty. The user agent is truncated to 128 bytes.
func FieldManagerName(option, userAgent string) string {
	if option != "" {
		return option
	}
	name, _, _ := strings.Cut(userAgent, "/")
	if len(name) > 128 {
		name = name[:128]
	}
	return name
}
