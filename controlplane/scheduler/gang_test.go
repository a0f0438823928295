package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins"
)

// group makes a PodGroup; 0 is the policy basic.
func (b *bed) group(name string, least int32) *schedulingv1beta1.PodGroup {
	b.t.Helper()
	g := &schedulingv1beta1.PodGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	if least > 0 {
		g.Spec.SchedulingPolicy.Gang = &schedulingv1beta1.GangSchedulingPolicy{MinCount: least}
	} else {
		g.Spec.SchedulingPolicy.Basic = &schedulingv1beta1.BasicSchedulingPolicy{}
	}
	g, err := client.Create(b.ctx, b.client, g)
	if err != nil {
		b.t.Fatal(err)
	}
	return g
}

func inGroup(name string) func(*v1.Pod) {
	return func(pod *v1.Pod) { pod.Spec.SchedulingGroup = &v1.PodSchedulingGroup{PodGroupName: &name} }
}

func (b *bed) awaitWords(pod, words string) {
	b.t.Helper()
	b.eventually("condition of "+pod, func() error {
		for _, c := range b.get(pod).Status.Conditions {
			if c.Type == v1.PodScheduled && strings.Contains(c.Message, words) {
				return nil
			}
		}
		return fmt.Errorf("%+v, want words %q", b.get(pod).Status.Conditions, words)
	})
}

// awaitGroup waits until the condition of a group says this.
func (b *bed) awaitGroup(name string, status metav1.ConditionStatus, reason, words string) {
	b.t.Helper()
	b.eventually("condition of group "+name, func() error {
		g, err := client.Get[*schedulingv1beta1.PodGroup](b.ctx, b.client, "default", name)
		if err != nil {
			return err
		}
		for _, c := range g.Status.Conditions {
			if c.Type == schedulingv1beta1.PodGroupInitiallyScheduled && c.Status == status && c.Reason == reason &&
				strings.Contains(c.Message, words) {
				return nil
			}
		}
		return fmt.Errorf("%+v", g.Status.Conditions)
	})
}

func (b *bed) without(names ...string) {
	b.t.Helper()
	for _, name := range names {
		if n := b.get(name).Spec.NodeName; n != "" {
			b.t.Fatalf("pod %s is on %s", name, n)
		}
	}
}

// F89: a group of three waits until it exists, until there are three, and until three fit; meanwhile none of them holds room.
// What became of it is in its status, and stays there.
func TestGangOfThree(t *testing.T) {
	b := newBed(t, nil)
	b.node("n1", "2")
	b.lead()
	b.pod("g1", "1", inGroup("g"))
	b.awaitWords("g1", "pod group g does not exist")
	b.group("g", 3)
	b.awaitWords("g1", "pod group g has fewer than the 3 pods that it needs")
	b.pod("g2", "1", inGroup("g"))
	b.awaitWords("g2", "pod group g has fewer than the 3 pods that it needs")
	b.pod("g3", "1", inGroup("g"))
	b.awaitWords("g3", "0/1 nodes are available: 1 Insufficient cpu. pod group g: only 2 of 3 pods had a node.")
	for _, name := range []string{"g1", "g2"} {
		b.awaitWords(name, "pod group g: only 2 of 3 pods had a node; pod g3: 0/1 nodes are available: 1 "+
			"Insufficient cpu.")
	}
	b.awaitGroup("g", metav1.ConditionFalse, "Unschedulable", "only 2 of 3 pods had a node")
	b.pod("single", "2") // the room is free for others
	b.awaitNode("single", "n1")
	b.without("g1", "g2", "g3")
	b.node("n2", "3")
	for _, name := range []string{"g1", "g2", "g3"} {
		b.awaitNode(name, "n2")
	}
	b.awaitGroup("g", metav1.ConditionTrue, "Scheduled", "")
	// Pods that run count: one that takes a lost one's place goes alone, and one too many waits alone.
	b.delete("g2")
	b.pod("g4", "1", inGroup("g"))
	b.awaitNode("g4", "n2")
	b.pod("g5", "1", inGroup("g"))
	b.awaitWords("g5", "2 Insufficient cpu")
	b.awaitGroup("g", metav1.ConditionTrue, "Scheduled", "")
}

// Of a group that has lost two of three, one alone is not enough, and two are.
func TestGangIsMadeWhole(t *testing.T) {
	b := newBed(t, nil)
	b.node("n1", "8")
	b.group("g", 3)
	b.lead()
	for _, name := range []string{"a", "b", "c"} {
		b.pod(name, "1", inGroup("g"))
	}
	b.awaitNode("c", "n1")
	b.delete("a")
	b.delete("b")
	b.pod("d", "1", inGroup("g"))
	b.awaitWords("d", "pod group g has fewer than the 3 pods that it needs")
	b.pod("e", "1", inGroup("g"))
	b.awaitNode("d", "n1")
	b.awaitNode("e", "n1")
}

// Two groups that come mixed, each of which fits alone, do not keep each other waiting.
func TestGangsDoNotBlockEachOther(t *testing.T) {
	b := newBed(t, nil)
	b.node("n1", "4")
	b.group("a", 3)
	b.group("b", 3)
	for i := range 3 {
		b.pod(fmt.Sprintf("a%d", i), "1", inGroup("a"))
		b.pod(fmt.Sprintf("b%d", i), "1", inGroup("b"))
	}
	b.lead()
	on := func() map[string]int {
		out := map[string]int{}
		for i := range 3 {
			for _, g := range []string{"a", "b"} {
				if b.get(fmt.Sprintf("%s%d", g, i)).Spec.NodeName != "" {
					out[g]++
				}
			}
		}
		return out
	}
	b.eventually("one group", func() error {
		if got := on(); got["a"]+got["b"] != 3 || got["a"]*got["b"] != 0 {
			return fmt.Errorf("%v are placed", got)
		}
		return nil
	})
	b.node("n2", "4")
	b.eventually("both groups", func() error {
		if got := on(); got["a"]+got["b"] != 6 {
			return fmt.Errorf("%v are placed", got)
		}
		return nil
	})
}

// What wakes a group: a smaller number, a pod whose gate falls, a pod of another scheduler that goes, one that another
// scheduler has placed. A pod of the policy basic goes alone.
func TestGangWakes(t *testing.T) {
	b := newBed(t, nil)
	b.node("n1", "8")
	b.lead()
	for _, name := range []string{"lower", "gated", "mixed", "helped"} {
		b.group(name, 2)
		b.pod(name+"-1", "1", inGroup(name))
		b.awaitWords(name+"-1", "has fewer than the 2 pods")
	}
	g, err := client.Get[*schedulingv1beta1.PodGroup](b.ctx, b.client, "default", "lower")
	if err != nil {
		t.Fatal(err)
	}
	g = g.DeepCopy() // what is read is shared
	g.Spec.SchedulingPolicy.Gang.MinCount = 1
	if _, err := client.Update(b.ctx, b.client, g); err != nil {
		t.Fatal(err)
	}
	b.awaitNode("lower-1", "n1")

	p := b.pod("gated-2", "1", inGroup("gated"), func(pod *v1.Pod) {
		pod.Spec.SchedulingGates = []v1.PodSchedulingGate{{Name: "x.io/gate"}}
	})
	b.without("gated-1", "gated-2")
	p = p.DeepCopy()
	p.Spec.SchedulingGates = nil
	if _, err := client.Update(b.ctx, b.client, p); err != nil {
		t.Fatal(err)
	}
	b.awaitNode("gated-1", "n1")
	b.awaitNode("gated-2", "n1")

	b.pod("mixed-2", "1", inGroup("mixed"), forScheduler("theirs"))
	b.pod("mixed-3", "1", inGroup("mixed"))
	b.awaitWords("mixed-3", "pods of pod group mixed name different schedulers")
	b.delete("mixed-2")
	b.awaitNode("mixed-1", "n1")
	b.awaitNode("mixed-3", "n1")

	b.pod("helped-2", "1", inGroup("helped"), func(pod *v1.Pod) { pod.Spec.NodeName = "n1" })
	b.awaitNode("helped-1", "n1")

	b.group("loose", 0)
	b.pod("big", "64", inGroup("loose"))
	b.awaitGroup("loose", metav1.ConditionFalse, "Unschedulable", "Insufficient cpu")
	b.pod("small", "1", inGroup("loose"))
	b.awaitNode("small", "n1")
	b.awaitGroup("loose", metav1.ConditionTrue, "Scheduled", "")
}

// Small pods go where large ones keep a group from its number, and pods of different sizes fit whatever came first.
func TestGangOfSizes(t *testing.T) {
	b := newBed(t, nil)
	b.node("n1", "4")
	b.group("few", 4)
	b.pod("large", "4", inGroup("few"))
	for i := range 4 {
		b.pod(fmt.Sprintf("small%d", i), "1", inGroup("few"))
	}
	b.lead()
	for i := range 4 {
		b.awaitNode(fmt.Sprintf("small%d", i), "n1")
	}
	b.awaitWords("large", "1 Insufficient cpu")
	b.node("n2", "8")
	b.node("n3", "8")
	b.group("sizes", 3)
	b.awaitNode("large", "")
	b.pod("s1", "2", inGroup("sizes"))
	b.pod("s2", "2", inGroup("sizes"))
	b.pod("s3", "8", inGroup("sizes"))
	for _, name := range []string{"s1", "s2", "s3"} {
		b.awaitNode(name, "")
	}
}

// A group that never fits is tried once, and again when something may help, and not by itself.
func TestGangThatNeverFits(t *testing.T) {
	other := &faulty{name: "other", times: 3}
	b := newBed(t, func(h *framework.Handle) []framework.WeightedPlugin {
		return append(plugins.Default(h), framework.WeightedPlugin{Plugin: other})
	})
	b.node("n1", "32")
	b.group("g", 3)
	b.lead()
	var pods []*v1.Pod
	for i := range 3 {
		pods = append(pods, b.pod(fmt.Sprintf("g%d", i), "20", inGroup("g")))
	}
	before := make([]int, 3)
	for i, pod := range pods {
		b.awaitWords(pod.Name, "only 1 of 3 pods had a node")
		before[i] = b.scheduler.Attempts(pod.UID)
	}
	b.pod("other", "1") // placed at the fourth attempt, after three times of rest, the first as long as the group's was
	b.awaitNode("other", "n1")
	for i, pod := range pods {
		if now := b.scheduler.Attempts(pod.UID); now != before[i] {
			t.Errorf("pod g%d was tried %d times, after %d", i, now, before[i])
		}
	}
	b.node("n2", "64")
	for _, pod := range pods {
		b.awaitNode(pod.Name, "")
	}
}

// faulty is a filter that fails so many times for one pod.
type faulty struct {
	name  string
	times int
}

func (*faulty) Name() string { return "Faulty" }

// Filter implements framework.Filter.
func (f *faulty) Filter(_ context.Context, c *framework.Cycle, _ *framework.NodeInfo) *framework.Status {
	if c.Pod.Pod.Name != f.name || f.times == 0 {
		return nil
	}
	f.times--
	return framework.Fail("Faulty", errors.New("not yet"))
}

// A leadership that ends while a group is being placed leaves nothing behind: nothing is bound before the whole group has
// nodes, and what was bound by then counts for the next leader, which binds the rest. No pod is bound twice.
func TestGangAcrossLeaders(t *testing.T) {
	gate := &stopper{reached: make(chan struct{}, 1), name: "g2"}
	b := newBed(t, func(h *framework.Handle) []framework.WeightedPlugin {
		return append(plugins.Default(h), framework.WeightedPlugin{Plugin: gate})
	})
	b.node("n1", "3")
	b.group("g", 3)
	names := []string{"g1", "g2", "g3"}
	depose := b.lead()
	for _, name := range names {
		b.pod(name, "1", inGroup("g"))
	}
	<-gate.reached // g1 has a node in the leader's mind
	b.without(names...)
	depose()
	gate.pass()

	var once sync.Once
	bound := make(chan struct{})
	var mu sync.Mutex
	tried := 0
	b.binds = func(string) error { // the first goes through, the others fail with the leadership
		mu.Lock()
		defer mu.Unlock()
		if tried++; tried > 1 {
			return errors.New("the leader is going")
		}
		once.Do(func() { close(bound) })
		return nil
	}
	depose = b.lead()
	<-bound
	depose()
	mu.Lock()
	b.binds = func(string) error { return nil }
	mu.Unlock()
	depose = b.lead()
	for _, name := range names {
		b.awaitNode(name, "n1")
	}
	depose() // the last answers have come then
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, name := range names {
		if b.bound[name] != 1 {
			t.Errorf("pod %s was bound %d times", name, b.bound[name])
		}
	}
}

// stopper is a filter that holds the scheduler up at one pod until it is let pass, or the leadership ends.
type stopper struct {
	reached chan struct{}
	name    string
	mu      sync.Mutex
	open    bool
}

func (*stopper) Name() string { return "Stopper" }

func (s *stopper) pass() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = true
}

// Filter implements framework.Filter.
func (s *stopper) Filter(ctx context.Context, c *framework.Cycle, _ *framework.NodeInfo) *framework.Status {
	s.mu.Lock()
	open := s.open
	s.mu.Unlock()
	if open || c.Pod.Pod.Name != s.name {
		return nil
	}
	s.reached <- struct{}{}
	<-ctx.Done()
	return framework.Fail("Stopper", ctx.Err())
}
