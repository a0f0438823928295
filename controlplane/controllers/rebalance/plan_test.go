package rebalance

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
)

var now = time.Unix(10000, 0)

// pod is a pod that may move, on a node.
func pod(name, node string, change ...func(*corev1.Pod)) *corev1.Pod {
	yes := true
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name),
			Labels:          map[string]string{"app": "web"},
			OwnerReferences: []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "web", UID: "web", Controller: &yes}}},
		Spec: corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue,
				LastTransitionTime: metav1.NewTime(now.Add(-time.Hour))}}},
	}
	for _, f := range change {
		f(p)
	}
	return p
}

func mounts(v corev1.VolumeSource) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: v}} }
}

func budget(name string, allowed int32, behind bool) *policyv1.PodDisruptionBudget {
	b := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Generation: 2},
		Spec: policyv1.PodDisruptionBudgetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
		Status: policyv1.PodDisruptionBudgetStatus{ObservedGeneration: 2, DisruptionsAllowed: allowed}}
	if behind {
		b.Status.ObservedGeneration = 1
	}
	return b
}

func TestUnmovable(t *testing.T) {
	ready := func(at time.Time, s corev1.ConditionStatus) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.Conditions[0].Status, p.Status.Conditions[0].LastTransitionTime = s, metav1.NewTime(at)
		}
	}
	priority := func(n int32) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Spec.Priority = &n } }
	for _, c := range []struct {
		pod  *corev1.Pod
		with Surroundings
		want string
	}{
		{pod: pod("a", "n1"), want: ""},
		{pod: pod("a", ""), want: "it does not run"},
		{pod: pod("a", "n1", func(p *corev1.Pod) {
			p.DeletionTimestamp = &metav1.Time{Time: now}
		}), want: "it does not run"},
		{pod: pod("a", "n1", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }), want: "it does not run"},
		{pod: pod("a", "n1", func(p *corev1.Pod) { p.Status.Conditions = nil }), want: "it is not ready"},
		{pod: pod("a", "n1", ready(now, corev1.ConditionFalse)), want: "it is not ready"},
		{pod: pod("a", "n1", ready(now.Add(-59*time.Second), corev1.ConditionTrue)),
			want: "it has only just become ready"},
		{pod: pod("a", "n1", ready(now.Add(-time.Minute), corev1.ConditionTrue)), want: ""},
		{pod: pod("a", "n1", func(p *corev1.Pod) { p.OwnerReferences = nil }), want: "no controller would replace it"},
		{pod: pod("a", "n1", func(p *corev1.Pod) {
			p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
		}), want: "it is bound to its node"},
		{pod: pod("a", "n1", func(p *corev1.Pod) {
			p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{}
		}), want: "its group would stop working without it"},
		{pod: pod("a", "n1", priority(systemCritical)), want: "the cluster needs it"},
		{pod: pod("a", "n1", priority(systemCritical-1)), want: ""},
		{pod: pod("a", "n1", mounts(corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}})),
			want: "volume v holds data that would stay behind"},
		{pod: pod("a", "n1", mounts(corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{}})),
			want: "volume v holds data that would stay behind"},
		{pod: pod("a", "n1", mounts(corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}})),
			want: "volume v holds data that would stay behind"},
		{pod: pod("a", "n1",
			mounts(
				corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}})),
			want: ""},
		{pod: pod("a", "n1"), with: Surroundings{Budgets: []*policyv1.PodDisruptionBudget{budget("b", 1, false)}},
			want: ""},
		{pod: pod("a", "n1"), with: Surroundings{Budgets: []*policyv1.PodDisruptionBudget{budget("b", 0, false)}},
			want: "PodDisruptionBudget b allows no disruption"},
		{pod: pod("a", "n1"), with: Surroundings{Budgets: []*policyv1.PodDisruptionBudget{budget("b", 1, true)}},
			want: "PodDisruptionBudget b allows no disruption"},
		{pod: pod("a", "n1"), with: Surroundings{Budgets: []*policyv1.PodDisruptionBudget{budget("b", 1, false),
			budget("c", 1, false)}}, want: "more than one PodDisruptionBudget covers it"},
		{pod: pod("a", "n1", func(p *corev1.Pod) {
			p.Namespace = "other"
		}), with: Surroundings{Budgets: []*policyv1.PodDisruptionBudget{budget("b", 0, false)}}, want: ""},
		{pod: pod("a", "n1"), with: Surroundings{Skip: map[types.UID]time.Time{"a": now.Add(1)}},
			want: "its eviction was refused recently"},
		{pod: pod("a", "n1"), with: Surroundings{Skip: map[types.UID]time.Time{"a": now}}, want: ""},
	} {
		c.with.Now, c.with.Interval = now, time.Minute
		if got := Unmovable(c.pod, c.with); got != c.want {
			t.Errorf("%+v: %q, want %q", c.pod, got, c.want)
		}
	}
}

// A pod moves for a rule, for evenness or for room, and only where every node that may be chosen is clearly better.
func TestJudge(t *testing.T) {
	zones := func(node string) string { return map[string]string{"n1": "a", "n2": "a", "n3": "b", "n4": "b"}[node] }
	none := func(string) string { return "" }
	on := func(nodes ...string) (w Workload) {
		for i, n := range nodes {
			w.Pods = append(w.Pods, pod(fmt.Sprint("p", i), n))
		}
		w.Kind, w.Object = "Deployment", &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web"}}
		return w
	}
	room := Verdict{Best: []string{"n2"}, Gain: 10, WithPod: 40, WithoutPod: 30, InBest: 30}
	with := func(change func(v *Verdict)) Verdict {
		v := room
		change(&v)
		return v
	}
	for name, c := range map[string]struct {
		w    Workload // its first pod is judged
		v    Verdict
		zone func(string) string
		want string
	}{
		"nothing is said of it": {on("n1"), with(func(v *Verdict) { v.SkipReason = "x" }), none, ""},
		"nowhere to go":         {on("n1"), Verdict{Refusal: "x"}, none, ""},
		"as good where it is":   {on("n1"), with(func(v *Verdict) { v.Best = []string{"n1", "n2"} }), none, ""},
		"a rule": {on("n1", "n2", "n2"), Verdict{Refusal: "a taint", Best: []string{"n2"}}, none,
			"n2: node n1 would not accept it again: a taint"},
		"room": {on("n1"), room, none,
			"n2: node n1 is 40% full, node n2 would be 30% full with it"},
		"too little a gain":      {on("n1"), with(func(v *Verdict) { v.Gain = 9 }), none, ""},
		"too little room":        {on("n1"), with(func(v *Verdict) { v.InBest = 30.5 }), none, ""},
		"its node gains nothing": {on("n1"), with(func(v *Verdict) { v.WithoutPod = 40 }), none, ""},
		"room, beside its like":  {on("n1", "n2"), room, none, ""},
		"as many there as here": {on("n1", "n1", "n2"), room, none,
			"n2: node n1 is 40% full, node n2 would be 30% full with it"},
		"more even": {on("n1", "n1"), with(func(v *Verdict) {
			v.InBest = 90
		}), none, "n2: its node runs more pods of Deployment web than node n2"},
		"one of two is less even": {on("n1", "n1", "n3"), with(func(v *Verdict) {
			v.Best = []string{"n2", "n3"}
			v.InBest = 90
		}), none, ""},
		"zones come first": {on("n1", "n2", "n4"), with(func(v *Verdict) {
			v.Best = []string{"n4"}
			v.InBest = 90
		}), zones, ""},
		"more even over zones": {on("n1", "n2"), with(func(v *Verdict) {
			v.Best = []string{"n3"}
			v.InBest = 90
		}), zones, "n3: its node runs more pods of Deployment web than node n3"},
		"less even over zones": {on("n1", "n3"), with(func(v *Verdict) { v.Best = []string{"n4"} }), zones, ""},
		"within a zone, over node": {on("n1", "n1", "n3"), with(func(v *Verdict) {
			v.InBest = 90
		}), zones, "n2: its node runs more pods of Deployment web than node n2"},
	} {
		to, why, _ := Judge(c.w, c.w.Pods[0], c.v, c.zone)
		if got := strings.TrimPrefix(to+": "+why, ": "); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// said returns the configured verdict for a pod.
type said struct {
	verdicts map[string]Verdict
	harms    map[string]string
	asked    int
}

func (s *said) Evaluate(_ context.Context, p *corev1.Pod) (Verdict, error) {
	s.asked++
	return s.verdicts[p.Name], nil
}

func (s *said) FindHarmedPod(_ context.Context, p *corev1.Pod, to string) (string, error) {
	return s.harms[p.Name+">"+to], nil
}

func TestChoose(t *testing.T) {
	w := Workload{Kind: "ReplicaSet", Object: &appsv1.ReplicaSet{},
		Pods: []*corev1.Pod{pod("room", "n1"), pod("even", "n2"), pod("rule", "n3"), pod("more", "n4"),
			pod("like", "n2")}}
	at := Surroundings{Now: now, Interval: time.Minute, Zone: func(string) string { return "" }}
	s := &said{verdicts: map[string]Verdict{
		"room": {Best: []string{"n8"}, Gain: 50, WithPod: 50, WithoutPod: 40, InBest: 10},
		"more": {Best: []string{"n8"}, Gain: 60, WithPod: 50, WithoutPod: 40, InBest: 10},
		"even": {Best: []string{"n8"}, Gain: 10},
		"rule": {Best: []string{"n8", "n9"}, Refusal: "x"},
	}, harms: map[string]string{}}
	for _, want := range []string{"rule>n9", "even>n8", "more>n8", "room>n8", ""} {
		// each move in turn would harm another pod
		m, err := Choose(t.Context(), s, []Workload{w}, at)
		if err != nil {
			t.Fatal(err)
		}
		name, _, _ := strings.Cut(want, ">")
		if got := m; (got == nil) != (want == "") || got != nil && got.Pod.Name != name {
			t.Fatalf("chosen is %+v, want %q", got, want)
		}
		s.harms[want] = "default/other"
	}
	many := w
	many.Pods = nil
	for i := range 3 * MaxEvaluated {
		many.Pods = append(many.Pods, pod(fmt.Sprint(i), "n1"))
	}
	s.asked = 0
	if _, err := Choose(t.Context(), s, []Workload{many, many}, at); err != nil || s.asked != MaxEvaluated {
		t.Errorf("%d pods weighed, %v", s.asked, err)
	}
	seen := map[string]bool{}
	for turn := range 3 {
		for _, p := range rotatePods(many.Pods, turn*MaxEvaluated)[:MaxEvaluated] {
			seen[p.Name] = true
		}
	}
	if len(seen) != len(many.Pods) {
		t.Errorf("of %d pods %d come to their turn in three rounds", len(many.Pods), len(seen))
	}
}

func TestUnsettled(t *testing.T) {
	two, zero := int32(2), int32(0)
	deployment := func(unavailable string, change ...func(*appsv1.Deployment)) *appsv1.Deployment {
		u := intstr.Parse(unavailable)
		d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Generation: 3},
			Spec: appsv1.DeploymentSpec{Replicas: &two,
				Strategy: appsv1.DeploymentStrategy{RollingUpdate: &appsv1.RollingUpdateDeployment{
					MaxUnavailable: &u}}},
			Status: appsv1.DeploymentStatus{ObservedGeneration: 3, Replicas: 2, UpdatedReplicas: 2,
				AvailableReplicas: 2}}
		for _, f := range change {
			f(d)
		}
		return d
	}
	going := pod("b", "n1", func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: now} })
	unready := pod("b", "n1", func(p *corev1.Pod) { p.Status.Conditions = nil })
	both := []*corev1.Pod{pod("a", "n1"), pod("b", "n1")}
	for name, c := range map[string]struct {
		o    api.Object
		pods []*corev1.Pod
		want string
	}{
		"all is well": {deployment("50%"), both, ""},
		"recreated all at once": {deployment("1", func(d *appsv1.Deployment) {
			d.Spec.Strategy.RollingUpdate = nil
		}), both, ""},
		"it may miss none": {deployment("25%"), both, "with 2 pods, maxUnavailable 25% allows no eviction"},
		"none are wanted": {deployment("1", func(d *appsv1.Deployment) {
			d.Spec.Replicas = &zero
		}), nil, "it has no pods to move"},
		"it goes": {deployment("1", func(d *appsv1.Deployment) {
			d.DeletionTimestamp = &metav1.Time{Time: now}
		}), both, "it has no pods to move"},
		"not seen yet": {deployment("1", func(d *appsv1.Deployment) {
			d.Generation++
		}), both, "it is being changed"},
		"a rollout": {deployment("1", func(d *appsv1.Deployment) {
			d.Status.UpdatedReplicas = 1
		}), both, "it is being changed"},
		"one is not available": {deployment("1", func(d *appsv1.Deployment) {
			d.Status.AvailableReplicas = 1
		}), both, "it is being changed"},
		"one is not ready": {deployment("1"), []*corev1.Pod{both[0], unready}, "1 of 2 pods are ready"},
		"one is missing":   {deployment("1"), both[:1], "1 of 2 pods are ready"},
		"one is going":     {deployment("1"), append(both, going), "pod b is still terminating"},
		"a set": {&appsv1.ReplicaSet{Spec: appsv1.ReplicaSetSpec{Replicas: &two},
			Status: appsv1.ReplicaSetStatus{AvailableReplicas: 2}}, both, ""},
		"a set, not available": {&appsv1.ReplicaSet{Spec: appsv1.ReplicaSetSpec{Replicas: &two},
			Status: appsv1.ReplicaSetStatus{AvailableReplicas: 1}}, both, "it is being changed"},
		"a stateful set": {&appsv1.StatefulSet{Spec: appsv1.StatefulSetSpec{Replicas: &two},
			Status: appsv1.StatefulSetStatus{AvailableReplicas: 2, UpdatedReplicas: 2}}, both, ""},
		"a stateful set of two kind": {&appsv1.StatefulSet{Spec: appsv1.StatefulSetSpec{Replicas: &two},
			Status: appsv1.StatefulSetStatus{AvailableReplicas: 2, UpdatedReplicas: 1}}, both, "it is being changed"},
	} {
		if got := Unsettled(c.o, c.pods); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
