package deployment

import (
	"cmp"
	"math"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
)

// hasSizeChanged reports whether the Deployment's replicas differ from those for which an active
// ReplicaSet was last sized. The change is then a scaling, not a rollout.
func (p *planner) hasSizeChanged() bool {
	for _, rs := range p.allReplicaSets() {
		if specReplicas(rs) == 0 {
			continue
		}
		if n, ok := intAnnotation(rs, DesiredReplicasAnnotation); ok && n != replicasOrDefault(p.d.Spec.Replicas) {
			return true
		}
	}
	return false
}

// planScale sizes the ReplicaSets for the Deployment's replicas without advancing the rollout. A
// single active ReplicaSet gets all replicas; several share them in proportion.
func (p *planner) planScale() {
	want := replicasOrDefault(p.d.Spec.Replicas)
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

// latestReplicaSet returns the ReplicaSet of the current template, or else the newest.
func (p *planner) latestReplicaSet() *appsv1.ReplicaSet {
	if p.current != nil {
		return p.current
	}
	if len(p.old) > 0 {
		return p.old[len(p.old)-1]
	}
	return nil
}

// annotateSize records the Deployment's size on a ReplicaSet that already has the right replicas.
func (p *planner) annotateSize(rs *appsv1.ReplicaSet) {
	c := rs.DeepCopy()
	if setScaleAnnotations(c, p.d) {
		setScaleAnnotations(p.editableCopy(rs), p.d)
	}
}

// isSaturated reports whether all pods of the current template are available. Pods of other
// templates are then superfluous.
func (p *planner) isSaturated() bool {
	want := replicasOrDefault(p.d.Spec.Replicas)
	if p.current == nil {
		return false
	}
	n, ok := intAnnotation(p.current, DesiredReplicasAnnotation)
	return ok && n == want && specReplicas(p.current) == want && p.current.Status.AvailableReplicas == want
}

// scaleInProportion divides the difference among the active ReplicaSets in proportion to their
// sizes. Scaling up prefers the largest and newest, scaling down the largest and oldest.
func (p *planner) scaleInProportion(active []*appsv1.ReplicaSet, want int32) {
	surge, _ := rollingUpdateBounds(p.d)
	allowed := want + surge
	if want == 0 {
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

// proportionalShare returns the part of diff for rs: in proportion to the size for which it was
// last annotated, and at most the part that is left.
func proportionalShare(rs *appsv1.ReplicaSet, most, diff, spent int32) int32 {
	was, ok := intAnnotation(rs, MaxReplicasAnnotation)
	if !ok || was == 0 {
		was = rs.Status.Replicas
	}
	if was == 0 {
		return 0
	}
	part := int32(math.Round(float64(specReplicas(rs))*float64(most)/float64(was))) - specReplicas(rs)
	left := diff - spent
	if diff > 0 {
		return max(0, min(part, left))
	}
	return min(0, max(part, left))
}
