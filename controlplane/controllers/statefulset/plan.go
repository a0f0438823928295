// Package statefulset manages the pods of StatefulSets. Each pod has a stable name, an ordinal and
// its own claims.
package statefulset

import (
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Snapshot is the input of PlanStatefulSet: a StatefulSet, its pods and revisions.
type Snapshot struct {
	Set     *appsv1.StatefulSet
	Pods    []*corev1.Pod // pods that the StatefulSet controls
	Going   func(*corev1.Pod) bool
	Current string // name of the revision before the current rollout; equal to Update if no rollout is in progress
	Update  string // name of the revision of the current template
	Now     time.Time
}

// Step is the result of PlanStatefulSet: the next writes. Writes that are not possible yet are
// planned again when a pod changes.
type Step struct {
	Create  []Creation
	Replace []*corev1.Pod // terminal pods that are deleted and will be replaced
	Delete  []*corev1.Pod // excess pods, or pods of an older revision
	Label   []*corev1.Pod // pods that lack the labels of their ordinal
	Again   time.Duration // time until a ready pod becomes available; 0 means that no pod waits for that
}

// Creation is a pod that must be created.
type Creation struct {
	Ordinal int
	Current bool // the pod is created from revision Snapshot.Current instead of Snapshot.Update
}

// state is the state of one pod of a StatefulSet.
type state struct {
	pod       *corev1.Pod
	ordinal   int
	going     bool
	ended     bool
	ready     bool
	available bool
	wait      time.Duration // time until the pod is available if it stays ready
}

func (s Snapshot) podState(p *corev1.Pod, ordinal int) *state {
	st := &state{pod: p, ordinal: ordinal, going: s.Going(p), ended: api.IsPodTerminal(p)}
	st.ready = !st.ended && !st.going && p.Status.Phase == corev1.PodRunning && api.IsPodReady(p)
	if st.ready {
		st.available, st.wait = engine.IsPodAvailable(p, s.Set.Spec.MinReadySeconds, s.Now)
	}
	return st
}

// partitionPods divides the pods by the replicas of the set. wanted has one entry for each desired
// ordinal, in order; the entry is nil if the pod is missing. condemned are excess pods, the highest
// ordinal first.
func (s Snapshot) partitionPods() (wanted, condemned []*state) {
	from := firstOrdinal(s.Set)
	wanted = make([]*state, replicasOrDefault(s.Set))
	for _, p := range s.Pods {
		n, ok := ordinalOf(s.Set, p.Name)
		switch {
		case !ok:
		case n >= from && n < from+len(wanted):
			wanted[n-from] = s.podState(p, n)
		default:
			condemned = append(condemned, s.podState(p, n))
		}
	}
	slices.SortFunc(condemned, func(a, b *state) int { return b.ordinal - a.ordinal })
	return wanted, condemned
}

// PlanStatefulSet returns the next writes for a StatefulSet. With pod management policy
// OrderedReady, it creates one pod at a time, when all lower pods are available. It deletes the
// highest excess pod when all other pods are available. An update replaces pods from the highest
// ordinal down to the partition.
func PlanStatefulSet(s Snapshot) Step {
	var step Step
	if s.Set.DeletionTimestamp != nil {
		return step
	}
	wanted, condemned := s.partitionPods()
	for _, st := range slices.Concat(wanted, condemned) {
		if st != nil && !st.going && !st.ended && !hasIdentity(s.Set, st.pod, st.ordinal) {
			step.Label = append(step.Label, st.pod)
		}
	}
	if s.Set.Spec.PodManagementPolicy == appsv1.ParallelPodManagement {
		s.planParallel(&step, wanted, condemned)
		return step
	}
	if s.planCreation(&step, wanted) && s.planScaleDown(&step, condemned) {
		s.planUpdate(&step, wanted, false)
	}
	return step
}

// planCreation adds to step the creation or replacement of the first pod that is missing or has
// ended. It returns true if all wanted pods are available.
func (s Snapshot) planCreation(step *Step, wanted []*state) bool {
	for i, st := range wanted {
		switch {
		case st == nil:
			step.Create = []Creation{s.newCreation(i)}
		case st.going:
		case st.ended:
			step.Replace = []*corev1.Pod{st.pod}
		case st.available:
			continue
		default:
			step.Again = st.wait
		}
		return false
	}
	return true
}

// planScaleDown adds to step the deletion of the highest excess pod. It returns true if there is no
// excess pod.
func (s Snapshot) planScaleDown(step *Step, condemned []*state) bool {
	if len(condemned) == 0 {
		return true
	}
	lowest := condemned[len(condemned)-1] // all wanted pods are available, so only this excess pod may be unavailable
	for _, st := range slices.Backward(condemned) {
		if !st.available {
			lowest = st
			break
		}
	}
	highest := condemned[0]
	if highest.going || !highest.available && highest != lowest && !highest.ended {
		step.Again = highest.wait
		return false
	}
	step.Delete = append(step.Delete, highest.pod)
	return false
}

// planParallel adds to step the creation of all missing pods and the deletion of all excess pods.
// It also updates as many pods as maxUnavailable permits.
func (s Snapshot) planParallel(step *Step, wanted, condemned []*state) {
	for i, st := range wanted {
		switch {
		case st == nil:
			step.Create = append(step.Create, s.newCreation(i))
		case st.ended && !st.going:
			step.Replace = append(step.Replace, st.pod)
		}
	}
	for _, st := range condemned {
		if !st.going {
			step.Delete = append(step.Delete, st.pod)
		}
	}
	s.planUpdate(step, wanted, true)
}

// planUpdate adds to step the deletion of pods of older revisions, from the highest ordinal down to
// the partition. At most maxUnavailable pods are unavailable at a time. Unavailable pods may be
// deleted within that limit. Unless outOfOrder is true, a pod is deleted only after all higher pods
// were updated.
func (s Snapshot) planUpdate(step *Step, wanted []*state, outOfOrder bool) {
	if s.Set.Spec.UpdateStrategy.Type != appsv1.RollingUpdateStatefulSetStrategyType {
		return
	}
	away := 0
	for _, st := range wanted {
		if st == nil || !st.available {
			away++
			if st != nil && st.wait > 0 && (step.Again == 0 || st.wait < step.Again) {
				step.Again = st.wait
			}
		}
	}
	most := maxUnavailable(s.Set)
	for i, st := range slices.Backward(wanted) {
		if i < updatePartition(s.Set) {
			return
		}
		if st == nil || st.going || st.ended || revisionOf(st.pod) == s.Update {
			continue
		}
		cost := 0
		if st.available {
			cost = 1
		}
		if away+cost > most {
			if !outOfOrder {
				return
			}
			continue
		}
		away += cost
		step.Delete = append(step.Delete, st.pod)
	}
}

func (s Snapshot) newCreation(place int) Creation {
	c := Creation{Ordinal: firstOrdinal(s.Set) + place}
	u := s.Set.Spec.UpdateStrategy
	if u.Type == appsv1.RollingUpdateStatefulSetStrategyType && s.Current != s.Update {
		if u.RollingUpdate == nil {
			c.Current = place < int(s.Set.Status.CurrentReplicas)
		} else {
			c.Current = place < updatePartition(s.Set)
		}
	}
	return c
}

func revisionOf(p *corev1.Pod) string { return p.Labels[appsv1.ControllerRevisionHashLabelKey] }

// updatePartition returns the partition of a rolling update: pods below it, counted from the first
// pod, are not updated.
func updatePartition(set *appsv1.StatefulSet) int {
	if u := set.Spec.UpdateStrategy.RollingUpdate; u != nil && u.Partition != nil {
		return int(*u.Partition)
	}
	return 0
}

// maxUnavailable returns how many pods may be unavailable during a rolling update. It is at least
// one.
func maxUnavailable(set *appsv1.StatefulSet) int {
	u := set.Spec.UpdateStrategy.RollingUpdate
	if u == nil || u.MaxUnavailable == nil {
		return 1
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(u.MaxUnavailable, replicasOrDefault(set), false)
	if err != nil {
		return 1
	}
	return max(1, n)
}

// Status returns the new status of a StatefulSet. again is the time until a ready pod becomes
// available, or
// 0.
func Status(s Snapshot, collisions *int32) (out appsv1.StatefulSetStatus, again time.Duration) {
	out = appsv1.StatefulSetStatus{
		ObservedGeneration: s.Set.Generation, CollisionCount: collisions,
		CurrentRevision: s.Current, UpdateRevision: s.Update, Conditions: s.Set.Status.Conditions,
	}
	for _, p := range s.Pods {
		n, ok := ordinalOf(s.Set, p.Name)
		if !ok {
			continue
		}
		st := s.podState(p, n)
		out.Replicas++
		if st.ready {
			out.ReadyReplicas++
		}
		if st.available {
			out.AvailableReplicas++
		} else if st.wait > 0 && (again == 0 || st.wait < again) {
			again = st.wait
		}
		if st.going {
			continue
		}
		if revisionOf(p) == s.Current {
			out.CurrentReplicas++
		}
		if revisionOf(p) == s.Update {
			out.UpdatedReplicas++
		}
	}
	n := int32(replicasOrDefault(s.Set))
	rolling := s.Set.Spec.UpdateStrategy.Type == appsv1.RollingUpdateStatefulSetStrategyType
	if rolling && out.UpdatedReplicas == n && out.ReadyReplicas == n && out.Replicas == n {
		out.CurrentRevision, out.CurrentReplicas = out.UpdateRevision, out.UpdatedReplicas
	}
	return out, again
}
