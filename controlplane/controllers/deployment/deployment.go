package deployment

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// New returns the Deployment controller.
func New(d engine.Deps) *engine.Descriptor {
	deployments := client.Informer[*appsv1.Deployment](d.Informers)
	sets := client.Informer[*appsv1.ReplicaSet](d.Informers)
	pods := client.Informer[*corev1.Pod](d.Informers)
	engine.IndexControllers(sets)
	engine.IndexControllers(pods)
	return &engine.Descriptor{
		Name:    "deployment-controller",
		Workers: 8,
		Watches: []engine.Watch{
			engine.OnInformer(deployments, engine.Self[*appsv1.Deployment]),
			engine.OnInformer(sets, engine.OwnersOf[*appsv1.Deployment, *appsv1.ReplicaSet](deployments,
				kind.GroupKind(), func(d *appsv1.Deployment) labels.Selector {
					return engine.SelectorOf(d.Spec.Selector)
				})),
			engine.OnInformer(pods, func(c engine.Change[*corev1.Pod]) []engine.Key {
				return ofPod(deployments, sets, c)
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"apps"}, Resources: []string{"deployments"},
				Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{"apps"}, Resources: []string{"deployments/status", "deployments/finalizers"},
				Verbs: []string{"update"}},
			{APIGroups: []string{"apps"}, Resources: []string{"replicasets"},
				Verbs: []string{"create", "delete", "get", "list", "patch", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, deployments: engine.ViewOf[*appsv1.Deployment](t, deployments),
				sets: engine.ViewOf[*appsv1.ReplicaSet](t, sets), pods: pods}
			r.status = engine.NewStatusWriter(t, r.deployments, "deployment")
			return r.reconcileDeployment
		},
	}
}

// ofPod returns the key of the Deployment of a pod in two cases: the pod ended and the Deployment
// has strategy Recreate, or the pod crashes and the Deployment has automatic rollback.
func ofPod(deployments, sets cache.SharedIndexInformer, c engine.Change[*corev1.Pod]) []engine.Key {
	ends := c.Type == engine.Deleted || !mayPodRun(c.New)
	if !ends && !crashLoops(c.New) {
		return nil
	}
	ref := metav1.GetControllerOfNoCopy(c.New)
	if ref == nil || ref.Kind != "ReplicaSet" || engine.GroupOf(ref) != appsv1.GroupName {
		return nil
	}
	rs, ok := engine.Cached[*appsv1.ReplicaSet](sets, c.New.Namespace, ref.Name)
	if !ok {
		return nil
	}
	if ref = metav1.GetControllerOfNoCopy(rs); ref == nil {
		return nil
	}
	d, ok := engine.Cached[*appsv1.Deployment](deployments, rs.Namespace, ref.Name)
	if waits := ok && d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType; !ok || ends && !waits ||
		!ends && !rollsBack(d) {
		return nil
	}
	return []engine.Key{engine.KeyOf(d)}
}

// reconciler reconciles Deployments during one term of leadership. Every term has a new reconciler.
type reconciler struct {
	term        *engine.Term
	deployments *engine.View[*appsv1.Deployment]
	sets        *engine.View[*appsv1.ReplicaSet]
	pods        cache.SharedIndexInformer
	status      *engine.StatusWriter[*appsv1.Deployment]
}

func (r *reconciler) reconcileDeployment(ctx context.Context, key engine.Key) (time.Duration, error) {
	d, ok := r.deployments.Get(key.Namespace, key.Name)
	if !ok {
		return 0, nil
	}
	selector := engine.SelectorOf(d.Spec.Selector)
	if selector == nil {
		return 0, nil
	}
	candidates := r.sets.By(engine.ControllerIndex, string(d.UID), engine.OrphansOf(d.Namespace))
	owned, err := engine.ApplyOwnership[*appsv1.Deployment](ctx, r.term.Client, r.sets, d, ownerRef(d),
		engine.SortByOwnership(d, selector, candidates))
	if err != nil {
		return 0, err
	}
	if changed, err := r.maintainRollback(ctx, d, owned); changed || err != nil {
		return time.Millisecond, err
	}
	step, err := PlanDeployment(Snapshot{Deployment: d, Sets: owned,
		OldPodsAlive: func(old []*appsv1.ReplicaSet) (bool, error) {
			return r.oldPodsAlive(ctx, old)
		}})
	if err != nil {
		return 0, fmt.Errorf("planning deployment %s/%s: %w", d.Namespace, d.Name, err)
	}
	did, failure := r.performStep(ctx, d, step)
	switch {
	case apierrors.HasStatusCause(failure, corev1.NamespaceTerminatingCause):
		return 0, nil // no object is needed in a terminating namespace
	case failure != nil && did == nil:
		return 0, failure
	}
	again, err := r.writeDeploymentStatus(ctx, d, step, did)
	return again, errors.Join(failure, err)
}

// oldPodsAlive reports whether a pod of the ReplicaSets in old is not terminal. It returns true if
// such a pod is cached. Otherwise it lists the pods from the API, because a pod may not be cached
// yet.
func (r *reconciler) oldPodsAlive(ctx context.Context, old []*appsv1.ReplicaSet) (bool, error) {
	if len(old) == 0 {
		return false, nil
	}
	for _, rs := range old {
		for _, p := range engine.CachedBy[*corev1.Pod](r.pods, engine.ControllerIndex, string(rs.UID)) {
			if mayPodRun(p) {
				return true, nil
			}
		}
	}
	live, err := client.List[*corev1.Pod](ctx, r.term.Client, old[0].Namespace, metav1.ListOptions{})
	if err != nil {
		return false, fmt.Errorf("listing old pods: %w", err)
	}
	for _, p := range live {
		for _, rs := range old {
			if mayPodRun(p) && metav1.IsControlledBy(p, rs) {
				return true, nil
			}
		}
	}
	return false, nil
}

// performStep performs the writes of step. It returns the resulting reason and message of condition
// Progressing, or nil if the writes do not change them.
func (r *reconciler) performStep(ctx context.Context, d *appsv1.Deployment, step Step) (*Progress, error) {
	if step.Create != nil {
		return r.createReplicaSet(ctx, d, step.Create)
	}
	for _, u := range step.Update {
		if err := r.updateReplicaSet(ctx, d, u); err != nil {
			return nil, err
		}
	}
	for _, rs := range step.Delete {
		err := client.Delete[*appsv1.ReplicaSet](ctx, r.term.Client, rs.Namespace, rs.Name, engine.DeleteOnlyUID(rs))
		if err != nil && !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("deleting old replica set %s/%s: %w", rs.Namespace, rs.Name, err)
		}
	}
	if step.Found != "" {
		return &Progress{Reason: reasonFound, Message: fmt.Sprintf("Found new replica set %q", step.Found)}, nil
	}
	return nil, nil
}

func (r *reconciler) createReplicaSet(ctx context.Context, d *appsv1.Deployment, want *appsv1.ReplicaSet) (
	*Progress, error,
) {
	start := r.term.Now()
	rs, err := client.Create(ctx, r.term.Client, want.DeepCopy())
	switch {
	case err == nil:
		r.sets.RecordWrite(rs)
		r.term.Record("replicaset created", rs, "replicaset", start, "of deployment "+d.Name)
		if n := specReplicas(rs); n > 0 {
			r.term.Events.Eventf(d, corev1.EventTypeNormal, "ScalingReplicaSet",
				"Scaled up replica set %s from 0 to %d", rs.Name, n)
		}
		return &Progress{Reason: reasonCreated, Message: fmt.Sprintf("Created new replica set %q", rs.Name)}, nil
	case apierrors.IsAlreadyExists(err):
		return nil, r.resolveNameCollision(ctx, d, want)
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) || ctx.Err() != nil:
		return nil, err
	}
	message := fmt.Sprintf("Failed to create new replica set %q: %v", want.Name, err)
	r.term.Events.Event(d, corev1.EventTypeWarning, reasonCreateFailed, message)
	return &Progress{Reason: reasonCreateFailed, Message: message, Failed: true},
		fmt.Errorf("creating replica set %s/%s: %w", want.Namespace, want.Name, err)
}

// resolveNameCollision handles the failure to create the ReplicaSet wanted because a ReplicaSet
// with the same name exists. If the existing ReplicaSet belongs to Deployment d and has the same
// template, the cache was stale, and a retry suffices. Otherwise the hashes of two templates
// collide. resolveNameCollision then increments the collision count of d, so that the next hash
// differs.
func (r *reconciler) resolveNameCollision(ctx context.Context, d *appsv1.Deployment, wanted *appsv1.ReplicaSet) error {
	rs, err := client.Get[*appsv1.ReplicaSet](ctx, r.term.Client, wanted.Namespace, wanted.Name)
	if err != nil {
		return fmt.Errorf("reading replica set %s/%s, whose name is taken: %w", wanted.Namespace, wanted.Name, err)
	}
	if metav1.IsControlledBy(rs, d) && sameTemplate(&rs.Spec.Template, &d.Spec.Template) {
		r.sets.RecordWrite(rs)
		return engine.RaceError("replica set %s/%s already exists", rs.Namespace, rs.Name)
	}
	next := d.DeepCopy()
	n := int32(1)
	if d.Status.CollisionCount != nil {
		n = *d.Status.CollisionCount + 1
	}
	next.Status.CollisionCount = &n
	next, err = client.UpdateStatus(ctx, r.term.Client, next)
	if err != nil {
		return fmt.Errorf("incrementing the collision count of deployment %s/%s: %w", d.Namespace, d.Name, err)
	}
	r.deployments.RecordWrite(next)
	return engine.RaceError("another object has the replica set name %s/%s", wanted.Namespace, wanted.Name)
}

func (r *reconciler) updateReplicaSet(ctx context.Context, d *appsv1.Deployment, u Update) error {
	rs, err := client.Update(ctx, r.term.Client, u.Set)
	if err != nil {
		return fmt.Errorf("updating replica set %s/%s: %w", u.Set.Namespace, u.Set.Name, err)
	}
	r.sets.RecordWrite(rs)
	switch n := specReplicas(rs); {
	case n > u.Was:
		r.term.Events.Eventf(d, corev1.EventTypeNormal, "ScalingReplicaSet", "Scaled up replica set %s from %d to %d",
			rs.Name, u.Was, n)
	case n < u.Was:
		r.term.Events.Eventf(d, corev1.EventTypeNormal, "ScalingReplicaSet", "Scaled down replica set %s from %d to %d",
			rs.Name, u.Was, n)
	}
	return nil
}

// writeDeploymentStatus writes the revision annotation and the status of Deployment d if they
// changed. It returns the delay after which d must be reconciled again, or 0. It must be called
// after the other writes of this reconcile. progress is the result of performStep.
func (r *reconciler) writeDeploymentStatus(
	ctx context.Context, d *appsv1.Deployment, step Step, progress *Progress,
) (time.Duration, error) {
	if step.Revision != 0 && revisionOf(d) != step.Revision {
		next := d.DeepCopy()
		next.Annotations = withEntry(next.Annotations, RevisionAnnotation, fmt.Sprint(step.Revision))
		next, err := client.Update(ctx, r.term.Client, next)
		if err != nil {
			return 0, fmt.Errorf("setting the revision of deployment %s/%s: %w", d.Namespace, d.Name, err)
		}
		r.deployments.RecordWrite(next)
		d = next
	}
	owned := r.sets.By(engine.ControllerIndex, string(d.UID))
	status, again := Status(d, owned, progress, r.term.Now())
	if equality.Semantic.DeepEqual(status, d.Status) {
		return again, nil
	}
	next := d.DeepCopy()
	next.Status = status
	if progress != nil {
		_, err := r.status.WriteNow(ctx, next)
		return again, err
	}
	_, wait, err := r.status.Write(ctx, next)
	return cmp.Or(wait, again), err
}
