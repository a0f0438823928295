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
		GroupVersion: corev1.SchemeGroupVersion, Kind: "Event", CreateOnUpdate: true, Plural: "events", Singular: "event", Short: []string{"ev"},
		Rule: builder.PathSegment, // older clients may use any name
	}, func(l *corev1.EventList) *[]corev1.Event { return &l.Items })
	k.TTL = eventTTL
	builder.AddValidation(k, validateEvent)
	k.Columns = builder.Columns(builder.StringColumn("Last Seen"), builder.StringColumn("Type"),
		builder.StringColumn("Reason"), builder.StringColumn("Object"), builder.WideColumn("Subobject"), builder.WideColumn("Source"),
		builder.StringColumn("Message"), builder.WideColumn("First Seen"), builder.WideColumn("Count"), func() builder.ColumnDefinition { c := builder.NameColumn; c.Priority = 1; return c }())
	k.Row = builder.Row(EventRow)
	k.Fields = builder.Fields(eventFields)
	return k
}

// validateEvent validates an Event of the core group. An Event with eventTime comes from a client
// of the newer API, and must have a reporter and an action. Older clients set none of these.
func validateEvent(e *corev1.Event) field.ErrorList {
	errs := EventNamespace(e.Namespace, e.InvolvedObject.Namespace, !e.EventTime.IsZero(), field.NewPath("involvedObject", "namespace"))
	if e.EventTime.IsZero() {
		return errs
	}
	errs = append(errs, ValidateReporter(e.ReportingController, field.NewPath("reportingComponent"))...)
	errs = append(errs, ValidateEventText("reportingInstance", e.ReportingInstance)...)
	errs = append(errs, ValidateEventText("action", e.Action)...)
	errs = append(errs, ValidateEventText("reason", e.Reason)...)
	if len(e.Message) > MaxEventNote {
		errs = append(errs, TooLong("message", MaxEventNote))
	}
	return errs
}

// ValidateReporter validates the name of the component that reports an Event.
func ValidateReporter(name string, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if name == "" {
		errs = append(errs, field.Required(at, ""))
	}
	return append(errs, fieldrules.Invalid(at, name, validation.IsQualifiedName(name))...)
}

// EventNamespace validates the namespace of an Event's object. Events of cluster-scoped objects,
// which have no namespace, are in "default", or in "kube-system" when timed (with eventTime). Only
// Events that are not timed need the object's namespace.
func EventNamespace(event, object string, timed bool, at *field.Path) field.ErrorList {
	ok := event == object || event == metav1.NamespaceDefault && object == ""
	if timed {
		ok = object != "" || event == metav1.NamespaceDefault || event == metav1.NamespaceSystem
	}
	if ok {
		return nil
	}
	return field.ErrorList{field.Invalid(at, object, "does not match event.namespace")}
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
		return field.ErrorList{TooLong(name, maxEventText)}
	}
	return nil
}

// TooLong returns the error for a text of an Event that is longer than most bytes.
func TooLong(name string, most int) *field.Error {
	return field.Invalid(field.NewPath(name), "", fmt.Sprintf("can have at most %d characters", most))
}
