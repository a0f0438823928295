package cronjob

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// New returns the CronJob controller.
func New(d engine.Deps) *engine.Descriptor {
	crons := client.Informer[*batchv1.CronJob](d.Informers)
	jobs := client.Informer[*batchv1.Job](d.Informers)
	engine.IndexControllers(jobs)
	none := func(*batchv1.CronJob) labels.Selector { return nil } // a CronJob adopts no jobs
	return &engine.Descriptor{
		Name:    "cronjob-controller",
		Workers: 5,
		Watches: []engine.Watch{
			engine.OnInformer(crons, engine.Self[*batchv1.CronJob]),
			engine.OnInformer(jobs, engine.OwnersOf[*batchv1.CronJob, *batchv1.Job](crons, kind.GroupKind(), none)),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"batch"}, Resources: []string{"cronjobs"},
				Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{"batch"}, Resources: []string{"jobs"},
				Verbs: []string{"create", "delete", "get", "list", "patch", "update", "watch"}},
			{APIGroups: []string{"batch"}, Resources: []string{"cronjobs/status", "cronjobs/finalizers"},
				Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, crons: engine.ViewOf[*batchv1.CronJob](t, crons),
				jobs: engine.ViewOf[*batchv1.Job](t, jobs)}
			r.status = engine.NewStatusWriter(t, r.crons, "cron job")
			return r.reconcileCronJob
		},
	}
}

// reconciler reconciles CronJobs during one term of leadership. Every term has a new reconciler.
type reconciler struct {
	term   *engine.Term
	crons  *engine.View[*batchv1.CronJob]
	jobs   *engine.View[*batchv1.Job]
	status *engine.StatusWriter[*batchv1.CronJob]

	mu         sync.Mutex
	lastEvents map[engine.Key]map[Event]bool
}

func (r *reconciler) reconcileCronJob(ctx context.Context, key engine.Key) (time.Duration, error) {
	c, ok := r.crons.Get(key.Namespace, key.Name)
	if !ok {
		r.recordNewEvents(key, nil, nil)
		return 0, nil
	}
	s := Snapshot{CronJob: c, Jobs: r.ownedJobs(c), Going: r.jobs.IsDeleting, Now: r.term.Now(), Local: time.Local}
	step := PlanCronJob(s)
	r.recordNewEvents(key, c, step.Events)
	ran, failure := r.performStep(ctx, c, step)
	if engine.IsNamespaceTerminating(failure) {
		return 0, nil // no object is needed in a terminating namespace
	}
	s.Jobs = r.ownedJobs(c)
	wait, err := r.writeCronJobStatus(ctx, s, ran)
	if err != nil || wait > 0 {
		return wait, errors.Join(failure, err)
	}
	// Only jobs that the status includes may be deleted.
	for _, j := range Past(s) {
		failure = errors.Join(failure, r.deleteJob(ctx, c, j))
	}
	return step.Again, failure
}

func (r *reconciler) ownedJobs(c *batchv1.CronJob) []*batchv1.Job {
	return r.jobs.By(engine.ControllerIndex, string(c.UID))
}

// performStep deletes the jobs that a step replaces, and then creates the job of the step. ran is
// the scheduled time for which a job exists now, or nil.
func (r *reconciler) performStep(ctx context.Context, c *batchv1.CronJob, step Step) (ran *time.Time, err error) {
	if step.Run == nil {
		return nil, nil
	}
	for _, j := range step.Replace {
		if err := r.deleteJob(ctx, c, j); err != nil {
			return nil, err
		}
	}
	want := newJob(c, *step.Run)
	start := r.term.Now()
	made, err := client.Create(ctx, r.term.Client, want)
	switch {
	case apierrors.IsAlreadyExists(err):
		return r.resolveNameCollision(ctx, c, want, step.Run)
	case err != nil:
		if !engine.IsNamespaceTerminating(err) && ctx.Err() == nil {
			r.term.Events.Eventf(c, corev1.EventTypeWarning, "FailedCreate", "Error creating job: %v", err)
		}
		return nil, fmt.Errorf("creating job %s/%s of cron job %s: %w", want.Namespace, want.Name, c.Name, err)
	}
	r.jobs.RecordWrite(made)
	r.term.Record("job created", made, "job", start, "of cron job "+c.Name)
	r.term.Events.Eventf(c, corev1.EventTypeNormal, "SuccessfulCreate", "Created job %v", made.Name)
	return step.Run, nil
}

// resolveNameCollision handles the failure to create a job because a job with the same name exists.
// If CronJob c created the existing job, it is the job for scheduledAt, and scheduledAt is
// returned. Any other job prevents the run, which is recorded as an event.
func (r *reconciler) resolveNameCollision(
	ctx context.Context, c *batchv1.CronJob, want *batchv1.Job, scheduledAt *time.Time,
) (*time.Time, error) {
	existing, err := client.Get[*batchv1.Job](ctx, r.term.Client, want.Namespace, want.Name)
	if err != nil {
		return nil, fmt.Errorf("reading job %s/%s, whose name is taken: %w", want.Namespace, want.Name, err)
	}
	if metav1.IsControlledBy(existing, c) {
		r.jobs.RecordWrite(existing)
		return scheduledAt, nil
	}
	err = fmt.Errorf("job %s exists and does not belong to this cron job: delete or rename it", want.Name)
	r.term.Events.Eventf(c, corev1.EventTypeWarning, "FailedCreate", "Error creating job: %v", err)
	return nil, engine.RaceError("cron job %s/%s: %w", c.Namespace, c.Name, err)
}

func (r *reconciler) deleteJob(ctx context.Context, c *batchv1.CronJob, j *batchv1.Job) error {
	o, background := engine.DeleteOnlyUID(j), metav1.DeletePropagationBackground
	o.PropagationPolicy = &background
	r.jobs.MarkDeleting(j)
	err := client.Delete[*batchv1.Job](ctx, r.term.Client, j.Namespace, j.Name, o)
	switch {
	case err == nil:
		r.term.Events.Eventf(c, corev1.EventTypeNormal, "SuccessfulDelete", "Deleted job %v", j.Name)
		return nil
	case apierrors.IsNotFound(err):
		return nil
	}
	r.jobs.UnmarkDeleting(j)
	if ctx.Err() == nil {
		r.term.Events.Eventf(c, corev1.EventTypeWarning, "FailedDelete", "Deleted job: %v", err)
	}
	return fmt.Errorf("deleting job %s/%s of cron job %s: %w", j.Namespace, j.Name, c.Name, err)
}

// writeCronJobStatus writes the status of the CronJob if it changed. If wait is not 0, the last
// write was too recent and nothing was written: the CronJob must be reconciled again after wait. It
// must be called after the other writes of this reconcile, because the status includes their
// results. ran is the result of performStep.
func (r *reconciler) writeCronJobStatus(ctx context.Context, s Snapshot, ran *time.Time) (
	wait time.Duration, err error,
) {
	status, events := Status(s, ran)
	if equality.Semantic.DeepEqual(status, s.CronJob.Status) {
		return 0, nil
	}
	next := s.CronJob.DeepCopy()
	next.Status = status
	if ran != nil {
		_, err = r.status.WriteNow(ctx, next)
	} else {
		_, wait, err = r.status.Write(ctx, next)
	}
	if err == nil && wait == 0 {
		for _, e := range events {
			r.term.Events.Event(s.CronJob, e.Type, e.Reason, e.Message)
		}
	}
	return wait, err
}

// recordNewEvents records those events of CronJob c that were not passed in the last call for key.
// If c is nil, the CronJob was deleted and its record is removed.
func (r *reconciler) recordNewEvents(key engine.Key, c *batchv1.CronJob, events []Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.lastEvents[key]
	delete(r.lastEvents, key)
	if len(events) == 0 {
		return
	}
	if r.lastEvents == nil {
		r.lastEvents = map[engine.Key]map[Event]bool{}
	}
	now := map[Event]bool{}
	for _, e := range events {
		now[e] = true
		if !before[e] {
			r.term.Events.Event(c, e.Type, e.Reason, e.Message)
		}
	}
	r.lastEvents[key] = now
}
