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
	k := newKind(names{
		gv: corev1.SchemeGroupVersion, kind: "Event", putCreates: true, plural: "events", singular: "event", short: []string{"ev"},
	}, func(l *corev1.EventList) *[]corev1.Event { return &l.Items })
	k.TTL = eventTTL
	check(k, func(e *corev1.Event) field.ErrorList {
		return eventNamespace(e.Namespace, e.InvolvedObject.Namespace, field.NewPath("involvedObject", "namespace"))
	})
	k.Columns = columns(col("Last Seen"), col("Type"), col("Reason"), col("Object"), wide("Subobject"), wide("Source"),
		col("Message"), wide("First Seen"), wide("Count"), func() columnDef { c := nameCol; c.Priority = 1; return c }())
	k.Row = row(eventRow)
	k.Fields = fieldsOf(eventFields)
	return k
}

// eventNamespace wants an event in the namespace of what it is about. The objects of a cluster-scoped kind have none;
// their events live in "default".
func eventNamespace(event, about string, at *field.Path) field.ErrorList {
	if about != event && (about != "" || event != "default" && event != "kube-system") {
		return field.ErrorList{field.Invalid(at, about, "does not match event.namespace")}
	}
	return nil
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
