package deployment

import (
	"cmp"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Annotations of Deployments and ReplicaSets that kubectl also reads or writes.
const (
	RevisionAnnotation        = "deployment.kubernetes.io/revision"
	RevisionHistoryAnnotation = "deployment.kubernetes.io/revision-history"
	DesiredReplicasAnnotation = "deployment.kubernetes.io/desired-replicas"
	MaxReplicasAnnotation     = "deployment.kubernetes.io/max-replicas"
)

// notCopied holds the annotations that are not copied from a Deployment to its ReplicaSets.
var notCopied = map[string]bool{
	corev1.LastAppliedConfigAnnotation: true,
	RevisionAnnotation:                 true,
	RevisionHistoryAnnotation:          true,
	DesiredReplicasAnnotation:          true,
	MaxReplicasAnnotation:              true,
	appsv1.DeprecatedRollbackTo:        true,
	api.RollbackAnnotation:             true,
	api.RestartAnnotation:              true,
	api.ConfigSeenAnnotation:           true,
	api.RebalanceAnnotation:            true,
	api.RebalancedAnnotation:           true,
	CompletedAnnotation:                true,
	api.TraceParentAnnotation:          true, // copied by CopyTrace together with other changes
}

func sumReplicas(sets []*appsv1.ReplicaSet, f func(*appsv1.ReplicaSet) int32) int32 {
	var n int32
	for _, rs := range sets {
		n += f(rs)
	}
	return n
}

func specReplicas(rs *appsv1.ReplicaSet) int32 { return ptr.Deref(rs.Spec.Replicas, 1) }

// maxPresentPods returns the maximum number of pods that rs may have now. Pods that rs is about to
// delete count until its status shows that they no longer exist.
func maxPresentPods(rs *appsv1.ReplicaSet) int32 { return max(specReplicas(rs), rs.Status.Replicas) }

// areStatusesCurrent reports whether the status of every ReplicaSet is as new as its spec.
// Otherwise there may be more pods than spec or status show, for example after a ReplicaSet was
// scaled down before its created pods were counted.
func areStatusesCurrent(sets []*appsv1.ReplicaSet) bool {
	for _, rs := range sets {
		if rs.Status.ObservedGeneration < rs.Generation {
			return false
		}
	}
	return true
}

// availableOf returns how many pods of rs are certainly available. This is at most the desired
// number of replicas, because rs may be deleting further pods although its status does not show
// that yet.
func availableOf(rs *appsv1.ReplicaSet) int32 {
	return min(rs.Status.AvailableReplicas, specReplicas(rs))
}

// rollingUpdateBounds returns maxSurge of Deployment d, rounded up, and maxUnavailable, rounded
// down. If both are zero, maxUnavailable is one, because the rollout could not progress otherwise.
func rollingUpdateBounds(d *appsv1.Deployment) (surge, unavailable int32) {
	if d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
		return 0, 0
	}
	want := int(ptr.Deref(d.Spec.Replicas, 1))
	one := intstr.FromString("25%")
	s, u := &one, &one
	if r := d.Spec.Strategy.RollingUpdate; r != nil {
		s, u = cmp.Or(r.MaxSurge, s), cmp.Or(r.MaxUnavailable, u)
	}
	up, err := intstr.GetScaledValueFromIntOrPercent(s, want, true)
	if err != nil {
		up = 0
	}
	down, err := intstr.GetScaledValueFromIntOrPercent(u, want, false)
	if err != nil {
		down = 0
	}
	if up == 0 && down == 0 {
		down = 1
	}
	return int32(up), int32(min(down, want))
}

// oldestFirst returns a copy of sets, sorted by creation time and then by name.
func oldestFirst(sets []*appsv1.ReplicaSet) []*appsv1.ReplicaSet {
	sets = slices.Clone(sets)
	slices.SortFunc(sets, func(a, b *appsv1.ReplicaSet) int {
		return cmp.Or(a.CreationTimestamp.Time.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	return sets
}

// splitReplicaSets returns the ReplicaSet with the current template of Deployment d, and all
// others, oldest first. If several ReplicaSets have the current template, current is the oldest of
// them. If no ReplicaSet has it, current is nil.
func splitReplicaSets(d *appsv1.Deployment, sets []*appsv1.ReplicaSet) (
	current *appsv1.ReplicaSet, old []*appsv1.ReplicaSet,
) {
	for _, rs := range oldestFirst(sets) {
		if current == nil && sameTemplate(&rs.Spec.Template, &d.Spec.Template) {
			current = rs
		} else {
			old = append(old, rs)
		}
	}
	return current, old
}

// sameTemplate reports whether two pod templates are equal without the hash label.
func sameTemplate(a, b *corev1.PodTemplateSpec) bool {
	strip := func(t *corev1.PodTemplateSpec) *corev1.PodTemplateSpec {
		if _, ok := t.Labels[appsv1.DefaultDeploymentUniqueLabelKey]; !ok {
			return t
		}
		t = t.DeepCopy()
		delete(t.Labels, appsv1.DefaultDeploymentUniqueLabelKey)
		return t
	}
	return equality.Semantic.DeepEqual(strip(a), strip(b))
}

// TemplateHash returns the hash of a pod template that distinguishes ReplicaSets. Equal templates
// have equal hashes for equal collision counts.
func TemplateHash(t *corev1.PodTemplateSpec, collisions *int32) string {
	h := fnv.New32a()
	data, err := json.Marshal(t)
	if err != nil { // a decoded template always encodes
		panic("deployment: encoding a pod template: " + err.Error())
	}
	_, _ = h.Write(data)
	if collisions != nil {
		_, _ = h.Write([]byte(strconv.Itoa(int(*collisions))))
	}
	return rand.SafeEncodeString(strconv.FormatUint(uint64(h.Sum32()), 10))
}

// newSet returns the ReplicaSet for the current template with n replicas.
func newSet(d *appsv1.Deployment, old []*appsv1.ReplicaSet, n int32) *appsv1.ReplicaSet {
	t := d.Spec.Template.DeepCopy()
	hash := TemplateHash(&d.Spec.Template, d.Status.CollisionCount)
	t.Labels = withEntry(t.Labels, appsv1.DefaultDeploymentUniqueLabelKey, hash)
	selector := d.Spec.Selector.DeepCopy()
	selector.MatchLabels = withEntry(selector.MatchLabels, appsv1.DefaultDeploymentUniqueLabelKey, hash)
	rs := &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       d.Namespace,
			Name:            d.Name + "-" + hash,
			Labels:          t.Labels,
			OwnerReferences: []metav1.OwnerReference{ownerRef(d)},
		},
		Spec: appsv1.ReplicaSetSpec{
			Replicas:        &n,
			MinReadySeconds: d.Spec.MinReadySeconds,
			Selector:        selector,
			Template:        *t,
		},
	}
	syncAnnotations(rs, d, nextRevision(old))
	setScaleAnnotations(rs, d)
	engine.CopyTrace(rs, d)
	return rs
}

var kind = appsv1.SchemeGroupVersion.WithKind("Deployment")

func ownerRef(d *appsv1.Deployment) metav1.OwnerReference { return *metav1.NewControllerRef(d, kind) }

// withEntry returns a copy of m in which k maps to v.
func withEntry(m map[string]string, k, v string) map[string]string {
	out := make(map[string]string, len(m)+1)
	for mk, mv := range m {
		out[mk] = mv
	}
	out[k] = v
	return out
}

func revisionOf(o metav1.Object) int64 {
	n, err := strconv.ParseInt(o.GetAnnotations()[RevisionAnnotation], 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// nextRevision returns the revision number of a new ReplicaSet: one more than the highest in old.
func nextRevision(old []*appsv1.ReplicaSet) int64 {
	var top int64
	for _, rs := range old {
		top = max(top, revisionOf(rs))
	}
	return top + 1
}

// syncAnnotations copies the annotations of Deployment d to rs, and raises the revision of rs to
// revision. It reports whether rs changed. If rs had an earlier revision, that revision is added to
// the revision history annotation.
func syncAnnotations(rs *appsv1.ReplicaSet, d *appsv1.Deployment, revision int64) bool {
	changed := false
	set := func(k, v string) {
		if have, ok := rs.Annotations[k]; !ok || have != v {
			rs.Annotations = withEntry(rs.Annotations, k, v)
			changed = true
		}
	}
	for k, v := range d.Annotations {
		if !notCopied[k] {
			set(k, v)
		}
	}
	if was := revisionOf(rs); was < revision {
		if was > 0 {
			history := strings.Split(rs.Annotations[RevisionHistoryAnnotation], ",")
			if history[0] == "" {
				history = nil
			}
			set(RevisionHistoryAnnotation, strings.Join(append(history, strconv.FormatInt(was, 10)), ","))
		}
		set(RevisionAnnotation, strconv.FormatInt(revision, 10))
	}
	return changed
}

// setScaleAnnotations records the replicas of Deployment d in annotations of rs, and reports
// whether rs changed. The annotations let a later reconcile detect that d was scaled during a
// rollout, and scale the ReplicaSets in proportion.
func setScaleAnnotations(rs *appsv1.ReplicaSet, d *appsv1.Deployment) bool {
	surge, _ := rollingUpdateBounds(d)
	desired := fmt.Sprint(ptr.Deref(d.Spec.Replicas, 1))
	most := fmt.Sprint(ptr.Deref(d.Spec.Replicas, 1) + surge)
	if rs.Annotations[DesiredReplicasAnnotation] == desired && rs.Annotations[MaxReplicasAnnotation] == most {
		return false
	}
	rs.Annotations = withEntry(withEntry(rs.Annotations, DesiredReplicasAnnotation, desired),
		MaxReplicasAnnotation, most)
	return true
}

// intAnnotation returns the value of an annotation of rs as a number. It returns false if the
// annotation is missing or not a number.
func intAnnotation(rs *appsv1.ReplicaSet, key string) (int32, bool) {
	n, err := strconv.ParseInt(rs.Annotations[key], 10, 32)
	return int32(n), err == nil
}
