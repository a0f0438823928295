package replicaset

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func set(n int32) *appsv1.ReplicaSet {
	l := map[string]string{"app": "web"}
	return &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web-1", UID: "rs", Generation: 2,
			Annotations: map[string]string{api.TraceParentAnnotation: "trace"}},
		Spec: appsv1.ReplicaSetSpec{Replicas: &n, Selector: &metav1.LabelSelector{MatchLabels: l},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: l,
				Annotations: map[string]string{"a": "b"}}}},
	}
}

// pod is a pod in a state: "node=w1 ready=60 phase=Running cost=5 restarts=1 age=600".
func pod(name, state string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name),
		Labels: map[string]string{"app": "web"}}}
	p.CreationTimestamp = metav1.NewTime(epoch.Add(-time.Hour))
	p.Status.Phase = corev1.PodRunning
	for _, f := range strings.Fields(state) {
		k, v, _ := strings.Cut(f, "=")
		var n int
		_, _ = fmt.Sscan(v, &n)
		at := metav1.NewTime(epoch.Add(-time.Duration(n) * time.Second))
		switch k {
		case "node":
			p.Spec.NodeName = v
		case "phase":
			p.Status.Phase = corev1.PodPhase(v)
		case "ready":
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue,
				LastTransitionTime: at}}
		case "cost":
			p.Annotations = map[string]string{corev1.PodDeletionCost: v}
		case "restarts":
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: int32(n)}}
		case "age":
			p.CreationTimestamp = at
		}
	}
	return p
}

// F60 F61
func TestPlanScaling(t *testing.T) {
	pods := func(n int) (out []*corev1.Pod) {
		for i := range n {
			out = append(out, pod(fmt.Sprint("p", i), "node=w1 ready=60"))
		}
		return out
	}
	for _, c := range []struct {
		want   int32
		have   int
		create int
		remove int
	}{{3, 0, 3, 0}, {3, 2, 1, 0}, {3, 3, 0, 0}, {1, 3, 0, 2}, {0, 2, 0, 2}} {
		s := PlanScaling(set(c.want), pods(c.have), nil, epoch)
		if s.Create != c.create || len(s.Delete) != c.remove {
			t.Errorf("%d wanted, %d there: create %d, delete %d", c.want, c.have, s.Create, len(s.Delete))
		}
	}
	going := set(3)
	going.DeletionTimestamp = &metav1.Time{Time: epoch}
	if s := PlanScaling(going, nil, nil, epoch); s.Create != 0 {
		t.Error("a replica set that is being deleted creates pods")
	}
	if s := PlanScaling(&appsv1.ReplicaSet{}, nil, nil, epoch); s.Create != 1 {
		t.Error("no replicas means one")
	}
}

// Each pair differs in one respect: the first is missed less.
func TestDeletionOrder(t *testing.T) {
	for _, c := range []struct{ why, first, second string }{
		{"without a node", "phase=Pending", "node=w1 phase=Pending"},
		{"pending", "node=w1 phase=Pending", "node=w1 phase=Running"},
		{"not ready", "node=w1", "node=w1 ready=60"},
		{"cheaper", "node=w1 ready=60 cost=-5", "node=w1 ready=60"},
		{"on a crowded node", "node=w2 ready=60", "node=w1 ready=60"},
		{"ready for a shorter time", "node=w1 ready=10", "node=w1 ready=1000"},
		{"restarted more often", "node=w1 ready=60 restarts=3", "node=w1 ready=60 restarts=1"},
		{"younger", "node=w1 ready=60 age=100", "node=w1 ready=60 age=10000"},
		{"not ready beats cost", "node=w1 cost=100", "node=w1 ready=60 cost=-100"},
	} {
		t.Run(c.why, func(t *testing.T) {
			first, second := pod("z", c.first), pod("a", c.second)
			got := rankForDeletion([]*corev1.Pod{second, first}, map[string]int{"w1": 1, "w2": 5}, epoch)
			if got[0] != first {
				t.Errorf("%q goes before %q", c.second, c.first)
			}
		})
	}
}

// F70
func TestNewPod(t *testing.T) {
	rs := set(1)
	p := engine.PodFrom(rs, replicaSets.controllerRef(rs), &rs.Spec.Template)
	ref := metav1.GetControllerOf(p)
	if p.GenerateName != "web-1-" || p.Labels["app"] != "web" || p.Annotations["a"] != "b" ||
		p.Annotations[api.TraceParentAnnotation] != "trace" {
		t.Errorf("pod %+v", p.ObjectMeta)
	}
	if ref == nil || ref.UID != rs.UID || ref.Kind != "ReplicaSet" || !*ref.BlockOwnerDeletion {
		t.Errorf("owner %+v", ref)
	}
	p.Labels["app"], p.Annotations["a"] = "changed", "changed"
	if rs.Spec.Template.Labels["app"] != "web" || rs.Spec.Template.Annotations["a"] != "b" {
		t.Error("a pod shares its maps with the template")
	}
}

func TestStatus(t *testing.T) {
	rs := set(4)
	rs.Spec.MinReadySeconds = 30
	stranger := pod("d", "node=w1 ready=60")
	stranger.Labels = map[string]string{"other": "x"}
	s, again := Status(rs, []*corev1.Pod{pod("a", "node=w1 ready=60"), pod("b", "node=w1 ready=10"),
		pod("c", "node=w1"), stranger}, 2, nil, epoch)
	if got := fmt.Sprint(s.Replicas, s.FullyLabeledReplicas, s.ReadyReplicas, s.AvailableReplicas,
		s.ObservedGeneration); got != "4 3 3 2 2" {
		t.Errorf("replicas, labelled, ready, available, generation: %s", got)
	}
	if again != 20*time.Second {
		t.Errorf("again in %v, when the second pod becomes available in 20 s", again)
	}
	if s.TerminatingReplicas == nil || *s.TerminatingReplicas != 2 {
		t.Errorf("terminating: %v", s.TerminatingReplicas)
	}
	s, _ = Status(rs, nil, 0, errors.New("quota"), epoch)
	if len(s.Conditions) != 1 || s.Conditions[0].Reason != "FailedCreate" || s.Conditions[0].Message != "quota" {
		t.Errorf("conditions %+v", s.Conditions)
	}
	rs.Status = s
	if s, _ = Status(rs, nil, 0, nil, epoch); len(s.Conditions) != 0 {
		t.Errorf("the failure stays: %+v", s.Conditions)
	}
}
