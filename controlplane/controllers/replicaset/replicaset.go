package replicaset

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
)

// New returns the ReplicaSet controller.
func New(d controllers.Deps) *controllers.Controller {
	sets := client.Informer[*appsv1.ReplicaSet](d.Informers)
	pods := client.Informer[*corev1.Pod](d.Informers)
	controllers.IndexControllers(sets)
	controllers.IndexControllers(pods)
	return &controllers.Controller{
		Name:    "replicaset-controller",
		Workers: 8,
		Watches: []controllers.Watch{
			controllers.OnInformer(sets, controllers.Self[*appsv1.ReplicaSet]),
			controllers.OnInformer(pods, func(c controllers.Change[*corev1.Pod]) []controllers.Key {
				return setsOf(sets, c)
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"apps"}, Resources: []string{"replicasets"}, Verbs: []string{"get", "list", "watch", "update"}},
			{APIGroups: []string{"apps"}, Resources: []string{"replicasets/status", "replicasets/finalizers"}, Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"create", "delete", "list", "patch", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *controllers.Term) controllers.Reconcile {
			r := &reconciler{
				term: t,
				sets: controllers.ViewOf[*appsv1.ReplicaSet](t, sets),
				pods: controllers.ViewOf[*corev1.Pod](t, pods),
			}
			r.refused.told = map[controllers.Key]round{}
			return r.reconcile
		},
	}
}

// setsOf maps a pod's change to the ReplicaSets concerned: its controller before
// and after, or when it has none those that would adopt it.
func setsOf(sets cache.SharedIndexInformer, c controllers.Change[*corev1.Pod]) []controllers.Key {
	var keys []controllers.Key
	add := func(p *corev1.Pod) bool {
		ref := metav1.GetControllerOfNoCopy(p)
		if ref == nil {
			return false
		}
		if ref.Kind == "ReplicaSet" {
			keys = append(keys, controllers.Key{Namespace: p.Namespace, Name: ref.Name})
		}
		return true
	}
	if c.Type == controllers.Updated && c.Old != nil && !metav1.IsControlledBy(c.New, ownerObject(c.Old)) {
		add(c.Old)
	}
	if add(c.New) || c.Type == controllers.Deleted || len(c.New.Labels) == 0 {
		return keys
	}
	for _, rs := range controllers.CachedBy[*appsv1.ReplicaSet](sets, controllers.NamespaceIndex, c.New.Namespace) {
		if sel, err := metav1.LabelSelectorAsSelector(rs.Spec.Selector); err == nil && !sel.Empty() && sel.Matches(labels.Set(c.New.Labels)) {
			keys = append(keys, controllers.KeyOf(rs))
		}
	}
	return keys
}

// ownerObject stands for a pod's controller where only its UID is asked.
func ownerObject(p *corev1.Pod) metav1.Object {
	o := &metav1.ObjectMeta{}
	if ref := metav1.GetControllerOfNoCopy(p); ref != nil {
		o.UID = ref.UID
	}
	return o
}

// reconciler is the thin shell of one leadership.
type reconciler struct {
	term *controllers.Term
	sets *controllers.View[*appsv1.ReplicaSet]
	pods *controllers.View[*corev1.Pod]

	refused rounds
}

func (r *reconciler) reconcile(ctx context.Context, key controllers.Key) (time.Duration, error) {
	rs, ok := r.sets.Get(key.Namespace, key.Name)
	if !ok {
		r.refused.forget(key)
		return 0, nil
	}
	selector, err := metav1.LabelSelectorAsSelector(rs.Spec.Selector)
	if err != nil || selector.Empty() {
		return 0, nil // validation refuses such a one; it must not claim the whole namespace
	}
	claims := controllers.SortClaims(rs, selector, r.candidates(rs))
	owned, err := controllers.Claim[*appsv1.ReplicaSet](ctx, r.term.Client, r.pods, rs, ownerRef(rs), claims)
	if err != nil {
		return 0, err
	}
	active := r.active(owned)
	var related map[string]int
	if len(active) > int(replicas(rs)) {
		related = r.related(rs)
	}
	plan := PlanScaling(rs, active, related, r.term.Now())
	refusals := controllers.CountRefusals(owned, r.term.Now())
	wanted := plan.Create
	var refusal error
	if wanted > 0 {
		refusal = r.tell(rs, key, refusals)
	}
	plan.Create = refusals.Allow(plan.Create)
	more, failure := r.scale(ctx, rs, plan, len(active))
	again, err := r.writeStatus(ctx, rs, cmp.Or(failure, refusal))
	switch {
	case more:
		again = goOn
	case wanted > plan.Create && (again == 0 || refusals.Wait < again):
		again = max(refusals.Wait, goOn)
	}
	return again, errors.Join(failure, err)
}

// rounds remembers of which round of refusals an owner has been told last.
type rounds struct {
	mu   sync.Mutex
	told map[controllers.Key]round
}

type round struct {
	number int
	at     int64
}

func (t *rounds) forget(key controllers.Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.told, key)
}

// isNew says whether key has not been told of the round yet.
func (t *rounds) isNew(key controllers.Key, r controllers.Refusals) bool {
	now := round{number: r.Rounds, at: r.Last.CreationTimestamp.Unix()}
	t.mu.Lock()
	defer t.mu.Unlock()
	was := t.told[key]
	t.told[key] = now
	return was != now
}

// tell says in an Event that nodes refuse the pods of rs, and returns the same as an error for its status.
func (r *reconciler) tell(rs *appsv1.ReplicaSet, key controllers.Key, refusals controllers.Refusals) error {
	if refusals.Rounds == 0 {
		r.refused.forget(key)
		return nil
	}
	p := refusals.Last
	err := fmt.Errorf("pod %s was refused by node %s: %s: %s", p.Name, p.Spec.NodeName, p.Status.Reason, p.Status.Message)
	if refusals.Wait > 0 && r.refused.isNew(key, refusals) {
		r.term.Events.Eventf(rs, corev1.EventTypeWarning, "BackOff", "Creating no pods for %v, attempt %d: %v",
			refusals.Wait.Round(time.Second), refusals.Rounds, err)
	}
	return err
}

// candidates are the pods that rs controls and those that nobody does.
func (r *reconciler) candidates(rs *appsv1.ReplicaSet) []*corev1.Pod {
	var out []*corev1.Pod
	for _, p := range r.pods.By(controllers.ControllerIndex, string(rs.UID), controllers.OrphansOf(rs.Namespace)) {
		if metav1.GetControllerOfNoCopy(p) != nil || !controllers.PodEnded(p) {
			out = append(out, p)
		}
	}
	return out
}

// active are the pods that count: neither ended nor going.
func (r *reconciler) active(pods []*corev1.Pod) []*corev1.Pod {
	var out []*corev1.Pod
	for _, p := range pods {
		if !controllers.PodEnded(p) && !r.pods.Going(p) {
			out = append(out, p)
		}
	}
	return out
}

// related counts active pods per node over all ReplicaSets with the same controller.
func (r *reconciler) related(rs *appsv1.ReplicaSet) map[string]int {
	uids := []string{string(rs.UID)}
	if ref := metav1.GetControllerOfNoCopy(rs); ref != nil {
		uids = uids[:0]
		for _, other := range r.sets.By(controllers.ControllerIndex, string(ref.UID)) {
			uids = append(uids, string(other.UID))
		}
	}
	count := map[string]int{}
	for _, p := range r.active(r.pods.By(controllers.ControllerIndex, uids...)) {
		count[p.Spec.NodeName]++
	}
	return count
}

// maxEvents is how many pods of one scaling are told about by an Event each. No
// more would be kept of one object anyway, and thousands cost as much as the pods.
const maxEvents = 25

// A scaling is interrupted after a while, so that the status shows how far it has come, and goes on after goOn.
const (
	maxScaling = time.Second
	goOn       = time.Millisecond
)

// scale performs a plan that was made with so many active pods. Before every batch it looks again at what is wanted.
// more says that it was interrupted.
func (r *reconciler) scale(ctx context.Context, rs *appsv1.ReplicaSet, plan Scaling, active int) (more bool, err error) {
	began := r.term.Now()
	wanted := func() int {
		now, ok := r.sets.Get(rs.Namespace, rs.Name)
		if !ok || now.UID != rs.UID || now.DeletionTimestamp != nil {
			return active
		}
		if r.term.Now().Sub(began) > maxScaling {
			more = true
			return active
		}
		return int(replicas(now))
	}
	if plan.Create > 0 {
		_, err := controllers.SlowStart(ctx, func() int { return min(plan.Create, wanted()-active) },
			func(ctx context.Context, i int) error { return r.create(ctx, rs, i < maxEvents) })
		if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return false, nil // no pod will ever be wanted again
		}
		return more, err
	}
	err = controllers.InBatches(ctx, func() int { return min(len(plan.Delete), active-wanted()) },
		func(ctx context.Context, i int) error { return r.delete(ctx, rs, plan.Delete[i], i < maxEvents) })
	return more, err
}

func (r *reconciler) create(ctx context.Context, rs *appsv1.ReplicaSet, tell bool) error {
	start := r.term.Now()
	pod, err := client.Create(ctx, r.term.Client, NewPod(rs))
	if err != nil {
		if !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) && ctx.Err() == nil {
			r.term.Events.Eventf(rs, corev1.EventTypeWarning, "FailedCreate", "Error creating: %v", err)
		}
		return fmt.Errorf("creating a pod of replica set %s/%s: %w", rs.Namespace, rs.Name, err)
	}
	r.pods.Wrote(pod)
	r.term.Record("pod created", pod, "pod", start, "of replicaset "+rs.Name)
	if tell {
		r.term.Events.Eventf(rs, corev1.EventTypeNormal, "SuccessfulCreate", "Created pod: %v", pod.Name)
	}
	return nil
}

func (r *reconciler) delete(ctx context.Context, rs *appsv1.ReplicaSet, pod *corev1.Pod, tell bool) error {
	r.pods.Deleting(pod)
	err := client.Delete[*corev1.Pod](ctx, r.term.Client, pod.Namespace, pod.Name, controllers.ByUID(pod))
	switch {
	case err == nil:
		if tell {
			r.term.Events.Eventf(rs, corev1.EventTypeNormal, "SuccessfulDelete", "Deleted pod: %v", pod.Name)
		}
		return nil
	case apierrors.IsNotFound(err):
		return nil // gone is what was wanted; the informer will say so
	}
	r.pods.Kept(pod)
	if ctx.Err() == nil && !apierrors.IsConflict(err) {
		r.term.Events.Eventf(rs, corev1.EventTypeWarning, "FailedDelete", "Error deleting: %v", err)
	}
	return fmt.Errorf("deleting pod %s/%s of replica set %s: %w", pod.Namespace, pod.Name, rs.Name, err)
}

// writeStatus writes the status when it changed, judged after this reconcile's own writes.
func (r *reconciler) writeStatus(ctx context.Context, rs *appsv1.ReplicaSet, failure error) (time.Duration, error) {
	owned := r.pods.By(controllers.ControllerIndex, string(rs.UID))
	status, again := Status(rs, r.active(owned), failure, r.term.Now())
	if statusEqual(status, rs.Status) {
		return again, nil
	}
	next := rs.DeepCopy()
	next.Status = status
	next, err := client.UpdateStatus(ctx, r.term.Client, next)
	switch {
	case apierrors.IsNotFound(err):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("updating the status of replica set %s/%s: %w", rs.Namespace, rs.Name, err)
	}
	r.sets.Wrote(next)
	return again, nil
}
