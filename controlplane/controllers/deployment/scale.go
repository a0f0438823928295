package deployment

import (
	"cmp"
	"math"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/utils/ptr"
)

// hasSizeChanged reports whether the replicas of the Deployment have changed since an active
// ReplicaSet was last sized, as its annotation shows. Such a change is a scaling, not a rollout.
func (p *planner) hasSizeChanged() bool {
	for _, rs := range p.allReplicaSets() {
		if specReplicas(rs) == 0 {
			continue
		}
		if n, ok := intAnnotation(rs, DesiredReplicasAnnotation); ok && n != ptr.Deref(p.d.Spec.Replicas, 1) {
			return true
		}
	}
	return false
}

// planScale plans to scale the ReplicaSets to the replicas of the Deployment without advancing the
// rollout. A single active ReplicaSet gets all replicas. Several active ReplicaSets share them in
// proportion.
func (p *planner) planScale() {
	want := ptr.Deref(p.d.Spec.Replicas, 1)
	var active []*appsv1.ReplicaSet
	for _, rs := range p.allReplicaSets() {
		if specReplicas(rs) > 0 {
			active = append(active, rs)
		}
	}
	if len(active) <= 1 {
		target := p.latestReplicaSet()
		if len(active) == 1 {
			target = active[0]
		}
		if target == nil {
			return
		}
		p.setReplicas(target, want)
		p.annotateSize(target)
		return
	}
	if p.isSaturated() {
		for _, rs := range p.old {
			p.setReplicas(rs, 0)
		}
		return
	}
	if p.d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
		return
	}
	p.scaleInProportion(active, want)
}

// latestReplicaSet returns the ReplicaSet of the current template. If it does not exist, it returns
// the newest old ReplicaSet, or nil if the Deployment has no ReplicaSet.
func (p *planner) latestReplicaSet() *appsv1.ReplicaSet {
	if p.current != nil {
		return p.current
	}
	if len(p.old) > 0 {
		return p.old[len(p.old)-1]
	}
	return nil
}

// annotateSize plans to update the annotations of rs that record the size of the Deployment.
func (p *planner) annotateSize(rs *appsv1.ReplicaSet) {
	c := rs.DeepCopy()
	if setScaleAnnotations(c, p.d) {
		setScaleAnnotations(p.editableCopy(rs), p.d)
	}
}

// isSaturated reports whether all desired pods have the current template and are available. Pods of
// other templates are then not needed.
func (p *planner) isSaturated() bool {
	want := ptr.Deref(p.d.Spec.Replicas, 1)
	if p.current == nil {
		return false
	}
	n, ok := intAnnotation(p.current, DesiredReplicasAnnotation)
	return ok && n == want && specReplicas(p.current) == want && p.current.Status.AvailableReplicas == want
}

// scaleInProportion plans to scale the active ReplicaSets so that together they have the given
// number of replicas, plus maxSurge. The difference is divided in proportion to their sizes.
// Rounding favors the largest and newest ReplicaSet when scaling up, and the largest and oldest
// when scaling down.
func (p *planner) scaleInProportion(active []*appsv1.ReplicaSet, replicas int32) {
	surge, _ := rollingUpdateBounds(p.d)
	allowed := replicas + surge
	if replicas == 0 {
		allowed = 0
	}
	diff := allowed - sumReplicas(active, specReplicas)
	age := func(a, b *appsv1.ReplicaSet) int { return a.CreationTimestamp.Time.Compare(b.CreationTimestamp.Time) }
	slices.SortStableFunc(active, func(a, b *appsv1.ReplicaSet) int {
		bySize := cmp.Compare(specReplicas(b), specReplicas(a))
		if diff > 0 {
			return cmp.Or(bySize, age(b, a))
		}
		return cmp.Or(bySize, age(a, b))
	})
	size := make([]int32, len(active))
	var spent int32
	for i, rs := range active {
		size[i] = specReplicas(rs)
		if diff != 0 {
			part := proportionalShare(rs, allowed, diff, spent)
			size[i] += part
			spent += part
		}
	}
	size[0] = max(0, size[0]+diff-spent) // the remainder of rounding
	for i, rs := range active {
		p.setReplicas(rs, size[i])
		p.annotateSize(rs)
	}
}

// proportionalShare returns how many replicas rs gains or loses if the active ReplicaSets together
// gain or lose diff. total is the new total, and spent is the part of diff that is already assigned
// to other ReplicaSets. The share is in proportion to the size of rs relative to the total in its
// annotation.
func proportionalShare(rs *appsv1.ReplicaSet, total, diff, spent int32) int32 {
	was, ok := intAnnotation(rs, MaxReplicasAnnotation)
	if !ok || was == 0 {
		was = rs.Status.Replicas
	}
	if was == 0 {
		return 0
	}
	part := int32(math.Round(float64(specReplicas(rs))*float64(total)/float64(was))) - specReplicas(rs)
	left := diff - spent
	if diff > 0 {
		return max(0, min(part, left))
	}
	return min(0, max(part, left))
}
