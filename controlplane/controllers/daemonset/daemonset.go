package daemonset

import (
	"cmp"
	"context"
	"errors"
	"maps"
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

// New returns the DaemonSet controller.
func New(d engine.Deps) *engine.Descriptor {
	own := engine.RevisedFrom(d, engine.RevisedKind[*appsv1.DaemonSet]{
		GVK: kind, Resource: "daemonsets", DisplayName: "daemon set",
		Selector: func(s *appsv1.DaemonSet) *metav1.LabelSelector { return s.Spec.Selector },
		Template: func(s *appsv1.DaemonSet) *corev1.PodTemplateSpec { return &s.Spec.Template },
		History: func(s *appsv1.DaemonSet) (collisions, limit *int32) {
			return s.Status.CollisionCount, s.Spec.RevisionHistoryLimit
		},
	})
	nodes := client.Informer[*corev1.Node](d.Informers)
	return &engine.Descriptor{
		Name: "daemon-set-controller", Workers: 4,
		Watches: own.Watches(engine.OnInformer(nodes, func(c engine.Change[*corev1.Node]) []engine.Key {
			return ofNode(own.Owners, c)
		})),
		Rules: own.Rules(rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"nodes"},
			Verbs: []string{"list", "watch"}}),
		Lead: func(t *engine.Term) engine.Reconcile {
			return (&reconciler{RevisedOwners: own.Lead(t), nodes: nodes}).reconcileDaemonSet
		},
	}
}

// ofNode returns the keys of the DaemonSets that may have to create or delete a pod because of the
// change of a node.
func ofNode(sets cache.SharedIndexInformer, c engine.Change[*corev1.Node]) []engine.Key {
	if c.Type == engine.Updated && maps.Equal(c.Old.Labels, c.New.Labels) &&
		equality.Semantic.DeepEqual(c.Old.Spec.Taints, c.New.Spec.Taints) {
		return nil
	}
	var keys []engine.Key
	for _, set := range engine.CachedAll[*appsv1.DaemonSet](sets) {
		t := podTemplate(set)
		run, stay := ShouldRun(t, c.New)
		if c.Type == engine.Updated {
			if ran, stayed := ShouldRun(t, c.Old); ran == run && stayed == stay {
				continue
			}
		} else if !run && !stay {
			continue
		}
		keys = append(keys, engine.KeyOf(set))
	}
	return keys
}

// reconciler reconciles DaemonSets during one term of leadership. Every term has a new reconciler.
type reconciler struct {
	engine.RevisedOwners[*appsv1.DaemonSet]
	nodes cache.SharedIndexInformer
}

func (r *reconciler) reconcileDaemonSet(ctx context.Context, key engine.Key) (time.Duration, error) {
	set, ok := r.Owners.Get(key.Namespace, key.Name)
	if !ok || set.DeletionTimestamp != nil {
		return 0, nil
	}
	selector := engine.SelectorOf(set.Spec.Selector)
	if selector == nil {
		return 0, nil
	}
	s, history, err := r.claimSnapshot(ctx, set, selector)
	if engine.IsNamespaceTerminating(err) {
		return 0, nil // no object is needed in a terminating namespace
	}
	if err != nil {
		return 0, err
	}
	again, failure := r.performStep(ctx, s)
	if engine.IsNamespaceTerminating(failure) {
		return 0, nil
	}
	s.Pods = r.OwnedPods(set)
	wait, err := r.writeDaemonSetStatus(ctx, s, history)
	if err == nil && failure == nil {
		err = r.truncateRevisions(ctx, s, history)
	}
	if again == 0 || wait != 0 && wait < again {
		again = wait
	}
	return again, errors.Join(failure, err)
}

// claimSnapshot adopts and releases pods of a DaemonSet, and stores its template as a revision. It
// returns the input of PlanDaemonSet and the revisions.
func (r *reconciler) claimSnapshot(ctx context.Context, set *appsv1.DaemonSet, selector labels.Selector) (
	Snapshot, engine.History, error,
) {
	s := Snapshot{Set: set, Nodes: engine.CachedAll[*corev1.Node](r.nodes), Going: r.Pods.IsDeleting, Now: r.Term.Now()}
	var h engine.History
	var err error
	if s.Pods, err = r.ClaimPodsAndRevisions(ctx, set, selector); err != nil {
		return s, h, err
	}
	if h, err = r.Sync(ctx, set); err != nil {
		return s, h, err
	}
	s.Hash = h.Update.Labels[appsv1.ControllerRevisionHashLabelKey]
	return s, h, nil
}

// performStep performs the writes that PlanDaemonSet returns. again is the delay until the next
// reconcile, or 0.
func (r *reconciler) performStep(ctx context.Context, s Snapshot) (again time.Duration, err error) {
	step := PlanDaemonSet(s)
	again = step.Again
	for i, p := range step.Failed {
		if wait := r.Backoff.RemainingDelay(string(s.Set.UID)+"/"+nodeOf(p), p, s.Now); wait > 0 {
			if again == 0 || wait < again {
				again = wait
			}
			continue
		}
		if i < engine.MaxEvents {
			r.Term.Events.Eventf(s.Set, corev1.EventTypeWarning, "FailedDaemonPod",
				"Replacing pod %s on node %s, which has ended as %s",
				p.Name, nodeOf(p), engine.DescribePodEnd(p))
		}
		if err := r.Pods.Delete(ctx, s.Set, p, false); err != nil {
			return again, err
		}
	}
	failure := engine.InBatches(ctx, func() int { return len(step.Delete) }, func(ctx context.Context, i int) error {
		return r.Pods.Delete(ctx, s.Set, step.Delete[i], i < engine.MaxEvents)
	})
	t := podTemplate(s.Set)
	_, err = engine.SlowStart(ctx, func() int { return len(step.Create) }, func(ctx context.Context, i int) error {
		_, err := r.Pods.Create(ctx, s.Set, newPod(s.Set, t, s.Hash, step.Create[i]), i < engine.MaxEvents)
		return err
	})
	return again, errors.Join(failure, err)
}

// truncateRevisions deletes revisions that no pod uses, beyond the history limit of the DaemonSet.
func (r *reconciler) truncateRevisions(ctx context.Context, s Snapshot, h engine.History) error {
	live := map[string]bool{}
	for _, p := range s.Pods {
		live[p.Labels[appsv1.ControllerRevisionHashLabelKey]] = true
	}
	return r.Truncate(ctx, s.Set, h, func(r *appsv1.ControllerRevision) bool {
		return live[r.Labels[appsv1.ControllerRevisionHashLabelKey]]
	})
}

// writeDaemonSetStatus writes the status of the DaemonSet if it changed. It returns the delay after
// which the DaemonSet must be reconciled again, or 0. It must be called after the other writes of
// this reconcile, because the status includes their results.
func (r *reconciler) writeDaemonSetStatus(ctx context.Context, s Snapshot, h engine.History) (time.Duration, error) {
	status, again := Status(s, h.Collisions)
	if equality.Semantic.DeepEqual(status, s.Set.Status) {
		return again, nil
	}
	next := s.Set.DeepCopy()
	next.Status = status
	_, wait, err := r.Status.Write(ctx, next)
	return cmp.Or(wait, again), err
}
