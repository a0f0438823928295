// Package resourcequota recounts the usage of ResourceQuotas. Usually admission updates the usage
// in the same commit as the write that changes it. A recount is needed for quotas that are new or
// have a new spec, and for changes without such a commit. These are the removal of a kind, objects
// that cannot be read, pods beyond their grace period, and manual changes of a quota's status.
package resourcequota

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/quota"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Objects lists the objects of a resource in the namespace of a quota. The list must be at least as
// new as the quota. ok is false for a resource that does not exist.
type Objects func(of schema.GroupResource) (list []api.Object, ok bool, err error)

// PlanQuota returns the status that quota q must have, whether this changes its status, and the
// delay until the next recount. A terminating pod no longer counts once its grace period has
// passed.
func PlanQuota(q *corev1.ResourceQuota, now time.Time, objects Objects) (
	status corev1.ResourceQuotaStatus, changed bool, again time.Duration, err error,
) {
	used, err := quota.TotalUsage(&q.Spec, now, func(of schema.GroupResource) ([]api.Object, bool, error) {
		list, ok, err := objects(of)
		for _, o := range list {
			pod, isPod := o.(*corev1.Pod)
			if !isPod {
				break
			}
			if at, stuck := quota.UncountedFrom(pod); stuck && !at.Before(now) {
				if wait := at.Sub(now) + time.Millisecond; again == 0 || wait < again {
					again = wait
				}
			}
		}
		return list, ok, err
	})
	if err != nil {
		return corev1.ResourceQuotaStatus{}, false, 0, err
	}
	status = corev1.ResourceQuotaStatus{Hard: q.Spec.DeepCopy().Hard, Used: used}
	return status, !equality.Semantic.DeepEqual(status, q.Status), again, nil
}

// namespaceIndex indexes ResourceQuotas by namespace.
const namespaceIndex = "keelson.namespace"

// New returns the controller that recounts ResourceQuotas.
func New(d engine.Deps) *engine.Descriptor {
	quotas := client.Informer[*corev1.ResourceQuota](d.Informers)
	engine.Index(quotas, namespaceIndex, func(o api.Object) []string { return []string{o.GetNamespace()} })
	every := client.Every(d.Informers, isCountable, func(cache.SharedIndexInformer) {})
	return &engine.Descriptor{
		Name:    "resourcequota-controller",
		Workers: 2,
		Watches: []engine.Watch{engine.OnInformer(quotas, engine.Self[*corev1.ResourceQuota])},
		Dynamic: &engine.DynamicWatch{Current: every.Now,
			Keys: func(k *api.Kind, c engine.Change[api.Object]) []engine.Key {
				return affectedQuotas(quotas, k, c)
			}},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"resourcequotas/status"}, Verbs: []string{"update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, quotas: engine.ViewOf[*corev1.ResourceQuota](t, quotas)}
			return r.reconcileQuota
		},
	}
}

// isCountable reports whether quotas can count objects of kind k. Kinds with objects that expire
// cannot be counted.
func isCountable(k *api.Kind) bool { return k.Namespaced && !k.Serving.Virtual && k.Commit.TTL == 0 }

// affectedQuotas returns the keys of the quotas that must be recounted because of change c of an
// object of kind k. Creations and updates need no recount, because their commit updates the usage.
// For a deletion, the replica that processed it may not have known the quota yet.
func affectedQuotas(quotas cache.SharedIndexInformer, k *api.Kind, c engine.Change[api.Object]) []engine.Key {
	if c.Type != engine.Deleted && !isPodEnding(c) {
		return nil
	}
	var keys []engine.Key
	for _, q := range engine.CachedBy[*corev1.ResourceQuota](quotas, namespaceIndex, c.New.GetNamespace()) {
		if quota.LimitsResource(&q.Spec, k.GroupResource()) {
			keys = append(keys, engine.KeyOf(q))
		}
	}
	return keys
}

// isPodEnding reports whether change c is an update by which a pod becomes terminating or terminal.
func isPodEnding(c engine.Change[api.Object]) bool {
	pod, ok := c.New.(*corev1.Pod)
	if !ok || c.Type != engine.Updated {
		return false
	}
	was, ok := c.Old.(*corev1.Pod)
	return !ok || (pod.DeletionTimestamp != nil) != (was.DeletionTimestamp != nil) ||
		api.IsPodTerminal(pod) != api.IsPodTerminal(was)
}

// reconciler reconciles quotas during one term of leadership. Every term has a new reconciler.
type reconciler struct {
	term   *engine.Term
	quotas *engine.View[*corev1.ResourceQuota]
}

func (r *reconciler) reconcileQuota(ctx context.Context, key engine.Key) (time.Duration, error) {
	q, ok := r.quotas.Get(key.Namespace, key.Name)
	if !ok || q.DeletionTimestamp != nil {
		return 0, nil
	}
	status, changed, again, err := PlanQuota(q, r.term.Now(),
		func(of schema.GroupResource) ([]api.Object, bool, error) {
			k := r.kindOf(of)
			if k == nil {
				return nil, false, nil
			}
			list, err := r.term.Client.ListKind(ctx, k, q.Namespace)
			return list, true, err
		})
	if err != nil {
		return 0, fmt.Errorf("counting the objects of quota %s: %w", key, err)
	}
	if !changed {
		return again, nil
	}
	next := q.DeepCopy()
	next.Status = status
	// The write fails if the quota has changed: the counted usage may then be outdated.
	stored, err := client.UpdateStatus(ctx, r.term.Client, next)
	switch {
	case apierrors.IsNotFound(err):
		return 0, nil
	case apierrors.IsConflict(err):
		return time.Millisecond * 20, nil // the new version of the quota will soon be cached
	case err != nil:
		return 0, fmt.Errorf("writing the usage of quota %s: %w", key, err)
	}
	r.quotas.RecordWrite(stored)
	return again, nil
}

func (r *reconciler) kindOf(of schema.GroupResource) *api.Kind {
	for _, k := range r.term.Client.Kinds().Table().Stored() {
		if k.Resource == of.Resource && k.GVK.Group == of.Group && isCountable(k) {
			return k
		}
	}
	return nil
}
