package replicaset

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// New returns the ReplicaSet controller.
func New(d engine.Deps) *engine.Descriptor { return newController(d, replicaSets) }

// NewForReplicationControllers returns the controller of the core group's ReplicationControllers.
func NewForReplicationControllers(d engine.Deps) *engine.Descriptor {
	return newController(d, replicationControllers)
}

func newController[T api.Object](d engine.Deps, k kind[T]) *engine.Descriptor {
	sets := client.Informer[T](d.Informers)
	pods := client.Informer[*corev1.Pod](d.Informers)
	engine.IndexControllers(sets)
	engine.IndexControllers(pods)
	return &engine.Descriptor{
		Name:    k.controller,
		Workers: 8,
		Watches: []engine.Watch{
			engine.OnInformer(sets, engine.Self[T]),
			engine.OnInformer(pods, engine.OwnersOf[T, *corev1.Pod](sets, k.gvk.GroupKind(), k.selector)),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{k.gvk.Group}, Resources: []string{k.resource},
				Verbs: []string{"get", "list", "watch", "update"}},
			{APIGroups: []string{k.gvk.Group}, Resources: []string{k.resource + "/status", k.resource + "/finalizers"},
				Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"pods"},
				Verbs: []string{"create", "delete", "list", "patch", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler[T]{kind: k, term: t, sets: engine.ViewOf[T](t, sets), pods: engine.OwnedPodsOf(t, pods)}
			r.status = engine.NewStatusWriter(t, r.sets, k.word)
			return r.reconcileReplicaSet
		},
	}
}

// reconciler reconciles ReplicaSets or ReplicationControllers during one term of leadership. Every
// term has a new reconciler.
type reconciler[T api.Object] struct {
	kind kind[T]
	term *engine.Term
	sets *engine.View[T]
	pods *engine.OwnedPods

	refused engine.RefusalLog
	status  *engine.StatusWriter[T]
}

func (r *reconciler[T]) reconcileReplicaSet(ctx context.Context, key engine.Key) (time.Duration, error) {
	owner, ok := r.sets.Get(key.Namespace, key.Name)
	if !ok {
		r.refused.Forget(key)
		return 0, nil
	}
	selector := r.kind.selector(owner)
	if selector == nil {
		return 0, nil
	}
	rs := r.kind.set(owner)
	claims := engine.SortByOwnership(owner, selector, r.pods.Candidates(owner))
	// Terminal and terminating pods are neither adopted nor released.
	isInactive := func(p *corev1.Pod) bool { return api.IsPodTerminal(p) || p.DeletionTimestamp != nil }
	claims.Adopt, claims.Release = slices.DeleteFunc(claims.Adopt, isInactive),
		slices.DeleteFunc(claims.Release, isInactive)
	owned, err := engine.ApplyOwnership[T](ctx, r.term.Client, r.pods.View, owner, r.kind.controllerRef(owner), claims)
	if err != nil {
		return 0, err
	}
	active := r.pods.Active(owned)
	var related map[string]int
	if len(active) > int(replicasOrDefault(rs)) {
		related = r.countRelatedPods(owner)
	}
	plan := PlanScaling(rs, active, related, r.term.Now())
	refusals := engine.CountRefusals(owned, r.term.Now())
	wanted := plan.Create
	var refusal error
	if wanted > 0 {
		refusal = r.refused.Report(r.term, owner, key, refusals)
	}
	plan.Create = refusals.AllowedCreations(plan.Create)
	more, failure := r.performScaling(ctx, owner, plan, len(active))
	again, err := r.writeStatus(ctx, owner, cmp.Or(failure, refusal))
	switch {
	case more:
		again = scalingPause
	case wanted > plan.Create && (again == 0 || refusals.Wait < again):
		again = max(refusals.Wait, scalingPause)
	}
	return again, errors.Join(failure, err)
}

// countRelatedPods returns, by node, the number of active pods of all sets that have the same
// controller as owner.
func (r *reconciler[T]) countRelatedPods(owner T) map[string]int {
	uids := []string{string(owner.GetUID())}
	if ref := metav1.GetControllerOfNoCopy(owner); ref != nil {
		uids = uids[:0]
		for _, other := range r.sets.By(engine.ControllerIndex, string(ref.UID)) {
			uids = append(uids, string(other.GetUID()))
		}
	}
	count := map[string]int{}
	for _, p := range r.pods.Active(r.pods.By(engine.ControllerIndex, uids...)) {
		count[p.Spec.NodeName]++
	}
	return count
}

// A scaling is interrupted after maxScaling, so that the status shows its progress. It continues
// after scalingPause.
const (
	maxScaling   = time.Second
	scalingPause = time.Millisecond
)

// performScaling creates or deletes the pods of plan, which was computed for a number of active
// pods. Before every batch it reads the desired number of replicas again. more reports that it was
// interrupted after maxScaling and must be continued.
func (r *reconciler[T]) performScaling(ctx context.Context, owner T, plan Scaling, active int) (more bool, err error) {
	began := r.term.Now()
	wanted := func() int {
		now, ok := r.sets.Get(owner.GetNamespace(), owner.GetName())
		if !ok || now.GetUID() != owner.GetUID() || now.GetDeletionTimestamp() != nil {
			return active
		}
		if r.term.Now().Sub(began) > maxScaling {
			more = true
			return active
		}
		return int(replicasOrDefault(r.kind.set(now)))
	}
	if plan.Create > 0 {
		template := &r.kind.set(owner).Spec.Template
		_, err := engine.SlowStart(ctx, func() int { return min(plan.Create, wanted()-active) },
			func(ctx context.Context, i int) error {
				pod := engine.PodFrom(owner, r.kind.controllerRef(owner), template)
				_, err := r.pods.Create(ctx, owner, pod, i < engine.MaxEvents)
				return err
			})
		if engine.IsNamespaceTerminating(err) {
			return false, nil // no pod can be created in a terminating namespace
		}
		return more, err
	}
	err = engine.InBatches(ctx, func() int { return min(len(plan.Delete), active-wanted()) },
		func(ctx context.Context, i int) error {
			return r.pods.Delete(ctx, owner, plan.Delete[i], i < engine.MaxEvents)
		})
	return more, err
}

// countTerminating returns how many of the pods are terminating and not terminal.
func (r *reconciler[T]) countTerminating(pods []*corev1.Pod) (n int32) {
	for _, p := range pods {
		if r.pods.IsDeleting(p) && !api.IsPodTerminal(p) {
			n++
		}
	}
	return n
}

// writeStatus writes the status of owner if it changed. It returns the delay after which owner must
// be reconciled again, or 0. It must be called after the other writes of this reconcile. failure is
// the error of these writes, or nil.
func (r *reconciler[T]) writeStatus(ctx context.Context, owner T, failure error) (time.Duration, error) {
	rs := r.kind.set(owner)
	owned := r.pods.By(engine.ControllerIndex, string(owner.GetUID()))
	status, again := Status(rs, r.pods.Active(owned), r.countTerminating(owned), failure, r.term.Now())
	if !r.kind.terminating {
		status.TerminatingReplicas = nil
	}
	if statusEqual(status, rs.Status) {
		return again, nil
	}
	_, wait, err := r.status.Write(ctx, r.kind.withStatus(owner, status))
	return cmp.Or(wait, again), err
}
