package customresourcedefinition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	v1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// deletionRetryDelay is the delay until a CustomResourceDefinition that is being deleted is
// reconciled again, while objects remain or while this replica does not serve its kind yet.
const deletionRetryDelay = time.Second

// New returns the controller of CustomResourceDefinitions.
func New(d engine.Deps) *engine.Descriptor {
	definitions := client.Informer[*v1.CustomResourceDefinition](d.Informers)
	return &engine.Descriptor{
		Name: "customresourcedefinition-controller",
		// A single worker accepts names in the order of the requests.
		Workers: 1,
		Watches: []engine.Watch{engine.OnInformer(definitions,
			func(c engine.Change[*v1.CustomResourceDefinition]) []engine.Key {
				var keys []engine.Key
				if c.Type != engine.Deleted {
					keys = append(keys, engine.KeyOf(c.New))
				}
				if c.Type == engine.Added || c.Type == engine.Updated &&
					equality.Semantic.DeepEqual(c.Old.Status.AcceptedNames, c.New.Status.AcceptedNames) {
					return keys
				}
				// Other definitions may be waiting for names that are free now.
				for _, other := range engine.CachedAll[*v1.CustomResourceDefinition](definitions) {
					if other.Spec.Group == c.New.Spec.Group && !apihelpers.IsCRDConditionTrue(other, v1.NamesAccepted) {
						keys = append(keys, engine.KeyOf(other))
					}
				}
				return keys
			})},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"deletecollection", "list"}},
			{APIGroups: []string{v1.GroupName}, Resources: []string{"customresourcedefinitions"},
				Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{v1.GroupName}, Resources: []string{"customresourcedefinitions/status"},
				Verbs: []string{"update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, view: engine.ViewOf[*v1.CustomResourceDefinition](t, definitions),
				kinds: d.Client.Kinds()}
			return r.reconcileDefinition
		},
	}
}

// reconciler reconciles CustomResourceDefinitions during one term of leadership. Every term has a
// new reconciler.
type reconciler struct {
	term  *engine.Term
	view  *engine.View[*v1.CustomResourceDefinition]
	kinds *api.Kinds

	// schemaCache holds the result of nonStructuralCondition for one definition. A definition is
	// reconciled several times in a row as its status changes, and a schema may have thousands of
	// properties.
	schemaCache struct {
		uid        types.UID
		generation int64
		found      *v1.CustomResourceDefinitionCondition
	}
}

// cachedSchemaCondition returns the result of nonStructuralCondition for definition c. The result
// comes from the cache if the previous call was for c too. It is not safe for concurrent use; the
// controller has one worker.
func (r *reconciler) cachedSchemaCondition(c *v1.CustomResourceDefinition) *v1.CustomResourceDefinitionCondition {
	if l := &r.schemaCache; l.uid != c.UID || l.generation != c.Generation {
		l.uid, l.generation, l.found = c.UID, c.Generation, nonStructuralCondition(c)
	}
	return r.schemaCache.found.DeepCopy()
}

func (r *reconciler) reconcileDefinition(ctx context.Context, key engine.Key) (time.Duration, error) {
	c, ok := r.view.Get("", key.Name)
	switch {
	case !ok:
		return 0, nil
	case c.DeletionTimestamp != nil:
		if !apihelpers.CRDHasFinalizer(c, v1.CustomResourceCleanupFinalizer) {
			return 0, nil
		}
		return r.finalizeDefinition(ctx, c)
	}
	taken := FindUsedNames(c, r.view.All())
	r.addBuiltInNames(c.Spec.Group, taken)
	return 0, r.writeDefinitionStatus(ctx, c,
		computeStatus(c, taken, r.cachedSchemaCondition(c), metav1.NewTime(r.term.Now())))
}

// addBuiltInNames adds to t the names of the built-in kinds of an API group.
func (r *reconciler) addBuiltInNames(group string, t UsedNames) {
	for _, k := range r.kinds.All() {
		if k.GVK.Group != group || k.Serving.Definition != "" {
			continue
		}
		for _, name := range append([]string{k.Resource, k.Naming.Singular}, k.Naming.ShortNames...) {
			t.Resources[name] = true
		}
		t.Kinds[k.GVK.Kind], t.Kinds[k.ListGVK().Kind] = true, true
	}
}

func (r *reconciler) writeDefinitionStatus(
	ctx context.Context, c *v1.CustomResourceDefinition, status v1.CustomResourceDefinitionStatus,
) error {
	if equality.Semantic.DeepEqual(c.Status, status) {
		return nil
	}
	whole, err := custom.Unpack(c)
	if err != nil {
		return fmt.Errorf("reading custom resource definition %s: %w", c.Name, err)
	}
	next := withStatus(whole)
	next.Status = status
	stored, err := client.UpdateStatus(ctx, r.term.Client, next)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("writing the status of custom resource definition %s: %w", c.Name, err)
	}
	r.view.RecordWrite(stored)
	return nil
}

// finalizeDefinition deletes the custom objects of definition c, which is being deleted. It removes
// the finalizer of c when no objects remain; until then it returns the delay after which it must be
// called again.
func (r *reconciler) finalizeDefinition(ctx context.Context, c *v1.CustomResourceDefinition) (time.Duration, error) {
	if apihelpers.IsCRDConditionTrue(c, v1.Established) {
		left, err := r.deleteObjects(ctx, c)
		if err != nil || left > 0 {
			now := v1.CustomResourceDefinitionCondition{Type: v1.Terminating, Status: v1.ConditionTrue,
				LastTransitionTime: metav1.NewTime(r.term.Now()), Reason: "InstanceDeletionInProgress",
				Message: "CustomResource deletion is in progress"}
			if err != nil {
				now.Reason, now.Message = "InstanceDeletionFailed", err.Error()
			}
			next := withStatus(c)
			setCondition(next, now)
			return deletionRetryDelay, errors.Join(err, r.writeDefinitionStatus(ctx, c, next.Status))
		}
	}
	whole, err := custom.Unpack(c)
	if err != nil {
		return 0, fmt.Errorf("reading custom resource definition %s: %w", c.Name, err)
	}
	next := whole.DeepCopy()
	apihelpers.CRDRemoveFinalizer(next, v1.CustomResourceCleanupFinalizer)
	if _, err := client.Update(ctx, r.term.Client, next); err != nil && !apierrors.IsNotFound(err) {
		return 0, fmt.Errorf("finalizing custom resource definition %s: %w", c.Name, err)
	}
	return 0, nil
}

// deleteObjects deletes the custom objects of definition c and returns how many still exist. It
// returns an error if objects cannot be read, because c lacks their version or they are damaged:
// the finalizers of these objects are unknown.
func (r *reconciler) deleteObjects(ctx context.Context, c *v1.CustomResourceDefinition) (left int, err error) {
	stored := r.kinds.Table().Stored()
	i := slices.IndexFunc(stored, func(k *api.Kind) bool { return k.Serving.Definition == c.Name })
	if i < 0 {
		return 1, nil // this replica does not serve the kind yet
	}
	k := stored[i]
	objs, err := r.term.Client.ListWhole(ctx, k, "")
	if err != nil {
		return 0, fmt.Errorf("could not list instances: %w", err)
	}
	done := map[string]bool{}
	for _, o := range objs {
		ns := o.GetNamespace()
		if done[ns] || o.GetDeletionTimestamp() != nil {
			continue
		}
		done[ns] = true
		if _, err := r.term.Client.Do(ctx, &api.Request{Verb: api.VerbDeleteCollection, Kind: k, Namespace: ns}); err !=
			nil {
			return len(objs), fmt.Errorf("could not issue all deletes: %w", err)
		}
	}
	if len(objs) == 0 {
		return 0, nil
	}
	if objs, err = r.term.Client.ListWhole(ctx, k, ""); err != nil {
		return 0, fmt.Errorf("could not list instances: %w", err)
	}
	return len(objs), nil
}
