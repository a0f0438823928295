// Package resourcequota counts what the quotas of a namespace are about. Admission enters what each write adds or takes
// in the write's own commit; counting anew is for quotas that are new or bound something else, for what goes without a
// write of its own (a kind, an object that cannot be read, a pod whose time to end is over), and for what somebody wrote
// into a status.
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
	"keelson.dev/keelson/controlplane/controllers"
)

// Objects lists the objects of a resource in the quota's namespace, as of the quota's revision or later; ok is false for
// a resource that there is not.
type Objects func(of schema.GroupResource) (list []api.Object, ok bool, err error)

// Plan is the status that a quota shall have, whether it has another, and after how long to look again: pods that are
// being deleted count for nothing once their time is over.
func Plan(q *corev1.ResourceQuota, now time.Time, objects Objects) (
	status corev1.ResourceQuotaStatus, changed bool, again time.Duration, err error,
) {
	used, err := quota.Count(&q.Spec, now, func(of schema.GroupResource) ([]api.Object, bool, error) {
		list, ok, err := objects(of)
		for _, o := range list {
			pod, isPod := o.(*corev1.Pod)
			if !isPod {
				break
			}
			if at, stuck := quota.Stuck(pod); stuck && !at.Before(now) {
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

// namespaceIndex finds quotas by namespace.
const namespaceIndex = "keelson.namespace"

// New returns the controller.
func New(d controllers.Deps) *controllers.Controller {
	quotas := client.Informer[*corev1.ResourceQuota](d.Informers)
	controllers.Index(quotas, namespaceIndex, func(o api.Object) []string { return []string{o.GetNamespace()} })
	every := client.Every(d.Informers, counted, func(cache.SharedIndexInformer) {})
	return &controllers.Controller{
		Name:    "resourcequota-controller",
		Workers: 2,
		Watches: []controllers.Watch{controllers.OnInformer(quotas, controllers.Self[*corev1.ResourceQuota])},
		Every: &controllers.Every{Now: every.Now, Keys: func(k *api.Kind, c controllers.Change[api.Object]) []controllers.Key {
			return concerned(quotas, k, c)
		}},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"resourcequotas/status"}, Verbs: []string{"update"}},
		},
		Lead: func(t *controllers.Term) controllers.Reconcile {
			r := &reconciler{term: t, quotas: controllers.ViewOf[*corev1.ResourceQuota](t, quotas)}
			return r.reconcile
		},
	}
}

// counted says whether objects of a kind can be counted: those that end by themselves are not.
func counted(k *api.Kind) bool { return k.Namespaced && !k.Virtual && k.TTL == 0 }

// concerned are the quotas that may have to be counted anew after a change. What comes and changes is entered by its own
// commit; what goes may have been judged by a replica that did not know the quota yet.
func concerned(quotas cache.SharedIndexInformer, k *api.Kind, c controllers.Change[api.Object]) []controllers.Key {
	if c.Type != controllers.Deleted && !marked(c) {
		return nil
	}
	var keys []controllers.Key
	for _, q := range controllers.CachedBy[*corev1.ResourceQuota](quotas, namespaceIndex, c.New.GetNamespace()) {
		if quota.Concerns(&q.Spec, k.GroupResource()) {
			keys = append(keys, controllers.KeyOf(q))
		}
	}
	return keys
}

// marked says that a pod has begun to end, or has ended.
func marked(c controllers.Change[api.Object]) bool {
	pod, ok := c.New.(*corev1.Pod)
	if !ok || c.Type != controllers.Updated {
		return false
	}
	was, ok := c.Old.(*corev1.Pod)
	return !ok || (pod.DeletionTimestamp != nil) != (was.DeletionTimestamp != nil) || controllers.PodEnded(pod) != controllers.PodEnded(was)
}

// reconciler is the thin shell of one leadership.
type reconciler struct {
	term   *controllers.Term
	quotas *controllers.View[*corev1.ResourceQuota]
}

func (r *reconciler) reconcile(ctx context.Context, key controllers.Key) (time.Duration, error) {
	q, ok := r.quotas.Get(key.Namespace, key.Name)
	if !ok || q.DeletionTimestamp != nil {
		return 0, nil
	}
	status, changed, again, err := Plan(q, r.term.Now(), func(of schema.GroupResource) ([]api.Object, bool, error) {
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
	// It is written over the state that was looked at only: what is counted has changed since if that has.
	stored, err := client.UpdateStatus(ctx, r.term.Client, next)
	switch {
	case apierrors.IsNotFound(err):
		return 0, nil
	case apierrors.IsConflict(err):
		return time.Millisecond * 20, nil // the quota's next state is on its way to the cache
	case err != nil:
		return 0, fmt.Errorf("writing what is used of quota %s: %w", key, err)
	}
	r.quotas.Wrote(stored)
	return again, nil
}

func (r *reconciler) kindOf(of schema.GroupResource) *api.Kind {
	for _, k := range r.term.Client.Kinds().Table().Stored() {
		if k.Resource == of.Resource && k.GVK.Group == of.Group && counted(k) {
			return k
		}
	}
	return nil
}
