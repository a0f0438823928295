package why

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
)

// explainBudget returns the Findings about a PodDisruptionBudget: that it is being deleted, or that
// it allows no eviction, with the problems of its pods. It returns nil if the budget allows
// evictions or selects no pods.
func (w *World) explainBudget(b *policyv1.PodDisruptionBudget) []Finding {
	if f := explainDeletion(b, "poddisruptionbudget"); f != nil {
		return []Finding{*f}
	}
	if b.Status.DisruptionsAllowed > 0 || b.Status.ExpectedPods == 0 {
		return nil
	}
	var held []string
	for i := range w.Pods {
		if p := &w.Pods[i]; budgetBlocks(b, p) {
			held = append(held, p.Name)
		}
	}
	f := Finding{Object: objectName("poddisruptionbudget", b), What: "allows no eviction: a drain waits for it",
		Because: budgetShortage(b), Mend: budgetMend(b)}
	if len(held) > 0 {
		f.Details = append(f.Details, "pods that cannot be evicted: "+strings.Join(boundList(held), ", "))
	}
	out := []Finding{f}
	covered := slices.DeleteFunc(slices.Clone(w.Pods), func(p corev1.Pod) bool { return !budgetCovers(b, &p) })
	return append(out, w.workloads().explainUnhealthyPods(covered, &out[0])...)
}

// explainDrain returns Findings for a cordoned node that cannot be drained. There is one Finding
// for each PodDisruptionBudget that blocks evictions. Each pod that several budgets select has one
// Finding as well. It returns nil if the node is not cordoned, or if pods or budgets could not be
// read.
func (w *World) explainDrain(n *corev1.Node) []Finding {
	if !n.Spec.Unschedulable || !w.hasList(Placed) || !w.hasList(Budgets) {
		return nil
	}
	var out []Finding
	several := map[string]bool{} // namespace/name of each pod that several budgets select
	for i := range w.Budgets {
		b := &w.Budgets[i]
		var held []string
		for k := range w.Placed {
			p := &w.Placed[k]
			if p.Spec.NodeName != n.Name || !isEvictable(p) || !budgetCovers(b, p) {
				continue
			}
			if w.budgetsOf(p) > 1 {
				several[p.Namespace+"/"+p.Name] = true
			} else if budgetBlocks(b, p) {
				held = append(held, p.Name)
			}
		}
		if len(held) > 0 && len(out) < maxDetails {
			out = append(out, Finding{Object: objectName("node", n),
				What: fmt.Sprintf("cannot be drained: budget %s/%s keeps %s: %s",
					b.Namespace, b.Name, countNoun(len(held), "pod"), strings.Join(boundList(held), ", ")),
				Because: budgetShortage(b), Mend: budgetMend(b)})
		}
	}
	for _, pod := range sortedKeys(several) {
		namespace, name, _ := strings.Cut(pod, "/")
		out = append(out, Finding{Object: "node " + n.Name,
			What:    "cannot be drained: more than one budget covers pod " + pod,
			Because: "the API evicts only pods that at most one PodDisruptionBudget covers",
			Mend: []string{"kctl -n " + namespace +
				" get poddisruptionbudgets   # delete one of those, or change its selector so that it does not cover " +
				name}})
	}
	return out
}

func sortedKeys(m map[string]bool) (out []string) {
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out[:min(len(out), maxDetails)]
}

func (w *World) budgetsOf(p *corev1.Pod) (n int) {
	for i := range w.Budgets {
		if budgetCovers(&w.Budgets[i], p) {
			n++
		}
	}
	return n
}

// isEvictable reports whether a drain evicts pod p. Pods of DaemonSets, static pods, terminated
// pods and pods that are being deleted are not evicted.
func isEvictable(p *corev1.Pod) bool {
	_, static := p.Annotations[corev1.MirrorPodAnnotationKey]
	owner := metav1.GetControllerOf(p)
	return !static && p.DeletionTimestamp == nil && !api.IsPodTerminal(p) &&
		(owner == nil || owner.Kind != "DaemonSet")
}

func budgetCovers(b *policyv1.PodDisruptionBudget, p *corev1.Pod) bool {
	s, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
	return err == nil && b.Namespace == p.Namespace && s.Matches(labels.Set(p.Labels))
}

// budgetBlocks reports whether budget b prevents the eviction of pod p. A pending pod can always be
// evicted. A running pod that is not Ready can be evicted while enough pods are healthy, or always
// if unhealthyPodEvictionPolicy is AlwaysAllow.
func budgetBlocks(b *policyv1.PodDisruptionBudget, p *corev1.Pod) bool {
	if b.Status.DisruptionsAllowed > 0 || !budgetCovers(b, p) || !isEvictable(p) ||
		p.Status.Phase == corev1.PodPending {
		return false
	}
	if api.IsPodReady(p) {
		return true
	}
	always := b.Spec.UnhealthyPodEvictionPolicy != nil && *b.Spec.UnhealthyPodEvictionPolicy == policyv1.AlwaysAllow
	met := b.Status.CurrentHealthy >= b.Status.DesiredHealthy && b.Status.DesiredHealthy > 0
	return !always && !met
}

// budgetShortage returns the reason why budget b allows no eviction: too few Ready pods, or an
// error of the controller that computes its status.
func budgetShortage(b *policyv1.PodDisruptionBudget) string {
	s := b.Status
	asks := ""
	switch {
	case b.Spec.MinAvailable != nil:
		asks = fmt.Sprintf("minAvailable is %s", b.Spec.MinAvailable.String())
	case b.Spec.MaxUnavailable != nil:
		asks = fmt.Sprintf("maxUnavailable is %s", b.Spec.MaxUnavailable.String())
	}
	if message := budgetSyncError(b); message != "" {
		return "the control plane cannot compute it: " + message
	}
	text := fmt.Sprintf("%s: of %s at least %d must be Ready (now: %d)", asks, countNoun(int(s.ExpectedPods), "pod"),
		s.DesiredHealthy, s.CurrentHealthy)
	if s.DesiredHealthy >= s.ExpectedPods {
		text += ", so that no pod may be evicted even when all are Ready"
	}
	return text
}

// budgetMend returns commands that let budget b allow evictions, the least harmful command first.
func budgetMend(b *policyv1.PodDisruptionBudget) []string {
	edit := kctlCommand(b, "edit poddisruptionbudget %s   # let the application do without one pod more", b.Name)
	var out []string
	switch s := b.Status; {
	case budgetSyncError(b) != "":
		return []string{kctlCommand(b, "edit poddisruptionbudget %s   # give minAvailable as a number", b.Name)}
	case s.CurrentHealthy < s.DesiredHealthy:
		out = append(out, kctlCommand(b, "get pods -l '%s'   # kctl why pod/NAME explains those that are not Ready",
			metav1.FormatLabelSelector(b.Spec.Selector)))
	}
	if least := b.Spec.MinAvailable; b.Status.DesiredHealthy >= b.Status.ExpectedPods && least != nil &&
		least.Type == intstr.Int {
		out = append(out,
			kctlCommand(b, "scale KIND/NAME --replicas=%d   # one pod more than the budget needs; the drain goes on "+
				"when it is Ready", b.Status.DesiredHealthy+1))
	}
	return append(out, edit)
}

// budgetSyncError returns the error message if the disruption controller cannot compute the status
// of budget b. It returns "" otherwise.
func budgetSyncError(b *policyv1.PodDisruptionBudget) string {
	for _, c := range b.Status.Conditions {
		if c.Type == policyv1.DisruptionAllowedCondition && c.Reason == policyv1.SyncFailedReason {
			return singleLine(c.Message)
		}
	}
	return ""
}
