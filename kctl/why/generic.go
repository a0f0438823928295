package why

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// deletedObject explains an object that is on its way out, by its finalizers.
func deletedObject(o metav1.Object, kind string) *Finding {
	if o.GetDeletionTimestamp() == nil {
		return nil
	}
	f := &Finding{Object: name(kind, o), What: "is being deleted", Since: at(*o.GetDeletionTimestamp())}
	if len(o.GetFinalizers()) > 0 {
		f.Because = "finalizers hold it: " + owned(o.GetFinalizers())
		f.Mend = []string{unfinalize(o, kind)}
	}
	return f
}

// healthy are the conditions that are True of a healthy object, whatever its kind.
var healthy = []string{"Ready", "Available", "Established", "Healthy", "Synced", "Accepted", "Programmed"}

// other explains an object of a kind that nothing more is known of: deletion, and conditions that do not hold.
func (w *World) other(subject runtime.Object, r *Report) {
	o, err := meta.Accessor(subject)
	if err != nil {
		return
	}
	kind := strings.ToLower(subject.GetObjectKind().GroupVersionKind().Kind)
	r.Object = name(kind, o)
	r.Well = "it is not being deleted and no condition of it fails; more is not known of this kind"
	if f := deletedObject(o, kind); f != nil {
		r.Findings = append(r.Findings, *f)
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(subject)
	if err != nil {
		return
	}
	conditions, _, _ := unstructured.NestedSlice(content, "status", "conditions")
	for _, c := range conditions[:min(len(conditions), 10*most)] {
		fields, ok := c.(map[string]any)
		if !ok {
			continue
		}
		text := func(key string) string { s, _ := fields[key].(string); return s }
		for _, t := range healthy {
			if text("type") != t || text("status") == "True" {
				continue
			}
			f := Finding{Object: r.Object, What: fmt.Sprintf("condition %s is %s", t, text("status")),
				Because: line(text("reason") + ": " + text("message")), Mend: []string{kctl(o, "describe %s %s", kind, o.GetName())}}
			var since metav1.Time
			if since.UnmarshalQueryParameter(text("lastTransitionTime")) == nil {
				f.Since = at(since)
			}
			r.Findings = append(r.Findings, f)
		}
	}
}
