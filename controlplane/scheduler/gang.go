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

// lookUpGroup implements framework.Handle.Group.
func (s *Scheduler) lookUpGroup(key framework.GroupKey) framework.Group {
	spec, ok := client.Cached[*schedulingv1beta1.PodGroup](s.cfg.Informers, key.Namespace, key.Name)
	if !ok {
		spec = nil
	}
	return s.groups.groupFor(key, spec)
}

// groupChanged handles changes of a group's policy. The scheduler itself writes the status, so
// status changes are ignored.
func (s *Scheduler) groupChanged(old, now *schedulingv1beta1.PodGroup) {
	if old != nil && now != nil && old.UID == now.UID && minCount(old) == minCount(now) {
		return
	}
	g := currentOrOld(old, now)
	s.queue.handleEvent(context.Background(), framework.GroupChanged, framework.GroupKey{Namespace: g.Namespace, Name: g.Name})
}

func minCount(g *schedulingv1beta1.PodGroup) int32 {
	if gang := g.Spec.SchedulingPolicy.Gang; gang != nil {
		return gang.MinCount
	}
	return 0
}

// gangToPlace returns the group without which the pod cannot be placed. It returns false if the pod
// can be placed alone, or if the group cannot be placed yet.
func (s *Scheduler) gangToPlace(pod *v1.Pod) (framework.Group, bool) {
	key, ok := framework.GroupOf(pod)
	if !ok || !slices.ContainsFunc(s.profiles.forPod(pod).Permits, func(x framework.Permit) bool { return x.Name() == framework.GangScheduling }) {
		return framework.Group{}, false
	}
	g := s.lookUpGroup(key)
	return g, g.Known && !g.Mixed && g.Able >= g.Least && g.Needs() > 1
}

// groupAttempt is one attempt to place the pods of a group. Each pod gets a node in turn, with the
// pods before it counted. If enough pods get a node, all of them are bound. Otherwise all give up
// their nodes. No other pod is tried meanwhile, so the attempt has no effect on others.
type groupAttempt struct {
	group     framework.Group
	hasQuorum bool
	chosen    []*nodeChoice
	failed    []schedulingFailure
	untried   []*queuedPod // pods without a node that no plugin has refused
}

// attemptGroup tries to place the group of a pod that was taken from the queue.
func (s *Scheduler) attemptGroup(ctx context.Context, pod *queuedPod, g framework.Group, ties *rand.Rand, binders *workerPool) {
	if until := s.groups.nextAttempt(g.GroupKey); s.queue.now().Before(until) {
		s.queue.requeueAfter(pod, until)
		return
	}
	members := s.queue.takeGroupMembers(pod, s.groups.pendingMembers(g.GroupKey))
	slices.SortStableFunc(members, compareInGroup)
	done := false
	defer func() {
		if !done { // after a panic, which runRecovering reports
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
	s.groups.recordAttempt(g.GroupKey, t.hasQuorum, func(failures int) time.Time { return s.queue.backoffUntil(failures) })
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
	// The group is placed without these pods. They are scheduled like any other pod.
	for _, f := range t.failed {
		s.queue.requeueFailed(ctx, f.pod, nil)
	}
	for _, pod := range t.untried {
		s.queue.requeueFailed(ctx, pod, nil)
	}
}

// compareInGroup orders the pods of a group for an attempt: by priority, then large pods first,
// because small pods fit more easily beside large ones.
func compareInGroup(a, b *queuedPod) int {
	return cmp.Or(cmp.Compare(b.Priority, a.Priority), compareSize(b, a), a.Added.Compare(b.Added), cmp.Compare(a.Pod.Name, b.Pod.Name))
}

func compareSize(a, b *queuedPod) int {
	return cmp.Or(cmp.Compare(a.Requests.MilliCPU, b.Requests.MilliCPU), cmp.Compare(a.Requests.Memory, b.Requests.Memory))
}

// smallestPods returns the n smallest pods, large ones first. It returns nil if all pods are needed
// or have the same size.
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

// placeMembers tries pods until too few are left to place the group.
func (s *Scheduler) placeMembers(ctx context.Context, g framework.Group, members []*queuedPod, ties *rand.Rand) *groupAttempt {
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
		case f.err == nil && f.status == nil: // the pod is on a node already
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

// placeSmallest tries the smallest pods after the attempt with all pods has failed. The failures of
// the other pods are kept.
func (s *Scheduler) placeSmallest(ctx context.Context, before *groupAttempt, few []*queuedPod, ties *rand.Rand) *groupAttempt {
	s.releaseChosen(ctx, before)
	t := s.placeMembers(ctx, before.group, few, ties)
	for _, f := range before.failed {
		if !slices.Contains(few, f.pod) || slices.Contains(t.untried, f.pod) {
			t.untried = slices.DeleteFunc(t.untried, func(pod *queuedPod) bool { return pod == f.pod })
			t.failed = append(t.failed, f)
		}
	}
	for _, pod := range before.untried {
		if !slices.Contains(few, pod) {
			t.untried = append(t.untried, pod)
		}
	}
	return t
}

// releaseChosen gives up the nodes of all chosen pods.
func (s *Scheduler) releaseChosen(ctx context.Context, t *groupAttempt) {
	for _, x := range t.chosen {
		s.releasePod(ctx, x.pod, x.cycle, x.result.Node)
		t.untried = append(t.untried, x.pod)
	}
	t.chosen = nil
}

// chooseNodeRecovering returns a panic as a failure of the pod.
func (s *Scheduler) chooseNodeRecovering(ctx context.Context, pod *queuedPod, ties *rand.Rand) (x *nodeChoice, f *schedulingFailure) {
	defer func() {
		if r := recover(); r != nil {
			s.log.Error("panic while scheduling a pod of a group", "pod", pod.Pod.Namespace+"/"+pod.Pod.Name, "panic", r, "stack", string(debug.Stack()))
			s.cluster.forgetAssumedPod(pod.Pod.UID)
			x, f = nil, &schedulingFailure{pod: pod, err: fmt.Errorf("panic: %v", r)}
		}
	}()
	return s.chooseNode(ctx, pod, ties)
}

// failGroupAttempt ends an attempt that placed too few pods. Pods that were refused wait for an
// event that may help; the others wait for the group. room is called after all nodes are released
// and returns a message about preemption.
func (s *Scheduler) failGroupAttempt(ctx context.Context, t *groupAttempt, room func() string) {
	had := len(t.chosen)
	s.releaseChosen(ctx, t)
	if ctx.Err() != nil {
		return
	}
	summary := fmt.Sprintf("pod group %s: only %d of %d pods had a node", t.group.Name, t.group.Placed+had, t.group.Least)
	if said := room(); said != "" {
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
		s.queue.requeueFailed(ctx, f.pod, by)
	}
	s.reportGroup(t.group.GroupKey, metav1.ConditionFalse, reason, message)
	for _, pod := range t.untried {
		s.reportFailure(pod, v1.PodReasonUnschedulable, message)
		s.queue.requeueFailed(ctx, pod, map[string]bool{framework.GangScheduling: true})
	}
}

// releasePod undoes the reservation and assumption of a pod within a group attempt.
func (s *Scheduler) releasePod(ctx context.Context, pod *queuedPod, c *framework.Cycle, node string) {
	s.profiles.forPod(pod.Pod).Unreserve(ctx, c, node)
	s.cluster.forgetAssumedPod(pod.Pod.UID)
}

// explainFailure returns why the pod has no node and which plugins refused it. The plugins are nil
// if the attempt itself failed. A single pod of a group does not preempt other pods, because that
// may help the pod but not the group. See preemptForGroup.
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

// reportGroup writes the status of a group if it changed. A group that was placed once keeps that
// status.
func (s *Scheduler) reportGroup(key framework.GroupKey, status metav1.ConditionStatus, reason, message string) {
	g, ok := client.Cached[*schedulingv1beta1.PodGroup](s.cfg.Informers, key.Namespace, key.Name)
	if !ok || meta.IsStatusConditionTrue(g.Status.Conditions, schedulingv1beta1.PodGroupInitiallyScheduled) ||
		!s.groups.recordStatus(key, string(g.UID)+string(status)+reason+message) {
		return
	}
	s.enqueueNote(&podUpdateNote{group: g, at: time.Now(), condition: reason, message: message, status: status})
}

// reportGroupPlaced reports a group as placed, after one of its pods was bound and enough pods have
// a node.
func (s *Scheduler) reportGroupPlaced(pod *v1.Pod) {
	key, ok := framework.GroupOf(pod)
	if !ok {
		return
	}
	if g := s.lookUpGroup(key); g.Known && g.Needs() == 0 {
		s.reportGroup(key, metav1.ConditionTrue, "Scheduled", fmt.Sprintf("pod group %s is placed", key.Name))
	}
}

// reportGroupRefused reports a group as not placed after one of its pods, which may be placed
// alone, found no node.
func (s *Scheduler) reportGroupRefused(pod *v1.Pod, reason, message string) {
	key, ok := framework.GroupOf(pod)
	if !ok {
		return
	}
	if g := s.lookUpGroup(key); g.Known && g.Able >= g.Least && g.Needs() > 0 {
		s.reportGroup(key, metav1.ConditionFalse, reason, message)
	}
}

// writeGroupCondition writes the condition of a group.
func (s *Scheduler) writeGroupCondition(ctx context.Context, n *podUpdateNote) error {
	return updateStatus(ctx, s, n.group, true, func(g *schedulingv1beta1.PodGroup) (*schedulingv1beta1.PodGroup, bool) {
		if meta.IsStatusConditionTrue(g.Status.Conditions, schedulingv1beta1.PodGroupInitiallyScheduled) {
			return g, false
		}
		next := g.DeepCopy()
		changed := meta.SetStatusCondition(&next.Status.Conditions, metav1.Condition{Type: schedulingv1beta1.PodGroupInitiallyScheduled,
			Status: n.status, Reason: n.condition, Message: n.message, ObservedGeneration: g.Generation})
		return next, changed
	})
}
