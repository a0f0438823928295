package assign

import (
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/internal/virtual"
)

func sliceOf(ready map[types.UID]bool) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{}
	for uid, r := range ready {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Conditions: discoveryv1.EndpointConditions{Ready: &r},
			TargetRef:  &v1.ObjectReference{Kind: "Pod", UID: uid}})
	}
	return s
}

const gatedPod = types.UID("p")

// gateStep is one input to a gate in virtual time, with the expected opening.
type gateStep struct {
	name  string
	steps func(g *StopGate, open func())
	want  time.Duration // expected opening, measured from the start
}

func gateSlices() (a, b key) {
	return key{kindEndpointSlice, "default", "a"}, key{kindEndpointSlice, "default", "b"}
}

// askedFirst returns the cases in which ask is called while EndpointSlices list the pod as ready.
func askedFirst() []gateStep {
	const pod = gatedPod
	a, b := gateSlices()
	return []gateStep{
		{"in no slice", func(g *StopGate, open func()) { g.RequestStop(pod, open) }, 0},
		{"unready in a slice", func(g *StopGate, open func()) {
			g.updateSlice(a, sliceOf(map[types.UID]bool{pod: false}), 5)
			g.RequestStop(pod, open)
		}, 0},
		{"nobody applies", func(g *StopGate, open func()) {
			g.updateSlice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.RecordApplied("w1", 5)
			g.RequestStop(pod, open)
			g.updateSlice(a, nil, 6)
		}, time.Second},
		{"all apply", func(g *StopGate, open func()) {
			g.updateSlice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.RecordApplied("w1", 5)
			g.RecordApplied("w2", 5)
			g.RequestStop(pod, open)
			g.updateSlice(a, sliceOf(map[types.UID]bool{pod: false}), 6)
			g.RecordApplied("w1", 6)
			time.Sleep(100 * time.Millisecond)
			g.RecordApplied("w2", 7)
		}, 100 * time.Millisecond},
		{"two slices", func(g *StopGate, open func()) {
			g.updateSlice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.updateSlice(b, sliceOf(map[types.UID]bool{pod: true}), 6)
			g.RecordApplied("w1", 6)
			g.RequestStop(pod, open)
			g.updateSlice(a, nil, 7)
			g.RecordApplied("w1", 7)
			time.Sleep(200 * time.Millisecond)
			g.updateSlice(b, nil, 8)
			time.Sleep(100 * time.Millisecond)
			g.RecordApplied("w1", 8)
		}, 300 * time.Millisecond},
		{"a node dies", func(g *StopGate, open func()) {
			g.updateSlice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.RecordApplied("w1", 5)
			g.setNodeReady("w2", true) // Ready, but not connected to this replica
			g.RequestStop(pod, open)
			g.updateSlice(a, nil, 6)
			g.RecordApplied("w1", 6)
			time.Sleep(400 * time.Millisecond)
			g.setNodeReady("w2", false)
		}, 400 * time.Millisecond},
		{"a node falls silent and is dead", func(g *StopGate, open func()) {
			g.updateSlice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.RecordApplied("w1", 5)
			g.RequestStop(pod, open)
			g.updateSlice(a, nil, 6)
			time.Sleep(400 * time.Millisecond)
			g.RecordDisconnect("w1")
		}, 400 * time.Millisecond},
	}
}

// leftFirst returns the cases in which the pod has left its EndpointSlices before ask, or leaves
// them then.
func leftFirst() []gateStep {
	const pod = gatedPod
	a, _ := gateSlices()
	return []gateStep{
		{"already applied when it leaves", func(g *StopGate, open func()) {
			g.updateSlice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.RecordApplied("w1", 9)
			g.RequestStop(pod, open)
			g.updateSlice(a, nil, 8)
		}, 0},
		{"left before the question", func(g *StopGate, open func()) {
			g.updateSlice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.RecordApplied("w1", 5)
			g.RecordApplied("w2", 5)
			g.updateSlice(a, sliceOf(map[types.UID]bool{pod: false}), 6)
			g.RecordApplied("w1", 6)
			g.RequestStop(pod, open)
			time.Sleep(100 * time.Millisecond)
			g.RecordApplied("w2", 6)
		}, 100 * time.Millisecond},
		{"left before the question, and nobody applies", func(g *StopGate, open func()) {
			g.updateSlice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.RecordApplied("w1", 5)
			g.updateSlice(a, nil, 6)
			time.Sleep(300 * time.Millisecond)
			g.RequestStop(pod, open)
		}, time.Second},
		{"left long before the question", func(g *StopGate, open func()) {
			g.updateSlice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.RecordApplied("w1", 5)
			g.updateSlice(a, nil, 6)
			time.Sleep(1500 * time.Millisecond)
			g.RequestStop(pod, open)
		}, 1500 * time.Millisecond},
		{"left and came back before the question", func(g *StopGate, open func()) {
			g.updateSlice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.RecordApplied("w1", 5)
			g.updateSlice(a, nil, 6)
			g.updateSlice(a, sliceOf(map[types.UID]bool{pod: true}), 7)
			g.RecordApplied("w1", 7)
			g.RequestStop(pod, open)
			time.Sleep(100 * time.Millisecond)
			g.updateSlice(a, nil, 8)
			time.Sleep(100 * time.Millisecond)
			g.RecordApplied("w1", 8)
		}, 200 * time.Millisecond},
	}
}

// P20: the gate opens at the expected times.
func TestGate(t *testing.T) {
	_, b := gateSlices()
	for _, tt := range append(askedFirst(), leftFirst()...) {
		t.Run(tt.name, func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				g := NewStopGate(time.Second)
				began := time.Now()
				opened := make(chan time.Duration, 2)
				tt.steps(g, func() { opened <- time.Since(began) })
				if got := <-opened; got != tt.want {
					t.Errorf("opened after %s, want %s", got, tt.want)
				}
				time.Sleep(2 * time.Second)
				if len(opened) > 0 {
					t.Error("opened twice")
				}
				if len(g.waiting) > 0 {
					t.Errorf("%d pods still wait", len(g.waiting))
				}
				// Departures of pods without ask are dropped at the next departure.
				g.updateSlice(b, sliceOf(map[types.UID]bool{"q": true}), 100)
				g.updateSlice(b, nil, 101)
				if len(g.removed) != 1 || len(g.removalOrder) != 1 {
					t.Errorf("remembers %v, %v", g.removed, g.removalOrder)
				}
			})
		})
	}
}
