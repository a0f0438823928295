package core

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// eventTTL is the time after the last write at which an Event expires.
const eventTTL = time.Hour

// EventKind returns the definition of the kind Event.
func EventKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "Event", CreateOnUpdate: true, Plural: "events",
		Singular: "event", Short: []string{"ev"},
		Rule: builder.PathSegment, // older clients may use any name
	}, func(l *corev1.EventList) *[]corev1.Event { return &l.Items })
	k.Commit.TTL = eventTTL
	builder.AddValidation(k, validateEvent)
	k.Lists.Columns = builder.Columns(builder.StringColumn("Last Seen"), builder.StringColumn("Type"),
		builder.StringColumn("Reason"), builder.StringColumn("Object"), builder.WideColumn("Subobject"),
		builder.WideColumn("Source"),
		builder.StringColumn("Message"), builder.WideColumn("First Seen"), builder.WideColumn("Count"),
		func() builder.ColumnDefinition { c := builder.NameColumn; c.Priority = 1; return c }())
	k.Lists.Row = builder.Row(EventRow)
	k.Lists.Fields = builder.Fields(eventFields)
	return k
}

// validateEvent validates an Event of the core group. An Event with eventTime comes from a client
// of the newer API, and must have a reporter and an action. Older clients set none of these.
func validateEvent(e *corev1.Event) field.ErrorList {
	errs := ValidateEventNamespace(e.Namespace, e.InvolvedObject.Namespace, !e.EventTime.IsZero(),
		field.NewPath("involvedObject", "namespace"))
	if e.EventTime.IsZero() {
		return errs
	}
	errs = append(errs, ValidateReporter(e.ReportingController, field.NewPath("reportingComponent"))...)
	errs = append(errs, ValidateEventText("reportingInstance", e.ReportingInstance)...)
	errs = append(errs, ValidateEventText("action", e.Action)...)
	errs = append(errs, ValidateEventText("reason", e.Reason)...)
	if len(e.Message) > MaxEventNote {
		errs = append(errs, NewTooLongError("message", MaxEventNote))
	}
	return errs
}

// ValidateReporter validates the name of the component that reports an Event.
func ValidateReporter(name string, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if name == "" {
		errs = append(errs, field.Required(fldPath, ""))
	}
	return append(errs, fieldrules.InvalidErrors(fldPath, name, validation.IsQualifiedName(name))...)
}

// ValidateEventNamespace validates the namespace of an Event, given the namespace of the object
// that the Event is about. An Event without eventTime must be in the object's namespace, or in
// "default" if the object is cluster-scoped. An Event with eventTime about a cluster-scoped object
// must be in "default" or "kube-system".
func ValidateEventNamespace(event, object string, hasEventTime bool, fldPath *field.Path) field.ErrorList {
	ok := event == object || event == metav1.NamespaceDefault && object == ""
	if hasEventTime {
		ok = object != "" || event == metav1.NamespaceDefault || event == metav1.NamespaceSystem
	}
	if ok {
		return nil
	}
	return field.ErrorList{field.Invalid(fldPath, object, "does not match event.namespace")}
}

// EventRow returns the table row of an Event.
func EventRow(e *corev1.Event, now time.Time) []any {
	first := builder.Since(e.FirstTimestamp, now)
	if e.FirstTimestamp.IsZero() {
		first = builder.Since(builder.MicroTime(e.EventTime), now)
	}
	last, count := first, int64(e.Count)
	if !e.LastTimestamp.IsZero() {
		last = builder.Since(e.LastTimestamp, now)
	}
	if e.Series != nil {
		last, count = builder.Since(builder.MicroTime(e.Series.LastObservedTime), now), int64(e.Series.Count)
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

const (
	maxEventText = 128
	MaxEventNote = 1024
)

// ValidateEventText returns an error if a required text of an Event is empty or too long.
func ValidateEventText(name, value string) field.ErrorList {
	switch {
	case value == "":
		return field.ErrorList{field.Required(field.NewPath(name), "")}
	case len(value) > maxEventText:
		return field.ErrorList{NewTooLongError(name, maxEventText)}
	}
	return nil
}

// NewTooLongError returns the error for a field of an Event that is longer than maxBytes.
func NewTooLongError(name string, maxBytes int) *field.Error {
	return field.Invalid(field.NewPath(name), "", fmt.Sprintf("can have at most %d characters", maxBytes))
}
