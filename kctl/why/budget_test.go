package why

import (
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func budgetOf(name string, healthy, desired, expected int32) *policyv1.PodDisruptionBudget {
	least := intstr.FromInt32(desired)
	return &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: policyv1.PodDisruptionBudgetSpec{MinAvailable: &least,
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
		Status: policyv1.PodDisruptionBudgetStatus{CurrentHealthy: healthy, DesiredHealthy: desired,
			ExpectedPods: expected, DisruptionsAllowed: max(0, healthy-desired)}}
}

// A cordoned node names the budgets that block its drain, their pods and the remedy; so does the budget itself. Pods that a drain
// leaves alone, and pods that may go, are not named. F126
func TestBudgetsThatBlockADrain(t *testing.T) {
	cordoned := node("w1", func(n *corev1.Node) { n.Spec.Unschedulable = true })
	always := policyv1.AlwaysAllow
	lenient := budgetOf("web", 1, 2, 2)
	lenient.Spec.UnhealthyPodEvictionPolicy = &always
	healthy, broken := *pod("web-1", on("w1"), ready(corev1.ConditionTrue)),
		*pod("web-2", on("w1"), ready(corev1.ConditionFalse))
	elsewhere := *pod("web-3", on("w2"), ready(corev1.ConditionTrue))
	daemon := *pod("web-4", on("w1"), ready(corev1.ConditionTrue), func(p *corev1.Pod) {
		p.OwnerReferences[0].Kind = "DaemonSet"
	})
	static := *pod("web-5", on("w1"), ready(corev1.ConditionTrue), func(p *corev1.Pod) {
		p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
	})
	other := *pod("other", on("w1"), ready(corev1.ConditionTrue), alone)
	all := []corev1.Pod{healthy, broken, elsewhere, daemon, static, other}
	of := func(b ...*policyv1.PodDisruptionBudget) World {
		w := World{Placed: all, Pods: all, Nodes: []corev1.Node{cordoned, node("w2")}}
		for _, b := range b {
			w.Budgets = append(w.Budgets, *b)
		}
		return w
	}
	unsynced := budgetOf("web", 0, 0, 2)
	unsynced.Status.Conditions = []metav1.Condition{{Type: policyv1.DisruptionAllowedCondition,
		Reason: policyv1.SyncFailedReason, Message: "no scale subresource"}}
	transcript(t, "budgets", []subject{
		{"a node whose budget wants all pods", of(budgetOf("web", 3, 3, 3)), &cordoned},
		{"a node with a pod that is not Ready", of(budgetOf("web", 1, 2, 2)), &cordoned},
		{"a node with a pod that is not Ready and may go", of(lenient), &cordoned},
		{"a node whose budget allows an eviction", of(budgetOf("web", 3, 2, 3)), &cordoned},
		{"a node with two budgets", of(budgetOf("web", 3, 2, 3), budgetOf("more", 3, 2, 3)), &cordoned},
		{"budgets that may not be read", World{Placed: all, Unread: []string{Budgets}}, &cordoned},
		{"a budget", of(), budgetOf("web", 1, 2, 2)},
		{"a budget that cannot be computed", of(), unsynced},
		{"a budget that allows an eviction", of(), budgetOf("web", 3, 2, 3)},
	})
}

// Pods that wait for an init container or a sidecar are explained with it. F126
func TestInitContainersThatRun(t *testing.T) {
	always, no := corev1.ContainerRestartPolicyAlways, false
	waiting := func(c corev1.Container, s corev1.ContainerStatus) *corev1.Pod {
		return pod("a", on("w1"), func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: "prepare"}, c}
			s.Name, s.State.Running = c.Name, &corev1.ContainerStateRunning{StartedAt: ago(3 * time.Minute)}
			p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "prepare",
				State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}}, s}
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main",
				State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "PodInitializing"}}}}
		})
	}
	sidecar := waiting(corev1.Container{Name: "proxy", RestartPolicy: &always}, corev1.ContainerStatus{Started: &no})
	w := World{Nodes: []corev1.Node{node("w1")}}
	failing := w
	failing.Events = []corev1.Event{said(sidecar, "Unhealthy", "Startup probe failed: connection refused",
		time.Second, "proxy")}
	mounted := waiting(corev1.Container{Name: "migrate"}, corev1.ContainerStatus{})
	earlier := w
	earlier.Events = []corev1.Event{said(mounted, "FailedMount", "it was late", 4*time.Minute)}
	transcript(t, "init", []subject{
		{"an init container runs", w, waiting(corev1.Container{Name: "migrate"}, corev1.ContainerStatus{})},
		{"an init container runs after a volume was late", earlier, mounted},
		{"a sidecar does not start", failing, sidecar},
	})
}

// A pod of a StatefulSet that is not Ready and has an old template blocks the rollout, and the remedy is to delete it. F126
func TestStatefulSetStuckOnAnOldTemplate(t *testing.T) {
	set := func(change ...func(*appsv1.StatefulSet)) *appsv1.StatefulSet {
		three := int32(3)
		s := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: "default", UID: "s"},
			Spec: appsv1.StatefulSetSpec{Replicas: &three}}
		s.Spec.UpdateStrategy.Type, s.Spec.PodManagementPolicy = appsv1.RollingUpdateStatefulSetStrategyType,
			appsv1.OrderedReadyPodManagement
		s.Status = appsv1.StatefulSetStatus{ReadyReplicas: 2, UpdatedReplicas: 0, CurrentRevision: "db-1",
			UpdateRevision: "db-3"}
		for _, c := range change {
			c(s)
		}
		return s
	}
	member := func(name, revision string, status corev1.ConditionStatus) corev1.Pod {
		return *pod(name, of("StatefulSet", "s"), on("w1"), ready(status), func(p *corev1.Pod) {
			p.Labels = map[string]string{appsv1.StatefulSetRevisionLabel: revision}
		})
	}
	pods := []corev1.Pod{member("db-0", "db-1", corev1.ConditionTrue), member("db-1", "db-1", corev1.ConditionTrue),
		member("db-2", "db-2", corev1.ConditionFalse)}
	w := World{Nodes: []corev1.Node{node("w1")}, Pods: pods}
	ofPod := World{Nodes: w.Nodes, StatefulSet: set()}
	kept := set(func(s *appsv1.StatefulSet) {
		three := int32(3)
		s.Spec.UpdateStrategy.RollingUpdate = &appsv1.RollingUpdateStatefulSetStrategy{Partition: &three}
	})
	transcript(t, "stuck", []subject{
		{"the StatefulSet", w, set()},
		{"the pod", ofPod, &pods[2]},
		{"a pod that is Ready", ofPod, &pods[0]},
		{"pods in parallel", w, set(func(s *appsv1.StatefulSet) {
			s.Spec.PodManagementPolicy = appsv1.ParallelPodManagement
		})},
		{"a partition", World{Nodes: w.Nodes, StatefulSet: kept}, &pods[2]},
	})
}
