package why

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// explainDeletion returns a Finding if object o is being deleted, with the finalizers that delay
// the deletion. It returns nil otherwise. kind is the name of the object's kind in texts and
// commands.
func explainDeletion(o metav1.Object, kind string) *Finding {
	if o.GetDeletionTimestamp() == nil {
		return nil
	}
	f := &Finding{Object: objectName(kind, o), What: "is being deleted", Since: timeOrNil(*o.GetDeletionTimestamp())}
	if len(o.GetFinalizers()) > 0 {
		f.Because = "finalizers hold it: " + finalizerOwners(o.GetFinalizers())
		f.Mend = []string{unfinalizeCommand(o, kind)}
	}
	return f
}

// healthyConditions lists the condition types that are True on a healthy object of any kind.
var healthyConditions = []string{"Ready", "Available", "Established", "Healthy", "Synced", "Accepted", "Programmed",
	"ResolvedRefs"}

// unhealthyConditions lists the condition types that are True on an unhealthy object of any kind.
var unhealthyConditions = []string{"PartiallyInvalid", "OverlappingTLSConfig"}

// explainOther adds to r the Findings about an object of a kind without its own explanation. There
// is a Finding if the object is being deleted, and one for each condition that shows a problem.
func (w *World) explainOther(subject runtime.Object, r *Report) {
	o, err := meta.Accessor(subject)
	if err != nil {
		return
	}
	kind := strings.ToLower(subject.GetObjectKind().GroupVersionKind().Kind)
	r.Object = objectName(kind, o)
	r.Well = "it is not being deleted and no condition of it fails; more is not known of this kind"
	if f := explainDeletion(o, kind); f != nil {
		r.Findings = append(r.Findings, *f)
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(subject)
	if err != nil {
		return
	}
	described := kctlCommand(o, "describe %s %s", kind, o.GetName())
	for _, l := range conditionLists(content) {
		for _, c := range l.conditions[:min(len(l.conditions), 10*maxDetails)] {
			fields, ok := c.(map[string]any)
			if !ok {
				continue
			}
			text := func(key string) string { s, _ := fields[key].(string); return s }
			bad := slices.Contains(healthyConditions, text("type")) && text("status") != "True" ||
				slices.Contains(unhealthyConditions, text("type")) && text("status") == "True"
			if !bad {
				continue
			}
			f := Finding{Object: r.Object, What: fmt.Sprintf("condition %s%s is %s", text("type"), l.part,
				text("status")),
				Because: singleLine(text("reason") + ": " + text("message")), Mend: []string{described}}
			var since metav1.Time
			if since.UnmarshalQueryParameter(text("lastTransitionTime")) == nil {
				f.Since = timeOrNil(since)
			}
			r.Findings = append(r.Findings, f)
		}
	}
}

// conditionList contains status conditions of an object, or of a Gateway listener or a route's
// parent in the status of the object. part names the listener or the parent in messages. It is
// empty for the conditions of the object itself.
type conditionList struct {
	part       string
	conditions []any
}

// conditionLists returns the status conditions in content, the unstructured form of an object. It
// includes the conditions of Gateway listeners and of the parents of routes.
func conditionLists(content map[string]any) []conditionList {
	own, _, _ := unstructured.NestedSlice(content, "status", "conditions")
	out := []conditionList{{conditions: own}}
	part := func(field, word string, path ...string) {
		list, _, _ := unstructured.NestedSlice(content, "status", field)
		for _, l := range list[:min(len(list), 10*maxDetails)] {
			m, ok := l.(map[string]any)
			if !ok {
				continue
			}
			of, _, _ := unstructured.NestedString(m, path...)
			conditions, _, _ := unstructured.NestedSlice(m, "conditions")
			out = append(out, conditionList{fmt.Sprintf(" %s %s", word, of), conditions})
		}
	}
	part("listeners", "of listener", "name")
	part("parents", "for", "parentRef", "name")
	return out
}
