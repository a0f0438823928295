package disruption

import (
	"context"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
)

// New returns the disruption controller.
func New(d controllers.Deps) *controllers.Controller {
	r := informers{
		budgets:     client.Informer[*policyv1.PodDisruptionBudget](d.Informers),
		pods:        client.Informer[*corev1.Pod](d.Informers),
		sets:        client.Informer[*appsv1.ReplicaSet](d.Informers),
		deployments: client.Informer[*appsv1.Deployment](d.Informers),
		stateful:    client.Informer[*appsv1.StatefulSet](d.Informers),
		replicated:  client.Informer[*corev1.ReplicationController](d.Informers),
	}
	read := []string{"get", "list", "watch"}
	return &controllers.Controller{
		Name:    "disruption-controller",
		Workers: 1,
		Watches: []controllers.Watch{
			controllers.OnInformer(r.budgets, controllers.Self[*policyv1.PodDisruptionBudget]),
			controllers.OnInformer(r.pods, func(c controllers.Change[*corev1.Pod]) []controllers.Key { return r.budgetsOf(c.New) }),
			controllers.OnInformer(r.deployments, func(c controllers.Change[*appsv1.Deployment]) []controllers.Key {
				return r.budgetsIn(c.New.Namespace, nil)
			}),
			controllers.OnInformer(r.stateful, func(c controllers.Change[*appsv1.StatefulSet]) []controllers.Key {
				return r.budgetsIn(c.New.Namespace, nil)
			}),
			controllers.OnInformer(r.replicated, func(c controllers.Change[*corev1.ReplicationController]) []controllers.Key {
				return r.budgetsIn(c.New.Namespace, nil)
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"pods", "replicationcontrollers"}, Verbs: read},
			{APIGroups: []string{"apps"}, Resources: []string{"deployments", "replicasets", "statefulsets"}, Verbs: read},
			{APIGroups: []string{"policy"}, Resources: []string{"poddisruptionbudgets"}, Verbs: read},
			{APIGroups: []string{"policy"}, Resources: []string{"poddisruptionbudgets/status"}, Verbs: []string{"update"}},
		},
		Lead: func(t *controllers.Term) controllers.Reconcile {
			return (&reconciler{informers: r, term: t, view: controllers.ViewOf[*policyv1.PodDisruptionBudget](t,
				r.budgets)}).reconcile
		},
	}
}

type informers struct {
	budgets, pods, sets, deployments, stateful, replicated cache.SharedIndexInformer
}

// budgetsOf are the budgets that cover a pod.
func (r informers) budgetsOf(p *corev1.Pod) []controllers.Key {
	return r.budgetsIn(p.Namespace, func(s labels.Selector) bool { return s.Matches(labels.Set(p.Labels)) })
}

func (r informers) budgetsIn(namespace string, covers func(labels.Selector) bool) []controllers.Key {
	var keys []controllers.Key
	for _, b := range controllers.CachedBy[*policyv1.PodDisruptionBudget](r.budgets,
		controllers.NamespaceIndex, namespace) {
		if s, err := metav1.LabelSelectorAsSelector(b.Spec.Selector); err == nil && (covers == nil || covers(s)) {
			keys = append(keys, controllers.Key{Namespace: b.Namespace, Name: b.Name})
		}
	}
	return keys
}

// reconciler is the thin shell of one leadership.
type reconciler struct {
	informers
	term *controllers.Term
	view *controllers.View[*policyv1.PodDisruptionBudget]
}

func (r *reconciler) reconcile(ctx context.Context, key controllers.Key) (time.Duration, error) {
	b, ok := r.view.Get(key.Namespace, key.Name)
	if !ok || b.DeletionTimestamp != nil {
		return 0, nil
	}
	selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
	if err != nil {
		return 0, nil // validation has let it pass: nothing will mend it but its author
	}
	var pods []*corev1.Pod
	for _, p := range controllers.CachedBy[*corev1.Pod](r.pods, controllers.NamespaceIndex, b.Namespace) {
		if selector.Matches(labels.Set(p.Labels)) {
			pods = append(pods, p)
		}
	}
	status, again, err := Status(b, pods, r.expected(pods), r.term.Now())
	if err != nil {
		return 0, fmt.Errorf("reading PodDisruptionBudget %s/%s: %w", b.Namespace, b.Name, err)
	}
	if equality.Semantic.DeepEqual(status, b.Status) {
		return again, nil
	}
	next := b.DeepCopy()
	next.Status = status
	switch next, err = client.UpdateStatus(ctx, r.term.Client, next); {
	case apierrors.IsNotFound(err):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("writing the status of PodDisruptionBudget %s/%s: %w", b.Namespace, b.Name, err)
	}
	r.view.Wrote(next)
	return again, nil
}

// expected is how many pods there should be: what their owners ask for, and those without an owner.
func (r *reconciler) expected(pods []*corev1.Pod) int {
	n := 0
	seen := map[types.UID]bool{}
	for _, p := range pods {
		owner := metav1.GetControllerOf(p)
		if owner == nil {
			n++
			continue
		}
		uid, replicas := r.replicas(p.Namespace, owner)
		if !seen[uid] {
			seen[uid] = true
			n += replicas
		}
	}
	return n
}

// replicas is how many pods an owner asks for; the Deployment's word counts for all of its ReplicaSets.
func (r *reconciler) replicas(namespace string, owner *metav1.OwnerReference) (types.UID, int) {
	switch owner.Kind {
	case "ReplicaSet":
		set, ok := controllers.Cached[*appsv1.ReplicaSet](r.sets, namespace, owner.Name)
		if !ok || set.UID != owner.UID {
			break
		}
		if up := metav1.GetControllerOf(set); up != nil && up.Kind == "Deployment" {
			if d, ok := controllers.Cached[*appsv1.Deployment](r.deployments, namespace, up.Name); ok && d.UID == up.UID {
				return d.UID, number(d.Spec.Replicas)
			}
		}
		return set.UID, number(set.Spec.Replicas)
	case "StatefulSet":
		if s, ok := controllers.Cached[*appsv1.StatefulSet](r.stateful, namespace, owner.Name); ok && s.UID == owner.UID {
			return s.UID, number(s.Spec.Replicas)
		}
	case "ReplicationController":
		if c, ok := controllers.Cached[*corev1.ReplicationController](r.replicated, namespace, owner.Name); ok && c.UID == owner.UID {
			return c.UID, number(c.Spec.Replicas)
		}
	}
	return owner.UID, 1
}

func number(replicas *int32) int {
	if replicas == nil {
		return 1
	}
	return int(*replicas)
}
