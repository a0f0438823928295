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

// group implements framework.Handle.Group.
func (s *Scheduler) group(key framework.GroupKey) framework.Group {
	spec, ok := client.Cached[*schedulingv1beta1.PodGroup](s.cfg.Informers, key.Namespace, key.Name)
	if !ok {
		spec = nil
	}
	return s.groups.of(key, spec)
}

// groupChanged follows the policies of groups; their status is the scheduler's own.
func (s *Scheduler) groupChanged(old, now *schedulingv1beta1.PodGroup) {
	if old != nil && now != nil && old.UID == now.UID && minCount(old) == minCount(now) {
		return
	}
	g := pick(old, now)
	s.queue.happened(context.Background(), framework.GroupChanged, framework.GroupKey{Namespace: g.Namespace, Name: g.Name})
}

func minCount(g *schedulingv1beta1.PodGroup) int32 {
	if gang := g.Spec.SchedulingPolicy.Gang; gang != nil {
		return gang.MinCount
	}
	return 0
}

// gangOf is the group that the pod can be placed with only; false when it may go alone, or not at all yet.
func (s *Scheduler) gangOf(p *v1.Pod) (framework.Group, bool) {
	key, ok := framework.GroupOf(p)
	if !ok || !slices.ContainsFunc(s.profiles.of(p).Permits, func(x framework.Permit) bool { return x.Name() == framework.GangScheduling }) {
		return framework.Group{}, false
	}
	g := s.group(key)
	return g, g.Known && !g.Mixed && g.Able >= g.Least && g.Needs() > 1
}

// turn is one attempt at the pods of a group: each gets a node in turn, beside those before it, and is bound if they are
// enough in the end. Otherwise all give their nodes back, and as nobody else was tried meanwhile, nobody else has noticed.
type turn struct {
	group  framework.Group
	enough bool
	held   []*choice
	failed []failure
	others []*queued // they have no node, and nothing was found that keeps them from one
}

// attemptGroup has a turn with the group of a pod that was taken from the queue.
func (s *Scheduler) attemptGroup(ctx context.Context, p *queued, g framework.Group, ties *rand.Rand, binders *crew) {
	if until := s.groups.restsUntil(g.GroupKey); s.queue.now().Before(until) {
		s.queue.postpone(p, until)
		return
	}
	members := s.queue.join(p, s.groups.waiting(g.GroupKey))
	slices.SortStableFunc(members, beforeInGroup)
	done := false
	defer func() {
		if !done { // a panic: guarded tells of it
			for _, m := range members {
				s.cluster.forget(m.Pod.UID)
				s.queue.failed(ctx, m, nil)
			}
		}
	}()
	t := s.tryGroup(ctx, g, members, ties)
	if few := smallest(members, g.Needs()); !t.enough && few != nil {
		t = s.tryFew(ctx, t, few, ties)
	}
	s.groups.turned(g.GroupKey, t.enough, func(failures int) time.Time { return s.queue.rest(failures) })
	if !t.enough {
		s.giveUp(ctx, t, func() string { return s.makeRoom(ctx, t, members, ties) })
		done = true
		return
	}
	done = true
	for _, x := range t.held {
		delete(x.delays, framework.GangScheduling)
		s.send(ctx, x, binders)
	}
	// The group is placed without the others: they are tried as any pod is.
	for _, f := range t.failed {
		s.queue.failed(ctx, f.p, nil)
	}
	for _, p := range t.others {
		s.queue.failed(ctx, p, nil)
	}
}

// beforeInGroup is the order in which pods of a group are tried: by priority, then large ones before small ones, which
// fit in between more easily than the other way round.
func beforeInGroup(a, b *queued) int {
	return cmp.Or(cmp.Compare(b.Priority, a.Priority), bySize(b, a), a.Added.Compare(b.Added), cmp.Compare(a.Pod.Name, b.Pod.Name))
}

func bySize(a, b *queued) int {
	return cmp.Or(cmp.Compare(a.Requests.MilliCPU, b.Requests.MilliCPU), cmp.Compare(a.Requests.Memory, b.Requests.Memory))
}

// smallest are the n smallest of the pods, large ones first; nil when that is no choice.
func smallest(members []*queued, n int) []*queued {
	if n >= len(members) || n == 0 {
		return nil
	}
	out := slices.Clone(members)
	slices.SortStableFunc(out, bySize)
	if bySize(out[0], out[len(out)-1]) == 0 {
		return nil
	}
	out = out[:n]
	slices.SortStableFunc(out, func(a, b *queued) int { return bySize(b, a) })
	return out
}

// tryGroup tries pods until too few are left for the group.
func (s *Scheduler) tryGroup(ctx context.Context, g framework.Group, members []*queued, ties *rand.Rand) *turn {
	t := &turn{group: g}
	for i, m := range members {
		if !t.enough && len(t.held)+len(members)-i < g.Needs() {
			t.others = append(t.others, members[i:]...)
			break
		}
		x, f := s.chooseGuarded(ctx, m, ties)
		switch {
		case f == nil:
			t.held = append(t.held, x)
			if _, waits := x.delays[framework.GangScheduling]; !waits {
				t.enough = true
			}
		case f.err == nil && f.status == nil: // it has a node already
			s.queue.remove(m.Pod.UID)
		default:
			if f.status != nil {
				s.release(ctx, m, f.c, f.node)
			}
			t.failed = append(t.failed, *f)
		}
	}
	return t
}

// tryFew tries, after all pods were too many, the smallest that are enough. What is known of those that found no node
// before is kept.
func (s *Scheduler) tryFew(ctx context.Context, before *turn, few []*queued, ties *rand.Rand) *turn {
	s.giveBack(ctx, before)
	t := s.tryGroup(ctx, before.group, few, ties)
	for _, f := range before.failed {
		if !slices.Contains(few, f.p) || slices.Contains(t.others, f.p) {
			t.others = slices.DeleteFunc(t.others, func(p *queued) bool { return p == f.p })
			t.failed = append(t.failed, f)
		}
	}
	for _, p := range before.others {
		if !slices.Contains(few, p) {
			t.others = append(t.others, p)
		}
	}
	return t
}

// giveBack takes the nodes from those that have one.
func (s *Scheduler) giveBack(ctx context.Context, t *turn) {
	for _, x := range t.held {
		s.release(ctx, x.p, x.c, x.res.Node)
		t.others = append(t.others, x.p)
	}
	t.held = nil
}

// chooseGuarded makes a panic over a pod a failure of it.
func (s *Scheduler) chooseGuarded(ctx context.Context, p *queued, ties *rand.Rand) (x *choice, f *failure) {
	defer func() {
		if r := recover(); r != nil {
			s.log.Error("scheduling a pod of a group panicked", "pod", p.Pod.Namespace+"/"+p.Pod.Name, "panic", r, "stack", string(debug.Stack()))
			s.cluster.forget(p.Pod.UID)
			x, f = nil, &failure{p: p, err: fmt.Errorf("panic: %v", r)}
		}
	}()
	return s.choose(ctx, p, ties)
}

// giveUp ends a turn that placed too few. Those that found no node wait for what refused them; the others wait for these. room
// is asked, once nobody holds a node any more, what becomes of others for the sake of the group.
func (s *Scheduler) giveUp(ctx context.Context, t *turn, room func() string) {
	had := len(t.held)
	s.giveBack(ctx, t)
	if ctx.Err() != nil {
		return
	}
	summary := fmt.Sprintf("pod group %s: only %d of %d pods had a node", t.group.Name, t.group.Placed+had, t.group.Least)
	if said := room(); said != "" {
		summary += "; " + said
	}
	reason, message := schedulingv1beta1.PodGroupReasonUnschedulable, summary
	for i, f := range t.failed {
		why, by := f.explain()
		if i == 0 {
			message = fmt.Sprintf("%s; pod %s: %s", summary, f.p.Pod.Name, why)
		}
		if by == nil {
			reason = schedulingv1beta1.PodGroupReasonSchedulerError
			s.report(f.p, v1.PodReasonSchedulerError, why)
		} else {
			s.report(f.p, v1.PodReasonUnschedulable, why+" "+summary+".")
		}
		s.queue.failed(ctx, f.p, by)
	}
	s.reportGroup(t.group.GroupKey, metav1.ConditionFalse, reason, message)
	for _, p := range t.others {
		s.report(p, v1.PodReasonUnschedulable, message)
		s.queue.failed(ctx, p, map[string]bool{framework.GangScheduling: true})
	}
}

// release takes back what was promised to a pod within a turn.
func (s *Scheduler) release(ctx context.Context, p *queued, c *framework.Cycle, node string) {
	s.profiles.of(p.Pod).Unreserve(ctx, c, node)
	s.cluster.forget(p.Pod.UID)
}

// explain says why the pod found no node, and which plugins refused it: none when the attempt itself failed. A pod of a
// group that is not placed makes nobody go by itself: that may help the pod and not the group, for which makeRoom looks.
func (f *failure) explain() (string, map[string]bool) {
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

// reportGroup has the status of a group say what became of it, unless it does. What was placed once stays so.
func (s *Scheduler) reportGroup(key framework.GroupKey, status metav1.ConditionStatus, reason, message string) {
	g, ok := client.Cached[*schedulingv1beta1.PodGroup](s.cfg.Informers, key.Namespace, key.Name)
	if !ok || meta.IsStatusConditionTrue(g.Status.Conditions, schedulingv1beta1.PodGroupInitiallyScheduled) ||
		!s.groups.says(key, string(g.UID)+string(status)+reason+message) {
		return
	}
	s.note(&note{group: g, at: time.Now(), condition: reason, message: message, status: status})
}

// groupPlaced tells of a group of which enough pods have a node, when one of them was bound.
func (s *Scheduler) groupPlaced(p *v1.Pod) {
	key, ok := framework.GroupOf(p)
	if !ok {
		return
	}
	if g := s.group(key); g.Known && g.Needs() == 0 {
		s.reportGroup(key, metav1.ConditionTrue, "Scheduled", fmt.Sprintf("pod group %s has its nodes", key.Name))
	}
}

// groupRefused tells of a group none of whose pods has a node when one that may go alone found none.
func (s *Scheduler) groupRefused(p *v1.Pod, reason, message string) {
	key, ok := framework.GroupOf(p)
	if !ok {
		return
	}
	if g := s.group(key); g.Known && g.Able >= g.Least && g.Needs() > 0 {
		s.reportGroup(key, metav1.ConditionFalse, reason, message)
	}
}

// writeGroup writes the condition of a group.
func (s *Scheduler) writeGroup(ctx context.Context, n *note) error {
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
