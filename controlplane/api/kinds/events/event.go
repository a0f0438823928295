// Package events describes the kinds of the API group events.k8s.io.
package events

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// NewEventKind returns the definition of the kind Event in group events.k8s.io. Its objects are
// stored as Events of the core group, but some fields have other names, and new Events have
// stricter rules. coreEvents is the kind of the core group.
func NewEventKind(coreEvents *api.Kind) *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: eventsv1.SchemeGroupVersion, Kind: "Event", CreateOnUpdate: true, Plural: "events",
		Singular: "event", Short: []string{"ev"},
	}, func(l *eventsv1.EventList) *[]eventsv1.Event { return &l.Items })
	k.Commit.TTL = coreEvents.Commit.TTL
	k.Storage = coreEvents.Storage
	k.Storage.Known = append(k.Storage.Known, api.Version{
		GVK: k.GVK, New: k.Type.New, Shallow: k.Type.Ops.Shallow,
		ToHub: func(o api.Object) (api.Object, error) { return toCoreEvent(o.(*eventsv1.Event)), nil },
	})
	k.Conversion = eventConversion
	builder.AddValidation(k, validateNewEvent)
	builder.AddUpdateValidation(k, validateNewEventUpdate)
	k.Lists.Columns = coreEvents.Lists.Columns
	k.Lists.Row = builder.Row(func(e *eventsv1.Event, now time.Time) []any {
		return core.EventRow(toCoreEvent(e), now)
	})
	k.Lists.Fields = builder.Fields(newEventFields)
	return k
}

// validateNewEvent validates a new Event. It must identify the controller that reports it, and must
// not set fields that only old clients use.
func validateNewEvent(e *eventsv1.Event) field.ErrorList {
	errs := core.ValidateEventNamespace(e.Namespace, e.Regarding.Namespace, !e.EventTime.IsZero(),
		field.NewPath("regarding", "namespace"))
	if e.EventTime.IsZero() {
		errs = append(errs, field.Required(field.NewPath("eventTime"), ""))
	}
	errs = append(errs, core.ValidateReporter(e.ReportingController, field.NewPath("reportingController"))...)
	errs = append(errs, core.ValidateEventText("reportingInstance", e.ReportingInstance)...)
	errs = append(errs, core.ValidateEventText("action", e.Action)...)
	errs = append(errs, core.ValidateEventText("reason", e.Reason)...)
	if len(e.Note) > core.MaxEventNote {
		errs = append(errs, core.NewTooLongError("note", core.MaxEventNote))
	}
	if e.Type != corev1.EventTypeNormal && e.Type != corev1.EventTypeWarning {
		errs = append(errs, field.Invalid(field.NewPath("type"), "", fmt.Sprintf("has invalid value: %s", e.Type)))
	}
	return append(append(errs, validateEventSeries(e.Series)...), validateOldEventFields(e)...)
}

func validateEventSeries(s *eventsv1.EventSeries) field.ErrorList {
	var errs field.ErrorList
	if s != nil && s.Count < 2 {
		errs = append(errs, field.Invalid(field.NewPath("series", "count"), s.Count, "should be at least 2"))
	}
	if s != nil && s.LastObservedTime.IsZero() {
		errs = append(errs, field.Required(field.NewPath("series", "lastObservedTime"), ""))
	}
	return errs
}

func validateOldEventFields(e *eventsv1.Event) field.ErrorList {
	var errs field.ErrorList
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"deprecatedFirstTimestamp", !e.DeprecatedFirstTimestamp.IsZero()},
		{"deprecatedLastTimestamp", !e.DeprecatedLastTimestamp.IsZero()},
		{"deprecatedCount", e.DeprecatedCount != 0}, {"deprecatedSource", e.DeprecatedSource != corev1.EventSource{}},
	} {
		if f.set {
			errs = append(errs, field.Invalid(field.NewPath(f.name), "", "needs to be unset"))
		}
	}
	return errs
}

// validateNewEventUpdate returns errors for changes of an Event other than its series.
func validateNewEventUpdate(e, old *eventsv1.Event) field.ErrorList {
	var errs field.ErrorList
	for _, f := range []struct {
		name     string
		now, was any
	}{
		{"regarding", e.Regarding, old.Regarding}, {"reason", e.Reason, old.Reason}, {"note", e.Note, old.Note},
		{"type", e.Type, old.Type}, {"eventTime", truncateToMicro(e.EventTime), truncateToMicro(old.EventTime)},
		{"action", e.Action, old.Action}, {"related", e.Related, old.Related},
		{"reportingController", e.ReportingController, old.ReportingController},
		{"reportingInstance", e.ReportingInstance, old.ReportingInstance},
	} {
		errs = append(errs, fieldrules.ValidateUnchanged(f.now, f.was, field.NewPath(f.name))...)
	}
	return errs
}

// truncateToMicro truncates a time to microseconds, the precision with which it is stored.
func truncateToMicro(timestamp metav1.MicroTime) metav1.MicroTime {
	return metav1.NewMicroTime(timestamp.Truncate(time.Microsecond).UTC())
}

// newEventFields returns the values of the field selectors of an Event of group events.k8s.io,
// given the stored Event of the core group.
func newEventFields(e *corev1.Event) fields.Set {
	o := e.InvolvedObject
	return fields.Set{
		"regarding.kind":            o.Kind,
		"regarding.namespace":       o.Namespace,
		"regarding.name":            o.Name,
		"regarding.uid":             string(o.UID),
		"regarding.apiVersion":      o.APIVersion,
		"regarding.resourceVersion": o.ResourceVersion,
		"regarding.fieldPath":       o.FieldPath,
		"reason":                    e.Reason,
		"reportingController":       e.ReportingController,
		"type":                      e.Type,
	}
}

var eventConversion = &api.Conversion{
	From: api.ConvertEach(func(o api.Object) (api.Object, error) { return fromCoreEvent(o.(*corev1.Event)), nil }),
	To: func(_ context.Context, o api.Object) (api.Object, error) {
		return toCoreEvent(o.(*eventsv1.Event)), nil
	},
}

// toCoreEvent converts an Event to the core group.
func toCoreEvent(e *eventsv1.Event) *corev1.Event {
	out := &corev1.Event{
		ObjectMeta: e.ObjectMeta, InvolvedObject: e.Regarding, Related: e.Related,
		Reason: e.Reason, Message: e.Note, Type: e.Type, EventTime: e.EventTime, Action: e.Action,
		ReportingController: e.ReportingController, ReportingInstance: e.ReportingInstance,
		Source: e.DeprecatedSource, Count: e.DeprecatedCount,
		FirstTimestamp: e.DeprecatedFirstTimestamp, LastTimestamp: e.DeprecatedLastTimestamp,
	}
	if s := e.Series; s != nil {
		out.Series = &corev1.EventSeries{Count: s.Count, LastObservedTime: s.LastObservedTime}
	}
	return out
}

// fromCoreEvent is the inverse of toCoreEvent.
func fromCoreEvent(e *corev1.Event) *eventsv1.Event {
	out := &eventsv1.Event{
		ObjectMeta: e.ObjectMeta, Regarding: e.InvolvedObject, Related: e.Related,
		Reason: e.Reason, Note: e.Message, Type: e.Type, EventTime: e.EventTime, Action: e.Action,
		ReportingController: e.ReportingController, ReportingInstance: e.ReportingInstance,
		DeprecatedSource: e.Source, DeprecatedCount: e.Count,
		DeprecatedFirstTimestamp: e.FirstTimestamp, DeprecatedLastTimestamp: e.LastTimestamp,
	}
	if s := e.Series; s != nil {
		out.Series = &eventsv1.EventSeries{Count: s.Count, LastObservedTime: s.LastObservedTime}
	}
	return out
}
