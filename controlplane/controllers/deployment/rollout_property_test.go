package deployment_test

import (
	"fmt"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/deployment"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/replicaset"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
)

// simulation is a cluster of pure functions: everything moves in single steps, in
// whatever order chance decides, so that every status is as stale as it can get.
type simulation struct {
	t    *rapid.T
	now  time.Time
	uid  int
	d    *appsv1.Deployment
	sets []*appsv1.ReplicaSet
	pods []*corev1.Pod
}

func newSimulation(t *rapid.T) *simulation {
	s := &simulation{t: t, now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
	n := int32(rapid.IntRange(1, 12).Draw(t, "replicas"))
	value := func(name string) *intstr.IntOrString {
		v := intstr.FromInt32(int32(rapid.IntRange(0, int(n)+1).Draw(t, name)))
		if rapid.Bool().Draw(t, name+" in percent") {
			v = intstr.FromString(fmt.Sprintf("%d%%", rapid.IntRange(0, 100).Draw(t, name+" percent")))
		}
		return &v
	}
	s.d = testcluster.NewDeployment("web", n, "web:0")
	s.d.UID, s.d.Generation = "d", 1
	s.d.Spec.Strategy.Type = appsv1.RollingUpdateDeploymentStrategyType
	s.d.Spec.Strategy.RollingUpdate = &appsv1.RollingUpdateDeployment{MaxSurge: value("surge"),
		MaxUnavailable: value("unavailable")}
	return s
}

// bounds returns the bounds of the strategy, computed independently.
func (s *simulation) bounds() (most, least int) {
	n := int(*s.d.Spec.Replicas)
	amount := func(v *intstr.IntOrString, up int) int {
		if v.Type == intstr.Int {
			return v.IntValue()
		}
		var p int
		if _, err := fmt.Sscanf(v.StrVal, "%d%%", &p); err != nil {
			s.t.Fatal(err)
		}
		return (p*n + up) / 100
	}
	surge, unavailable := amount(s.d.Spec.Strategy.RollingUpdate.MaxSurge, 99),
		amount(s.d.Spec.Strategy.RollingUpdate.MaxUnavailable, 0)
	if surge == 0 && unavailable == 0 {
		unavailable = 1
	}
	return n + surge, max(0, n-unavailable)
}

func (s *simulation) stepDeployment() bool {
	step, err := deployment.PlanDeployment(deployment.Snapshot{Deployment: s.d, Sets: s.sets,
		OldPodsAlive: func([]*appsv1.ReplicaSet) (bool, error) { return false, nil }})
	if err != nil {
		s.t.Fatal(err)
	}
	changed := step.Create != nil || len(step.Update) > 0
	if rs := step.Create; rs != nil {
		s.uid++
		rs.UID, rs.Generation = types.UID(fmt.Sprintf("rs%d", s.uid)), 1
		rs.CreationTimestamp = metav1.NewTime(s.now.Add(time.Duration(s.uid) * time.Second))
		s.sets = append(s.sets, rs)
	}
	for _, u := range step.Update {
		for i, rs := range s.sets {
			if rs.UID == u.Set.UID {
				if *rs.Spec.Replicas != *u.Set.Spec.Replicas {
					u.Set.Generation++
				}
				s.sets[i] = u.Set
			}
		}
	}
	status, _ := deployment.Status(s.d, s.sets, nil, s.now)
	s.d.Status = status
	return changed
}

func (s *simulation) of(rs *appsv1.ReplicaSet) []*corev1.Pod {
	var out []*corev1.Pod
	for _, p := range s.pods {
		if metav1.IsControlledBy(p, rs) {
			out = append(out, p)
		}
	}
	return out
}

// stepSet scales one set, as far as limit allows, without writing its status.
func (s *simulation) stepSet(rs *appsv1.ReplicaSet, limit int) bool {
	plan := replicaset.PlanScaling(rs, s.of(rs), nil, s.now)
	for range min(plan.Create, limit) {
		p := engine.PodFrom(rs, *metav1.NewControllerRef(rs, appsv1.SchemeGroupVersion.WithKind("ReplicaSet")),
			&rs.Spec.Template)
		s.uid++
		p.UID = types.UID(fmt.Sprintf("p%d", s.uid))
		s.pods = append(s.pods, p)
	}
	for _, gone := range plan.Delete[:min(len(plan.Delete), limit)] {
		for i, p := range s.pods {
			if p.UID == gone.UID {
				s.pods = append(s.pods[:i:i], s.pods[i+1:]...)
				break
			}
		}
	}
	return plan.Create+len(plan.Delete) > 0
}

// countSet writes one set's status. A set is only counted when it is done: its
// controller counts after it has scaled.
func (s *simulation) countSet(rs *appsv1.ReplicaSet) bool {
	if len(s.of(rs)) != int(*rs.Spec.Replicas) {
		return false
	}
	status, _ := replicaset.Status(rs, s.of(rs), 0, nil, s.now)
	changed := status.ObservedGeneration != rs.Status.ObservedGeneration ||
		status.AvailableReplicas != rs.Status.AvailableReplicas || status.Replicas != rs.Status.Replicas
	rs.Status = status
	return changed
}

func (s *simulation) ready(p *corev1.Pod) bool {
	if api.IsPodReady(p) {
		return false
	}
	p.Spec.NodeName, p.Status.Phase = "w1", corev1.PodRunning
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue,
		LastTransitionTime: metav1.NewTime(s.now)}}
	return true
}

// settle runs everything until nothing moves.
func (s *simulation) settle() {
	for range 1000 {
		moved := s.stepDeployment()
		for _, rs := range s.sets {
			moved = s.stepSet(rs, 1000) || moved
		}
		for _, p := range s.pods {
			moved = s.ready(p) || moved
		}
		for _, rs := range s.sets {
			moved = s.countSet(rs) || moved
		}
		if !moved {
			return
		}
	}
	s.t.Fatal("the cluster does not come to rest")
}

func (s *simulation) available() int {
	n := 0
	for _, p := range s.pods {
		if api.IsPodReady(p) {
			n++
		}
	}
	return n
}

// F68: at every instant the number of pods is within [desired - maxUnavailable, desired +
// maxSurge], in any order of events, and the rollout always completes.
func TestRolloutNeverLeavesItsBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := newSimulation(t)
		s.settle()
		most, least := s.bounds()
		for i := range rapid.IntRange(1, 3).Draw(t, "rollouts") {
			s.d.Spec.Template.Spec.Containers[0].Image = fmt.Sprintf("web:%d", (i+1)%3)
			s.d.Generation++
			for range rapid.IntRange(0, 60).Draw(t, "steps") {
				set := func() *appsv1.ReplicaSet { return s.sets[rapid.IntRange(0, len(s.sets)-1).Draw(t, "set")] }
				switch rapid.IntRange(0, 3).Draw(t, "who") {
				case 0:
					s.stepDeployment()
				case 1:
					s.stepSet(set(), rapid.IntRange(1, 20).Draw(t, "how far"))
				case 2:
					s.countSet(set())
				case 3:
					if len(s.pods) > 0 {
						s.ready(s.pods[rapid.IntRange(0, len(s.pods)-1).Draw(t, "pod")])
					}
				}
				if len(s.pods) > most || s.available() < least {
					t.Fatalf("%d pods (at most %d), %d available (at least %d)", len(s.pods), most,
						s.available(), least)
				}
			}
		}
		s.settle()
		if len(s.pods) != int(*s.d.Spec.Replicas) || s.available() != len(s.pods) {
			t.Fatalf("at the end %d pods, %d available", len(s.pods), s.available())
		}
		for _, p := range s.pods {
			if p.Spec.Containers[0].Image != s.d.Spec.Template.Spec.Containers[0].Image {
				t.Fatalf("at the end a pod runs %s", p.Spec.Containers[0].Image)
			}
		}
	})
}
