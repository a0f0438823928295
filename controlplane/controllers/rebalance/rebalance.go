package rebalance

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// DefaultInterval is the minimum time between two evictions in the whole cluster.
const DefaultInterval = time.Minute

// maxReplacementWait is a number of intervals. It limits how long the controller waits for the
// replacement of an evicted pod. A pod is also not moved for that time after its eviction was
// refused.
const maxReplacementWait = 10

// Options configures the controller.
type Options struct {
	// Trial returns a new simulation of the scheduler on the current cluster state.
	Trial func() (Trial, error)
	// Interval is the minimum time between two evictions; 0 means DefaultInterval.
	Interval time.Duration
}

// workloadKind is a kind of workload, such as Deployment, with pods that may be moved.
type workloadKind struct {
	kind     string
	informer cache.SharedIndexInformer
	patch    func(ctx context.Context, c *client.Client, namespace, name string, patch []byte) error
}

func workloadOf[T api.Object](d engine.Deps, kind string) workloadKind {
	return workloadKind{kind: kind, informer: client.Informer[T](d.Informers),
		patch: func(ctx context.Context, c *client.Client, namespace, name string, patch []byte) error {
			_, err := client.Patch[T](ctx, c, namespace, name, "", types.MergePatchType, patch)
			return err
		}}
}

// isRebalanceEnabled reports whether workload o requests rebalancing. It returns false for a
// ReplicaSet of a Deployment.
func isRebalanceEnabled(o api.Object) bool {
	if o.GetAnnotations()[api.RebalanceAnnotation] != "true" || o.GetDeletionTimestamp() != nil {
		return false
	}
	_, isSet := o.(*appsv1.ReplicaSet)
	return !isSet || metav1.GetControllerOf(o) == nil
}

// all is the only key of the controller: it moves one pod at a time in the whole cluster.
var all = engine.Key{Name: "cluster"}

// New returns the rebalancing controller.
func New(d engine.Deps, o Options) *engine.Descriptor {
	r := &rebalancing{
		options: o,
		kinds: []workloadKind{
			workloadOf[*appsv1.Deployment](d, "Deployment"), workloadOf[*appsv1.ReplicaSet](d, "ReplicaSet"),
			workloadOf[*appsv1.StatefulSet](d, "StatefulSet"),
		},
		pods: client.Informer[*corev1.Pod](d.Informers), nodes: client.Informer[*corev1.Node](d.Informers),
		budgets: client.Informer[*policyv1.PodDisruptionBudget](d.Informers),
	}
	r.options.Interval = cmp.Or(o.Interval, DefaultInterval)
	engine.IndexControllers(r.pods)
	read := []string{"get", "list", "watch"}
	c := &engine.Descriptor{
		Name: "rebalance-controller", Workers: 1,
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"apps"}, Resources: []string{"deployments", "replicasets", "statefulsets"},
				Verbs: append([]string{"patch"}, read...)},
			{APIGroups: []string{""}, Resources: []string{"pods", "nodes"}, Verbs: read},
			{APIGroups: []string{""}, Resources: []string{"pods/eviction"}, Verbs: []string{"create"}},
			{APIGroups: []string{"policy"}, Resources: []string{"poddisruptionbudgets"}, Verbs: read},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: r.leadRebalancing,
	}
	for _, w := range r.kinds {
		c.Watches = append(c.Watches, engine.OnInformer(w.informer, func(c engine.Change[api.Object]) []engine.Key {
			if c.Type == engine.Deleted || !isRebalanceEnabled(c.New) ||
				c.Type == engine.Updated && isRebalanceEnabled(c.Old) {
				return nil // workloads that requested it before are evaluated at every interval
			}
			return []engine.Key{all}
		}))
	}
	return c
}

type rebalancing struct {
	options              Options
	kinds                []workloadKind
	pods, nodes, budgets cache.SharedIndexInformer
}

// rebalancer evaluates workloads and evicts pods during one term of leadership. Every term has a
// new rebalancer.
type rebalancer struct {
	*rebalancing
	term *engine.Term
	last time.Time               // time of the last eviction
	skip map[types.UID]time.Time // by UID: time until which a pod is not moved, because its eviction was refused
	from string                  // ID of the workload after which the next round starts
	turn int                     // number of rounds; it determines which pods of a large workload are evaluated
}

func (r *rebalancing) leadRebalancing(t *engine.Term) engine.Reconcile {
	one := &rebalancer{rebalancing: r, term: t, skip: map[types.UID]time.Time{}}
	return func(ctx context.Context, _ engine.Key) (time.Duration, error) { return one.reconcileRound(ctx) }
}

// candidateWorkload is a workload that requests rebalancing, with its pods.
type candidateWorkload struct {
	workloadKind
	object api.Object
	pods   []*corev1.Pod // pods of the workload, including terminating pods
	moved  time.Time     // time of the last move of one of its pods, from its annotation
}

func (a candidateWorkload) workloadID() string {
	return a.kind + "/" + a.object.GetNamespace() + "/" + a.object.GetName()
}

func (r *rebalancer) reconcileRound(ctx context.Context) (time.Duration, error) {
	list := r.eligibleWorkloads()
	if len(list) == 0 {
		return 0, nil
	}
	now, interval := r.term.Now(), r.options.Interval
	if wait := r.restTime(list, now); wait > 0 {
		return wait, nil
	}
	move, err := r.chooseMove(ctx, list, now)
	if err != nil {
		return 0, fmt.Errorf("choosing a pod to move: %w", err)
	}
	if move == nil {
		return interval, nil
	}
	return interval, r.performMove(ctx, *move)
}

// eligibleWorkloads returns the workloads that request rebalancing. The list starts after the
// workload that was evaluated last.
func (r *rebalancer) eligibleWorkloads() []candidateWorkload {
	var out []candidateWorkload
	for _, w := range r.kinds {
		for _, o := range engine.CachedAll[api.Object](w.informer) {
			if !isRebalanceEnabled(o) {
				continue
			}
			at, err := time.Parse(time.RFC3339, o.GetAnnotations()[api.RebalancedAnnotation])
			if err != nil {
				at = time.Time{} // the annotation is missing or invalid
			}
			out = append(out, candidateWorkload{w, o, r.podsOf(o), at})
		}
	}
	slices.SortFunc(out, func(a, b candidateWorkload) int { return cmp.Compare(a.workloadID(), b.workloadID()) })
	i, _ := slices.BinarySearchFunc(out, r.from, func(a candidateWorkload, id string) int {
		return cmp.Or(cmp.Compare(a.workloadID(), id), -1) // start after the workload with this ID
	})
	return append(out[i:len(out):len(out)], out[:i]...)
}

// podsOf returns the pods of workload o that are not terminal, sorted by name.
func (r *rebalancer) podsOf(o api.Object) (out []*corev1.Pod) {
	owners := []types.UID{o.GetUID()}
	if _, ok := o.(*appsv1.Deployment); ok {
		owners = nil
		for _, set := range engine.CachedBy[*appsv1.ReplicaSet](r.kinds[1].informer, engine.NamespaceIndex,
			o.GetNamespace()) {
			if metav1.IsControlledBy(set, o) {
				owners = append(owners, set.UID)
			}
		}
	}
	for _, uid := range owners {
		for _, p := range engine.CachedBy[*corev1.Pod](r.pods, engine.ControllerIndex, string(uid)) {
			if !api.IsPodTerminal(p) {
				out = append(out, p)
			}
		}
	}
	slices.SortFunc(out, func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// restTime returns how long no pod may be evicted. One interval must have passed since the last
// eviction, which a previous leader may have made, and the evicted pod must have been replaced. It
// waits for the replacement for at most maxReplacementWait intervals.
func (r *rebalancer) restTime(list []candidateWorkload, now time.Time) time.Duration {
	last := slices.MaxFunc(list, func(a, b candidateWorkload) int { return a.moved.Compare(b.moved) })
	interval, since := r.options.Interval, r.last
	if last.moved.After(since) && !last.moved.After(now) {
		since = last.moved
	}
	if left := since.Add(interval).Sub(now); left > 0 {
		return left
	}
	if !last.moved.IsZero() && now.Sub(last.moved) < maxReplacementWait*interval &&
		Unsettled(last.object, last.pods) != "" {
		return interval
	}
	return 0
}

// chooseMove returns the best move of a pod among the workloads that can lose a pod now, or nil. It
// evaluates about MaxEvaluated pods.
func (r *rebalancer) chooseMove(ctx context.Context, list []candidateWorkload, now time.Time) (*Move, error) {
	for uid, until := range r.skip {
		if !until.After(now) {
			delete(r.skip, uid)
		}
	}
	s := Surroundings{Now: now, Interval: r.options.Interval, Skip: r.skip,
		Budgets: engine.CachedAll[*policyv1.PodDisruptionBudget](r.budgets), Zone: r.nodeZone}
	r.turn++
	var able []Workload
	pods := 0
	for _, a := range list {
		if Unsettled(a.object, a.pods) != "" || !slices.ContainsFunc(a.pods, func(p *corev1.Pod) bool {
			return Unmovable(p, s) == ""
		}) {
			continue
		}
		able = append(able, Workload{a.kind, a.object, rotatePods(a.pods, r.turn*MaxEvaluated)})
		if pods += len(a.pods); pods >= MaxEvaluated {
			r.from = a.workloadID()
			break
		}
	}
	if len(able) == 0 {
		return nil, nil
	}
	t, err := r.options.Trial()
	if err != nil {
		return nil, err
	}
	return Choose(ctx, t, able, s)
}

// rotatePods returns pods rotated left by count elements if there are more than MaxEvaluated.
// Otherwise it returns pods.
func rotatePods(pods []*corev1.Pod, count int) []*corev1.Pod {
	if len(pods) <= MaxEvaluated {
		return pods
	}
	count %= len(pods)
	return slices.Concat(pods[count:], pods[:count])
}

func (r *rebalancer) nodeZone(node string) string {
	if n, ok := engine.Cached[*corev1.Node](r.nodes, "", node); ok {
		return n.Labels[corev1.LabelTopologyZone]
	}
	return ""
}

// performMove records move m in an annotation of the workload and then evicts the pod. The
// annotation preserves the interval when the leader changes. A crash between the two writes only
// delays the next move by one interval.
func (r *rebalancer) performMove(ctx context.Context, m Move) error {
	o := m.Workload.Object
	i := slices.IndexFunc(r.kinds, func(w workloadKind) bool { return w.kind == m.Workload.Kind })
	now := r.term.Now()
	r.last = now
	note, err := json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": o.GetResourceVersion(),
		"uid":         o.GetUID(),
		"annotations": map[string]string{api.RebalancedAnnotation: now.UTC().Format(time.RFC3339)}}})
	if err != nil {
		return fmt.Errorf("encoding the annotation of %s: %w", o.GetName(), err)
	}
	if err := r.kinds[i].patch(ctx, r.term.Client, o.GetNamespace(), o.GetName(), note); err != nil {
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			return engine.RaceError("%s %s: %w", m.Workload.Kind, o.GetName(), err)
		}
		return fmt.Errorf("recording the move of a pod in %s %s/%s: %w", m.Workload.Kind, o.GetNamespace(),
			o.GetName(), err)
	}
	p := m.Pod
	by := engine.DeleteOnlyUID(p)
	_, err = client.Sub[*corev1.Pod](ctx, r.term.Client, p.Namespace, p.Name, "eviction",
		&policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name}, DeleteOptions: &by})
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		return nil // the pod was deleted or replaced: the next round evaluates again
	case err != nil:
		r.skip[p.UID] = now.Add(maxReplacementWait * r.options.Interval)
		if apierrors.IsTooManyRequests(err) {
			return nil // another client used up the disruption budget
		}
		return fmt.Errorf("evicting pod %s/%s: %w", p.Namespace, p.Name, err)
	}
	r.term.Events.Eventf(p, corev1.EventTypeNormal, "Rebalanced",
		"is evicted from node %s so that its replacement can start on node %s: %s", p.Spec.NodeName, m.To, m.Why)
	r.term.Events.Eventf(o, corev1.EventTypeNormal, "Rebalanced",
		"pod %s is evicted from node %s so that its replacement can start on node %s: %s", p.Name,
		p.Spec.NodeName, m.To, m.Why)
	return nil
}
