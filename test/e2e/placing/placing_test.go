package placing

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/test/testenv"
)

func resourceList(name v1.ResourceName, amount string) v1.ResourceList {
	return v1.ResourceList{name: resource.MustParse(amount)}
}

// The pods of a second profile fill one node, those of the first spread, in one cluster at one time.
func TestSecondProfile(t *testing.T) {
	cs, ns := newNamespace(t)
	on := map[string]map[string]bool{}
	for i, profile := range []string{"packed", "packed", "packed", v1.DefaultSchedulerName, v1.DefaultSchedulerName,
		v1.DefaultSchedulerName} {
		p := sleeperPod(fmt.Sprint("pod-", i), "50m")
		p.Labels = map[string]string{"app": profile}
		p.Spec.SchedulerName = profile
		// a score
		p.Spec.TopologySpreadConstraints = []v1.TopologySpreadConstraint{{MaxSkew: 1, TopologyKey: v1.LabelHostname,
			WhenUnsatisfiable: v1.ScheduleAnyway, LabelSelector: &metav1.LabelSelector{MatchLabels: p.Labels}}}
		if _, err := cs.CoreV1().Pods(ns).Create(context.Background(), p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if on[profile] == nil {
			on[profile] = map[string]bool{}
		}
		on[profile][awaitNode(t, cs, ns, p.Name)] = true
	}
	if len(on["packed"]) != 1 || len(on[v1.DefaultSchedulerName]) != 3 {
		t.Errorf("pods are on %v", on)
	}
}

// An extender outside of the cluster chooses the nodes of pods that request its managed resource,
// and is called for no other pods. While it does not respond, these pods wait and report the
// reason.
func TestExtender(t *testing.T) {
	cs, ns := newNamespace(t)
	ctx := context.Background()
	p := sleeperPod("sent", "10m")
	p.Spec.Containers[0].Resources = v1.ResourceRequirements{Requests: resourceList(asked, "1"),
		Limits: resourceList(asked, "1")}
	if _, err := cs.CoreV1().Pods(ns).Create(ctx, p, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		p, err := cs.CoreV1().Pods(ns).Get(ctx, "sent", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(p.Status.Conditions, func(c v1.PodCondition) bool {
			return c.Type == v1.PodScheduled && c.Reason == v1.PodReasonSchedulerError &&
				strings.Contains(c.Message, outsideIP)
		}) {
			return fmt.Errorf("its conditions are %+v", p.Status.Conditions)
		}
		return nil
	})
	e := &schedulerExtender{}
	e.serveFilter(t, "w2")
	if _, err := cs.CoreV1().Pods(ns).Create(ctx, sleeperPod("other", "10m"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if node := awaitNode(t, cs, ns, "sent"); node != "w2" {
		t.Errorf("the pod is on %s", node)
	}
	awaitNode(t, cs, ns, "other")
	e.mu.Lock()
	defer e.mu.Unlock()
	if slices.ContainsFunc(e.requested, func(name string) bool { return name != "sent" }) || len(e.requested) == 0 {
		t.Errorf("the extender was called for %v", e.requested)
	}
}

// A worker that was drained and uncordoned gets pods of workloads that opt in, one at a time and
// within the disruption budget.
func TestRebalance(t *testing.T) {
	cs, ns := newNamespace(t)
	ctx := context.Background()
	set := map[string]string{"app": "web"}
	one := intstr.FromInt32(1)
	six := int32(6)
	if _, err := cs.PolicyV1().PodDisruptionBudgets(ns).Create(ctx,
		&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "web"},
			Spec: policyv1.PodDisruptionBudgetSpec{MaxUnavailable: &one,
				Selector: &metav1.LabelSelector{MatchLabels: set}}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	tpl := v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: set}, Spec: sleeperPod("", "10m").Spec}
	if _, err := cs.AppsV1().Deployments(ns).Create(ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Annotations: map[string]string{"keelson.dev/rebalance": "true"}},
		Spec: appsv1.DeploymentSpec{Replicas: &six, Selector: &metav1.LabelSelector{MatchLabels: set},
			Template: tpl}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	awaitSpread(t, cs, ns, "[2 2 2]")
	setUnschedulable(t, cs, "w3", true)
	t.Cleanup(func() { setUnschedulable(t, cs, "w3", false) })
	drained := map[string]bool{}
	for _, p := range webPods(t, cs, ns) {
		if p.Spec.NodeName != "w3" {
			continue
		}
		drained[p.Name] = true
		testenv.Eventually(t, soon, func() error { // the budget lets one go at a time
			return cs.PolicyV1().Evictions(ns).Evict(ctx,
				&policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: ns}})
		})
	}
	awaitSpread(t, cs, ns, "[3 3]")
	seen, err := cs.AppsV1().Deployments(ns).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	setUnschedulable(t, cs, "w3", false)
	awaitSpread(t, cs, ns, "[2 2 2]")
	seen.Stop()
	for e := range seen.ResultChan() {
		if d, ok := e.Object.(*appsv1.Deployment); ok && d.Status.AvailableReplicas < 5 {
			t.Errorf("%d pods were available, and the budget is for five", d.Status.AvailableReplicas)
		}
	}
	var events *v1.EventList
	testenv.Eventually(t, soon, func() (err error) { // the events are written after the change
		events, err = cs.CoreV1().Events(ns).List(ctx,
			metav1.ListOptions{FieldSelector: "reason=Rebalanced,involvedObject.kind=Pod"})
		if err == nil && len(events.Items) < 2 {
			err = fmt.Errorf("%d events", len(events.Items))
		}
		return err
	})
	for _, e := range events.Items {
		if drained[e.InvolvedObject.Name] || !strings.Contains(e.Message,
			"so that its replacement can start on node w3: its node runs more pods of Deployment web") {
			t.Errorf("event of %s: %s", e.InvolvedObject.Name, e.Message)
		}
	}
	if len(events.Items) != 2 {
		t.Errorf("%d pods were moved, two were to", len(events.Items))
	}
}

func setUnschedulable(t *testing.T, cs kubernetes.Interface, node string, yes bool) {
	t.Helper()
	patch := fmt.Sprintf(`{"spec": {"unschedulable": %v}}`, yes)
	if _, err := cs.CoreV1().Nodes().Patch(context.Background(), node, types.MergePatchType, []byte(patch),
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

func webPods(t *testing.T, cs kubernetes.Interface, ns string) []v1.Pod {
	t.Helper()
	list, err := cs.CoreV1().Pods(ns).List(context.Background(), metav1.ListOptions{LabelSelector: "app=web"})
	if err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// awaitSpread waits until the workers have the wanted numbers of Ready pods and no other pods
// exist.
func awaitSpread(t *testing.T, cs kubernetes.Interface, ns, want string) {
	t.Helper()
	testenv.Eventually(t, 2*soon, func() error {
		on := map[string]int{}
		for _, p := range webPods(t, cs, ns) {
			if !podIsReady(&p) || p.DeletionTimestamp != nil {
				return fmt.Errorf("pod %s on %s is not ready", p.Name, p.Spec.NodeName)
			}
			on[p.Spec.NodeName]++
		}
		var counts []int
		for _, n := range on {
			counts = append(counts, n)
		}
		if slices.Sort(counts); fmt.Sprint(counts) != want {
			return fmt.Errorf("ready pods are on %v", on)
		}
		return nil
	})
}
