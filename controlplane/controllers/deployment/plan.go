// Package deployment performs the rollouts of Deployments: it moves the pods of a Deployment from
// one template to the next. It decides how many replicas each ReplicaSet of the Deployment has.
package deployment

import (
	"cmp"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Snapshot is the input of PlanDeployment: a Deployment and its ReplicaSets.
type Snapshot struct {
	Deployment *appsv1.Deployment
	Sets       []*appsv1.ReplicaSet // ReplicaSets that the Deployment controls
	// OldPodsAlive reports whether a pod of an old template is not terminal. Only strategy Recreate
	// calls it.
	OldPodsAlive func(old []*appsv1.ReplicaSet) (bool, error)
}

// Step is the result of PlanDeployment: the next writes. It contains either one creation, or
// updates, or deletions. The status is computed after these writes.
type Step struct {
	Create *appsv1.ReplicaSet
	Update []Update
	Delete []*appsv1.ReplicaSet
	// Revision is the new revision annotation of the Deployment; 0 leaves it unchanged.
	Revision int64
	// Found is the name of the existing ReplicaSet of the current template. It is "" if condition
	// Progressing has reported that ReplicaSet already.
	Found string
}

// Update is a changed copy of a ReplicaSet, and its number of replicas before the change.
type Update struct {
	Set *appsv1.ReplicaSet
	Was int32
}

// planner builds the Step of a Deployment. It copies a ReplicaSet before its first change.
type planner struct {
	d       *appsv1.Deployment
	current *appsv1.ReplicaSet
	old     []*appsv1.ReplicaSet
	changed map[string]int // index in step.Update by the name of the ReplicaSet
	step    Step
}

// PlanDeployment returns the next writes for a Deployment. They never lead to more pods than the
// desired number plus maxSurge, nor to fewer available pods than the desired number minus
// maxUnavailable. It returns an error only if OldPodsAlive does.
func PlanDeployment(s Snapshot) (Step, error) {
	p := &planner{d: s.Deployment, changed: map[string]int{}}
	if p.d.DeletionTimestamp != nil {
		return p.step, nil
	}
	p.current, p.old = splitReplicaSets(p.d, s.Sets)
	switch {
	case p.d.Spec.Paused:
		p.planScale()
		if len(p.step.Update) == 0 {
			p.cleanUp()
		}
	case p.hasSizeChanged():
		p.planScale()
	case p.d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType:
		return p.step, p.planRecreate(s)
	default:
		p.planRollingUpdate()
	}
	return p.step, nil
}

func (p *planner) allReplicaSets() []*appsv1.ReplicaSet {
	if p.current == nil {
		return p.old
	}
	return append(slices.Clone(p.old), p.current)
}

// editableCopy returns a copy of ReplicaSet rs to modify, and adds it to the updates of the step.
func (p *planner) editableCopy(rs *appsv1.ReplicaSet) *appsv1.ReplicaSet {
	if i, ok := p.changed[rs.Name]; ok {
		return p.step.Update[i].Set
	}
	c := rs.DeepCopy()
	p.changed[rs.Name] = len(p.step.Update)
	p.step.Update = append(p.step.Update, Update{Set: c, Was: specReplicas(rs)})
	engine.CopyTrace(c, p.d)
	return c
}

// setReplicas adds to the step an update of rs to n replicas, unless rs already has n.
func (p *planner) setReplicas(rs *appsv1.ReplicaSet, n int32) {
	if specReplicas(rs) == n {
		return
	}
	c := p.editableCopy(rs)
	c.Spec.Replicas = &n
	setScaleAnnotations(c, p.d)
}

// planRollingUpdate plans one step of a rolling update. It scales up the ReplicaSet of the current
// template if possible, and otherwise scales down old ReplicaSets. When the rollout is complete it
// deletes old ReplicaSets beyond the history limit.
func (p *planner) planRollingUpdate() {
	if !p.ensureCurrent() {
		return
	}
	p.setReplicas(p.current, p.sizeFor(p.current))
	if len(p.step.Update) > 0 {
		return
	}
	p.shrinkOld()
	if len(p.step.Update) == 0 && isRolloutComplete(p.d, p.d.Status) {
		p.cleanUp()
	}
}

// planRecreate plans one step of strategy Recreate: it scales all old ReplicaSets to zero, waits
// until their pods have ended, and then creates pods of the current template.
func (p *planner) planRecreate(s Snapshot) error {
	for _, rs := range p.old {
		p.setReplicas(rs, 0)
	}
	if len(p.step.Update) > 0 {
		return nil
	}
	if len(p.old) > 0 && (p.current == nil || specReplicas(p.current) != ptr.Deref(p.d.Spec.Replicas, 1)) {
		if !areStatusesCurrent(p.old) {
			return nil
		}
		if alive, err := s.OldPodsAlive(p.old); alive || err != nil {
			return err
		}
	}
	if !p.ensureCurrent() {
		return nil
	}
	p.setReplicas(p.current, ptr.Deref(p.d.Spec.Replicas, 1))
	if len(p.step.Update) == 0 && isRolloutComplete(p.d, p.d.Status) {
		p.cleanUp()
	}
	return nil
}

// ensureCurrent plans the creation of the ReplicaSet of the current template, or an update of its
// annotations. It reports whether that ReplicaSet exists already.
func (p *planner) ensureCurrent() bool {
	if p.current == nil {
		rs := newSet(p.d, p.old, 0)
		n := p.sizeFor(rs)
		rs.Spec.Replicas = &n
		p.step.Create = rs
		p.step.Revision = revisionOf(rs)
		return false
	}
	c := p.current.DeepCopy()
	changed := syncAnnotations(c, p.d, nextRevision(p.old))
	if c.Spec.MinReadySeconds != p.d.Spec.MinReadySeconds {
		c.Spec.MinReadySeconds = p.d.Spec.MinReadySeconds
		changed = true
	}
	if changed {
		e := p.editableCopy(p.current)
		e.Annotations = c.Annotations
		e.Spec.MinReadySeconds = c.Spec.MinReadySeconds
		engine.CopyTrace(e, p.d)
	}
	if revisionOf(p.d) != revisionOf(c) {
		p.step.Revision = revisionOf(c)
	}
	if findCondition(p.d.Status, appsv1.DeploymentProgressing) == nil && hasDeadline(p.d) {
		p.step.Found = p.current.Name
	}
	return true
}

// sizeFor returns how many replicas rs, the ReplicaSet of the current template, may have now.
func (p *planner) sizeFor(rs *appsv1.ReplicaSet) int32 {
	want := ptr.Deref(p.d.Spec.Replicas, 1)
	if p.d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
		return want
	}
	have := specReplicas(rs)
	if have > want {
		return want
	}
	if !areStatusesCurrent(append(slices.Clone(p.old), rs)) {
		return have
	}
	surge, _ := rollingUpdateBounds(p.d)
	room := want + surge - sumReplicas(p.old, maxPresentPods) - max(have, rs.Status.Replicas)
	return have + max(0, min(room, want-have))
}

// shrinkOld plans to scale down old ReplicaSets as far as maxUnavailable permits. Unavailable pods
// are removed first, because they serve no traffic.
func (p *planner) shrinkOld() {
	if sumReplicas(p.old, specReplicas) == 0 {
		return
	}
	_, unavailable := rollingUpdateBounds(p.d)
	least := ptr.Deref(p.d.Spec.Replicas, 1) - unavailable
	// Pods that the current ReplicaSet has not started yet count as unavailable.
	spare := sumReplicas(p.allReplicaSets(), specReplicas) - least -
		max(0, specReplicas(p.current)-availableOf(p.current))
	if spare <= 0 {
		return
	}
	size := map[string]int32{}
	for _, rs := range p.old {
		size[rs.Name] = specReplicas(rs)
		broken := min(spare, size[rs.Name]-availableOf(rs))
		size[rs.Name] -= broken
		spare -= broken
	}
	healthy := min(spare, sumReplicas(p.allReplicaSets(), availableOf)-least)
	for _, rs := range p.old {
		if healthy <= 0 {
			break
		}
		n := min(healthy, size[rs.Name])
		size[rs.Name] -= n
		healthy -= n
	}
	for _, rs := range p.old {
		p.setReplicas(rs, size[rs.Name])
	}
}

// cleanUp plans the deletion of empty old ReplicaSets beyond the history limit, lowest revision
// first.
func (p *planner) cleanUp() {
	if p.d.Spec.RevisionHistoryLimit == nil {
		return
	}
	excess := len(p.old) - int(*p.d.Spec.RevisionHistoryLimit)
	if excess <= 0 {
		return
	}
	byRevision := slices.Clone(p.old)
	slices.SortStableFunc(byRevision, func(a, b *appsv1.ReplicaSet) int {
		return cmp.Compare(revisionOf(a), revisionOf(b))
	})
	for _, rs := range byRevision[:excess] {
		if rs.Status.Replicas == 0 && specReplicas(rs) == 0 && rs.Generation <= rs.Status.ObservedGeneration &&
			rs.DeletionTimestamp == nil {
			p.step.Delete = append(p.step.Delete, rs)
		}
	}
}

// mayPodRun reports whether pod p is not terminal. Strategy Recreate waits until no old pod may
// run.
func mayPodRun(p *corev1.Pod) bool { return !api.IsPodTerminal(p) }
