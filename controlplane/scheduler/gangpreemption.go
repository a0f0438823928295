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

// Limits of the search for pods to evict for a PodGroup. gangPreemptionTimeout bounds its duration,
// because other pods wait meanwhile. maxPriorityLevels bounds its steps: in each step, the search
// removes the possible victims of one or several priorities from its snapshot.
const (
	gangPreemptionTimeout = 2 * time.Second
	maxPriorityLevels     = 16
)

// gangPreemption is the result of a gangPreemptionSearch: the nodes for the pods of the group, and
// the victims, which must be evicted from these and other nodes.
type gangPreemption struct {
	nodes   map[types.UID]string // chosen node of each pod of the group, by pod UID
	victims []*trialPod
}

// gangPreemptionSearch searches for pods of lower priority to evict, so that all given pods of a
// PodGroup (members) get a node. It works on its own snapshot and does not change the cluster
// state.
type gangPreemptionSearch struct {
	*Trial
	members []*framework.PodInfo
	profile func(*v1.Pod) *profile
	ties    *rand.Rand
	removed map[types.UID]bool // UIDs of possible victims that are currently removed from the snapshot
	nodes   map[types.UID]string
}

// findVictims returns the pods to evict and the nodes for the members of the group. It removes pods
// from the snapshot, lowest priorities first, until all members fit. It then restores the pods that
// need not be evicted, in the sequence that order returns. If the members do not fit even without
// all pods of lower priority, it returns nil.
func (r *gangPreemptionSearch) findVictims(
	ctx context.Context, order func([]*framework.PodInfo) []*framework.PodInfo,
) (*gangPreemption, error) {
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

// lowerPriorityPods returns the possible victims, sorted by ascending priority: the pods outside
// the group that have a lower priority than every member of the group.
func (r *gangPreemptionSearch) lowerPriorityPods() (out []*trialPod) {
	least := slices.MinFunc(r.members, func(a, b *framework.PodInfo) int {
		return cmp.Compare(a.Priority, b.Priority)
	}).Priority
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

// priorityLevels returns the priorities at which the search proceeds, in ascending order. In each
// step the search removes the victims with a priority up to the next level. There are at most
// maxPriorityLevels; the last one is the highest priority of a victim.
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

// placeMembers chooses a node for one member of the group after the other, and adds the member to
// its node in the snapshot. If no node fits a member, it removes all members from the snapshot and
// returns false.
func (r *gangPreemptionSearch) placeMembers(ctx context.Context) (bool, error) {
	for _, m := range r.members {
		p := r.profile(m.Pod)
		res, err := p.Schedule(ctx, framework.NewCycle(m, r.snap),
			framework.Options{Sample: framework.SampleSize(len(r.snap.Nodes), p.percentage), Rand: r.ties})
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

// setMemberOnNode adds the member m of the group to the node in the snapshot if present is true,
// and otherwise removes m from it.
func (r *gangPreemptionSearch) setMemberOnNode(m *framework.PodInfo, node string, present bool) {
	had := r.snap.ByName[node]
	now := had.Clone()
	if present {
		now.AddPod(m)
	} else {
		now.RemovePod(m.Pod.UID)
	}
	r.replaceNode(had, now)
}

// membersStillFit reports whether each member of the group fits the node chosen for it, together
// with all other pods in the snapshot. If node is not "", only the members on that node are
// checked.
func (r *gangPreemptionSearch) membersStillFit(ctx context.Context, node string) (bool, error) {
	for _, m := range r.members {
		at := r.nodes[m.Pod.UID]
		if node != "" && at != node {
			continue
		}
		r.setMemberOnNode(m, at, false)
		refusal, err := r.profile(m.Pod).RefusalBy(ctx, framework.NewCycle(m, r.snap), at)
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

// restoreUnneeded adds removed pods to the snapshot again if all members of the group still fit,
// and returns the pods that it could not add as victims. Pods on nodes without members are added
// first, all together. The other pods are added one by one in the sequence that order returns. It
// returns nil if the members do not fit in the end.
func (r *gangPreemptionSearch) restoreUnneeded(
	ctx context.Context, victims []*trialPod, order func([]*framework.PodInfo) []*framework.PodInfo,
) (*gangPreemption, error) {
	taken, used, far := map[types.UID]*trialPod{}, map[string]bool{}, []*trialPod{}
	for _, node := range r.nodes {
		used[node] = true
	}
	var near []*framework.PodInfo
	for _, v := range victims {
		switch {
		case !r.removed[v.Pod.UID] || v.Pod.DeletionTimestamp != nil: // no eviction necessary
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
	} else if !ok { // for example, anti-affinity of a member excludes pods in the whole zone
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

// hasPodRules reports whether the pod has inter-pod affinity terms or topology spread constraints,
// so that pods on other nodes affect whether it fits.
func hasPodRules(pod *framework.PodInfo) bool {
	return pod.Affinity != nil || len(pod.Pod.Spec.TopologySpreadConstraints) > 0
}

// preemptForGroup evicts pods of lower priority if enough pods of the PodGroup then fit. members
// are the pods that the failed attempt t tried to place. It returns a message about the evictions,
// or the reason why no pods are evicted; "" if there is nothing to report. No pod is evicted unless
// the group then reaches its minimum.
func (s *Scheduler) preemptForGroup(
	ctx context.Context, t *groupAttempt, members []*queuedPod, ties *rand.Rand,
) string {
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
	r := &gangPreemptionSearch{Trial: trial, profile: s.profiles.forPod, ties: ties, removed: map[types.UID]bool{},
		nodes: map[types.UID]string{}}
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
	s.metrics.preemption.attempts.Inc()
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
			s.evictions.nominatePod(m.Pod, "")
		}
		return fmt.Sprintf("preemption: evicting pods of lower priority would not help %d pods of the group", need)
	}
	s.evictions.evictForGroup(ctx, chosen, room)
	return "preemption: pods of lower priority are being evicted for the group"
}

// preemptionPlugin returns the PostFilter plugin of the profile that evicts pods, or nil if it has
// none.
func preemptionPlugin(p *profile) framework.PreemptionPlugin {
	for _, x := range p.PostFilters {
		if by, ok := x.(framework.PreemptionPlugin); ok {
			return by
		}
	}
	return nil
}

// noMessage is returned by groupPreemptionRefusal if no pods may be evicted and there is no reason
// to report.
const noMessage = " "

// groupPreemptionRefusal returns the reason why no pods may be evicted for the group of the attempt
// t. It returns "" if evictions are allowed, and noMessage if they are not, but there is nothing to
// report. need is the number of members that must get a node.
func (s *Scheduler) groupPreemptionRefusal(t *groupAttempt, members []*queuedPod, need int) string {
	if need < 1 || len(members) < need {
		return noMessage
	}
	for _, f := range t.failed {
		if _, by := f.explainFailure(); by == nil {
			return noMessage // the attempt ended with an error, so it is unknown whether preemption would help
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
		case len(framework.InterestedExtenders(profile.Extenders, framework.VerbFilter, m.PodInfo)) > 0 ||
			len(framework.InterestedExtenders(profile.Extenders, framework.VerbPreempt, m.PodInfo)) > 0:
			return "preemption: not supported for groups whose placement depends on an extender"
		}
	}
	return ""
}

// isPreemptingForGroup reports whether an earlier preemption for the group is in progress:
// evictions are not finished, or victims on the members' nominated nodes are still terminating.
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

// evictForGroup nominates the nodes that a gangPreemptionSearch found for the pods in chosen, and
// evicts the victims that it found in the background. If an eviction fails, these nominations are
// cleared and the pods are requeued.
func (e *evictor) evictForGroup(ctx context.Context, chosen []*queuedPod, preemption *gangPreemption) {
	group, _ := framework.GroupOf(chosen[0].Pod)
	var pods []*v1.Pod // copied now: the queue may replace the Pod of a queuedPod later
	for _, m := range chosen {
		pods = append(pods, m.Pod)
		node := preemption.nodes[m.Pod.UID]
		e.nominatePod(m.Pod, node)
		for _, pod := range e.cluster.nominatedBelow(node, m.Priority) {
			e.nominatePod(pod.Pod, "")
			e.queue.requeueUnschedulable(ctx, pod.Pod)
		}
	}
	if len(preemption.victims) == 0 {
		return // the only victims are terminating already
	}
	e.metrics.victims.Observe(float64(len(preemption.victims)))
	e.groups.setPreempting(group, true)
	select {
	case e.slots <- struct{}{}:
	case <-ctx.Done():
		return
	}
	e.running.Go(func() {
		defer func() { <-e.slots }()
		defer e.groups.setPreempting(group, false)
		for _, v := range preemption.victims {
			if err := e.evictVictim(ctx, v.Pod, pods[0], v.node); err != nil && ctx.Err() == nil {
				e.log.Warn("preemption for a group failed, will retry", "group",
					group.Namespace+"/"+group.Name, "err", err)
				for _, pod := range pods {
					e.nominatePod(pod, "")
					e.queue.requeueUnschedulable(ctx, pod)
				}
				return
			}
		}
	})
}
