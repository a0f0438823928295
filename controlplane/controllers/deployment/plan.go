// Package deployment rolls a Deployment's pods from one template to the next. It decides how many
// replicas each ReplicaSet of the Deployment has.
package deployment

import (
	"cmp"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/controllers"
)

// Snapshot is the input of Plan.
type Snapshot struct {
	Deployment *appsv1.Deployment
	Sets       []*appsv1.ReplicaSet // the ReplicaSets that the Deployment controls
	// OldPodsAlive reports whether a pod of an old template is not terminal. Only strategy Recreate
	// calls it.
	OldPodsAlive func(old []*appsv1.ReplicaSet) (bool, error)
}

// Step is the next step: one creation, or updates, or deletions, but never two of these. The status
// is computed after the step.
type Step struct {
	Create *appsv1.ReplicaSet
	Update []Update
	Delete []*appsv1.ReplicaSet
	// Revision is the new revision annotation of the Deployment; 0 leaves it unchanged.
	Revision int64
	// Found names the existing ReplicaSet of the template if it has not been reported as progress
	// yet.
	Found string
}

// Update is a changed copy of a ReplicaSet and its previous size.
type Update struct {
	Set *appsv1.ReplicaSet
	Was int32
}

// planner builds a step. It copies a ReplicaSet on its first change.
type planner struct {
	d       *appsv1.Deployment
	current *appsv1.ReplicaSet
	old     []*appsv1.ReplicaSet
	changed map[string]int // name → index in step.Update
	step    Step
}

// Plan computes the next step. It never plans more pods than desired plus maxSurge, nor fewer
// available pods than desired minus maxUnavailable. It returns an error only if OldPodsAlive does.
func Plan(s Snapshot) (Step, error) {
	p := &planner{d: s.Deployment, changed: map[string]int{}}
	if p.d.DeletionTimestamp != nil {
		return p.step, nil
	}
	p.current, p.old = split(p.d, s.Sets)
	switch {
	case p.d.Spec.Paused:
		p.scale()
		if len(p.step.Update) == 0 {
			p.cleanUp()
		}
	case p.resized():
		p.scale()
	case p.d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType:
		return p.step, p.recreate(s)
	default:
		p.roll()
	}
	return p.step, nil
}

func (p *planner) all() []*appsv1.ReplicaSet {
	if p.current == nil {
		return p.old
	}
	return append(slices.Clone(p.old), p.current)
}

// edit returns a copy of rs that the step will write.
func (p *planner) edit(rs *appsv1.ReplicaSet) *appsv1.ReplicaSet {
	if i, ok := p.changed[rs.Name]; ok {
		return p.step.Update[i].Set
	}
	c := rs.DeepCopy()
	p.changed[rs.Name] = len(p.step.Update)
	p.step.Update = append(p.step.Update, Update{Set: c, Was: specReplicas(rs)})
	controllers.CopyTrace(c, p.d)
	return c
}

// resize sets the replicas of rs if they differ.
func (p *planner) resize(rs *appsv1.ReplicaSet, n int32) {
	if specReplicas(rs) == n {
		return
	}
	c := p.edit(rs)
	c.Spec.Replicas = &n
	setScaleAnnotations(c, p.d)
}

// roll plans one step of a rolling update. It scales up the ReplicaSet of the current template
// first. If that is not possible it scales down old ReplicaSets. When the rollout is complete it
// deletes old history.
func (p *planner) roll() {
	if !p.ensureCurrent() {
		return
	}
	p.resize(p.current, p.sizeFor(p.current))
	if len(p.step.Update) > 0 {
		return
	}
	p.shrinkOld()
	if len(p.step.Update) == 0 && complete(p.d, p.d.Status) {
		p.cleanUp()
	}
}

// recreate scales all old ReplicaSets to zero, waits until their pods have ended, and then creates
// pods of the current template.
func (p *planner) recreate(s Snapshot) error {
	for _, rs := range p.old {
		p.resize(rs, 0)
	}
	if len(p.step.Update) > 0 {
		return nil
	}
	if len(p.old) > 0 && (p.current == nil || specReplicas(p.current) != replicas(p.d.Spec.Replicas)) {
		if !settled(p.old) {
			return nil
		}
		if alive, err := s.OldPodsAlive(p.old); alive || err != nil {
			return err
		}
	}
	if !p.ensureCurrent() {
		return nil
	}
	p.resize(p.current, replicas(p.d.Spec.Replicas))
	if len(p.step.Update) == 0 && complete(p.d, p.d.Status) {
		p.cleanUp()
	}
	return nil
}

// ensureCurrent plans the creation of the current template's ReplicaSet, or the update of its
// annotations. It reports whether the ReplicaSet exists.
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
	changed := annotate(c, p.d, nextRevision(p.old))
	if c.Spec.MinReadySeconds != p.d.Spec.MinReadySeconds {
		c.Spec.MinReadySeconds = p.d.Spec.MinReadySeconds
		changed = true
	}
	if changed {
		e := p.edit(p.current)
		e.Annotations = c.Annotations
		e.Spec.MinReadySeconds = c.Spec.MinReadySeconds
		controllers.CopyTrace(e, p.d)
	}
	if revisionOf(p.d) != revisionOf(c) {
		p.step.Revision = revisionOf(c)
	}
	if condition(p.d.Status, appsv1.DeploymentProgressing) == nil && hasDeadline(p.d) {
		p.step.Found = p.current.Name
	}
	return true
}

// sizeFor returns how many replicas the current template's ReplicaSet may have now.
func (p *planner) sizeFor(rs *appsv1.ReplicaSet) int32 {
	want := replicas(p.d.Spec.Replicas)
	if p.d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
		return want
	}
	have := specReplicas(rs)
	if have > want {
		return want
	}
	if !settled(append(slices.Clone(p.old), rs)) {
		return have
	}
	surge, _ := bounds(p.d)
	room := want + surge - sum(p.old, present) - max(have, rs.Status.Replicas)
	return have + max(0, min(room, want-have))
}

// shrinkOld scales old ReplicaSets down as far as availability permits. Unavailable pods are
// removed first, because they serve no traffic.
func (p *planner) shrinkOld() {
	if sum(p.old, specReplicas) == 0 {
		return
	}
	_, unavailable := bounds(p.d)
	least := replicas(p.d.Spec.Replicas) - unavailable
	// Pods that the current ReplicaSet still lacks count as unavailable: room was already made for
	// them.
	spare := sum(p.all(), specReplicas) - least - max(0, specReplicas(p.current)-availableOf(p.current))
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
	healthy := min(spare, sum(p.all(), availableOf)-least)
	for _, rs := range p.old {
		if healthy <= 0 {
			break
		}
		n := min(healthy, size[rs.Name])
		size[rs.Name] -= n
		healthy -= n
	}
	for _, rs := range p.old {
		p.resize(rs, size[rs.Name])
	}
}

// cleanUp deletes old ReplicaSets that are empty and exceed the history limit, lowest revision
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
	slices.SortStableFunc(byRevision, func(a, b *appsv1.ReplicaSet) int { return cmp.Compare(revisionOf(a), revisionOf(b)) })
	for _, rs := range byRevision[:excess] {
		if rs.Status.Replicas == 0 && specReplicas(rs) == 0 && rs.Generation <= rs.Status.ObservedGeneration && rs.DeletionTimestamp == nil {
			p.step.Delete = append(p.step.Delete, rs)
		}
	}
}

// alive reports whether a pod may still run. Strategy Recreate waits for it.
func alive(p *corev1.Pod) bool { return !controllers.PodEnded(p) }
