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

// Bounds of the search for room: how long it takes at most, for others wait meanwhile, and how many priorities are told apart.
const (
	roomLimit  = 2 * time.Second
	roomLevels = 16
)

// gangRoom is how a group would fit: where its pods would go, and who has to go for that.
type gangRoom struct {
	places  map[types.UID]string // by pod of the group
	victims []*seat
}

// roomSearch looks for room for pods of a group on a snapshot of its own. It changes nothing but that.
type roomSearch struct {
	*Trial
	members []*framework.PodInfo
	profile func(*v1.Pod) *profile
	ties    *rand.Rand
	gone    map[types.UID]bool // taken away in thought
	at      map[types.UID]string
}

// find takes pods of lower priority away in thought, the least important priorities first, until all members fit beside each
// other; then it gives back whom that leaves room for, those that budgets protect and the important ones first. nil: they would
// not all fit if everybody went who may.
func (r *roomSearch) find(ctx context.Context, order func([]*framework.PodInfo) []*framework.PodInfo) (*gangRoom, error) {
	victims := r.lower()
	for _, level := range levels(victims) {
		for _, v := range victims {
			if !r.gone[v.Pod.UID] && (v.Priority <= level || v.Pod.DeletionTimestamp != nil) {
				r.take(v)
			}
		}
		fit, err := r.placeAll(ctx)
		if err != nil {
			return nil, err
		}
		if fit {
			return r.giveBack(ctx, victims, order)
		}
	}
	return nil, nil
}

// lower are the pods that may go: those of lower priority than every member's, and not of the group.
func (r *roomSearch) lower() (out []*seat) {
	least := slices.MinFunc(r.members, func(a, b *framework.PodInfo) int { return cmp.Compare(a.Priority, b.Priority) }).Priority
	own, _ := framework.GroupOf(r.members[0].Pod)
	for _, p := range r.pods {
		if its, ok := framework.GroupOf(p.Pod); p.Priority < least && (!ok || its != own) {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b *seat) int {
		return cmp.Or(cmp.Compare(a.Priority, b.Priority), strings.Compare(string(a.Pod.UID), string(b.Pod.UID)))
	})
	return out
}

// levels are the priorities up to which pods go, one step after the other.
func levels(victims []*seat) (out []int32) {
	for _, v := range victims {
		if len(out) == 0 || v.Priority > out[len(out)-1] {
			out = append(out, v.Priority)
		}
	}
	for len(out) > roomLevels { // every other one, and the last
		var half []int32
		for i := len(out) - 1; i >= 0; i -= 2 {
			half = append(half, out[i])
		}
		slices.Reverse(half)
		out = half
	}
	return out
}

func (r *roomSearch) take(v *seat) {
	had := r.snap.ByName[v.node]
	less := had.Clone()
	less.RemovePod(v.Pod.UID)
	r.swap(had, less)
	r.gone[v.Pod.UID] = true
}

func (r *roomSearch) put(v *seat) {
	had := r.snap.ByName[v.node]
	more := had.Clone()
	more.AddPod(v.PodInfo)
	r.swap(had, more)
	delete(r.gone, v.Pod.UID)
}

// placeAll gives each member a node beside those before it; when one finds none, none has.
func (r *roomSearch) placeAll(ctx context.Context) (bool, error) {
	for _, m := range r.members {
		p := r.profile(m.Pod)
		res, err := p.Schedule(ctx, framework.NewCycle(m, r.snap), framework.Options{Sample: framework.SampleSize(len(r.snap.Nodes), p.percentage), Rand: r.ties})
		var none *framework.FitError
		switch {
		case errors.As(err, &none):
			for _, m := range r.members {
				if node := r.at[m.Pod.UID]; node != "" {
					r.move(m, node, false)
				}
			}
			clear(r.at)
			return false, ctx.Err()
		case err != nil:
			return false, err
		}
		r.at[m.Pod.UID] = res.Node
		r.move(m, res.Node, true)
	}
	return true, ctx.Err()
}

// move has a member count on a node, or not.
func (r *roomSearch) move(m *framework.PodInfo, node string, there bool) {
	had := r.snap.ByName[node]
	now := had.Clone()
	if there {
		now.AddPod(m)
	} else {
		now.RemovePod(m.Pod.UID)
	}
	r.swap(had, now)
}

// stand says whether the nodes of members would take them, each beside all others: of all members, or of those on one node.
func (r *roomSearch) stand(ctx context.Context, node string) (bool, error) {
	for _, m := range r.members {
		at := r.at[m.Pod.UID]
		if node != "" && at != node {
			continue
		}
		r.move(m, at, false)
		refusal, err := r.profile(m.Pod).Takes(ctx, framework.NewCycle(m, r.snap), at)
		r.move(m, at, true)
		if err != nil || ctx.Err() != nil {
			return false, errors.Join(err, ctx.Err())
		}
		if !refusal.OK() {
			return false, nil
		}
	}
	return true, nil
}

// giveBack puts those back whom the members leave room for. In the end all members are looked at once more beside all who stay.
func (r *roomSearch) giveBack(ctx context.Context, victims []*seat, order func([]*framework.PodInfo) []*framework.PodInfo) (*gangRoom, error) {
	taken, used, far := map[types.UID]*seat{}, map[string]bool{}, []*seat{}
	for _, node := range r.at {
		used[node] = true
	}
	var near []*framework.PodInfo
	for _, v := range victims {
		switch {
		case !r.gone[v.Pod.UID] || v.Pod.DeletionTimestamp != nil: // it goes anyway
		case used[v.node]:
			taken[v.Pod.UID] = v
			near = append(near, v.PodInfo)
		default:
			far = append(far, v)
		}
	}
	for _, v := range far {
		r.put(v)
	}
	if ok, err := r.stand(ctx, ""); err != nil {
		return nil, err
	} else if !ok { // a rule about other pods reaches beyond the nodes of the members
		for _, v := range far {
			r.take(v)
			taken[v.Pod.UID] = v
			near = append(near, v.PodInfo)
		}
	}
	out := &gangRoom{places: r.at}
	wide := slices.ContainsFunc(r.members, minds)
	for _, info := range order(near) {
		v := taken[info.Pod.UID]
		r.put(v)
		where := v.node
		if wide || minds(info) {
			where = ""
		}
		ok, err := r.stand(ctx, where)
		if err != nil {
			return nil, err
		}
		if !ok {
			r.take(v)
			out.victims = append(out.victims, v)
		}
	}
	if ok, err := r.stand(ctx, ""); err != nil || !ok {
		return nil, err
	}
	return out, nil
}

// minds says whether a pod has rules about others, on its node or elsewhere.
func minds(p *framework.PodInfo) bool {
	return p.Affinity != nil || len(p.Pod.Spec.TopologySpreadConstraints) > 0
}

// makeRoom has pods of lower priority ended when a group fits with that, as a whole, and says what is done or why nothing is.
// Nobody is ended for a part of a group.
func (s *Scheduler) makeRoom(ctx context.Context, t *turn, members []*queued, ties *rand.Rand) string {
	need := t.group.Needs()
	members = slices.DeleteFunc(slices.Clone(members), func(m *queued) bool { return s.cluster.placed(m.Pod.UID) })
	if why := s.mayMakeRoom(t, members, need); why != "" {
		return strings.TrimSpace(why)
	}
	chosen := smallest(members, need)
	if chosen == nil {
		chosen = members[:need]
	}
	trial := newTrial(s.profiles, s.cluster.duplicate())
	r := &roomSearch{Trial: trial, profile: s.profiles.of, ties: ties, gone: map[types.UID]bool{}, at: map[types.UID]string{}}
	for _, m := range chosen {
		r.members = append(r.members, m.PodInfo)
	}
	mine := func(p *framework.PodInfo) bool {
		return slices.ContainsFunc(members, func(m *queued) bool { return m.Pod.UID == p.Pod.UID })
	}
	for node, kept := range trial.snap.Nominated {
		trial.snap.Nominated[node] = slices.DeleteFunc(slices.Clone(kept), mine)
	}
	if len(r.lower()) == 0 {
		return ""
	}
	if s.clearing(r) {
		return "preemption: pods of lower priority are being ended to make room for the group"
	}
	limited, cancel := context.WithTimeout(ctx, roomLimit)
	defer cancel()
	room, err := r.find(limited, preempts(s.profiles.of(chosen[0].Pod)).Order)
	switch {
	case ctx.Err() != nil:
		return ""
	case err != nil:
		return fmt.Sprintf("preemption: whom to end for the group was not found within %s", roomLimit)
	case room == nil:
		for _, m := range members {
			s.nominate(m.Pod, "")
		}
		return fmt.Sprintf("preemption: ending pods of lower priority would not make room for %d pods of the group", need)
	}
	s.clear(ctx, chosen, room)
	return "preemption: pods of lower priority are being ended to make room for the group"
}

// preempts is the plugin by which pods of a profile preempt; nil when they do not.
func preempts(p *profile) framework.Preempts {
	for _, x := range p.PostFilters {
		if by, ok := x.(framework.Preempts); ok {
			return by
		}
	}
	return nil
}

// nothing is to be said of others.
const nothing = " "

// mayMakeRoom says why nobody is ended for a group; "" when somebody may be.
func (s *Scheduler) mayMakeRoom(t *turn, members []*queued, need int) string {
	if need < 1 || len(members) < need {
		return nothing
	}
	for _, f := range t.failed {
		if _, by := f.explain(); by == nil {
			return nothing // an attempt failed: what would help is not known
		}
	}
	for _, m := range members {
		p, profile := m.Pod, s.profiles.of(m.Pod)
		switch {
		case preempts(profile) == nil:
			return nothing
		case p.Spec.PreemptionPolicy != nil && *p.Spec.PreemptionPolicy == v1.PreemptNever:
			return "preemption: a pod of the group has preemptionPolicy=Never"
		case len(p.Spec.ResourceClaims) > 0 || hasClaims(p):
			return "preemption: nobody is ended for a group whose pods claim devices or volumes"
		case len(framework.Asked(profile.Extenders, framework.VerbFilter, m.PodInfo)) > 0 || len(framework.Asked(profile.Extenders, framework.VerbPreempt, m.PodInfo)) > 0:
			return "preemption: nobody is ended for a group of which an extender has a say"
		}
	}
	return ""
}

// clearing says whether pods that were ended for the group have yet to go.
func (s *Scheduler) clearing(r *roomSearch) bool {
	group, _ := framework.GroupOf(r.members[0].Pod)
	if s.groups.isClearing(group) {
		return true
	}
	for _, m := range r.members {
		n := r.snap.ByName[s.cluster.nomination(m.Pod.UID)]
		if n == nil {
			continue
		}
		for _, p := range n.Pods {
			if p.Pod.DeletionTimestamp != nil && p.Priority < m.Priority {
				return true
			}
		}
	}
	return false
}

// clear keeps the room for the pods of a group and ends the victims beside the loop.
func (s *Scheduler) clear(ctx context.Context, chosen []*queued, room *gangRoom) {
	group, _ := framework.GroupOf(chosen[0].Pod)
	var pods []*v1.Pod // as they are now: the queue changes its own when they are back in it
	for _, m := range chosen {
		pods = append(pods, m.Pod)
		node := room.places[m.Pod.UID]
		s.nominate(m.Pod, node)
		for _, p := range s.cluster.nominatedBelow(node, m.Priority) {
			s.nominate(p.Pod, "")
			s.queue.again(ctx, p.Pod)
		}
	}
	if len(room.victims) == 0 {
		return // those that end by themselves are enough
	}
	s.groups.setClearing(group, true)
	select {
	case s.bindings <- struct{}{}:
	case <-ctx.Done():
		return
	}
	s.evictions.Go(func() {
		defer func() { <-s.bindings }()
		defer s.groups.setClearing(group, false)
		for _, v := range room.victims {
			if err := s.evict(ctx, v.Pod, pods[0], v.node); err != nil && ctx.Err() == nil {
				s.log.Warn("preemption for a group failed, will retry", "group", group.Namespace+"/"+group.Name, "err", err)
				for _, p := range pods {
					s.nominate(p, "")
					s.queue.again(ctx, p)
				}
				return
			}
		}
	})
}
