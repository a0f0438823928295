package controllers_test

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

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
)

// fakeNodes bind, start and stop pods as scheduler and agents would.
type fakeNodes struct {
	mu     sync.Mutex
	dead   map[string]bool // nodes on which nothing happens any more
	held   map[string]bool // apps whose pods do not become ready
	placed bool            // another component binds pods
	next   atomic.Int64    // address
	turns  int
	turn   map[types.UID]int // of pods that are to be bound, the same at each try
}

func (f *fakeNodes) set(table map[string]bool, key string, v bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	table[key] = v
}

func (f *fakeNodes) get(table map[string]bool, key string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return table[key]
}

// choose has pods take turns at the nodes. A binding that is tried again counts once: nodes get the same number.
func (f *fakeNodes) choose(p *corev1.Pod, ready []*corev1.Node) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.turn[p.UID]; !ok {
		f.turns++
		f.turn[p.UID] = f.turns
	}
	return ready[f.turn[p.UID]%len(ready)].Name
}

func (f *fakeNodes) controller(d controllers.Deps) *controllers.Controller {
	pods := client.Informer[*corev1.Pod](d.Informers)
	nodes := client.Informer[*corev1.Node](d.Informers)
	return &controllers.Controller{
		Name: "fake-nodes", Workers: 16,
		Watches: []controllers.Watch{controllers.OnInformer(pods, controllers.Self[*corev1.Pod])},
		Lead: func(t *controllers.Term) controllers.Reconcile {
			view := controllers.ViewOf[*corev1.Pod](t, pods)
			return func(ctx context.Context, key controllers.Key) (time.Duration, error) {
				p, ok := view.Get(key.Namespace, key.Name)
				if !ok || f.get(f.dead, p.Spec.NodeName) {
					return 0, nil
				}
				return f.step(ctx, t, view, nodes, p)
			}
		},
	}
}

// step moves one pod on.
func (f *fakeNodes) step(ctx context.Context, t *controllers.Term, view *controllers.View[*corev1.Pod], nodes cache.SharedIndexInformer, p *corev1.Pod) (time.Duration, error) {
	switch {
	case p.Spec.NodeName != "" && p.DeletionTimestamp != nil:
		o := controllers.DeleteOnlyUID(p)
		now := int64(0)
		o.GracePeriodSeconds = &now
		if err := client.Delete[*corev1.Pod](ctx, t.Client, p.Namespace, p.Name, o); err != nil && !apierrors.IsNotFound(err) {
			return 0, err
		}
	case p.DeletionTimestamp != nil:
	case p.Spec.NodeName == "" && f.placed:
	case p.Spec.NodeName == "":
		var ready []*corev1.Node
		for _, n := range controllers.CachedAll[*corev1.Node](nodes) {
			if c := controllers.NodeCondition(n, corev1.NodeReady); c != nil && c.Status == corev1.ConditionTrue && len(n.Spec.Taints) == 0 {
				ready = append(ready, n)
			}
		}
		if len(ready) == 0 {
			return 20 * time.Millisecond, nil
		}
		slices.SortFunc(ready, func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
		name := f.choose(p, ready)
		if only := pinnedTo(p); only != "" {
			name = only
		}
		b := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: name}}
		if _, err := client.Sub[*corev1.Pod](ctx, t.Client, p.Namespace, p.Name, "binding", b); err != nil && !apierrors.IsNotFound(err) {
			return 0, err
		}
	case endsAs[p.Labels["ends"]] != "" && !controllers.IsPodTerminal(p):
		next := p.DeepCopy()
		next.Status.Phase = endsAs[p.Labels["ends"]]
		if _, err := client.UpdateStatus(ctx, t.Client, next); err != nil && !apierrors.IsNotFound(err) {
			return 0, err
		}
	case !controllers.IsPodReady(p) && !f.get(f.held, p.Labels["app"]) && !controllers.IsPodTerminal(p):
		next := p.DeepCopy()
		n := f.next.Add(1)
		if next.Status.PodIP == "" {
			next.Status.PodIP = fmt.Sprintf("10.244.%d.%d", n/250%250, n%250+1)
			next.Status.PodIPs = []corev1.PodIP{{IP: next.Status.PodIP}}
		}
		next.Status.Phase = corev1.PodRunning
		next.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()}}
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

// endsAs maps a label to the final phase of pods, which they get as soon as they run.
var endsAs = map[string]corev1.PodPhase{"well": corev1.PodSucceeded, "badly": corev1.PodFailed}

// pinnedTo is the only node that a pod's affinity lets it run on, by name.
func pinnedTo(p *corev1.Pod) string {
	a := p.Spec.Affinity
	if a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return ""
	}
	return a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchFields[0].Values[0]
}
