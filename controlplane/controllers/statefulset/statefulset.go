package statefulset

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// New returns the StatefulSet controller.
func New(d engine.Deps) *engine.Descriptor {
	own := engine.RevisedFrom(d, engine.RevisedKind[*appsv1.StatefulSet]{
		GVK: kind, Resource: "statefulsets", DisplayName: "stateful set",
		Selector: func(s *appsv1.StatefulSet) *metav1.LabelSelector { return s.Spec.Selector },
		Template: func(s *appsv1.StatefulSet) *corev1.PodTemplateSpec { return &s.Spec.Template },
		History: func(s *appsv1.StatefulSet) (collisions, limit *int32) {
			return s.Status.CollisionCount, s.Spec.RevisionHistoryLimit
		},
		KeepsRevisions: true,
	})
	claims := client.Informer[*corev1.PersistentVolumeClaim](d.Informers)
	return &engine.Descriptor{
		Name: "statefulset-controller", Workers: 8,
		Watches: own.Watches(engine.OnInformer(claims,
			func(c engine.Change[*corev1.PersistentVolumeClaim]) []engine.Key {
				return ofClaim(own.Owners, c)
			})),
		Rules: own.Rules(
			rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get"}},
			rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods/finalizers"},
				Verbs: []string{"update"}},
			rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims"},
				Verbs: []string{"create", "get", "list", "update", "watch"}},
		),
		Lead: func(t *engine.Term) engine.Reconcile {
			return (&reconciler{RevisedOwners: own.Lead(t),
				claims: engine.ViewOf[*corev1.PersistentVolumeClaim](t, claims)}).reconcileStatefulSet
		},
	}
}

// ofClaim returns the keys of the StatefulSets that may wait for the change of a claim.
func ofClaim(sets cache.SharedIndexInformer, c engine.Change[*corev1.PersistentVolumeClaim]) []engine.Key {
	if c.Type == engine.Updated && equality.Semantic.DeepEqual(c.Old.OwnerReferences, c.New.OwnerReferences) {
		return nil
	}
	var keys []engine.Key
	for _, set := range engine.CachedBy[*appsv1.StatefulSet](sets, engine.NamespaceIndex, c.New.Namespace) {
		for i := range set.Spec.VolumeClaimTemplates {
			if strings.HasPrefix(c.New.Name, set.Spec.VolumeClaimTemplates[i].Name+"-"+set.Name+"-") {
				keys = append(keys, engine.KeyOf(set))
				break
			}
		}
	}
	return keys
}

// reconciler reconciles StatefulSets during one term of leadership. Every term has a new
// reconciler.
type reconciler struct {
	engine.RevisedOwners[*appsv1.StatefulSet]
	claims *engine.View[*corev1.PersistentVolumeClaim]
}

func (r *reconciler) reconcileStatefulSet(ctx context.Context, key engine.Key) (time.Duration, error) {
	set, ok := r.Owners.Get(key.Namespace, key.Name)
	if !ok {
		return 0, nil
	}
	selector := engine.SelectorOf(set.Spec.Selector)
	if selector == nil {
		return 0, nil
	}
	snapshot, history, err := r.claimSnapshot(ctx, set, selector)
	if engine.IsNamespaceTerminating(err) {
		return 0, nil // no object is needed in a terminating namespace
	}
	if err != nil {
		return 0, err
	}
	again, failure := r.performStep(ctx, snapshot, history)
	if engine.IsNamespaceTerminating(failure) {
		return 0, nil
	}
	failure = errors.Join(failure, r.tendClaims(ctx, snapshot))
	snapshot.Pods = r.OwnedPods(set)
	wait, err := r.writeStatefulSetStatus(ctx, snapshot, history)
	if err == nil && failure == nil {
		live := func(rev *appsv1.ControllerRevision) bool {
			for _, p := range snapshot.Pods {
				if revisionOf(p) == rev.Name {
					return true
				}
			}
			return rev.Name == snapshot.Current
		}
		err = r.Truncate(ctx, set, history, live)
	}
	return shorterWait(again, wait), errors.Join(failure, err)
}

// shorterWait returns the shorter of two delays. 0 stands for no delay: the result is then the
// other delay.
func shorterWait(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// claimSnapshot adopts and releases pods of a StatefulSet, and stores its template as a revision.
// It returns the input of PlanStatefulSet and the revisions.
func (r *reconciler) claimSnapshot(ctx context.Context, set *appsv1.StatefulSet, selector labels.Selector) (
	Snapshot, engine.History, error,
) {
	s := Snapshot{Set: set, Going: r.Pods.IsDeleting, Now: r.Term.Now()}
	isMember := func(p *corev1.Pod) bool {
		_, ok := ordinalOf(set, p.Name)
		return ok
	}
	var h engine.History
	var err error
	if s.Pods, err = r.ClaimPodsAndRevisions(ctx, set, selector, isMember); err != nil {
		return s, h, err
	}
	if set.DeletionTimestamp != nil { // the revisions are deleted with the StatefulSet
		s.Current, s.Update = set.Status.CurrentRevision, set.Status.UpdateRevision
		return s, engine.History{Collisions: set.Status.CollisionCount}, nil
	}
	if h, err = r.Sync(ctx, set); err != nil {
		return s, h, err
	}
	s.Current, s.Update = h.Update.Name, h.Update.Name
	if c := h.FindByName(set.Status.CurrentRevision); c != nil {
		s.Current = c.Name
	}
	return s, h, nil
}

// performStep performs the writes that PlanStatefulSet returns. again is the delay until the next
// reconcile, or 0.
func (r *reconciler) performStep(ctx context.Context, s Snapshot, h engine.History) (again time.Duration, err error) {
	step := PlanStatefulSet(s)
	again = step.Again
	for _, p := range step.Label {
		if err := r.labelPod(ctx, s.Set, p); err != nil {
			return again, err
		}
	}
	_, err = engine.SlowStart(ctx, func() int { return len(step.Create) }, func(ctx context.Context, i int) error {
		return r.createPod(ctx, s, h, step.Create[i], i < engine.MaxEvents)
	})
	if err != nil {
		return again, err
	}
	for i, p := range step.Replace {
		if wait := r.Backoff.RemainingDelay(p.Namespace+"/"+p.Name, p, s.Now); wait > 0 {
			again = shorterWait(again, wait)
			continue
		}
		if i < engine.MaxEvents {
			r.Term.Events.Eventf(s.Set, corev1.EventTypeWarning, "RecreatingFailedPod",
				"Replacing pod %s, which has ended as %s",
				p.Name, engine.DescribePodEnd(p))
		}
		if err := r.Pods.Delete(ctx, s.Set, p, false); err != nil {
			return again, err
		}
	}
	return again, engine.InBatches(ctx, func() int { return len(step.Delete) }, func(ctx context.Context, i int) error {
		if err := r.releaseClaims(ctx, s, step.Delete[i]); err != nil {
			// must precede the deletion of the pod, which deletes its claims
			return err
		}
		return r.Pods.Delete(ctx, s.Set, step.Delete[i], i < engine.MaxEvents)
	})
}

func (r *reconciler) labelPod(ctx context.Context, set *appsv1.StatefulSet, p *corev1.Pod) error {
	ordinal, _ := ordinalOf(set, p.Name)
	next := p.DeepCopy()
	setIdentity(set, next, ordinal)
	next, err := client.Update(ctx, r.Term.Client, next)
	if err != nil {
		return fmt.Errorf("labeling pod %s/%s of stateful set %s: %w", p.Namespace, p.Name, set.Name, err)
	}
	r.Pods.RecordWrite(next)
	return nil
}

// createPod creates the missing claims of a pod and then the pod. If withEvent is true, success is
// recorded as an event.
func (r *reconciler) createPod(ctx context.Context, s Snapshot, h engine.History, c Creation, withEvent bool) error {
	if r.awaitsStaleClaim(s.Set, c.Ordinal) {
		return nil // the deletion of the claim queues the StatefulSet again
	}
	if err := r.setOwners(ctx, s.Set, c.Ordinal, nil); err != nil {
		return err
	}
	if err := r.makeClaims(ctx, s.Set, c.Ordinal); err != nil {
		return err
	}
	template, revision := &s.Set.Spec.Template, s.Update
	if c.Current {
		if have := h.FindByName(s.Current); have != nil {
			t, err := engine.TemplateOf(have)
			if err != nil {
				return err
			}
			template, revision = t, s.Current
		}
	}
	_, err := r.Pods.Create(ctx, s.Set, newPod(s.Set, template, revision, c.Ordinal), withEvent)
	return err
}

// writeStatefulSetStatus writes the status of the StatefulSet if it changed. It returns the delay
// after which the StatefulSet must be reconciled again, or 0. It must be called after the other
// writes of this reconcile, because the status includes their results.
func (r *reconciler) writeStatefulSetStatus(ctx context.Context, s Snapshot, h engine.History) (time.Duration, error) {
	status, again := Status(s, h.Collisions)
	if equality.Semantic.DeepEqual(status, s.Set.Status) {
		return again, nil
	}
	next := s.Set.DeepCopy()
	next.Status = status
	_, wait, err := r.Status.Write(ctx, next)
	return cmp.Or(wait, again), err
}
