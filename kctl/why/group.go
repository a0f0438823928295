package why

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"

	"keelson.dev/keelson/controlplane/api"
)

// podGroupName returns the name of the PodGroup of pod p, or "" if the pod belongs to no PodGroup.
func podGroupName(p *corev1.Pod) string {
	if g := p.Spec.SchedulingGroup; g != nil && g.PodGroupName != nil {
		return *g.PodGroupName
	}
	return ""
}

// explainPodGroup fills Finding f and returns true if pod p cannot be scheduled because of its
// PodGroup. Reasons are that the PodGroup does not exist, that its pods use different schedulers,
// or that it has fewer pods than its minimum. Otherwise it returns false.
func (w placementExplainer) explainPodGroup(p *corev1.Pod, f *Finding) bool {
	group := podGroupName(p)
	if group == "" || !w.world.hasList(Groups) {
		return false
	}
	var names []string
	var spec *schedulingv1beta1.PodGroup
	for i := range w.world.Group.Groups {
		names = append(names, w.world.Group.Groups[i].Name)
		if w.world.Group.Groups[i].Name == group {
			spec = &w.world.Group.Groups[i]
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
	if gang == nil || !w.world.hasList(Mates) {
		return false
	}
	able := 0
	var gated, schedulers []string
	for i := range w.world.Group.Mates {
		q := &w.world.Group.Mates[i]
		if podGroupName(q) != group || q.DeletionTimestamp != nil || api.IsPodTerminal(q) {
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
		f.Because = fmt.Sprintf("the pods of pod group %s are for different schedulers, and nobody places them "+
			"together: %s", group, strings.Join(boundList(schedulers), ", "))
		f.Mend = []string{kctlCommand(p,
			"get pods -o custom-columns=NAME:.metadata.name,SCHEDULER:.spec.schedulerName")}
	case able < least:
		f.Because = fmt.Sprintf("pod group %s waits for %d of %d pods", group, least-able, least)
		if len(gated) > 0 {
			f.Details = append(f.Details, countNoun(len(gated), "pod")+" of it held back by scheduling gates: "+
				strings.Join(boundList(gated), ", "))
		}
		f.Mend = []string{kctlCommand(p,
			`patch podgroup %s --type=merge -p '{"spec":{"schedulingPolicy":{"gang":{"minCount":%d}}}}'   # or make `+
				`the pods that it waits for`, group, able)}
	default:
		return false
	}
	return true
}

// groupReason returns the part of message, the scheduler's message about pod p, that is the reason
// for Finding f. It adds the parts about the PodGroup or another pod to f.Details. If another pod
// prevents the scheduling, it sets f.Mend to a command that explains the other pod. If p has no
// PodGroup, it returns message and does not change f.
func groupReason(p *corev1.Pod, message string, f *Finding) string {
	group := podGroupName(p)
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
