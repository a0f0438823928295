package events_test

import (
	"context"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// Every field of an event has its place in both versions: nothing is lost on the way there and back.
func TestEventsConvertWhole(t *testing.T) {
	k := kinds.All().ByType(&eventsv1.Event{})
	core := kinds.All().ByType(&corev1.Event{})
	if k.Storage.Prefix != core.Storage.Prefix || k.GVK == core.GVK || k.Storage.Hub.GVK != core.GVK {
		t.Fatalf("%s is stored as %s under %s", k.GVK, k.Storage.Hub.GVK, k.Storage.Prefix)
	}
	for seed := range int64(50) {
		e := &eventsv1.Event{}
		kindstest.NewFiller(seed).Fill(e)
		e.SetGroupVersionKind(k.GVK)
		before := e.DeepCopy()
		hub, err := k.Conversion.To(context.Background(), e)
		if err != nil {
			t.Fatal(err)
		}
		back, err := k.Conversion.From(context.Background(), []api.Object{hub})
		if err != nil {
			t.Fatal(err)
		}
		k.SetTypeMeta(back[0])
		if !reflect.DeepEqual(back[0], before) || !reflect.DeepEqual(e, before) {
			t.Fatalf("%+v became %+v", before, back[0])
		}
	}
}

const unnamedReporter = `reportingController: Invalid value: "": name part must be non-empty, reportingController: ` +
	`Invalid value: "": ` +

	"name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric " +
	"character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is " +
	"'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"

func TestNewEventRules(t *testing.T) {
	const good = "{metadata: {name: a, namespace: ns}, eventTime: '2024-01-01T00:00:00.000001Z', " +
		"reportingController: " +
		"example.com/c, reportingInstance: i, action: act, reason: why, type: Normal, regarding: " +
		"{namespace: ns, name: p}"
	for text, want := range map[string]string{
		good + "}": "",
		good + ", series: {count: 2, lastObservedTime: '2024-01-01T00:00:00.000001Z'}}": "",
		good + ", series: {count: 1}}": "series.count: Invalid value: 1: should be at " +
			"least 2, series.lastObservedTime: Required value",
		good + ", deprecatedCount: 3}": "deprecatedCount: Invalid value: \"\": " +
			"needs to be unset",
		good + ", regarding: {namespace: x}}": "",
		good + ", regarding: {name: n}}": "regarding.namespace: Invalid value: \"\": does " +
			"not match event.namespace",
		good + ", note: " + strings.Repeat("n", 1025) +
			"}": "note: Invalid value: \"\": can have at most 1024 characters",
		good + ", type: Bad}": "type: Invalid value: \"\": has invalid value: Bad",
		"{metadata: {name: a, namespace: default}, type: Normal}": "eventTime: Required value, reportingController: " +
			"Required value, " + unnamedReporter +
			", reportingInstance: Required value, action: Required value, reason: Required value",
	} {
		text = strings.Replace(text, "regarding: {namespace: ns, name: p}, regarding", "regarding", 1)
		text = strings.Replace(text, "type: Normal, regarding: {namespace: ns, name: p}, type: Bad",
			"regarding: {namespace: ns, name: p}, type: Bad", 1)
		e := kindstest.Load[*eventsv1.Event](t, text)
		var got []string
		for _, err := range kinds.All().ByType(e).Validation.Object(e) {
			got = append(got, err.Error())
		}
		if s := strings.Join(got, ", "); s != want {
			t.Errorf("%.300s:\ngot  %s\nwant %s", text, s, want)
		}
	}
	old := kindstest.Load[*eventsv1.Event](t, good+"}")
	next := old.DeepCopy()
	next.Series = &eventsv1.EventSeries{Count: 2, LastObservedTime: old.EventTime}
	k := kinds.All().ByType(old)
	if errs := k.Validation.Update(next, old); len(errs) > 0 {
		t.Errorf("a series may grow: %v", errs)
	}
	next.Note, next.Regarding.Name = "other", "q"
	if errs := k.Validation.Update(next, old); len(errs) != 2 {
		t.Errorf("two fields may not change: %v", errs)
	}
}
