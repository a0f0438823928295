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
	"keelson.dev/keelson/controlplane/controllers/engine"
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

// DeletionReason is the reason why a pod is deleted by force.
type DeletionReason string

// Reasons to delete a pod. Stays means that the pod is not deleted.
const (
	Stays        DeletionReason = ""
	Orphaned     DeletionReason = "PodGC: node no longer exists"
	Unscheduled  DeletionReason = "PodGC: deleted before it had a node"
	OutOfService DeletionReason = "PodGC: node is out of service"
)

// Judge returns why pod p is deleted, or Stays. node is nil if the node of p does not exist.
func Judge(p *corev1.Pod, node *corev1.Node) DeletionReason {
	switch {
	case p.Spec.NodeName == "" && p.DeletionTimestamp != nil:
		return Unscheduled
	case p.Spec.NodeName == "":
		return Stays
	case node == nil:
		return Orphaned
	case p.DeletionTimestamp != nil && api.IsOutOfService(node):
		return OutOfService
	}
	return Stays
}

// Surplus returns the terminated pods beyond limit, which must be deleted: evicted pods first, then
// the oldest pods.
func Surplus(pods []*corev1.Pod, limit int) []*corev1.Pod {
	var finished []*corev1.Pod
	for _, p := range pods {
		if api.IsPodTerminal(p) && p.DeletionTimestamp == nil {
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
func New(d engine.Deps, o Options) *engine.Descriptor {
	o.Finished = cmp.Or(o.Finished, 12500)
	o.Quarantine = cmp.Or(o.Quarantine, 40*time.Second)
	nodes := client.Informer[*corev1.Node](d.Informers)
	pods := client.Informer[*corev1.Pod](d.Informers)
	engine.Index(pods, engine.PodNodeIndex, engine.PodNodeKeys)
	missing := &absences{since: map[string]time.Time{}}
	return &engine.Descriptor{
		Name:    "pod-garbage-collector",
		Workers: 8,
		Watches: []engine.Watch{
			engine.OnInformer(pods, func(c engine.Change[*corev1.Pod]) []engine.Key { return ofPod(nodes, c) }),
			engine.OnInformer(nodes, func(c engine.Change[*corev1.Node]) []engine.Key {
				if c.Type != engine.Deleted {
					missing.removeAbsence(c.New.Name)
				}
				if c.Type == engine.Added || c.Type == engine.Updated && !api.IsOutOfService(c.New) {
					return nil
				}
				var keys []engine.Key
				for _, p := range engine.CachedBy[*corev1.Pod](pods, engine.PodNodeIndex, c.New.Name) {
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
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{
				term: t, options: o, nodes: nodes, informer: pods,
				pods:    engine.ViewOf[*corev1.Pod](t, pods),
				missing: missing,
			}
			missing.clearAbsences() // absences were not observed while another replica was leader
			return r.reconcilePodGC
		},
	}
}

func keyOf(p *corev1.Pod) engine.Key {
	return engine.Key{Kind: podKey, Namespace: p.Namespace, Name: p.Name}
}

func ofPod(nodes cache.SharedIndexInformer, c engine.Change[*corev1.Pod]) []engine.Key {
	if c.Type == engine.Deleted {
		return nil
	}
	var keys []engine.Key
	if api.IsPodTerminal(c.New) && (c.Old == nil || !api.IsPodTerminal(c.Old)) {
		keys = append(keys, engine.Key{Kind: finishedKey})
	}
	node, _ := engine.Cached[*corev1.Node](nodes, "", c.New.Spec.NodeName)
	if Judge(c.New, node) != Stays {
		keys = append(keys, keyOf(c.New))
	}
	return keys
}

// reconciler reconciles pods during one term of leadership. Every term has a new reconciler.
type reconciler struct {
	term     *engine.Term
	options  Options
	nodes    cache.SharedIndexInformer
	informer cache.SharedIndexInformer
	pods     *engine.View[*corev1.Pod]

	missing *absences
}

// absences records, for each Node that does not exist although a pod is bound to it, when this
// leader first observed that. The record is removed when the Node is observed: a Node that exists
// in between starts a new quarantine.
type absences struct {
	mu    sync.Mutex
	since map[string]time.Time
}

// maxAbsences is the maximum number of records in absences, because users can write any node name
// into a pod. When it is reached, records older than two quarantines are removed.
const maxAbsences = 10_000

// absentSince returns the time of its first call for a node that does not exist. The first call for
// such a node records the time now and returns it. If there are maxAbsences records, it removes
// records older than two quarantines.
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

func (r *reconciler) reconcilePodGC(ctx context.Context, key engine.Key) (time.Duration, error) {
	if key.Kind == finishedKey {
		return 0, r.deleteExcessTerminated(ctx)
	}
	p, ok := r.pods.Get(key.Namespace, key.Name)
	if !ok {
		return 0, nil
	}
	node, _ := engine.Cached[*corev1.Node](r.nodes, "", p.Spec.NodeName)
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
	if _, back := engine.Cached[*corev1.Node](r.nodes, "", node); back {
		// the Node was created after the caller had looked it up
		r.missing.removeAbsence(node)
		return 0, engine.RaceError("node %s has come back", node)
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
	return 0, engine.RaceError("node %s exists, but the cache was stale", node)
}

// forceDeletePod sets pod p to phase Failed and deletes it with grace period 0, because no agent
// will confirm that it has stopped.
func (r *reconciler) forceDeletePod(ctx context.Context, p *corev1.Pod, why DeletionReason) error {
	if !api.IsPodTerminal(p) {
		next := p.DeepCopy()
		next.Status.Phase = corev1.PodFailed
		if why != Unscheduled {
			next.Status.Conditions = append(next.Status.Conditions, corev1.PodCondition{
				Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: "DeletionByPodGC",
				Message: string(why), LastTransitionTime: metav1.NewTime(r.term.Now()),
				ObservedGeneration: p.Generation,
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
	o := engine.DeleteOnlyUID(p)
	now := int64(0)
	o.GracePeriodSeconds = &now
	if err := client.Delete[*corev1.Pod](ctx, r.term.Client, p.Namespace, p.Name, o); err != nil &&
		!apierrors.IsNotFound(err) {
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
	return engine.InParallel(ctx, len(surplus), func(ctx context.Context, i int) error {
		return r.deletePod(ctx, surplus[i], "finished")
	})
}
