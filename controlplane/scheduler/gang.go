package scheduler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// lookUpGroup implements framework.Handle.Group: it returns the scheduling state of the PodGroup
// with the given key.
func (s *Scheduler) lookUpGroup(key framework.GroupKey) framework.Group {
	spec, ok := client.Cached[*schedulingv1beta1.PodGroup](s.cfg.Informers, key.Namespace, key.Name)
	if !ok {
		spec = nil
	}
	return s.groups.groupFor(key, spec)
}

// groupChanged handles a change of a PodGroup that the informer reports. If the PodGroup is new or
// deleted, or its minCount has changed, it sends the event GroupChanged to the queue. Status
// changes are ignored, because the scheduler itself writes the status.
func (h *changeHandler) groupChanged(old, now *schedulingv1beta1.PodGroup) {
	if old != nil && now != nil && old.UID == now.UID && minCount(old) == minCount(now) {
		return
	}
	g := currentOrOld(old, now)
	h.queue.handleEvent(context.Background(), framework.GroupChanged,
		framework.GroupKey{Namespace: g.Namespace, Name: g.Name})
}

func minCount(g *schedulingv1beta1.PodGroup) int32 {
	if gang := g.Spec.SchedulingPolicy.Gang; gang != nil {
		return gang.MinCount
	}
	return 0
}

// gangToPlace returns the state of the pod's PodGroup, and whether several pods of that group must
// be placed in one attempt. The result is false if the pod can be placed alone, or if the group
// cannot be placed yet, for example because it has too few pods.
func (s *Scheduler) gangToPlace(pod *v1.Pod) (framework.Group, bool) {
	key, ok := framework.GroupOf(pod)
	if !ok || !slices.ContainsFunc(s.profiles.forPod(pod).Binding.Permits, func(x framework.Permit) bool {
		return x.Name() == framework.GangScheduling
	}) {
		return framework.Group{}, false
	}
	g := s.lookUpGroup(key)
	return g, g.Known && !g.Mixed && g.Able >= g.Least && g.Needs() > 1
}

// groupAttempt is one attempt to place the pods of a PodGroup together. A node is chosen for one
// pod after the other; each is assumed on its node before the next. If enough pods get a node,
// these pods are bound. Otherwise all of them are removed from their nodes. No other pod is
// scheduled during the attempt, so a failed attempt has no effect on other pods.
type groupAttempt struct {
	group     framework.Group
	hasQuorum bool
	chosen    []*nodeChoice
	failed    []schedulingFailure
	untried   []*queuedPod // pods without a node that were not tried, or that had a node which was released again
}

// attemptGroup tries to place the pods of the PodGroup g in one attempt. pod is the pod of the
// group that was popped from the queue. If enough pods get a node, they are bound by binders.
// Otherwise pods of lower priority may be evicted for the group. ties chooses among nodes with the
// same score.
func (s *Scheduler) attemptGroup(
	ctx context.Context, pod *queuedPod, g framework.Group, ties *rand.Rand, binders *workerPool,
) {
	if until := s.groups.nextAttempt(g.GroupKey); s.queue.now().Before(until) {
		s.queue.requeueAfter(pod, until)
		return
	}
	members := s.queue.takeGroupMembers(pod, s.groups.pendingMembers(g.GroupKey))
	slices.SortStableFunc(members, compareInGroup)
	done := false
	defer func() {
		if !done { // a panic has occurred, which runRecovering reports
			for _, m := range members {
				s.cluster.forgetAssumedPod(m.Pod.UID)
				s.queue.requeueFailed(ctx, m, nil)
			}
		}
	}()
	t := s.placeMembers(ctx, g, members, ties)
	if few := smallestPods(members, g.Needs()); !t.hasQuorum && few != nil {
		t = s.placeSmallest(ctx, t, few, ties)
	}
	s.groups.recordAttempt(g.GroupKey, t.hasQuorum, func(failures int) time.Time {
		return s.queue.backoffUntil(failures)
	})
	if !t.hasQuorum {
		s.failGroupAttempt(ctx, t, func() string { return s.preemptForGroup(ctx, t, members, ties) })
		done = true
		return
	}
	done = true
	for _, x := range t.chosen {
		delete(x.delays, framework.GangScheduling)
		s.startBinding(ctx, x, binders)
	}
	// The group has enough pods without these. They are then scheduled like any other pod.
	for _, f := range t.failed {
		s.recordAttempt(f.pod, f.attemptResult())
		s.queue.requeueFailed(ctx, f.pod, nil)
	}
	for _, pod := range t.untried {
		s.queue.requeueFailed(ctx, pod, nil)
	}
}

// compareInGroup compares two pods of a group for the order in which they are placed: higher
// priority first, then larger requests first, because small pods still fit when large ones have
// nodes.
func compareInGroup(a, b *queuedPod) int {
	return cmp.Or(cmp.Compare(b.Priority, a.Priority), compareSize(b, a), a.Added.Compare(b.Added),
		cmp.Compare(a.Pod.Name, b.Pod.Name))
}

func compareSize(a, b *queuedPod) int {
	return cmp.Or(cmp.Compare(a.Requests.MilliCPU, b.Requests.MilliCPU),
		cmp.Compare(a.Requests.Memory, b.Requests.Memory))
}

// smallestPods returns the n members with the smallest requests, largest of them first. It returns
// nil if the members are not more than n or all have the same size.
func smallestPods(members []*queuedPod, n int) []*queuedPod {
	if n >= len(members) || n == 0 {
		return nil
	}
	out := slices.Clone(members)
	slices.SortStableFunc(out, compareSize)
	if compareSize(out[0], out[len(out)-1]) == 0 {
		return nil
	}
	out = out[:n]
	slices.SortStableFunc(out, func(a, b *queuedPod) int { return compareSize(b, a) })
	return out
}

// placeMembers chooses a node for one pod of the group after the other. It stops as soon as the
// remaining pods are too few to reach the number that the group needs.
func (s *Scheduler) placeMembers(
	ctx context.Context, g framework.Group, members []*queuedPod, ties *rand.Rand,
) *groupAttempt {
	t := &groupAttempt{group: g}
	for i, m := range members {
		if !t.hasQuorum && len(t.chosen)+len(members)-i < g.Needs() {
			t.untried = append(t.untried, members[i:]...)
			break
		}
		x, f := s.chooseNodeRecovering(ctx, m, ties)
		switch {
		case f == nil:
			t.chosen = append(t.chosen, x)
			if _, waits := x.delays[framework.GangScheduling]; !waits {
				t.hasQuorum = true
			}
		case f.err == nil && f.status == nil: // the pod was bound or assumed in the meantime
			s.queue.removePod(m.Pod.UID)
		default:
			if f.status != nil {
				s.releasePod(ctx, m, f.cycle, f.node)
			}
			t.failed = append(t.failed, *f)
		}
	}
	return t
}

// placeSmallest tries to place only the given smallest pods of the group, after an attempt with all
// of its pods failed. It returns the new attempt, which also contains the other pods and their
// failures from the attempt failed.
func (s *Scheduler) placeSmallest(
	ctx context.Context, failed *groupAttempt, smallest []*queuedPod, ties *rand.Rand,
) *groupAttempt {
	s.releaseChosen(ctx, failed)
	t := s.placeMembers(ctx, failed.group, smallest, ties)
	for _, f := range failed.failed {
		if !slices.Contains(smallest, f.pod) || slices.Contains(t.untried, f.pod) {
			t.untried = slices.DeleteFunc(t.untried, func(pod *queuedPod) bool { return pod == f.pod })
			t.failed = append(t.failed, f)
		}
	}
	for _, pod := range failed.untried {
		if !slices.Contains(smallest, pod) {
			t.untried = append(t.untried, pod)
		}
	}
	return t
}

// releaseChosen removes the pods from the nodes that the attempt t has chosen for them.
func (s *Scheduler) releaseChosen(ctx context.Context, t *groupAttempt) {
	for _, x := range t.chosen {
		s.releasePod(ctx, x.pod, x.cycle, x.result.Node)
		t.untried = append(t.untried, x.pod)
	}
	t.chosen = nil
}

// chooseNodeRecovering calls chooseNode for a pod of a group. A panic is logged and returned as a
// failure of that pod.
func (s *Scheduler) chooseNodeRecovering(ctx context.Context, pod *queuedPod, ties *rand.Rand) (
	x *nodeChoice, f *schedulingFailure,
) {
	defer func() {
		if r := recover(); r != nil {
			s.log.Error("panic while scheduling a pod of a group", "pod", pod.Pod.Namespace+"/"+pod.Pod.Name, "panic",
				r, "stack", string(debug.Stack()))
			s.cluster.forgetAssumedPod(pod.Pod.UID)
			x, f = nil, &schedulingFailure{pod: pod, err: fmt.Errorf("panic: %v", r)}
		}
	}()
	return s.chooseNode(ctx, pod, ties)
}

// failGroupAttempt ends a group attempt that placed too few pods: it removes the pods from their
// nodes, reports why, and requeues them. A pod that plugins refused waits for an event that may
// help; the others wait for a change of their PodGroup. tryPreemption is called when the pods have
// no nodes any more. It returns a message about preemption for the report, or "".
func (s *Scheduler) failGroupAttempt(ctx context.Context, t *groupAttempt, tryPreemption func() string) {
	had := len(t.chosen)
	s.releaseChosen(ctx, t)
	if ctx.Err() != nil {
		return
	}
	summary := fmt.Sprintf("pod group %s: only %d of %d pods had a node", t.group.Name,
		t.group.Placed+had, t.group.Least)
	if said := tryPreemption(); said != "" {
		summary += "; " + said
	}
	reason, message := schedulingv1beta1.PodGroupReasonUnschedulable, summary
	for i, f := range t.failed {
		why, by := f.explainFailure()
		if i == 0 {
			message = fmt.Sprintf("%s; pod %s: %s", summary, f.pod.Pod.Name, why)
		}
		if by == nil {
			reason = schedulingv1beta1.PodGroupReasonSchedulerError
			s.reportFailure(f.pod, v1.PodReasonSchedulerError, why)
		} else {
			s.reportFailure(f.pod, v1.PodReasonUnschedulable, why+" "+summary+".")
		}
		s.recordAttempt(f.pod, f.attemptResult())
		s.queue.requeueFailed(ctx, f.pod, by)
	}
	s.reportGroup(t.group.GroupKey, metav1.ConditionFalse, reason, message)
	for _, pod := range t.untried {
		s.reportFailure(pod, v1.PodReasonUnschedulable, message)
		s.recordAttempt(pod, resultUnschedulable)
		s.queue.requeueFailed(ctx, pod, map[string]bool{framework.GangScheduling: true})
	}
}

// releasePod calls Unreserve of the Reserve plugins for a pod of a group attempt, and removes the
// pod from the node on which it was assumed.
func (s *Scheduler) releasePod(ctx context.Context, pod *queuedPod, c *framework.Cycle, node string) {
	s.profiles.forPod(pod.Pod).Unreserve(ctx, c, node)
	s.cluster.forgetAssumedPod(pod.Pod.UID)
}

// explainFailure returns the reason why the pod has no node, and the names of the plugins that
// refused it. The names are nil if the attempt ended with an error instead of a refusal.
func (f *schedulingFailure) explainFailure() (string, map[string]bool) {
	var fit *framework.FitError
	switch {
	case errors.As(f.err, &fit):
		return fit.Error(), fit.RefusedBy()
	case f.err != nil:
		return f.err.Error(), nil
	case f.status.Refused():
		return f.status.Message() + ".", map[string]bool{f.status.Plugin: true}
	case f.status != nil:
		return f.status.AsError().Error(), nil
	}
	return "", nil
}

// attemptResult returns the result of the failed attempt for the metrics.
func (f *schedulingFailure) attemptResult() attemptResult {
	if _, by := f.explainFailure(); by == nil {
		return resultError
	}
	return resultUnschedulable
}

// reportGroup enqueues the condition PodGroupInitiallyScheduled of a PodGroup with the given status
// for writing. It does nothing if the last report about the group was equal, or if the condition is
// already true.
func (s *Scheduler) reportGroup(key framework.GroupKey, status metav1.ConditionStatus, reason, message string) {
	g, ok := client.Cached[*schedulingv1beta1.PodGroup](s.cfg.Informers, key.Namespace, key.Name)
	if !ok || meta.IsStatusConditionTrue(g.Status.Conditions, schedulingv1beta1.PodGroupInitiallyScheduled) ||
		!s.groups.recordStatus(key, string(g.UID)+string(status)+reason+message) {
		return
	}
	s.reports.enqueueReport(&statusReport{group: g, at: time.Now(), condition: reason, message: message,
		status: status})
}

// reportGroupPlaced is called for a bound pod. If the pod has a PodGroup of which enough pods now
// have a node, it reports the condition PodGroupInitiallyScheduled as true.
func (s *Scheduler) reportGroupPlaced(pod *v1.Pod) {
	key, ok := framework.GroupOf(pod)
	if !ok {
		return
	}
	if g := s.lookUpGroup(key); g.Known && g.Needs() == 0 {
		s.reportGroup(key, metav1.ConditionTrue, "Scheduled", fmt.Sprintf("pod group %s is placed", key.Name))
	}
}

// reportGroupRefused is called after no node was found for a pod that was scheduled alone. If too
// few pods of its PodGroup have a node, it reports the condition PodGroupInitiallyScheduled of that
// group as false.
func (s *Scheduler) reportGroupRefused(pod *v1.Pod, reason, message string) {
	key, ok := framework.GroupOf(pod)
	if !ok {
		return
	}
	if g := s.lookUpGroup(key); g.Known && g.Able >= g.Least && g.Needs() > 0 {
		s.reportGroup(key, metav1.ConditionFalse, reason, message)
	}
}

// writeGroupCondition writes the condition PodGroupInitiallyScheduled to the status of the PodGroup
// in the report n. It does nothing if that condition is already true.
func (w *reportWriter) writeGroupCondition(ctx context.Context, n *statusReport) error {
	return updateStatus(ctx, w.informers, w.lead, n.group, true,
		func(g *schedulingv1beta1.PodGroup) (*schedulingv1beta1.PodGroup, bool) {
			if meta.IsStatusConditionTrue(g.Status.Conditions, schedulingv1beta1.PodGroupInitiallyScheduled) {
				return g, false
			}
			next := g.DeepCopy()
			changed := meta.SetStatusCondition(&next.Status.Conditions,
				metav1.Condition{Type: schedulingv1beta1.PodGroupInitiallyScheduled,
					Status: n.status, Reason: n.condition, Message: n.message, ObservedGeneration: g.Generation})
			return next, changed
		})
}
