package nodelifecycle

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Kinds of keys in the controller's queue: nodes and pods.
const (
	nodeKey = "node"
	podKey  = "pod"
)

var eviction = engine.Eviction{Reason: "DeletionByTaintManager",
	Message: "Taint manager: deleting due to NoExecute taint", Event: "TaintManagerEviction"}

// New returns the node lifecycle controller. It acts on condition Ready of nodes. The node gateway,
// the server to which agents connect, sets that condition to Unknown when the session of an agent
// is lost.
func New(d engine.Deps) *engine.Descriptor {
	nodes := client.Informer[*corev1.Node](d.Informers)
	pods := client.Informer[*corev1.Pod](d.Informers)
	engine.Index(pods, engine.PodNodeIndex, engine.PodNodeKeys)
	changed := &atomic.Bool{} // a node has changed since the zones were updated
	return &engine.Descriptor{
		Name:    "node-controller",
		Workers: 16,
		Watches: []engine.Watch{
			engine.OnInformer(nodes, func(c engine.Change[*corev1.Node]) []engine.Key {
				changed.Store(true)
				return ofNode(pods, c)
			}),
			engine.OnInformer(pods, func(c engine.Change[*corev1.Pod]) []engine.Key { return ofPod(nodes, c) }),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"pods/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"delete", "get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{
				term: t, nodes: nodes, changed: changed, limiter: NewEvictionLimiter(),
				nodeView: engine.ViewOf[*corev1.Node](t, nodes),
				pods:     engine.ViewOf[*corev1.Pod](t, pods),
			}
			return r.reconcileKey
		},
	}
}

// ofNode returns the keys to reconcile when a node changes: the node and, if its taints or its
// readiness changed, its pods.
func ofNode(pods cache.SharedIndexInformer, c engine.Change[*corev1.Node]) []engine.Key {
	if c.Type == engine.Deleted {
		return nil
	}
	keys := []engine.Key{{Kind: nodeKey, Name: c.New.Name}}
	if c.Type == engine.Updated && c.Old != nil && sameTaints(c.Old.Spec.Taints, c.New.Spec.Taints) &&
		readyStatus(c.Old) == readyStatus(c.New) {
		return keys
	}
	if c.Type == engine.Added && !hasTrouble(c.New) {
		return keys
	}
	for _, p := range engine.CachedBy[*corev1.Pod](pods, engine.PodNodeIndex, c.New.Name) {
		keys = append(keys, engine.Key{Kind: podKey, Namespace: p.Namespace, Name: p.Name})
	}
	return keys
}

// ofPod returns the key of a changed pod if its node is not ready or has a NoExecute taint.
func ofPod(nodes cache.SharedIndexInformer, c engine.Change[*corev1.Pod]) []engine.Key {
	if c.Type == engine.Deleted || c.New.Spec.NodeName == "" {
		return nil
	}
	if n, ok := engine.Cached[*corev1.Node](nodes, "", c.New.Spec.NodeName); !ok || !hasTrouble(n) {
		return nil
	}
	return []engine.Key{{Kind: podKey, Namespace: c.New.Namespace, Name: c.New.Name}}
}

// hasTrouble reports whether node n is not ready or has a NoExecute taint. Its pods may then have
// to be marked as not ready or evicted.
func hasTrouble(n *corev1.Node) bool {
	if readyStatus(n) != corev1.ConditionTrue {
		return true
	}
	for _, t := range n.Spec.Taints {
		if t.Effect == corev1.TaintEffectNoExecute {
			return true
		}
	}
	return false
}

// reconciler reconciles nodes and pods during one term of leadership. Every term has a new
// reconciler.
type reconciler struct {
	term     *engine.Term
	nodes    cache.SharedIndexInformer
	changed  *atomic.Bool
	limiter  *EvictionLimiter
	nodeView *engine.View[*corev1.Node]
	pods     *engine.View[*corev1.Pod]

	mu           sync.Mutex
	zonesUpdated time.Time // time at which the state of the zones was last updated
}

// zoneUpdatePeriod is the interval at which the EvictionLimiter counts the ready and lost nodes of
// each zone if no node has changed.
const zoneUpdatePeriod = 5 * time.Second

// updateZones passes all nodes to the EvictionLimiter, which then updates the eviction rate of each
// zone. It does nothing if no node has changed since the last update, unless that update is older
// than zoneUpdatePeriod.
func (r *reconciler) updateZones(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.changed.Swap(false) || now.Sub(r.zonesUpdated) >= zoneUpdatePeriod {
		r.zonesUpdated = now
		r.limiter.UpdateZones(engine.CachedAll[*corev1.Node](r.nodes), now)
	}
}

func (r *reconciler) reconcileKey(ctx context.Context, key engine.Key) (time.Duration, error) {
	if key.Kind == nodeKey {
		return 0, r.reconcileNode(ctx, key.Name)
	}
	r.updateZones(r.term.Now()) // the zones are needed only for the eviction of pods
	return r.reconcilePod(ctx, key)
}

// reconcileNode sets and removes taints of a node according to its conditions.
func (r *reconciler) reconcileNode(ctx context.Context, name string) error {
	n, ok := r.nodeView.Get("", name)
	if !ok || n.DeletionTimestamp != nil {
		return nil
	}
	want := Taints(n, r.term.Now())
	if sameTaints(want, n.Spec.Taints) {
		return nil
	}
	next := n.DeepCopy()
	next.Spec.Taints = want
	next, err := client.Update(ctx, r.term.Client, next)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("tainting node %s: %w", name, err)
	}
	r.nodeView.RecordWrite(next)
	if was, is := readyTaint(n.Spec.Taints), readyTaint(want); was != is {
		r.term.Events.Eventf(n, corev1.EventTypeNormal, "Node"+reasonOf(is), "Node %s status is now: Node%s",
			name, reasonOf(is))
	}
	return nil
}

func readyTaint(taints []corev1.Taint) string {
	for _, t := range taints {
		if t.Key == corev1.TaintNodeNotReady || t.Key == corev1.TaintNodeUnreachable {
			return t.Key
		}
	}
	return ""
}

func reasonOf(taint string) string {
	if taint == "" {
		return "Ready"
	}
	return "NotReady"
}

// reconcilePod marks a pod as not ready if its node is not ready, so that Services do not route to
// the pod. It evicts the pod when its toleration time has passed. It returns the delay until the
// next check.
func (r *reconciler) reconcilePod(ctx context.Context, key engine.Key) (time.Duration, error) {
	p, ok := r.pods.Get(key.Namespace, key.Name)
	if !ok || p.Spec.NodeName == "" || api.IsPodTerminal(p) {
		return 0, nil
	}
	n, ok := engine.Cached[*corev1.Node](r.nodes, "", p.Spec.NodeName)
	if !ok {
		return 0, nil // controller podgc deletes the pods of deleted nodes
	}
	now := r.term.Now()
	if readyStatus(n) != corev1.ConditionTrue && api.NodeCondition(n, corev1.NodeReady) != nil {
		if status, changed := NotReady(p, now); changed {
			next := p.DeepCopy()
			next.Status = status
			next, err := client.UpdateStatus(ctx, r.term.Client, next)
			if apierrors.IsNotFound(err) {
				return 0, nil
			}
			if err != nil {
				return 0, fmt.Errorf("marking pod %s/%s of node %s as not ready: %w", p.Namespace, p.Name, n.Name, err)
			}
			r.pods.RecordWrite(next)
			p = next
		}
	}
	if r.pods.IsDeleting(p) {
		return 0, nil
	}
	// Use the computed taints: a node that is ready again may still have the taints of a lost node.
	at, evict := Eviction(p, Taints(n, now), r.limiter.Since(n))
	switch {
	case !evict:
		return 0, nil
	case now.Before(at):
		return at.Sub(now), nil
	}
	if readyStatus(n) != corev1.ConditionTrue {
		if ok, again := r.limiter.Admit(n, now); !ok {
			return again, nil
		}
	}
	return 0, eviction.Evict(ctx, r.term, r.pods, p)
}
