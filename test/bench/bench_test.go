package main

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/procfs"
)

// In virtual time a load's figures are exact: three clients, calls of 100 ms, one second.
func TestLoadCountsEveryCall(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		got, err := closedLoop{clients: 3, during: time.Second, call: func(context.Context, int, int) error {
			<-time.After(100 * time.Millisecond)
			return nil
		}}.runClients(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(got.latencies) != 30 || got.took != time.Second || got.callsPerSecond() != 30 {
			t.Errorf("%d calls in %s, %v/s", len(got.latencies), got.took, got.callsPerSecond())
		}
		for _, l := range got.latencies {
			if l != 100*time.Millisecond {
				t.Errorf("a call took %s", l)
			}
		}
	})
}

func TestLoadEndsAtTheFirstFailure(t *testing.T) {
	broken := errors.New("broken")
	var calls atomic.Int64
	_, err := closedLoop{clients: 4, during: time.Hour, call: func(ctx context.Context, client, n int) error {
		if calls.Add(1) == 10 {
			return broken
		}
		return nil
	}}.runClients(t.Context())
	if !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

func TestSummarise(t *testing.T) {
	begin := time.Unix(100, 0)
	at := func(name, actor string, start, took int) api.Stage {
		return api.Stage{Name: name, Actor: actor, Start: begin.Add(time.Duration(start) * time.Millisecond),
			Duration: time.Duration(took) * time.Millisecond}
	}
	got := summarizeStages([][]api.Stage{
		{ // not in order; written by two replicas
			at("committed", "apiserver/cp2", 10, 3), at("committed", "apiserver/cp1", 0, 1),
			at("sandbox", "agent/w1", 20, 30),
		},
		{at("committed", "apiserver/cp1", 0, 2), at("committed", "apiserver/cp1", 12, 5),
			at("sandbox", "agent/w2", 22, 40)},
		{at("committed", "apiserver/cp1", 1000, 9)}, // starts are after the timeline's own first stage
	})
	want := []stageFigure{
		{"committed", "apiserver", 0, 2, 3},
		{"committed (2)", "apiserver", 10, 3, 2},
		{"sandbox", "agent", 20, 30, 2},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}

func TestUntilReady(t *testing.T) {
	begin := time.Unix(100, 0)
	stage := func(name string, ms int) api.Stage {
		return api.Stage{Name: name, Start: begin.Add(time.Duration(ms) * time.Millisecond)}
	}
	in := []api.Stage{stage("committed", 90), stage("received", 1), stage("ready", 80)}
	got, ready := stagesUntilReady(in)
	if len(got) != 2 || got[0].Name != "received" || got[1].Name != "ready" || ready != begin.Add(80*time.Millisecond) {
		t.Errorf("got %v, %v", got, ready)
	}
	if got, ready := stagesUntilReady(in[:2]); len(got) != 2 || !ready.IsZero() {
		t.Errorf("a timeline without an end: %v, %v", got, ready)
	}
}

func TestObserverNotesFirstMoments(t *testing.T) {
	o := &podObserver{pods: map[string]*podView{}, changed: make(chan struct{})}
	begin := time.Unix(100, 0)
	pod := func(node string, ready v1.ConditionStatus) *v1.Pod {
		return &v1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "p",
				Annotations: map[string]string{
					api.TraceParentAnnotation: "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"}},
			Spec:   v1.PodSpec{NodeName: node},
			Status: v1.PodStatus{Conditions: []v1.PodCondition{{Type: v1.PodReady, Status: ready}}},
		}
	}
	for i, e := range []watch.Event{
		{Type: watch.Added, Object: pod("", v1.ConditionFalse)},
		{Type: watch.Modified, Object: pod("w1", v1.ConditionFalse)},
		{Type: watch.Modified, Object: pod("w1", v1.ConditionTrue)},
		{Type: watch.Modified, Object: pod("w1", v1.ConditionTrue)},
		{Type: watch.Deleted, Object: pod("w1", v1.ConditionTrue)},
	} {
		o.handleEvent(e, begin.Add(time.Duration(i)*time.Second))
	}
	s, err := o.awaitPod(t.Context(), "p", "gone", func(s podView) bool { return !s.gone.IsZero() })
	if err != nil {
		t.Fatal(err)
	}
	for what, d := range map[string][2]time.Duration{"bound": {s.bound.Sub(begin), 1}, "ready": {s.ready.Sub(begin), 2},
		"gone": {s.gone.Sub(begin), 4}} {
		if d[0] != d[1]*time.Second {
			t.Errorf("%s after %s, want %ds", what, d[0], d[1])
		}
	}
	if s.traceID != "0123456789abcdef0123456789abcdef" {
		t.Errorf("trace %q", s.traceID)
	}
}

// When the watch ends, waiting calls return its error. The error of a deadline describes the pod's
// state.
func TestObserverGivesUp(t *testing.T) {
	never := func(podView) bool { return false }
	virtual.Test(t, func(t *testing.T) {
		o := &podObserver{pods: map[string]*podView{}, changed: make(chan struct{})}
		waited := make(chan error)
		go func() {
			_, err := o.awaitPod(t.Context(), "p", "Ready", never)
			waited <- err
		}()
		virtual.Wait()
		o.setError(errors.New("cut off"))
		if err := <-waited; err == nil || !strings.Contains(err.Error(), "cut off") {
			t.Errorf("got %v", err)
		}
	})
	virtual.Test(t, func(t *testing.T) {
		o := &podObserver{pods: map[string]*podView{}, changed: make(chan struct{})}
		o.handleEvent(watch.Event{Type: watch.Added, Object: &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"},
			Status: v1.PodStatus{Phase: v1.PodPending,
				Conditions: []v1.PodCondition{{Type: v1.PodScheduled, Status: v1.ConditionFalse,
					Reason:  "Unschedulable",
					Message: "0/3 nodes"}}}}}, time.Now())
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := o.awaitPod(ctx, "p", "Ready", never)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "0/3 nodes") {
			t.Errorf("got %v", err)
		}
	})
}

func TestPodProcesses(t *testing.T) {
	got := podProcesses([]procfs.Process{
		{PID: 10, Parent: 1, Name: shimName}, {PID: 11, Parent: 10, Name: pauseName},
		{PID: 12, Parent: 10, Name: "hello"},
		{PID: 20, Parent: 1, Name: shimName}, // has lost its pause
		{PID: 31, Parent: 1, Name: pauseName},
	})
	if want := []podProcess{{shim: 10, pause: 11}}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
}

func TestOptionsNameTheFlag(t *testing.T) {
	good := options{only: []string{partAPI}, sequentialPods: 1, burstPods: 1, duration: time.Second}
	if err := good.checkFlags(); err != nil {
		t.Error(err)
	}
	for flag, broken := range map[string]func(*options){
		"-only":       func(o *options) { o.only = []string{"everything"} },
		"-kubeconfig": func(o *options) { o.only, o.kubeconfig = []string{partIdle, partAPI}, "file" },
		"-programs":   func(o *options) { o.only = []string{partStore} },
		"-pods":       func(o *options) { o.sequentialPods = 0 },
	} {
		o := good
		broken(&o)
		if err := o.checkFlags(); err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%s: got %v", flag, err)
		}
	}
}

// A commit is the reference of creates with the same number of clients only.
func TestCommitReference(t *testing.T) {
	b := &benchmarks{tally: figures.BenchmarkRun{Records: []figures.Record{
		{Measure: "store: put", Params: map[string]any{"clients": 64.0, "through": "all"},
			Values: map[string]float64{"rate": 9000}},
	}}}
	if r := b.commitReference(64, "rate"); r == nil || r.Figure != 9000 {
		t.Errorf("got %+v", r)
	}
	if r := b.commitReference(1, "rate"); r != nil {
		t.Errorf("got %+v", r)
	}
}

func TestBenchmarkMetric(t *testing.T) {
	out := `goos: linux
BenchmarkPlacement/spread/1000-2         	   20000	    201754 ns/op	      4957 pods/s	   12721 B/op	     112 allocs/op
BenchmarkPlacement/spread/1000-2         	   20000	    101754 ns/op	      9827.5 pods/s	   12721 B/op	     112 allocs/op
BenchmarkPlacement/spread/1000-2         	   20000	    101754 ns/op	      7 pods/s	   12721 B/op	     112 allocs/op
PASS
`
	if got, err := parseMetric([]byte(out), "pods/s"); err != nil || !slices.Equal(got, []float64{4957, 9827.5, 7}) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := parseMetric([]byte(strings.Replace(out, "Placement", "Other", 1)), "pods/s"); err == nil {
		t.Errorf("one is missing, got %v", got)
	}
}

// Every placement target belongs to a placement that is measured.
func TestPlacementsHaveBars(t *testing.T) {
	measured := map[string]bool{}
	for _, size := range placementSizes {
		for _, kind := range placementKinds {
			measured[fmt.Sprintf("placement %s %d", kind, size)] = true
		}
	}
	bars := 0
	for key := range figures.Targets {
		if strings.HasPrefix(key, "placement ") {
			if bars++; !measured[key] {
				t.Errorf("%s is not measured", key)
			}
		}
	}
	if bars < 10 {
		t.Errorf("%d bars", bars)
	}
}
