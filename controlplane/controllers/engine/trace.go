package engine

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// CopyTrace copies the trace context annotation of owner to child. It does nothing if owner has no
// trace context.
func CopyTrace(child, owner metav1.Object) {
	trace := owner.GetAnnotations()[api.TraceParentAnnotation]
	if trace == "" {
		return
	}
	a := child.GetAnnotations()
	if a == nil {
		a = map[string]string{}
	}
	a[api.TraceParentAnnotation] = trace
	child.SetAnnotations(a)
}

// Record adds a stage with this name to the timeline of the API request that led to obj. The stage
// started at start and ends now. Record does nothing if obj has no trace context.
func (t *Term) Record(name string, obj metav1.Object, kind string, start time.Time, detail string) {
	id := api.TraceID(obj.GetAnnotations()[api.TraceParentAnnotation])
	if t.Timeline == nil || id == "" {
		return
	}
	t.Timeline.Record(api.Stage{
		TraceID: id, Name: name, Actor: t.Actor, Start: start, Duration: t.Now().Sub(start), Detail: detail,
		Object: kind + "/" + obj.GetNamespace() + "/" + obj.GetName(),
	})
}
