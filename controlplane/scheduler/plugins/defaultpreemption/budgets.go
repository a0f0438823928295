package defaultpreemption

import (
	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// budgetLedger contains how many disruptions each PodDisruptionBudget still allows. It is
// decremented for each pod on a node that would be evicted.
type budgetLedger struct {
	budgets []*policyv1.PodDisruptionBudget
	left    []int32
}

func newLedger(budgets []*policyv1.PodDisruptionBudget) *budgetLedger {
	l := &budgetLedger{budgets: budgets, left: make([]int32, len(budgets))}
	for i, b := range budgets {
		l.left[i] = b.Status.DisruptionsAllowed
	}
	return l
}

// splitProtected divides pods into those that a PodDisruptionBudget protects and the others, both
// in the given order. A pod is protected if its eviction, after the evictions of the pods before it
// in the list, would violate a budget.
func (l *budgetLedger) splitProtected(pods []*framework.PodInfo) (protected, free []*framework.PodInfo) {
	for _, pod := range pods {
		if l.spendDisruption(pod.Pod) {
			free = append(free, pod)
		} else {
			protected = append(protected, pod)
		}
	}
	return protected, free
}

// spendDisruption counts an eviction of the pod in every PodDisruptionBudget that selects it. It
// reports whether all these budgets allowed the eviction. If a budget's status already lists the
// pod in disruptedPods, the eviction is not counted again.
func (l *budgetLedger) spendDisruption(pod *v1.Pod) bool {
	allowed := true
	for i, b := range l.budgets {
		if b.Namespace != pod.Namespace || len(pod.Labels) == 0 {
			continue
		}
		sel, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
		if err != nil || sel.Empty() || !sel.Matches(labels.Set(pod.Labels)) {
			continue
		}
		if _, going := b.Status.DisruptedPods[pod.Name]; going {
			continue
		}
		if l.left[i]--; l.left[i] < 0 {
			allowed = false
		}
	}
	return allowed
}
