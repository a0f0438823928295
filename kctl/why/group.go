package why

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
)

// groupOf returns the name of the PodGroup of pod p, or "" if the pod belongs to no PodGroup.
func groupOf(p *corev1.Pod) string {
	if g := p.Spec.SchedulingGroup; g != nil && g.PodGroupName != nil {
		return *g.PodGroupName
	}
	return ""
}

// explainPodGroup fills Finding f and returns true if pod p cannot be scheduled because of its
// PodGroup. That is, the group does not exist, its pods use different schedulers, or it has fewer
// pods than its minimum. Otherwise group returns false.
func (w *World) explainPodGroup(p *corev1.Pod, f *Finding) bool {
	group := groupOf(p)
	if group == "" || !w.hasList(Groups) {
		return false
	}
	var names []string
	var spec *schedulingv1beta1.PodGroup
	for i := range w.Groups {
		names = append(names, w.Groups[i].Name)
		if w.Groups[i].Name == group {
			spec = &w.Groups[i]
		}
	}
	if spec == nil {
		f.Because = fmt.Sprintf("pod group %s does not exist", group)
		if near := nearestWord(group, names); near != "" {
			f.Details = append(f.Details, fmt.Sprintf("the namespace has one named %q", near))
		}
		f.Mend = []string{kctlCommand(p, "apply -f GROUP.yaml   # a podgroup named %s", group)}
		return true
	}
	gang := spec.Spec.SchedulingPolicy.Gang
	if gang == nil || !w.hasList(Mates) {
		return false
	}
	able := 0
	var gated, schedulers []string
	for i := range w.Mates {
		q := &w.Mates[i]
		if groupOf(q) != group || q.DeletionTimestamp != nil || q.Status.Phase == corev1.PodSucceeded || q.Status.Phase == corev1.PodFailed {
			continue
		}
		if s := cmp.Or(q.Spec.SchedulerName, corev1.DefaultSchedulerName); !slices.Contains(schedulers, s) {
			schedulers = append(schedulers, s)
		}
		if q.Spec.NodeName == "" && len(q.Spec.SchedulingGates) > 0 {
			gated = append(gated, q.Name)
		} else {
			able++
		}
	}
	slices.Sort(schedulers)
	least := int(gang.MinCount)
	switch {
	case len(schedulers) > 1:
		f.Because = fmt.Sprintf("the pods of pod group %s are for different schedulers, and nobody places them together: %s", group, strings.Join(boundList(schedulers), ", "))
		f.Mend = []string{kctlCommand(p, "get pods -o custom-columns=NAME:.metadata.name,SCHEDULER:.spec.schedulerName")}
	case able < least:
		f.Because = fmt.Sprintf("pod group %s waits for %d of %d pods", group, least-able, least)
		if len(gated) > 0 {
			f.Details = append(f.Details, countNoun(len(gated), "pod")+" of it held back by scheduling gates: "+strings.Join(boundList(gated), ", "))
		}
		f.Mend = []string{kctlCommand(p, `patch podgroup %s --type=merge -p '{"spec":{"schedulingPolicy":{"gang":{"minCount":%d}}}}'   # or make the pods that it waits for`, group, able)}
	default:
		return false
	}
	return true
}

// groupReason returns the part of a scheduling message that is the reason for f, a Finding about
// pod p. It adds the part about the PodGroup or about another pod to f.Details. If another pod
// prevents the scheduling, it sets f.Mend to explain that pod. Without a PodGroup, it returns the
// message unchanged.
func groupReason(p *corev1.Pod, message string, f *Finding) string {
	group := groupOf(p)
	if group == "" {
		return message
	}
	mark := "pod group " + group + ": only "
	switch i := strings.Index(message, mark); {
	case i > 0: // the pod itself fits on no node
		f.Details = append(f.Details, strings.TrimSuffix(singleLine(message[i:]), "."))
		return strings.TrimSpace(message[:i])
	case i == 0: // the pod itself fits on a node, and other pods of its group do not
		sum, other, _ := strings.Cut(message, "; ")
		if strings.HasPrefix(other, "preemption: ") {
			var said string
			said, other, _ = strings.Cut(other, "; ")
			f.Details = append(f.Details, singleLine(said))
		}
		if name, _, ok := strings.Cut(strings.TrimPrefix(other, "pod "), ": "); ok {
			f.Details = append(f.Details, singleLine(other))
			f.Mend = []string{kctlCommand(p, "why pod/%s", name)}
		}
		return sum
	}
	return message
}
