package kinds

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// eventTTL is how long an event is kept after it was last written.
const eventTTL = time.Hour

func eventKind() *api.Kind {
	k := newKind[corev1.Event, corev1.EventList](names{
		gv: corev1.SchemeGroupVersion, kind: "Event", plural: "events", singular: "event", short: []string{"ev"},
	})
	k.TTL = eventTTL
	check(k, func(e *corev1.Event) field.ErrorList {
		// The involved object of a cluster-scoped kind has no namespace; its events live in "default".
		if ns := e.InvolvedObject.Namespace; ns != e.Namespace && (ns != "" || e.Namespace != "default" && e.Namespace != "kube-system") {
			return field.ErrorList{field.Invalid(field.NewPath("involvedObject", "namespace"), ns, "does not match event.namespace")}
		}
		return nil
	})
	k.Columns = columns(col("Last Seen"), col("Type"), col("Reason"), col("Object"), wide("Subobject"), wide("Source"),
		col("Message"), wide("First Seen"), wide("Count"), func() columnDef { c := nameCol; c.Priority = 1; return c }())
	k.Row = row(eventRow)
	k.Fields = fieldsOf(eventFields)
	return k
}

func eventRow(e *corev1.Event, now time.Time) []any {
	first := since(e.FirstTimestamp, now)
	if e.FirstTimestamp.IsZero() {
		first = since(microTime(e.EventTime), now)
	}
	last, count := first, int64(e.Count)
	if !e.LastTimestamp.IsZero() {
		last = since(e.LastTimestamp, now)
	}
	if e.Series != nil {
		last, count = since(microTime(e.Series.LastObservedTime), now), int64(e.Series.Count)
	} else if count == 0 {
		count = 1
	}
	object := strings.ToLower(e.InvolvedObject.Kind)
	if e.InvolvedObject.Name != "" {
		object += "/" + e.InvolvedObject.Name
	}
	return []any{last, e.Type, e.Reason, object, e.InvolvedObject.FieldPath, eventSource(e),
		strings.TrimSpace(e.Message), first, count, e.Name}
}

func eventSource(e *corev1.Event) string {
	component, host := e.Source.Component, e.Source.Host
	if component == "" {
		component = e.ReportingController
	}
	if host == "" {
		host = e.ReportingInstance
	}
	if host == "" || host == component {
		return component
	}
	return fmt.Sprintf("%s, %s", component, host)
}

func eventFields(e *corev1.Event) fields.Set {
	source := e.Source.Component
	if source == "" {
		source = e.ReportingController
	}
	o := e.InvolvedObject
	return fields.Set{
		"involvedObject.kind":            o.Kind,
		"involvedObject.namespace":       o.Namespace,
		"involvedObject.name":            o.Name,
		"involvedObject.uid":             string(o.UID),
		"involvedObject.apiVersion":      o.APIVersion,
		"involvedObject.resourceVersion": o.ResourceVersion,
		"involvedObject.fieldPath":       o.FieldPath,
		"reason":                         e.Reason,
		"reportingComponent":             e.ReportingController,
		"source":                         source,
		"type":                           e.Type,
	}
}
