package namespace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// contentRetryDelay is the retry delay of a terminating namespace that still has objects.
const contentRetryDelay = 5 * time.Second

// New returns the controller that empties terminating namespaces.
func New(d engine.Deps) *engine.Descriptor {
	namespaces := client.Informer[*corev1.Namespace](d.Informers)
	watches := []engine.Watch{engine.OnInformer(namespaces, func(c engine.Change[*corev1.Namespace]) []engine.Key {
		if c.Type == engine.Deleted || c.New.DeletionTimestamp == nil {
			return nil
		}
		return []engine.Key{{Name: c.New.Name}}
	})}
	// Events are numerous and never block the deletion.
	wanted := func(k *api.Kind) bool { return k.Namespaced && k.Resource != "events" }
	contents := client.Every(d.Informers, wanted, func(cache.SharedIndexInformer) {})
	left := func(_ *api.Kind, c engine.Change[api.Object]) []engine.Key {
		if c.Type != engine.Deleted {
			return nil
		}
		ns, ok := engine.Cached[*corev1.Namespace](namespaces, "", c.New.GetNamespace())
		if !ok || ns.DeletionTimestamp == nil {
			return nil
		}
		return []engine.Key{{Name: ns.Name}}
	}
	return &engine.Descriptor{
		Name:    "namespace-controller",
		Workers: 4,
		Watches: watches,
		Dynamic: &engine.DynamicWatch{Current: contents.Now, Keys: left},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"*"}, Resources: []string{"*"},
				Verbs: []string{"delete", "deletecollection", "get", "list"}},
			{APIGroups: []string{""}, Resources: []string{"namespaces"},
				Verbs: []string{"delete", "get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"namespaces/finalize", "namespaces/status"},
				Verbs: []string{"update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, kind: d.Client.Kinds().ByGVK(corev1.SchemeGroupVersion.WithKind("Namespace")),
				namespaces: namespaces, kinds: d.Client.Kinds(),
				aggregated: d.Aggregated}
			return r.reconcileNamespace
		},
	}
}

// reconciler reconciles namespaces during one term of leadership. Every term has a new reconciler.
type reconciler struct {
	term       *engine.Term
	kind       *api.Kind
	namespaces cache.SharedIndexInformer
	kinds      *api.Kinds
	aggregated engine.AggregatedAPIs // nil means that the cluster has no aggregated APIs
}

func (r *reconciler) reconcileNamespace(ctx context.Context, key engine.Key) (time.Duration, error) {
	ns, ok := engine.Cached[*corev1.Namespace](r.namespaces, "", key.Name)
	if !ok || ns.DeletionTimestamp == nil || !slices.Contains(ns.Spec.Finalizers, corev1.FinalizerKubernetes) {
		return 0, nil
	}
	left, failures := r.deleteContents(ctx, ns.Name)
	if len(left) == 0 && len(failures) == 0 {
		return 0, r.finalizeNamespace(ctx, ns)
	}
	return contentRetryDelay, errors.Join(r.writeNamespaceStatus(ctx, ns, left, failures), errors.Join(failures...))
}

// deleteContents deletes the objects in namespace ns. It deletes pods first; the objects that they
// use are deleted when the pods have stopped. It returns the objects that still exist, as listed
// from the API, and the failures.
func (r *reconciler) deleteContents(ctx context.Context, ns string) (left []Content, failures []error) {
	isPod := func(k *api.Kind) bool { return k.Resource == "pods" && k.GVK.Group == "" }
	for _, pods := range []bool{true, false} {
		for _, k := range r.kinds.Table().Stored() {
			if !k.Namespaced || isPod(k) != pods {
				continue
			}
			objs, err := r.emptyKind(ctx, k, ns)
			if err != nil {
				failures = append(failures, err)
			}
			if len(objs) > 0 {
				left = append(left, Content{Resource: k.GroupResource().String(), Objects: objs})
			}
		}
		if !pods {
			more, failed := r.emptyAggregated(ctx, ns)
			left, failures = append(left, more...), append(failures, failed...)
		}
		if len(left) > 0 || len(failures) > 0 {
			return left, failures
		}
	}
	return left, failures
}

// emptyKind deletes the objects of one kind in namespace ns and returns the objects that still
// exist.
func (r *reconciler) emptyKind(ctx context.Context, k *api.Kind, ns string) ([]api.Object, error) {
	objs, err := r.listObjects(ctx, k, ns)
	if err != nil || len(objs) == 0 {
		return nil, err
	}
	fresh := slices.ContainsFunc(objs, func(o api.Object) bool { return o.GetDeletionTimestamp() == nil })
	if !fresh {
		return objs, nil
	}
	background := metav1.DeletePropagationBackground
	if _, err := r.term.Client.Do(ctx, &api.Request{Verb: api.VerbDeleteCollection, Kind: k, Namespace: ns,
		Delete: metav1.DeleteOptions{PropagationPolicy: &background}}); err != nil && !r.term.Client.Dropped(k, err) {
		return objs, fmt.Errorf("deleting %s of namespace %s: %w", k.GroupResource(), ns, err)
	}
	return r.listObjects(ctx, k, ns)
}

func (r *reconciler) listObjects(ctx context.Context, k *api.Kind, ns string) ([]api.Object, error) {
	objs, err := r.term.Client.ListWhole(ctx, k, ns)
	if r.term.Client.Dropped(k, err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing %s of namespace %s: %w", k.GroupResource(), ns, err)
	}
	return objs, nil
}

// finalizeNamespace removes the finalizer "kubernetes" from the spec of ns, which completes its
// deletion.
func (r *reconciler) finalizeNamespace(ctx context.Context, ns *corev1.Namespace) error {
	next := ns.DeepCopy()
	next.Spec.Finalizers = slices.DeleteFunc(next.Spec.Finalizers, func(f corev1.FinalizerName) bool {
		return f == corev1.FinalizerKubernetes
	})
	_, err := r.term.Client.Do(ctx, &api.Request{Verb: api.VerbUpdate, Kind: r.kind, Subresource: "finalize",
		Name: ns.Name, Object: next})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("finalizing namespace %s: %w", ns.Name, err)
	}
	return nil
}

func (r *reconciler) writeNamespaceStatus(
	ctx context.Context, ns *corev1.Namespace, left []Content, failures []error,
) error {
	status := TerminatingStatus(ns, left, failures, r.term.Now())
	if equality.Semantic.DeepEqual(status, ns.Status) {
		return nil
	}
	next := ns.DeepCopy()
	next.Status = status
	if _, err := client.UpdateStatus(ctx, r.term.Client, next); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("updating the status of namespace %s: %w", ns.Name, err)
	}
	return nil
}
