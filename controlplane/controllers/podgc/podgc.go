// Package podgc deletes pods that no other component deletes. These are pods of nodes that no
// longer exist, pods that were deleted before they had a node, and pods on nodes with the taint
// out-of-service. It also deletes the oldest terminated pods beyond a limit.
package podgc

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
)

// Kinds of keys in the controller's queue: podKey is for one pod, and finishedKey for all
// terminated pods together.
const (
	podKey      = "pod"
	finishedKey = "finished"
)

// Options configures the pod garbage collector.
type Options struct {
	// Finished is the number of terminated pods that are kept; 0 means 12500.
	Finished int
	// Quarantine is how long a Node must not have existed before its pods are deleted; 0 means 40
	// s.
	Quarantine time.Duration
}

// Why is the reason why a pod is deleted by force.
type Why string

// Reasons to delete a pod. Stays means that the pod is not deleted.
const (
	Stays        Why = ""
	Orphaned     Why = "PodGC: node no longer exists"
	Unscheduled  Why = "PodGC: deleted before it had a node"
	OutOfService Why = "PodGC: node is out of service"
)

// Judge returns why pod p is deleted, or Stays. node is nil if the node of p does not exist.
func Judge(p *corev1.Pod, node *corev1.Node) Why {
	switch {
	case p.Spec.NodeName == "" && p.DeletionTimestamp != nil:
		return Unscheduled
	case p.Spec.NodeName == "":
		return Stays
	case node == nil:
		return Orphaned
	case p.DeletionTimestamp != nil && api.OutOfService(node):
		return OutOfService
	}
	return Stays
}

// Surplus returns the terminated pods beyond limit, which must be deleted: evicted pods first, then
// the oldest pods.
func Surplus(pods []*corev1.Pod, limit int) []*corev1.Pod {
	var finished []*corev1.Pod
	for _, p := range pods {
		if controllers.IsPodTerminal(p) && p.DeletionTimestamp == nil {
			finished = append(finished, p)
		}
	}
	if len(finished) <= limit {
		return nil
	}
	evicted := func(p *corev1.Pod) int {
		if p.Status.Reason == "Evicted" {
			return 0
		}
		return 1
	}
	slices.SortFunc(finished, func(a, b *corev1.Pod) int {
		return cmp.Or(cmp.Compare(evicted(a), evicted(b)),
			a.CreationTimestamp.Time.Compare(b.CreationTimestamp.Time), cmp.Compare(a.UID, b.UID))
	})
	return finished[:len(finished)-limit]
}

// New returns the pod garbage collector.
func New(d controllers.Deps, o Options) *controllers.Controller {
	o.Finished = cmp.Or(o.Finished, 12500)
	o.Quarantine = cmp.Or(o.Quarantine, 40*time.Second)
	nodes := client.Informer[*corev1.Node](d.Informers)
	pods := client.Informer[*corev1.Pod](d.Informers)
	controllers.Index(pods, controllers.PodNodeIndex, controllers.PodNodeKeys)
	missing := &absences{since: map[string]time.Time{}}
	return &controllers.Controller{
		Name:    "pod-garbage-collector",
		Workers: 8,
		Watches: []controllers.Watch{
			controllers.OnInformer(pods, func(c controllers.Change[*corev1.Pod]) []controllers.Key { return ofPod(nodes, c) }),
			controllers.OnInformer(nodes, func(c controllers.Change[*corev1.Node]) []controllers.Key {
				if c.Type != controllers.Deleted {
					missing.removeAbsence(c.New.Name)
				}
				if c.Type == controllers.Added || c.Type == controllers.Updated && !api.OutOfService(c.New) {
					return nil
				}
				var keys []controllers.Key
				for _, p := range controllers.CachedBy[*corev1.Pod](pods, controllers.PodNodeIndex, c.New.Name) {
					keys = append(keys, keyOf(p))
				}
				return keys
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"delete", "get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"pods/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *controllers.Term) controllers.Reconcile {
			r := &reconciler{
				term: t, options: o, nodes: nodes, informer: pods,
				pods:    controllers.ViewOf[*corev1.Pod](t, pods),
				missing: missing,
			}
			missing.clearAbsences() // absences were not observed while another replica was leader
			return r.reconcilePodGC
		},
	}
}

func keyOf(p *corev1.Pod) controllers.Key {
	return controllers.Key{Kind: podKey, Namespace: p.Namespace, Name: p.Name}
}

func ofPod(nodes cache.SharedIndexInformer, c controllers.Change[*corev1.Pod]) []controllers.Key {
	if c.Type == controllers.Deleted {
		return nil
	}
	var keys []controllers.Key
	if controllers.IsPodTerminal(c.New) && (c.Old == nil || !controllers.IsPodTerminal(c.Old)) {
		keys = append(keys, controllers.Key{Kind: finishedKey})
	}
	node, _ := controllers.Cached[*corev1.Node](nodes, "", c.New.Spec.NodeName)
	if Judge(c.New, node) != Stays {
		keys = append(keys, keyOf(c.New))
	}
	return keys
}

// reconciler reconciles pods during one term of leadership. Every term has a new reconciler.
type reconciler struct {
	term     *controllers.Term
	options  Options
	nodes    cache.SharedIndexInformer
	informer cache.SharedIndexInformer
	pods     *controllers.View[*corev1.Pod]

	missing *absences
}

// absences records since when this leader has observed that the Node of a pod does not exist. The
// record is removed when the Node is observed: a Node that exists in between starts a new
// quarantine.
type absences struct {
	mu    sync.Mutex
	since map[string]time.Time
}

// maxAbsences is the maximum number of records in absences, because users can write any node name
// into a pod. When it is reached, records older than two quarantines are removed.
const maxAbsences = 10_000

// absentSince returns the time at which it was first called for a node that does not exist; at the
// first call this is now. If there are maxAbsences records, it removes records older than two
// quarantines.
func (a *absences) absentSince(node string, now time.Time, quarantine time.Duration) time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	if since, ok := a.since[node]; ok {
		return since
	}
	if len(a.since) >= maxAbsences {
		maps.DeleteFunc(a.since, func(_ string, since time.Time) bool { return now.Sub(since) > 2*quarantine })
	}
	a.since[node] = now
	return now
}

func (a *absences) removeAbsence(node string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.since, node)
}

func (a *absences) clearAbsences() {
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.since)
}

func (r *reconciler) reconcilePodGC(ctx context.Context, key controllers.Key) (time.Duration, error) {
	if key.Kind == finishedKey {
		return 0, r.deleteExcessTerminated(ctx)
	}
	p, ok := r.pods.Get(key.Namespace, key.Name)
	if !ok {
		return 0, nil
	}
	node, _ := controllers.Cached[*corev1.Node](r.nodes, "", p.Spec.NodeName)
	why := Judge(p, node)
	if why == Orphaned {
		left, err := r.remainingQuarantine(ctx, p.Spec.NodeName)
		if left > 0 || err != nil {
			return left, err
		}
	} else if node != nil {
		r.missing.removeAbsence(node.Name)
	}
	if why == Stays {
		return 0, nil
	}
	return 0, r.forceDeletePod(ctx, p, why)
}

// remainingQuarantine returns how long the pods of a Node that is not cached must still be kept. It
// returns
// 0 only after it has confirmed with the API that the Node does not exist.
func (r *reconciler) remainingQuarantine(ctx context.Context, node string) (time.Duration, error) {
	now := r.term.Now()
	since := r.missing.absentSince(node, now, r.options.Quarantine)
	if _, back := controllers.Cached[*corev1.Node](r.nodes, "", node); back { // the Node was created after the caller had looked it up
		r.missing.removeAbsence(node)
		return 0, controllers.RaceError("node %s has come back", node)
	}
	if left := r.options.Quarantine - now.Sub(since); left > 0 {
		return left, nil
	}
	_, err := client.Get[*corev1.Node](ctx, r.term.Client, "", node)
	switch {
	case apierrors.IsNotFound(err):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("reading node %s: %w", node, err)
	}
	r.missing.removeAbsence(node)
	return 0, controllers.RaceError("node %s exists, but the cache was stale", node)
}

// forceDeletePod sets pod p to phase Failed and deletes it with grace period 0, because no agent
// will confirm that it has stopped.
func (r *reconciler) forceDeletePod(ctx context.Context, p *corev1.Pod, why Why) error {
	if !controllers.IsPodTerminal(p) {
		next := p.DeepCopy()
		next.Status.Phase = corev1.PodFailed
		if why != Unscheduled {
			next.Status.Conditions = append(next.Status.Conditions, corev1.PodCondition{
				Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: "DeletionByPodGC",
				Message: string(why), LastTransitionTime: metav1.NewTime(r.term.Now()), ObservedGeneration: p.Generation,
			})
		}
		next, err := client.UpdateStatus(ctx, r.term.Client, next)
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("marking pod %s/%s as failed: %w", p.Namespace, p.Name, err)
		}
		r.pods.RecordWrite(next)
	}
	return r.deletePod(ctx, p, string(why))
}

func (r *reconciler) deletePod(ctx context.Context, p *corev1.Pod, why string) error {
	o := controllers.DeleteOnlyUID(p)
	now := int64(0)
	o.GracePeriodSeconds = &now
	if err := client.Delete[*corev1.Pod](ctx, r.term.Client, p.Namespace, p.Name, o); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("removing pod %s/%s (%s): %w", p.Namespace, p.Name, why, err)
	}
	return nil
}

// deleteExcessTerminated deletes the pods that Surplus returns.
func (r *reconciler) deleteExcessTerminated(ctx context.Context) error {
	if len(r.informer.GetIndexer().ListKeys()) <= r.options.Finished {
		return nil
	}
	surplus := Surplus(r.pods.All(), r.options.Finished)
	return controllers.InParallel(ctx, len(surplus), func(ctx context.Context, i int) error {
		return r.deletePod(ctx, surplus[i], "finished")
	})
}
