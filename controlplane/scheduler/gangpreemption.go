package scheduler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Limits of the search for victims of a PodGroup: its duration, because other pods wait meanwhile,
// and the number of priorities that it distinguishes.
const (
	gangPreemptionTimeout = 2 * time.Second
	maxPriorityLevels     = 16
)

// gangPreemption is the result of a gangPreemptionSearch: the nodes for the group's pods and the
// pods that must be evicted.
type gangPreemption struct {
	nodes   map[types.UID]string // by UID of the group's pod
	victims []*trialPod
}

// gangPreemptionSearch searches for pods to evict so that all members of a PodGroup fit. It works
// on its own snapshot and changes nothing outside of it.
type gangPreemptionSearch struct {
	*Trial
	members []*framework.PodInfo
	profile func(*v1.Pod) *profile
	ties    *rand.Rand
	removed map[types.UID]bool // UIDs of the pods that are removed from the snapshot
	nodes   map[types.UID]string
}

// findVictims returns the pods to evict and the nodes for the members. It returns nil if the
// members would not fit even without all pods of lower priority. It removes pods from the snapshot,
// lowest priorities first, until all members fit together. It then restores the removed pods that
// need not be evicted, in the sequence that order returns.
func (r *gangPreemptionSearch) findVictims(ctx context.Context, order func([]*framework.PodInfo) []*framework.PodInfo) (*gangPreemption, error) {
	victims := r.lowerPriorityPods()
	for _, level := range priorityLevels(victims) {
		for _, v := range victims {
			if !r.removed[v.Pod.UID] && (v.Priority <= level || v.Pod.DeletionTimestamp != nil) {
				r.removeVictim(v)
			}
		}
		fit, err := r.placeMembers(ctx)
		if err != nil {
			return nil, err
		}
		if fit {
			return r.restoreUnneeded(ctx, victims, order)
		}
	}
	return nil, nil
}

// lowerPriorityPods returns the possible victims: the pods outside the group with a lower priority
// than every member. They are sorted by priority.
func (r *gangPreemptionSearch) lowerPriorityPods() (out []*trialPod) {
	least := slices.MinFunc(r.members, func(a, b *framework.PodInfo) int { return cmp.Compare(a.Priority, b.Priority) }).Priority
	own, _ := framework.GroupOf(r.members[0].Pod)
	for _, p := range r.pods {
		if its, ok := framework.GroupOf(p.Pod); p.Priority < least && (!ok || its != own) {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b *trialPod) int {
		return cmp.Or(cmp.Compare(a.Priority, b.Priority), strings.Compare(string(a.Pod.UID), string(b.Pod.UID)))
	})
	return out
}

// priorityLevels returns at most maxPriorityLevels ascending priorities. Each step of the search
// removes the victims up to the next of them.
func priorityLevels(victims []*trialPod) (out []int32) {
	for _, v := range victims {
		if len(out) == 0 || v.Priority > out[len(out)-1] {
			out = append(out, v.Priority)
		}
	}
	for len(out) > maxPriorityLevels { // keep every second level, including the last
		var half []int32
		for i := len(out) - 1; i >= 0; i -= 2 {
			half = append(half, out[i])
		}
		slices.Reverse(half)
		out = half
	}
	return out
}

func (r *gangPreemptionSearch) removeVictim(v *trialPod) {
	had := r.snap.ByName[v.node]
	less := had.Clone()
	less.RemovePod(v.Pod.UID)
	r.replaceNode(had, less)
	r.removed[v.Pod.UID] = true
}

func (r *gangPreemptionSearch) restoreVictim(v *trialPod) {
	had := r.snap.ByName[v.node]
	more := had.Clone()
	more.AddPod(v.PodInfo)
	r.replaceNode(had, more)
	delete(r.removed, v.Pod.UID)
}

// placeMembers chooses a node for each member and adds the member to it in the snapshot, one after
// the other. If a member fits nowhere, it removes all of them again and returns false.
func (r *gangPreemptionSearch) placeMembers(ctx context.Context) (bool, error) {
	for _, m := range r.members {
		p := r.profile(m.Pod)
		res, err := p.Schedule(ctx, framework.NewCycle(m, r.snap), framework.Options{Sample: framework.SampleSize(len(r.snap.Nodes), p.percentage), Rand: r.ties})
		var none *framework.FitError
		switch {
		case errors.As(err, &none):
			for _, m := range r.members {
				if node := r.nodes[m.Pod.UID]; node != "" {
					r.setMemberOnNode(m, node, false)
				}
			}
			clear(r.nodes)
			return false, ctx.Err()
		case err != nil:
			return false, err
		}
		r.nodes[m.Pod.UID] = res.Node
		r.setMemberOnNode(m, res.Node, true)
	}
	return true, ctx.Err()
}

// setMemberOnNode adds a member to a node of the snapshot if there is true, and otherwise removes
// it.
func (r *gangPreemptionSearch) setMemberOnNode(m *framework.PodInfo, node string, there bool) {
	had := r.snap.ByName[node]
	now := had.Clone()
	if there {
		now.AddPod(m)
	} else {
		now.RemovePod(m.Pod.UID)
	}
	r.replaceNode(had, now)
}

// membersStillFit reports whether each member fits its node together with all other pods in the
// snapshot. If node is not "", only the members on that node are checked.
func (r *gangPreemptionSearch) membersStillFit(ctx context.Context, node string) (bool, error) {
	for _, m := range r.members {
		at := r.nodes[m.Pod.UID]
		if node != "" && at != node {
			continue
		}
		r.setMemberOnNode(m, at, false)
		refusal, err := r.profile(m.Pod).Takes(ctx, framework.NewCycle(m, r.snap), at)
		r.setMemberOnNode(m, at, true)
		if err != nil || ctx.Err() != nil {
			return false, errors.Join(err, ctx.Err())
		}
		if !refusal.OK() {
			return false, nil
		}
	}
	return true, nil
}

// restoreUnneeded adds removed pods to the snapshot again as long as all members still fit, and
// returns the others as victims. Pods on nodes without members are restored first, together. The
// rest is restored one by one in the sequence that order returns. It returns nil if the members do
// not fit in the end.
func (r *gangPreemptionSearch) restoreUnneeded(ctx context.Context, victims []*trialPod, order func([]*framework.PodInfo) []*framework.PodInfo) (*gangPreemption, error) {
	taken, used, far := map[types.UID]*trialPod{}, map[string]bool{}, []*trialPod{}
	for _, node := range r.nodes {
		used[node] = true
	}
	var near []*framework.PodInfo
	for _, v := range victims {
		switch {
		case !r.removed[v.Pod.UID] || v.Pod.DeletionTimestamp != nil: // it is terminating already
		case used[v.node]:
			taken[v.Pod.UID] = v
			near = append(near, v.PodInfo)
		default:
			far = append(far, v)
		}
	}
	for _, v := range far {
		r.restoreVictim(v)
	}
	if ok, err := r.membersStillFit(ctx, ""); err != nil {
		return nil, err
	} else if !ok { // a rule about other pods extends beyond the members' nodes
		for _, v := range far {
			r.removeVictim(v)
			taken[v.Pod.UID] = v
			near = append(near, v.PodInfo)
		}
	}
	out := &gangPreemption{nodes: r.nodes}
	wide := slices.ContainsFunc(r.members, hasPodRules)
	for _, pod := range order(near) {
		v := taken[pod.Pod.UID]
		r.restoreVictim(v)
		where := v.node
		if wide || hasPodRules(pod) {
			where = ""
		}
		ok, err := r.membersStillFit(ctx, where)
		if err != nil {
			return nil, err
		}
		if !ok {
			r.removeVictim(v)
			out.victims = append(out.victims, v)
		}
	}
	if ok, err := r.membersStillFit(ctx, ""); err != nil || !ok {
		return nil, err
	}
	return out, nil
}

// hasPodRules reports whether a pod has inter-pod affinity terms or topology spread constraints.
func hasPodRules(pod *framework.PodInfo) bool {
	return pod.Affinity != nil || len(pod.Pod.Spec.TopologySpreadConstraints) > 0
}

// preemptForGroup evicts pods of lower priority if the whole group then fits. members are the
// group's pods of the failed attempt t. It returns a message about the evictions, or about the
// reason why none exist; "" if there is nothing to report. It never evicts pods for only a part
// of a group.
func (s *Scheduler) preemptForGroup(ctx context.Context, t *groupAttempt, members []*queuedPod, ties *rand.Rand) string {
	need := t.group.Needs()
	members = slices.DeleteFunc(slices.Clone(members), func(m *queuedPod) bool { return s.cluster.isPlaced(m.Pod.UID) })
	if why := s.groupPreemptionRefusal(t, members, need); why != "" {
		return strings.TrimSpace(why)
	}
	chosen := smallestPods(members, need)
	if chosen == nil {
		chosen = members[:need]
	}
	trial := newTrial(s.profiles, s.cluster.copySnapshot())
	r := &gangPreemptionSearch{Trial: trial, profile: s.profiles.forPod, ties: ties, removed: map[types.UID]bool{}, nodes: map[types.UID]string{}}
	for _, m := range chosen {
		r.members = append(r.members, m.PodInfo)
	}
	mine := func(pod *framework.PodInfo) bool {
		return slices.ContainsFunc(members, func(m *queuedPod) bool { return m.Pod.UID == pod.Pod.UID })
	}
	for node, kept := range trial.snap.Nominated {
		trial.snap.Nominated[node] = slices.DeleteFunc(slices.Clone(kept), mine)
	}
	if len(r.lowerPriorityPods()) == 0 {
		return ""
	}
	if s.isPreemptingForGroup(r) {
		return "preemption: pods of lower priority are being evicted for the group"
	}
	limited, cancel := context.WithTimeout(ctx, gangPreemptionTimeout)
	defer cancel()
	room, err := r.findVictims(limited, preemptionPlugin(s.profiles.forPod(chosen[0].Pod)).Order)
	switch {
	case ctx.Err() != nil:
		return ""
	case err != nil:
		return fmt.Sprintf("preemption: no victims for the group were found within %s", gangPreemptionTimeout)
	case room == nil:
		for _, m := range members {
			s.nominatePod(m.Pod, "")
		}
		return fmt.Sprintf("preemption: evicting pods of lower priority would not help %d pods of the group", need)
	}
	s.evictForGroup(ctx, chosen, room)
	return "preemption: pods of lower priority are being evicted for the group"
}

// preemptionPlugin returns the profile's plugin that evicts pods, or nil.
func preemptionPlugin(p *profile) framework.Preempts {
	for _, x := range p.PostFilters {
		if by, ok := x.(framework.Preempts); ok {
			return by
		}
	}
	return nil
}

// noMessage is the result of groupPreemptionRefusal if preemption is not possible and there is
// nothing to report.
const noMessage = " "

// groupPreemptionRefusal returns the reason why no pods may be evicted for the group, or "" if they
// may. need is the number of pods that must get a node.
func (s *Scheduler) groupPreemptionRefusal(t *groupAttempt, members []*queuedPod, need int) string {
	if need < 1 || len(members) < need {
		return noMessage
	}
	for _, f := range t.failed {
		if _, by := f.explainFailure(); by == nil {
			return noMessage // the attempt itself failed, so it is unknown what would help
		}
	}
	for _, m := range members {
		pod, profile := m.Pod, s.profiles.forPod(m.Pod)
		switch {
		case preemptionPlugin(profile) == nil:
			return noMessage
		case pod.Spec.PreemptionPolicy != nil && *pod.Spec.PreemptionPolicy == v1.PreemptNever:
			return "preemption: a pod of the group has preemptionPolicy=Never"
		case len(pod.Spec.ResourceClaims) > 0 || hasClaims(pod):
			return "preemption: not supported for groups whose pods claim devices or volumes"
		case len(framework.Asked(profile.Extenders, framework.VerbFilter, m.PodInfo)) > 0 || len(framework.Asked(profile.Extenders, framework.VerbPreempt, m.PodInfo)) > 0:
			return "preemption: not supported for groups whose placement depends on an extender"
		}
	}
	return ""
}

// isPreemptingForGroup reports whether pods that were evicted for the group are still terminating.
func (s *Scheduler) isPreemptingForGroup(r *gangPreemptionSearch) bool {
	group, _ := framework.GroupOf(r.members[0].Pod)
	if s.groups.isPreempting(group) {
		return true
	}
	for _, m := range r.members {
		n := r.snap.ByName[s.cluster.nominatedNode(m.Pod.UID)]
		if n == nil {
			continue
		}
		for _, pod := range n.Pods {
			if pod.Pod.DeletionTimestamp != nil && pod.Priority < m.Priority {
				return true
			}
		}
	}
	return false
}

// evictForGroup nominates the found nodes for the chosen pods of a group, and evicts the victims in
// a separate goroutine. If an eviction fails, the nominations are cleared and the pods are tried
// again.
func (s *Scheduler) evictForGroup(ctx context.Context, chosen []*queuedPod, room *gangPreemption) {
	group, _ := framework.GroupOf(chosen[0].Pod)
	var pods []*v1.Pod // copied now: the queue replaces its pods once they are queued again
	for _, m := range chosen {
		pods = append(pods, m.Pod)
		node := room.nodes[m.Pod.UID]
		s.nominatePod(m.Pod, node)
		for _, pod := range s.cluster.nominatedBelow(node, m.Priority) {
			s.nominatePod(pod.Pod, "")
			s.queue.requeueNow(ctx, pod.Pod)
		}
	}
	if len(room.victims) == 0 {
		return // terminating pods are sufficient
	}
	s.groups.setPreempting(group, true)
	select {
	case s.bindingSlots <- struct{}{}:
	case <-ctx.Done():
		return
	}
	s.evictions.Go(func() {
		defer func() { <-s.bindingSlots }()
		defer s.groups.setPreempting(group, false)
		for _, v := range room.victims {
			if err := s.evictVictim(ctx, v.Pod, pods[0], v.node); err != nil && ctx.Err() == nil {
				s.log.Warn("preemption for a group failed, will retry", "group", group.Namespace+"/"+group.Name, "err", err)
				for _, pod := range pods {
					s.nominatePod(pod, "")
					s.queue.requeueNow(ctx, pod)
				}
				return
			}
		}
	})
}
