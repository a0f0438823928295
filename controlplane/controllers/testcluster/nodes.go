package testcluster

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// AddNode adds a Node with condition Ready and zone "z". In a cluster without the node lifecycle
// controller, it removes the taint of new nodes, as that controller does.
func (w *Cluster) AddNode(name string) {
	w.T.Helper()
	zone := map[string]string{corev1.LabelTopologyZone: "z"}
	w.CreateObject(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: zone}})
	w.SetNodeReady(name, corev1.ConditionTrue)
	if !slices.ContainsFunc(w.Controllers, func(c *engine.Descriptor) bool { return c.Name == "node-controller" }) {
		Update(w, name, func(n *corev1.Node) { n.Spec.Taints = nil })
	}
}

// FakeNodes simulates the agents of all nodes: pods become ready, end and are deleted. If Placed is
// false, it also binds pods to nodes.
type FakeNodes struct {
	Mu          sync.Mutex
	Dead        map[string]bool // nodes with an agent that has stopped working
	Held        map[string]bool // values of label app of pods that do not become ready
	Placed      bool            // another component, such as the real scheduler, binds pods
	NextAddress atomic.Int64    // number from which the address of the next pod is computed
	Turns       int
	Turn        map[types.UID]int // number by which the node of an unbound pod is chosen, the same for each attempt
}

// Mark sets table[key], where table is Dead or Held, with Mu held.
func (f *FakeNodes) Mark(table map[string]bool, key string, v bool) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	table[key] = v
}

// IsMarked returns table[key], where table is Dead or Held.
func (f *FakeNodes) IsMarked(table map[string]bool, key string) bool {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	return table[key]
}

// chooseNode returns the name of one of the ready nodes for pod p. Pods are distributed over the
// nodes in turn. A repeated call for a pod returns the same node if ready has not changed.
func (f *FakeNodes) chooseNode(p *corev1.Pod, ready []*corev1.Node) string {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	if _, ok := f.Turn[p.UID]; !ok {
		f.Turns++
		f.Turn[p.UID] = f.Turns
	}
	return ready[f.Turn[p.UID]%len(ready)].Name
}

func (f *FakeNodes) newController(d engine.Deps) *engine.Descriptor {
	pods := client.Informer[*corev1.Pod](d.Informers)
	nodes := client.Informer[*corev1.Node](d.Informers)
	return &engine.Descriptor{
		Name: "fake-nodes", Workers: 16,
		Watches: []engine.Watch{engine.OnInformer(pods, engine.Self[*corev1.Pod])},
		Lead: func(t *engine.Term) engine.Reconcile {
			view := engine.ViewOf[*corev1.Pod](t, pods)
			return func(ctx context.Context, key engine.Key) (time.Duration, error) {
				p, ok := view.Get(key.Namespace, key.Name)
				if !ok || f.IsMarked(f.Dead, p.Spec.NodeName) {
					return 0, nil
				}
				return f.advancePod(ctx, t, view, nodes, p)
			}
		},
	}
}

// advancePod performs the next change of pod p: it binds p, sets its phase, makes it ready, or
// deletes it. It returns the delay after which it must be called again, or 0 if only a change of an
// object requires another call.
func (f *FakeNodes) advancePod(
	ctx context.Context, t *engine.Term, view *engine.View[*corev1.Pod], nodes cache.SharedIndexInformer, p *corev1.Pod,
) (time.Duration, error) {
	switch {
	case p.Spec.NodeName != "" && p.DeletionTimestamp != nil:
		o := engine.DeleteOnlyUID(p)
		now := int64(0)
		o.GracePeriodSeconds = &now
		if err := client.Delete[*corev1.Pod](ctx, t.Client, p.Namespace, p.Name, o); err != nil &&
			!apierrors.IsNotFound(err) {
			return 0, err
		}
	case p.DeletionTimestamp != nil:
	case p.Spec.NodeName == "" && f.Placed:
	case p.Spec.NodeName == "":
		var ready []*corev1.Node
		for _, n := range engine.CachedAll[*corev1.Node](nodes) {
			if c := api.NodeCondition(n, corev1.NodeReady); c != nil && c.Status == corev1.ConditionTrue &&
				len(n.Spec.Taints) == 0 {
				ready = append(ready, n)
			}
		}
		if len(ready) == 0 {
			return 20 * time.Millisecond, nil
		}
		slices.SortFunc(ready, func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
		name := f.chooseNode(p, ready)
		if only := pinnedTo(p); only != "" {
			name = only
		}
		b := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name},
			Target: corev1.ObjectReference{Kind: "Node", Name: name}}
		if _, err := client.Sub[*corev1.Pod](ctx, t.Client, p.Namespace, p.Name, "binding", b); err != nil &&
			!apierrors.IsNotFound(err) {
			return 0, err
		}
	case endsAs[p.Labels["ends"]] != "" && !api.IsPodTerminal(p):
		next := p.DeepCopy()
		next.Status.Phase = endsAs[p.Labels["ends"]]
		if _, err := client.UpdateStatus(ctx, t.Client, next); err != nil && !apierrors.IsNotFound(err) {
			return 0, err
		}
	case !api.IsPodReady(p) && !f.IsMarked(f.Held, p.Labels["app"]) && !api.IsPodTerminal(p):
		next := p.DeepCopy()
		n := f.NextAddress.Add(1)
		if next.Status.PodIP == "" {
			next.Status.PodIP = fmt.Sprintf("10.244.%d.%d", n/250%250, n%250+1)
			next.Status.PodIPs = []corev1.PodIP{{IP: next.Status.PodIP}}
		}
		next.Status.Phase = corev1.PodRunning
		next.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue,
			LastTransitionTime: metav1.Now()}}
		next, err := client.UpdateStatus(ctx, t.Client, next)
		if err != nil {
			if apierrors.IsNotFound(err) {
				return 0, nil
			}
			return 0, err
		}
		view.RecordWrite(next)
	}
	return 0, nil
}

// endsAs maps the value of a pod's label "ends" to the final phase of the pod. The pod gets the
// phase as soon as it is bound.
var endsAs = map[string]corev1.PodPhase{"well": corev1.PodSucceeded, "badly": corev1.PodFailed}

// pinnedTo returns the name of the only node that the required node affinity of pod p allows, or
// "".
func pinnedTo(p *corev1.Pod) string {
	a := p.Spec.Affinity
	if a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return ""
	}
	return a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchFields[0].Values[0]
}
