package job

import (
	"context"
	"errors"
	"fmt"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// orphan is the kind of the keys of pods that have a tracking finalizer although their Job was
// deleted. Only this controller removes that finalizer.
const orphan = "Pod"

// New returns the Job controller.
func New(d engine.Deps) *engine.Descriptor {
	jobs := client.Informer[*batchv1.Job](d.Informers)
	pods := client.Informer[*corev1.Pod](d.Informers)
	engine.IndexControllers(pods)
	owners := engine.OwnersOf[*batchv1.Job, *corev1.Pod](jobs, kind.GroupKind(), jobSelector)
	return &engine.Descriptor{
		Name:    "job-controller",
		Workers: 8,
		Watches: []engine.Watch{
			engine.OnInformer(jobs, func(c engine.Change[*batchv1.Job]) []engine.Key { return ofJob(pods, c) }),
			engine.OnInformer(pods, func(c engine.Change[*corev1.Pod]) []engine.Key {
				keys := owners(c)
				if c.Type != engine.Deleted && isTracked(c.New) && !hasJob(jobs, c.New) {
					keys = append(keys, orphanKey(c.New))
				}
				return keys
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"batch"}, Resources: []string{"jobs"},
				Verbs: []string{"delete", "get", "list", "update", "patch", "watch"}},
			{APIGroups: []string{"batch"}, Resources: []string{"jobs/status", "jobs/finalizers"},
				Verbs: []string{"update", "patch"}},
			{APIGroups: []string{"batch"}, Resources: []string{"cronjobs"}, Verbs: []string{"get"}},
			{APIGroups: []string{""}, Resources: []string{"pods"},
				Verbs: []string{"create", "delete", "get", "list", "patch", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, jobs: engine.ViewOf[*batchv1.Job](t, jobs), pods: engine.OwnedPodsOf(t, pods)}
			r.status = engine.NewStatusWriter(t, r.jobs, "job")
			return r.reconcileJob
		},
	}
}

func jobSelector(j *batchv1.Job) labels.Selector {
	if othersManage(j) {
		return nil
	}
	return engine.SelectorOf(j.Spec.Selector)
}

// othersManage reports whether spec.managedBy of Job j names another controller.
func othersManage(j *batchv1.Job) bool {
	return j.Spec.ManagedBy != nil && *j.Spec.ManagedBy != batchv1.JobControllerName
}

// ofJob returns the key of a changed Job. For a deleted Job it also returns the keys of the
// remaining pods, with kind orphan.
func ofJob(pods cache.SharedIndexInformer, c engine.Change[*batchv1.Job]) []engine.Key {
	keys := []engine.Key{engine.KeyOf(c.New)}
	if c.Type == engine.Deleted {
		for _, p := range engine.CachedBy[*corev1.Pod](pods, engine.ControllerIndex, string(c.New.UID)) {
			if isTracked(p) {
				keys = append(keys, orphanKey(p))
			}
		}
	}
	return keys
}

func orphanKey(p *corev1.Pod) engine.Key {
	return engine.Key{Kind: orphan, Namespace: p.Namespace, Name: p.Name}
}

// hasJob reports whether the Job that controls pod p is cached.
func hasJob(jobs cache.SharedIndexInformer, p *corev1.Pod) bool {
	ref := metav1.GetControllerOfNoCopy(p)
	if ref == nil || ref.Kind != kind.Kind || engine.GroupOf(ref) != kind.Group {
		return false
	}
	j, ok := engine.Cached[*batchv1.Job](jobs, p.Namespace, ref.Name)
	return ok && j.UID == ref.UID
}

// reconciler reconciles Jobs during one term of leadership. Every term has a new reconciler.
type reconciler struct {
	term *engine.Term
	jobs *engine.View[*batchv1.Job]
	pods *engine.OwnedPods

	status *engine.StatusWriter[*batchv1.Job]
}

func (r *reconciler) reconcileJob(ctx context.Context, key engine.Key) (time.Duration, error) {
	if key.Kind == orphan {
		return 0, r.freeOrphan(ctx, key)
	}
	j, ok := r.jobs.Get(key.Namespace, key.Name)
	if !ok || othersManage(j) {
		return 0, nil
	}
	selector := engine.SelectorOf(j.Spec.Selector)
	if selector == nil {
		return 0, nil
	}
	owned, err := engine.ApplyOwnership[*batchv1.Job](ctx, r.term.Client, r.pods.View, j, ownerRef(j),
		engine.SortByOwnership(j, selector, r.pods.Candidates(j)), batchv1.JobTrackingFinalizer)
	if err != nil {
		return 0, err
	}
	step := PlanJob(Snapshot{Job: j, Pods: owned, Going: r.pods.IsDeleting, Now: r.term.Now()})
	if step.Expired {
		return r.expireJob(ctx, j)
	}
	failure := r.movePods(ctx, j, &step)
	if engine.IsNamespaceTerminating(failure) {
		failure = nil // no pod can be created in a terminating namespace; existing pods are still counted
	}
	stored, wait, err := r.writeJobStatus(ctx, j, step)
	if err != nil || wait > 0 {
		return wait, errors.Join(failure, err)
	}
	// The condition must be stored before these pods are deleted, so that the next reconcile does
	// not replace them.
	failure = errors.Join(failure, r.endPods(ctx, j, step.End))
	for _, e := range step.Events {
		r.term.Events.Event(stored, e.Type, e.Reason, e.Message)
	}
	err = engine.InParallel(ctx, len(step.Release), func(ctx context.Context, i int) error {
		return r.removeFinalizer(ctx, step.Release[i])
	})
	if err == nil && len(step.Release) > 0 {
		return time.Millisecond, failure // the next reconcile replaces the UIDs of these pods by counts
	}
	return step.Again, errors.Join(failure, err)
}

// movePods creates and deletes the pods of step. It subtracts failed creations from the status.
func (r *reconciler) movePods(ctx context.Context, j *batchv1.Job, step *Step) error {
	var errs []error
	// Remove the finalizer first: excess pods must not count as failed.
	errs = append(errs, engine.InBatches(ctx, func() int {
		return len(step.Delete)
	}, func(ctx context.Context, i int) error {
		p := step.Delete[i]
		if err := r.removeFinalizer(ctx, p); err != nil {
			return err
		}
		return r.pods.Delete(ctx, j, p, i < engine.MaxEvents)
	}))
	made, err := engine.SlowStart(ctx, func() int {
		return r.remainingCreations(j, step)
	}, func(ctx context.Context, i int) error {
		_, err := r.pods.Create(ctx, j, newPod(j, step.Create[i]), i < engine.MaxEvents)
		return err
	})
	step.Status.Active -= int32(len(step.Create) - made)
	return errors.Join(append(errs, err)...)
}

// endPods deletes pods of a Job that is finishing. They are counted when they have ended.
func (r *reconciler) endPods(ctx context.Context, j *batchv1.Job, pods []*corev1.Pod) error {
	return engine.InBatches(ctx, func() int { return len(pods) }, func(ctx context.Context, i int) error {
		return r.pods.Delete(ctx, j, pods[i], i < engine.MaxEvents)
	})
}

// remainingCreations returns how many pods of step must still be created. It returns 0 if Job j has
// changed since step was planned.
func (r *reconciler) remainingCreations(j *batchv1.Job, step *Step) int {
	now, ok := r.jobs.Get(j.Namespace, j.Name)
	if !ok || now.UID != j.UID || now.Generation != j.Generation || now.DeletionTimestamp != nil {
		return 0
	}
	return len(step.Create)
}

// removeFinalizer removes from pod p the finalizer that keeps it until it is counted.
func (r *reconciler) removeFinalizer(ctx context.Context, p *corev1.Pod) error {
	if !isTracked(p) {
		return nil
	}
	patch := fmt.Sprintf(`{"metadata":{"uid":%q,"$deleteFromPrimitiveList/finalizers":[%q]}}`, p.UID,
		batchv1.JobTrackingFinalizer)
	next, err := client.Patch[*corev1.Pod](ctx, r.term.Client, p.Namespace, p.Name, "",
		types.StrategicMergePatchType, []byte(patch))
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("removing the finalizer of pod %s/%s: %w", p.Namespace, p.Name, err)
	}
	r.pods.RecordWrite(next)
	return nil
}

// freeOrphan removes the finalizer of a pod if the Job that controlled it no longer exists.
func (r *reconciler) freeOrphan(ctx context.Context, key engine.Key) error {
	p, ok := r.pods.Get(key.Namespace, key.Name)
	if !ok || !isTracked(p) {
		return nil
	}
	if ref := metav1.GetControllerOfNoCopy(p); ref != nil && ref.Kind == kind.Kind &&
		engine.GroupOf(ref) == kind.Group {
		// Read the Job from the API: if only the cache lacked it, the pod would never be counted.
		j, err := client.Get[*batchv1.Job](ctx, r.term.Client, p.Namespace, ref.Name)
		if err == nil && j.UID == ref.UID || err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return r.removeFinalizer(ctx, p)
}

// cronJobRetryDelay is the delay after which an expired Job is reconciled again because the status
// of its CronJob does not include the run yet.
const cronJobRetryDelay = time.Second

// expireJob deletes Job j after its TTL has passed. If a CronJob owns j, it waits until
// lastScheduleTime of the CronJob includes the run of j. Otherwise the CronJob would start that run
// again.
func (r *reconciler) expireJob(ctx context.Context, j *batchv1.Job) (again time.Duration, err error) {
	ref := metav1.GetControllerOfNoCopy(j)
	at, err := time.Parse(time.RFC3339, j.Annotations[batchv1.CronJobScheduledTimestampAnnotation])
	if err == nil && ref != nil && ref.Kind == "CronJob" && engine.GroupOf(ref) == kind.Group {
		c, err := client.Get[*batchv1.CronJob](ctx, r.term.Client, j.Namespace, ref.Name)
		switch {
		case err != nil && !apierrors.IsNotFound(err):
			return 0, fmt.Errorf("reading cron job %s/%s of job %s: %w", j.Namespace, ref.Name, j.Name, err)
		case err == nil && c.UID == ref.UID &&
			(c.Status.LastScheduleTime == nil || c.Status.LastScheduleTime.Time.Before(at)):
			return cronJobRetryDelay, nil
		}
	}
	return 0, r.deleteExpired(ctx, j)
}

func (r *reconciler) deleteExpired(ctx context.Context, j *batchv1.Job) error {
	o := engine.DeleteOnlyUID(j)
	policy := metav1.DeletePropagationForeground
	o.PropagationPolicy, o.Preconditions.ResourceVersion = &policy, &j.ResourceVersion
	if err := client.Delete[*batchv1.Job](ctx, r.term.Client, j.Namespace, j.Name, o); err != nil &&
		!apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting job %s/%s after its ttlSecondsAfterFinished: %w", j.Namespace, j.Name, err)
	}
	return nil
}

// writeJobStatus stores the status of step. If wait is not 0, nothing was stored because of the
// limit on status writes. The caller must then not perform the writes that require the stored
// status.
func (r *reconciler) writeJobStatus(ctx context.Context, j *batchv1.Job, step Step) (
	stored *batchv1.Job, wait time.Duration, err error,
) {
	if equality.Semantic.DeepEqual(step.Status, j.Status) {
		return j, 0, nil
	}
	next := j.DeepCopy()
	next.Status = step.Status
	return r.status.Write(ctx, next)
}
