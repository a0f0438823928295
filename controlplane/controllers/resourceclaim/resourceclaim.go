// Package resourceclaim creates the ResourceClaims that pods request by templates, and writes their
// names to the pods' statuses. When pods end it removes their reservations, deallocates unused
// devices, and deletes claims that were created for one pod.
package resourceclaim

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	names "k8s.io/dynamic-resource-allocation/resourceclaim"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Kinds of keys in the controller's queue: pods and ResourceClaims.
const (
	podKey   = "pod"
	claimKey = "claim"
)

// claimsIndex indexes pods by their ResourceClaims, as namespace/name, and by the
// ResourceClaimTemplates that they name, as template:namespace/name.
const claimsIndex = "keelson.resourceclaim"

func claimsOf(o api.Object) []string {
	p, ok := o.(*corev1.Pod)
	if !ok || len(p.Spec.ResourceClaims) == 0 {
		return nil
	}
	var out []string
	for name := range names.PodClaims(p) {
		out = append(out, p.Namespace+"/"+name)
	}
	for i := range p.Spec.ResourceClaims {
		if t := p.Spec.ResourceClaims[i].ResourceClaimTemplateName; t != nil {
			out = append(out, "template:"+p.Namespace+"/"+*t)
		}
	}
	return out
}

func keyOf(kind, namespace, name string) engine.Key {
	return engine.Key{Kind: kind, Namespace: namespace, Name: name}
}

// New returns the controller of ResourceClaims that are created from templates.
func New(d engine.Deps) *engine.Descriptor {
	pods := client.Informer[*corev1.Pod](d.Informers)
	claims := client.Informer[*resourcev1.ResourceClaim](d.Informers)
	templates := client.Informer[*resourcev1.ResourceClaimTemplate](d.Informers)
	engine.Index(pods, claimsIndex, claimsOf)
	users := func(of string) []engine.Key {
		var keys []engine.Key
		for _, p := range engine.CachedBy[*corev1.Pod](pods, claimsIndex, of) {
			keys = append(keys, keyOf(podKey, p.Namespace, p.Name))
		}
		return keys
	}
	return &engine.Descriptor{
		Name:    "resourceclaim-controller",
		Workers: 8,
		Watches: []engine.Watch{
			engine.OnInformer(pods, ofPod),
			engine.OnInformer(claims, func(c engine.Change[*resourcev1.ResourceClaim]) []engine.Key {
				keys := users(c.New.Namespace + "/" + c.New.Name)
				if name, _ := owningPod(c.New); name != "" {
					keys = append(keys, keyOf(podKey, c.New.Namespace, name))
				}
				return append(keys, keyOf(claimKey, c.New.Namespace, c.New.Name))
			}),
			engine.OnInformer(templates, func(c engine.Change[*resourcev1.ResourceClaimTemplate]) []engine.Key {
				if c.Type != engine.Added { // templates are immutable
					return nil
				}
				return users("template:" + c.New.Namespace + "/" + c.New.Name)
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"pods/finalizers"}, Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"pods/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{resourcev1.GroupName}, Resources: []string{"resourceclaims"},
				Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{resourcev1.GroupName}, Resources: []string{"resourceclaims/status"},
				Verbs: []string{"update"}},
			{APIGroups: []string{resourcev1.GroupName}, Resources: []string{"resourceclaimtemplates"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, podCache: pods, templates: templates,
				pods: engine.ViewOf[*corev1.Pod](t, pods), claims: engine.ViewOf[*resourcev1.ResourceClaim](t, claims)}
			return r.reconcileKey
		},
	}
}

// ofPod returns the keys to reconcile when a pod changes: the pod itself and, if it was deleted or
// has ended, its ResourceClaims.
func ofPod(c engine.Change[*corev1.Pod]) []engine.Key {
	p := c.New
	if len(p.Spec.ResourceClaims) == 0 {
		return nil
	}
	var keys []engine.Key
	if c.Type != engine.Deleted {
		keys = append(keys, keyOf(podKey, p.Namespace, p.Name))
	}
	if c.Type == engine.Deleted || JudgeUser(p, string(p.UID)) != UserThere {
		for name := range names.PodClaims(p) {
			keys = append(keys, keyOf(claimKey, p.Namespace, name))
		}
	}
	return keys
}

type reconciler struct {
	term      *engine.Term
	podCache  cache.SharedIndexInformer
	templates cache.SharedIndexInformer
	pods      *engine.View[*corev1.Pod]
	claims    *engine.View[*resourcev1.ResourceClaim]
}

func (r *reconciler) reconcileKey(ctx context.Context, key engine.Key) (time.Duration, error) {
	if key.Kind == podKey {
		p, ok := r.pods.Get(key.Namespace, key.Name)
		if !ok {
			return 0, nil
		}
		return 0, r.reconcilePod(ctx, p)
	}
	for {
		c, ok := r.claims.Get(key.Namespace, key.Name)
		if !ok {
			return 0, nil
		}
		if again, err := r.reconcileClaim(ctx, c); !again || err != nil {
			return 0, err
		}
	}
}

func (r *reconciler) clusterState(namespace string) Cluster {
	return Cluster{
		Claim: func(name string) (*resourcev1.ResourceClaim, bool) { return r.claims.Get(namespace, name) },
		Template: func(name string) (*resourcev1.ResourceClaimTemplate, bool) {
			return engine.Cached[*resourcev1.ResourceClaimTemplate](r.templates, namespace, name)
		},
	}
}

// reconcilePod creates the missing ResourceClaims of pod p. When all of them exist, it writes their
// names to the status of p.
func (r *reconciler) reconcilePod(ctx context.Context, p *corev1.Pod) error {
	cluster := r.clusterState(p.Namespace)
	plan := PlanPod(p, cluster)
	for _, t := range plan.Troubles { // the pod is queued again when the template or the claim is created
		r.term.Events.Eventf(p, corev1.EventTypeWarning, "FailedResourceClaimCreation", "PodResourceClaim %s: %s",
			t.Entry, t.Why)
	}
	for _, m := range plan.Missing {
		if err := r.createClaim(ctx, p, m); err != nil {
			return err
		}
	}
	if len(plan.Missing) > 0 && len(plan.Troubles) == 0 {
		plan = PlanPod(p, cluster) // the view now includes the created claims
	}
	if plan.Statuses != nil {
		next := p.DeepCopy()
		next.Status.ResourceClaimStatuses = plan.Statuses
		stored, err := client.UpdateStatus(ctx, r.term.Client, next)
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case apierrors.IsConflict(err):
			return engine.RaceError("writing the claim names of pod %s/%s: %w", p.Namespace, p.Name, err)
		case err != nil:
			return fmt.Errorf("writing the claim names of pod %s/%s: %w", p.Namespace, p.Name, err)
		}
		r.pods.RecordWrite(stored)
		plan = PlanPod(stored, cluster)
	}
	for _, c := range plan.Reserve {
		next := c.DeepCopy()
		next.Status.ReservedFor = append(next.Status.ReservedFor,
			resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: p.Name, UID: p.UID})
		if err := r.writeClaimStatus(ctx, next); err != nil {
			return err
		}
	}
	return nil
}

func (r *reconciler) createClaim(ctx context.Context, p *corev1.Pod, m MissingClaim) error {
	made, err := client.Create(ctx, r.term.Client, m.Claim)
	switch {
	case apierrors.IsAlreadyExists(err): // wait until the existing claim is cached: it may belong to another pod
		return engine.RaceError("claim %s/%s of pod %s: %w", m.Claim.Namespace, m.Claim.Name, p.Name, err)
	case err != nil:
		r.term.Events.Eventf(p, corev1.EventTypeWarning, "FailedResourceClaimCreation",
			"PodResourceClaim %s: %v", m.Entry, err)
		return fmt.Errorf("creating claim %s/%s of pod %s: %w", m.Claim.Namespace, m.Claim.Name, p.Name, err)
	}
	r.claims.RecordWrite(made)
	return nil
}

// reconcileClaim performs the next write for ResourceClaim c. again reports that another write may
// be due.
func (r *reconciler) reconcileClaim(ctx context.Context, c *resourcev1.ResourceClaim) (again bool, err error) {
	if r.claims.IsDeleting(c) && c.DeletionTimestamp == nil {
		return false, nil
	}
	var failed error
	plan := PlanClaim(c, func(name, uid string) UserState {
		u, err := r.resolveConsumer(ctx, c.Namespace, name, uid)
		if err != nil {
			failed = err
			return UserThere
		}
		return u
	})
	if failed != nil {
		return false, failed
	}
	switch plan.Step {
	case WriteState:
		return true, r.writeClaimStatus(ctx, plan.Next)
	case Unprotect:
		stored, err := client.Update(ctx, r.term.Client, plan.Next)
		return false, r.recordResult(plan.Next, stored, err)
	case Remove:
		r.claims.MarkDeleting(c)
		uid := c.UID
		err := client.Delete[*resourcev1.ResourceClaim](ctx, r.term.Client, c.Namespace, c.Name,
			metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			r.claims.UnmarkDeleting(c)
			return false, fmt.Errorf("deleting claim %s/%s, whose pod will not run: %w", c.Namespace, c.Name, err)
		}
	}
	return false, nil
}

// resolveConsumer returns the state of the pod with this name and UID. If the pod is not cached, it
// reads the pod from the API, because the scheduler may use newer pods than the cache has.
func (r *reconciler) resolveConsumer(ctx context.Context, namespace, name, uid string) (UserState, error) {
	p, ok := engine.Cached[*corev1.Pod](r.podCache, namespace, name)
	if !ok || string(p.UID) != uid {
		now, err := client.Get[*corev1.Pod](ctx, r.term.Client, namespace, name)
		switch {
		case apierrors.IsNotFound(err):
			return UserGone, nil
		case err != nil:
			return UserThere, fmt.Errorf("reading pod %s/%s, which uses claims: %w", namespace, name, err)
		}
		p = now
	}
	return JudgeUser(p, uid), nil
}

// writeClaimStatus stores the status of a ResourceClaim and records the stored claim in the view.
func (r *reconciler) writeClaimStatus(ctx context.Context, next *resourcev1.ResourceClaim) error {
	stored, err := client.UpdateStatus(ctx, r.term.Client, next)
	return r.recordResult(next, stored, err)
}

// recordResult records stored, the result of writing next, in the view. err is the error of that
// write. It returns nil if the claim no longer exists.
func (r *reconciler) recordResult(next, stored *resourcev1.ResourceClaim, err error) error {
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case apierrors.IsConflict(err):
		return engine.RaceError("updating claim %s/%s: %w", next.Namespace, next.Name, err)
	case err != nil:
		return fmt.Errorf("updating claim %s/%s: %w", next.Namespace, next.Name, err)
	}
	r.claims.RecordWrite(stored)
	return nil
}
