// Package podgroupprotection keeps a PodGroup that is being deleted, by a finalizer, until the pods
// that name it have ended.
package podgroupprotection

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/scheduling"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// New returns the controller that protects PodGroups.
func New(d engine.Deps) *engine.Descriptor {
	groups := client.Informer[*schedulingv1beta1.PodGroup](d.Informers)
	pods := client.Informer[*corev1.Pod](d.Informers)
	engine.Index(pods, engine.PodGroupIndex, engine.PodGroupKeys)
	return &engine.Descriptor{
		Name:    "podgroup-protection-controller",
		Workers: 2,
		Watches: []engine.Watch{
			engine.OnInformer(groups, func(c engine.Change[*schedulingv1beta1.PodGroup]) []engine.Key {
				return []engine.Key{{Namespace: c.New.Namespace, Name: c.New.Name}}
			}),
			engine.OnInformer(pods, func(c engine.Change[*corev1.Pod]) []engine.Key { return ofPod(groups, c) }),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"scheduling.k8s.io"}, Resources: []string{"podgroups"},
				Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "watch"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, groups: groups, pods: pods}
			return r.reconcilePodGroup
		},
	}
}

// ofPod returns the key of the PodGroup of a pod that has ended, if the PodGroup is being deleted.
func ofPod(groups cache.SharedIndexInformer, c engine.Change[*corev1.Pod]) []engine.Key {
	if c.Type != engine.Deleted && !api.IsPodTerminal(c.New) {
		return nil
	}
	var keys []engine.Key
	for _, name := range engine.PodGroupKeys(c.New) {
		_, name, _ = strings.Cut(name, "/")
		if g, ok := engine.Cached[*schedulingv1beta1.PodGroup](groups, c.New.Namespace, name); ok &&
			g.DeletionTimestamp != nil {
			keys = append(keys, engine.Key{Namespace: g.Namespace, Name: g.Name})
		}
	}
	return keys
}

// reconciler reconciles PodGroups during one term of leadership. Every term has a new reconciler.
type reconciler struct {
	term         *engine.Term
	groups, pods cache.SharedIndexInformer
}

func (r *reconciler) reconcilePodGroup(ctx context.Context, key engine.Key) (time.Duration, error) {
	g, ok := engine.Cached[*schedulingv1beta1.PodGroup](r.groups, key.Namespace, key.Name)
	if !ok {
		return 0, nil
	}
	inUse, err := r.inUse(ctx, g)
	if err != nil {
		return 0, err
	}
	return 0, engine.UpdateFinalizer(ctx, r.term.Client, g, scheduling.PodGroupProtection, inUse)
}

// inUse reports whether a pod that has not ended names PodGroup g. Before it returns false, it
// lists the pods from the API, because a pod may not be cached yet.
func (r *reconciler) inUse(ctx context.Context, g *schedulingv1beta1.PodGroup) (bool, error) {
	if g.DeletionTimestamp == nil || !slices.Contains(g.Finalizers, scheduling.PodGroupProtection) {
		return false, nil
	}
	name := g.Namespace + "/" + g.Name
	of := func(p *corev1.Pod) bool {
		return !api.IsPodTerminal(p) && slices.Contains(engine.PodGroupKeys(p), name)
	}
	if slices.ContainsFunc(engine.CachedBy[*corev1.Pod](r.pods, engine.PodGroupIndex, name), of) {
		return true, nil
	}
	live, err := client.List[*corev1.Pod](ctx, r.term.Client, g.Namespace, metav1.ListOptions{})
	if err != nil {
		return false, fmt.Errorf("listing the pods that may be of pod group %s: %w", name, err)
	}
	return slices.ContainsFunc(live, of), nil
}
