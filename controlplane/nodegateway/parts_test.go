package nodegateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/virtual"
)

func sliceOf(ready map[types.UID]bool) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{}
	for uid, r := range ready {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Conditions: discoveryv1.EndpointConditions{Ready: &r}, TargetRef: &v1.ObjectReference{Kind: "Pod", UID: uid}})
	}
	return s
}

const gatedPod = types.UID("p")

// gateStep is one input to a gate in virtual time, with the expected opening.
type gateStep struct {
	name  string
	steps func(g *gate, open func())
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
		{"in no slice", func(g *gate, open func()) { g.ask(pod, open) }, 0},
		{"unready in a slice", func(g *gate, open func()) { g.slice(a, sliceOf(map[types.UID]bool{pod: false}), 5); g.ask(pod, open) }, 0},
		{"nobody applies", func(g *gate, open func()) {
			g.slice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.progress("w1", 5)
			g.ask(pod, open)
			g.slice(a, nil, 6)
		}, time.Second},
		{"all apply", func(g *gate, open func()) {
			g.slice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.progress("w1", 5)
			g.progress("w2", 5)
			g.ask(pod, open)
			g.slice(a, sliceOf(map[types.UID]bool{pod: false}), 6)
			g.progress("w1", 6)
			time.Sleep(100 * time.Millisecond)
			g.progress("w2", 7)
		}, 100 * time.Millisecond},
		{"two slices", func(g *gate, open func()) {
			g.slice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.slice(b, sliceOf(map[types.UID]bool{pod: true}), 6)
			g.progress("w1", 6)
			g.ask(pod, open)
			g.slice(a, nil, 7)
			g.progress("w1", 7)
			time.Sleep(200 * time.Millisecond)
			g.slice(b, nil, 8)
			time.Sleep(100 * time.Millisecond)
			g.progress("w1", 8)
		}, 300 * time.Millisecond},
		{"a node dies", func(g *gate, open func()) {
			g.slice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.progress("w1", 5)
			g.nodeReady("w2", true) // Ready, but not connected to this replica
			g.ask(pod, open)
			g.slice(a, nil, 6)
			g.progress("w1", 6)
			time.Sleep(400 * time.Millisecond)
			g.nodeReady("w2", false)
		}, 400 * time.Millisecond},
		{"a node falls silent and is dead", func(g *gate, open func()) {
			g.slice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.progress("w1", 5)
			g.ask(pod, open)
			g.slice(a, nil, 6)
			time.Sleep(400 * time.Millisecond)
			g.silent("w1")
		}, 400 * time.Millisecond},
	}
}

// leftFirst returns the cases in which the pod has left its EndpointSlices before ask, or leaves
// them then.
func leftFirst() []gateStep {
	const pod = gatedPod
	a, _ := gateSlices()
	return []gateStep{
		{"already applied when it leaves", func(g *gate, open func()) {
			g.slice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.progress("w1", 9)
			g.ask(pod, open)
			g.slice(a, nil, 8)
		}, 0},
		{"left before the question", func(g *gate, open func()) {
			g.slice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.progress("w1", 5)
			g.progress("w2", 5)
			g.slice(a, sliceOf(map[types.UID]bool{pod: false}), 6)
			g.progress("w1", 6)
			g.ask(pod, open)
			time.Sleep(100 * time.Millisecond)
			g.progress("w2", 6)
		}, 100 * time.Millisecond},
		{"left before the question, and nobody applies", func(g *gate, open func()) {
			g.slice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.progress("w1", 5)
			g.slice(a, nil, 6)
			time.Sleep(300 * time.Millisecond)
			g.ask(pod, open)
		}, time.Second},
		{"left long before the question", func(g *gate, open func()) {
			g.slice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.progress("w1", 5)
			g.slice(a, nil, 6)
			time.Sleep(1500 * time.Millisecond)
			g.ask(pod, open)
		}, 1500 * time.Millisecond},
		{"left and came back before the question", func(g *gate, open func()) {
			g.slice(a, sliceOf(map[types.UID]bool{pod: true}), 5)
			g.progress("w1", 5)
			g.slice(a, nil, 6)
			g.slice(a, sliceOf(map[types.UID]bool{pod: true}), 7)
			g.progress("w1", 7)
			g.ask(pod, open)
			time.Sleep(100 * time.Millisecond)
			g.slice(a, nil, 8)
			time.Sleep(100 * time.Millisecond)
			g.progress("w1", 8)
		}, 200 * time.Millisecond},
	}
}

// P20: the gate opens at the expected times.
func TestGate(t *testing.T) {
	_, b := gateSlices()
	for _, tt := range append(askedFirst(), leftFirst()...) {
		t.Run(tt.name, func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				g := newGate(time.Second)
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
				g.slice(b, sliceOf(map[types.UID]bool{"q": true}), 100)
				g.slice(b, nil, 101)
				if len(g.left) != 1 || len(g.leaving) != 1 {
					t.Errorf("remembers %v, %v", g.left, g.leaving)
				}
			})
		})
	}
}

// Grace timers: the newest epoch counts, a session stops the timer, and a failed write is retried.
func TestLosses(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var (
			mu    sync.Mutex
			lost  []string
			fails = map[string]int{"flaky": 2}
			began = time.Now()
		)
		l := newLosses(slog.New(slog.DiscardHandler), func(_ context.Context, node string, epoch uint64) error {
			mu.Lock()
			defer mu.Unlock()
			if fails[node] > 0 {
				fails[node]--
				return errors.New("no leader")
			}
			lost = append(lost, fmt.Sprintf("%s/%d at %s", node, epoch, time.Since(began)))
			return nil
		})
		done := make(chan error, 1)
		go func() { done <- l.run(ctx) }()
		l.arm("dead", 1, 5*time.Second)
		l.arm("dead", 1, time.Second) // a second call for the same loss has no effect
		l.arm("back", 1, 5*time.Second)
		l.arm("again", 1, 5*time.Second)
		l.arm("flaky", 1, 5*time.Second)
		l.arm("moved", 1, 5*time.Second)
		time.Sleep(2 * time.Second)
		l.disarm("back")
		l.arm("again", 2, 5*time.Second) // reconnected, then lost again
		l.keep(func(node string, _ uint64) bool { return node != "moved" })
		time.Sleep(time.Minute)
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		want := []string{"again/2 at 7s", "dead/1 at 5s", "flaky/1 at 6s"}
		slices.Sort(lost)
		if !slices.Equal(lost, want) {
			t.Errorf("lost %v, want %v", lost, want)
		}
	})
}

// A node of a failed replica gets a second grace period per session while its agent is connected to
// this replica. A node that is not connected is lost at once.
func TestMoving(t *testing.T) {
	m, began := newMoving(5*time.Second), time.Now()
	for _, c := range []struct {
		after     time.Duration
		epoch     uint64
		connected bool
		wait      bool
	}{
		{0, 1, true, true}, {4 * time.Second, 1, true, true}, {5 * time.Second, 1, true, false},
		{6 * time.Second, 2, true, true}, {7 * time.Second, 2, false, false},
		{8 * time.Second, 3, false, false},
	} {
		if got := m.wait("w1", c.epoch, c.connected, began.Add(c.after)); got != c.wait {
			t.Errorf("after %s, session %d, connected %v: waits %v", c.after, c.epoch, c.connected, got)
		}
	}
	if len(m.byNode) != 0 {
		t.Errorf("%d nodes are remembered", len(m.byNode))
	}
}

// Writes: at most one at a time per key, the newest wins, failures are retried, and the limit holds.
func TestWork(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		w := newWork(ctx, 3)
		var now, most atomic.Int64
		busy := make(map[string]bool)
		last := make(map[string]int)
		runs := 0
		var mu sync.Mutex
		for i := range 200 {
			k := fmt.Sprint("k", i%10)
			w.put(k, 0, func(context.Context) error {
				mu.Lock()
				if busy[k] {
					t.Errorf("two writes of %s at once", k)
				}
				busy[k] = true
				runs++
				mu.Unlock()
				most.Store(max(most.Load(), now.Add(1)))
				time.Sleep(10 * time.Millisecond)
				now.Add(-1)
				mu.Lock()
				defer mu.Unlock()
				busy[k] = false
				if runs%4 == 0 {
					return errors.New("conflict")
				}
				last[k] = i
				return nil
			})
		}
		time.Sleep(time.Minute)
		mu.Lock()
		defer mu.Unlock()
		for i := range 10 {
			if got := last[fmt.Sprint("k", i)]; got != 190+i {
				t.Errorf("key %d ended with write %d, want %d", i, got, 190+i)
			}
		}
		if runs > 40 {
			t.Errorf("%d writes for 10 keys: they must coalesce", runs)
		}
		if most.Load() != 3 {
			t.Errorf("%d writes at once, want 3", most.Load())
		}
		w.put("late", 0, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		cancel()
		w.wait()
	})
}

// A mirror pod's references are not sent to its node.
func TestMirrorPodsLeadNowhere(t *testing.T) {
	class := "c"
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}, Spec: v1.PodSpec{
		ServiceAccountName: "robot", ImagePullSecrets: []v1.LocalObjectReference{{Name: "s"}}, RuntimeClassName: &class,
	}}
	if got := references(p); len(got) != 3 {
		t.Errorf("an ordinary pod leads to %v", got)
	}
	p.Annotations = map[string]string{v1.MirrorPodAnnotationKey: "x"}
	if got := references(p); len(got) != 0 {
		t.Errorf("a mirror pod leads to %v", got)
	}
}

// The node's conditions replace stored ones, other conditions stay, and a final phase is never
// left.
func TestMergePodStatus(t *testing.T) {
	long := metav1.NewTime(time.Unix(1000, 0))
	stored := &v1.PodStatus{Phase: v1.PodFailed, Reason: "Evicted", QOSClass: v1.PodQOSBurstable, Conditions: []v1.PodCondition{
		{Type: v1.PodScheduled, Status: v1.ConditionTrue, LastTransitionTime: long},
		{Type: v1.PodReady, Status: v1.ConditionFalse, LastTransitionTime: long},
		{Type: "example.com/gate", Status: v1.ConditionTrue},
	}}
	got := mergePodStatus(stored, &v1.PodStatus{Phase: v1.PodRunning, Conditions: []v1.PodCondition{
		{Type: v1.PodScheduled, Status: v1.ConditionFalse},
		{Type: v1.PodReady, Status: v1.ConditionFalse, Reason: "ContainersNotReady", LastTransitionTime: metav1.Now()},
	}})
	if got.Phase != v1.PodFailed || got.Reason != "Evicted" || got.QOSClass != v1.PodQOSBurstable {
		t.Errorf("phase %s, reason %s, class %s", got.Phase, got.Reason, got.QOSClass)
	}
	want := []v1.PodCondition{stored.Conditions[0], {Type: v1.PodReady, Status: v1.ConditionFalse, Reason: "ContainersNotReady", LastTransitionTime: long}, stored.Conditions[2]}
	if !slices.Equal(got.Conditions, want) {
		t.Errorf("conditions %+v, want %+v", got.Conditions, want)
	}
}

// F32: an overlong message of a waiting container, as earlier agents send it, is truncated so that
// the status can be stored. The reported status itself is not modified.
func TestWaitsAreCut(t *testing.T) {
	waits := func(bytes int) v1.ContainerStatus {
		return v1.ContainerStatus{Name: "c", State: v1.ContainerState{Waiting: &v1.ContainerStateWaiting{Reason: "ErrImagePull", Message: strings.Repeat("x", bytes)}}}
	}
	said := &v1.PodStatus{Phase: v1.PodPending, InitContainerStatuses: []v1.ContainerStatus{waits(200 << 10)},
		ContainerStatuses: []v1.ContainerStatus{{Name: "runs"}, waits(mostOfAWait), waits(mostOfAWait + 1)}, EphemeralContainerStatuses: []v1.ContainerStatus{waits(200 << 10)}}
	before := said.DeepCopy()
	got := mergePodStatus(&v1.PodStatus{}, said)
	for _, list := range [][]v1.ContainerStatus{got.InitContainerStatuses, got.ContainerStatuses[1:], got.EphemeralContainerStatuses} {
		for _, s := range list {
			if w := s.State.Waiting; len(w.Message) != mostOfAWait || w.Reason != "ErrImagePull" {
				t.Errorf("%s for %d bytes", w.Reason, len(w.Message))
			}
		}
	}
	if !equality.Semantic.DeepEqual(said, before) {
		t.Error("what was reported is changed")
	}
	if again := mergePodStatus(got, said); !equality.Semantic.DeepEqual(again, got) {
		t.Error("it would be written again")
	}
}

// The smallest recent sample determines the estimated clock difference.
func TestOffset(t *testing.T) {
	var o offset
	if o.estimate() != 0 {
		t.Error("an estimate without samples")
	}
	for _, d := range []int64{900, 150, 400} {
		o.sample(5000 + d)
	}
	if got := o.estimate(); got != 5150 {
		t.Errorf("estimate %d, want 5150", got)
	}
	for range len(o.samples) { // the clocks have drifted: old samples are dropped
		o.sample(7000)
	}
	if got := o.estimate(); got != 7000 {
		t.Errorf("after a drift %d, want 7000", got)
	}
}

// An object is encoded once per revision for all sessions. Pods and Secrets are not cached.
func TestEncodings(t *testing.T) {
	e := newEncodings()
	svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "s", UID: "u", ResourceVersion: "3"}}
	one, err := e.get(kindService, svc)
	if err != nil {
		t.Fatal(err)
	}
	if two, _ := e.get(kindService, svc); two != one {
		t.Error("encoded twice at one revision")
	}
	next := svc.DeepCopy()
	next.ResourceVersion = "4"
	if three, _ := e.get(kindService, next); three == one || three.Revision != 4 {
		t.Error("an old encoding was served")
	}
	back := &v1.Service{}
	if err := decode(one.Raw, "Service", back); err != nil || back.Name != "s" {
		t.Errorf("decoded %+v, %v", back, err)
	}
	if err := decode(one.Raw, "Pod", &v1.Pod{}); err == nil {
		t.Error("a Service was decoded as a Pod")
	}
	e.forget("u")
	if len(e.byUID) != 0 {
		t.Error("not forgotten")
	}
}

// Node fields that agents do not need are not sent, and their changes wake no session.
func TestSlimNode(t *testing.T) {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", UID: "u", ResourceVersion: "1"}, Spec: v1.NodeSpec{PodCIDR: "10.0.1.0/24"}}
	n.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "192.0.2.1"}}
	busy := n.DeepCopy()
	busy.Status.Images = []v1.ContainerImage{{Names: []string{"hello"}}}
	busy.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady}}
	busy.Status.Allocatable = v1.ResourceList{v1.ResourceCPU: resource.MustParse("3"), v1.ResourceHugePagesPrefix + "2Mi": resource.MustParse("0")}
	if !sameSlim(n, busy) {
		t.Error("a status alone wakes every agent")
	}
	enc, err := encode(kindNode, busy)
	if err != nil {
		t.Fatal(err)
	}
	var got v1.Node
	if err := decode(enc.Raw, "Node", &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Status.Images) > 0 || got.Spec.PodCIDR != n.Spec.PodCIDR || len(got.Status.Addresses) != 1 {
		t.Errorf("sent %+v", got)
	}
	for what, change := range map[string]func(*v1.Node){
		"CIDR":    func(n *v1.Node) { n.Spec.PodCIDR = "10.0.2.0/24" },
		"address": func(n *v1.Node) { n.Status.Addresses[0].Address = "192.0.2.2" },
		"an extended resource": func(n *v1.Node) {
			n.Status.Allocatable = v1.ResourceList{"example.com/dongle": resource.MustParse("1")}
		},
		"label": func(n *v1.Node) { n.Labels = map[string]string{"a": "b"} },
	} {
		other := n.DeepCopy()
		change(other)
		if sameSlim(n, other) {
			t.Errorf("a change of %s does not travel", what)
		}
	}
}

// A node gets its attached volumes and the volumes in use known to the control plane. An agent that
// reports volumes in use replaces the whole list. F110
func TestNodesKnowWhatIsAttached(t *testing.T) {
	n := &v1.Node{Status: v1.NodeStatus{VolumesInUse: []v1.UniqueVolumeName{"a"}, VolumesAttached: []v1.AttachedVolume{{Name: "a"}},
		Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue, Message: "m"}}}}
	slim := slimNode(n).Status
	if len(slim.VolumesInUse) != 1 || len(slim.VolumesAttached) != 1 || len(slim.Conditions) != 1 || slim.Conditions[0].Message != "" {
		t.Errorf("%+v", slim)
	}
	for what, change := range map[string]func(*v1.NodeStatus){
		"volumes in use":   func(s *v1.NodeStatus) { s.VolumesInUse = nil },
		"attached volumes": func(s *v1.NodeStatus) { s.VolumesAttached = nil },
		"being lost":       func(s *v1.NodeStatus) { s.Conditions[0].Status = v1.ConditionUnknown },
	} {
		other := n.DeepCopy()
		if change(&other.Status); sameSlim(n, other) {
			t.Errorf("a change of %s does not travel", what)
		}
	}
	for _, tells := range []bool{false, true} {
		facts := &v1.Node{}
		if tells {
			facts.Annotations = map[string]string{api.AnnotationVolumesInUse: "told"}
		}
		got := mergeNodeStatus(&n.Status, &facts.Status, tellsVolumes(facts), metav1.Now())
		if len(got.VolumesAttached) != 1 || (len(got.VolumesInUse) == 0) != tells {
			t.Errorf("tells %v: %v in use, %v attached", tells, got.VolumesInUse, got.VolumesAttached)
		}
	}
}

// Extended resources that other clients wrote stay in the node's capacity. Allocatable follows the
// capacity, also at removal.
func TestExtendedResourcesStay(t *testing.T) {
	own := v1.ResourceList{v1.ResourceCPU: resource.MustParse("2"), "example.com/gpu": resource.MustParse("1")}
	facts := &v1.NodeStatus{Capacity: own, Allocatable: own.DeepCopy()}
	stored := &v1.NodeStatus{
		Capacity:    v1.ResourceList{v1.ResourceCPU: resource.MustParse("8"), "example.com/gpu": resource.MustParse("9"), "example.com/dongle": resource.MustParse("4")},
		Allocatable: v1.ResourceList{"example.com/dongle": resource.MustParse("1"), "example.com/gone": resource.MustParse("1")},
	}
	got := mergeNodeStatus(stored, facts, false, metav1.Now())
	want := v1.ResourceList{v1.ResourceCPU: resource.MustParse("2"), "example.com/gpu": resource.MustParse("1"), "example.com/dongle": resource.MustParse("4")}
	if !equality.Semantic.DeepEqual(got.Capacity, want) || !equality.Semantic.DeepEqual(got.Allocatable, want) {
		t.Errorf("capacity %v, allocatable %v, want %v", got.Capacity, got.Allocatable, want)
	}
	if len(facts.Capacity) != 2 || len(facts.Allocatable) != 2 {
		t.Error("the facts were changed")
	}
	again := mergeNodeStatus(got, facts, false, metav1.Now())
	if !equality.Semantic.DeepEqual(again, got) {
		t.Error("the second look writes again")
	}
}

// With another network product, the agent no longer reports a failure of its own network, and the
// stored one is removed. A condition of the other product stays.
func TestFailureOfTheNetworkIsTakenBack(t *testing.T) {
	ready := v1.NodeCondition{Type: v1.NodeReady, Status: v1.ConditionTrue}
	network := func(status v1.ConditionStatus, reason string) v1.NodeCondition {
		return v1.NodeCondition{Type: v1.NodeNetworkUnavailable, Status: status, Reason: reason}
	}
	for _, c := range []struct {
		name   string
		stored v1.NodeCondition
		facts  []v1.NodeCondition
		want   string // expected reason of the remaining condition
	}{
		{"it is silent now", network(v1.ConditionTrue, "NetworkPartFailed"), []v1.NodeCondition{ready}, ""},
		{"it still says so", network(v1.ConditionTrue, "NetworkPartFailed"), []v1.NodeCondition{ready, network(v1.ConditionTrue, "NetworkPartFailed")}, "NetworkPartFailed"},
		{"it says nothing at all yet", network(v1.ConditionTrue, "NetworkPartFailed"), nil, "NetworkPartFailed"},
		{"all was well", network(v1.ConditionFalse, "NetworkReady"), []v1.NodeCondition{ready}, "NetworkReady"},
		{"a product's", network(v1.ConditionTrue, "CalicoIsDown"), []v1.NodeCondition{ready}, "CalicoIsDown"},
	} {
		is := ""
		got := mergeNodeStatus(&v1.NodeStatus{Conditions: []v1.NodeCondition{c.stored}}, &v1.NodeStatus{Conditions: c.facts}, false, metav1.Now())
		if left := findNodeCondition(got.Conditions, v1.NodeNetworkUnavailable); left != nil {
			is = left.Reason
		}
		if is != c.want {
			t.Errorf("%s: %q is left, want %q", c.name, is, c.want)
		}
	}
}

// A node gets the Secret for the iSCSI login of a claim's volume, only if the volume requires it.
// If the volume names no namespace, the Secret is in the claim's. F110
func TestSecretsOfDisks(t *testing.T) {
	pv := func(d v1.ISCSIPersistentVolumeSource) *v1.PersistentVolume {
		return &v1.PersistentVolume{Spec: v1.PersistentVolumeSpec{ClaimRef: &v1.ObjectReference{Namespace: "team", Name: "data"}, PersistentVolumeSource: v1.PersistentVolumeSource{ISCSI: &d}}}
	}
	for _, c := range []struct {
		disk v1.ISCSIPersistentVolumeSource
		want []key
	}{
		{v1.ISCSIPersistentVolumeSource{SessionCHAPAuth: true, SecretRef: &v1.SecretReference{Name: "chap"}}, []key{{kindSecret, "team", "chap"}}},
		{v1.ISCSIPersistentVolumeSource{DiscoveryCHAPAuth: true, SecretRef: &v1.SecretReference{Name: "chap", Namespace: "other"}}, []key{{kindSecret, "other", "chap"}}},
		{v1.ISCSIPersistentVolumeSource{SecretRef: &v1.SecretReference{Name: "chap"}}, nil},
	} {
		if got := volumeReferences(pv(c.disk)); !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v, want %v", c.disk, got, c.want)
		}
	}
}

// F115: the conditions of a lost node keep the time of its last heartbeat, which is in no store while the node is Ready.
// The stored time stays when the replica does not know a later one.
func TestLostNodeKeepsItsLastHeartbeat(t *testing.T) {
	stored := metav1.NewTime(time.Unix(1_000, 0))
	for what, c := range map[string]struct{ known, want time.Time }{
		"heartbeats since the stored one":  {stored.Add(time.Hour), stored.Add(time.Hour)},
		"none since this replica started":  {time.Time{}, stored.Time},
		"an older session of this replica": {stored.Add(-time.Hour), stored.Time},
	} {
		status := &v1.NodeStatus{Conditions: []v1.NodeCondition{
			{Type: v1.NodeReady, Status: v1.ConditionTrue, LastHeartbeatTime: stored},
			{Type: v1.NodeDiskPressure, Status: v1.ConditionFalse, LastHeartbeatTime: stored},
			{Type: v1.NodeNetworkUnavailable, Status: v1.ConditionFalse, LastHeartbeatTime: stored},
		}}
		got := lostNodeStatus(status, c.known, metav1.Now())
		for i, want := range []time.Time{c.want, c.want, stored.Time} {
			if at := got.Conditions[i].LastHeartbeatTime; !at.Time.Equal(want) {
				t.Errorf("%s: %s has its heartbeat at %s, want %s", what, got.Conditions[i].Type, at, want)
			}
		}
	}
}
