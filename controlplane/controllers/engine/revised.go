package engine

import (
	"context"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
)

// RevisedKind describes StatefulSets or DaemonSets. Their objects create pods from a template, and
// store older templates as ControllerRevisions.
type RevisedKind[O api.Object] struct {
	GVK         schema.GroupVersionKind
	Resource    string // resource name, such as "statefulsets"
	DisplayName string // name of the kind in errors, such as "stateful set"
	Selector    func(O) *metav1.LabelSelector
	Template    func(O) *corev1.PodTemplateSpec
	// History returns the collision count in the status and the revision history limit in the spec.
	History func(O) (collisions, limit *int32)
	// KeepsRevisions reports whether an owner keeps revisions that no longer match its selector, as
	// StatefulSets in Kubernetes do. Otherwise such revisions are released.
	KeepsRevisions bool
}

// RevisedInformers holds the informers that a controller of a RevisedKind needs.
type RevisedInformers[O api.Object] struct {
	Owners, Pods, Revisions cache.SharedIndexInformer
	kind                    RevisedKind[O]
}

// RevisedFrom returns the informers for a RevisedKind and adds the required indexes to them.
func RevisedFrom[O api.Object](d Deps, k RevisedKind[O]) RevisedInformers[O] {
	i := RevisedInformers[O]{
		Owners: client.Informer[O](d.Informers), Pods: client.Informer[*corev1.Pod](d.Informers),
		Revisions: client.Informer[*appsv1.ControllerRevision](d.Informers), kind: k,
	}
	IndexControllers(i.Pods)
	IndexControllers(i.Revisions)
	return i
}

// Watches returns the Watches of owners, their pods and their revisions, in addition to the given
// ones. Each change queues the affected owners.
func (i RevisedInformers[O]) Watches(others ...Watch) []Watch {
	group, selector := i.kind.GVK.GroupKind(), func(o O) labels.Selector { return SelectorOf(i.kind.Selector(o)) }
	return append(others,
		OnInformer(i.Owners, Self[O]),
		OnInformer(i.Pods, OwnersOf[O, *corev1.Pod](i.Owners, group, selector)),
		OnInformer(i.Revisions, OwnersOf[O, *appsv1.ControllerRevision](i.Owners, group, selector)),
	)
}

// Rules returns the permissions to manage pods and revisions, in addition to the given ones.
func (i RevisedInformers[O]) Rules(others ...rbacv1.PolicyRule) []rbacv1.PolicyRule {
	group := []string{i.kind.GVK.Group}
	return append(others,
		rbacv1.PolicyRule{APIGroups: group, Resources: []string{i.kind.Resource},
			Verbs: []string{"get", "list", "watch"}},
		rbacv1.PolicyRule{APIGroups: group, Resources: []string{i.kind.Resource + "/status",
			i.kind.Resource + "/finalizers"}, Verbs: []string{"update"}},
		rbacv1.PolicyRule{APIGroups: []string{"apps"}, Resources: []string{"controllerrevisions"},
			Verbs: []string{"create", "delete", "get", "list", "patch", "update", "watch"}},
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods"},
			Verbs: []string{"create", "delete", "list", "patch", "update", "watch"}},
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"events"},
			Verbs: []string{"create", "patch", "update"}},
	)
}

// RevisedOwners gives access to the objects of a RevisedKind (the owners), their pods and their
// revisions during one term of leadership.
type RevisedOwners[O api.Object] struct {
	Term      *Term
	Owners    *View[O]
	Pods      *OwnedPods
	Revisions *Revisions
	Backoff   ReplacementBackoff
	Status    *StatusWriter[O]
	kind      RevisedKind[O]
}

// Lead returns the RevisedOwners for a term. It may be called only by Descriptor.Lead.
func (i RevisedInformers[O]) Lead(t *Term) RevisedOwners[O] {
	owners := ViewOf[O](t, i.Owners)
	return RevisedOwners[O]{
		Term: t, Owners: owners, Pods: OwnedPodsOf(t, i.Pods), Revisions: RevisionsOf(t, i.Revisions),
		Status: NewStatusWriter(t, owners, i.kind.DisplayName), kind: i.kind,
	}
}

// ClaimPodsAndRevisions adopts and releases pods and revisions for an owner. It returns the pods
// that the owner controls afterwards. A pod belongs to the owner if it matches the selector and
// passes all filters.
func (r *RevisedOwners[O]) ClaimPodsAndRevisions(
	ctx context.Context, owner O, selector labels.Selector, filters ...func(*corev1.Pod) bool,
) ([]*corev1.Pod, error) {
	ref := r.controllerRef(owner)
	claims := SortByOwnership(owner, selector, r.Pods.Candidates(owner), filters...)
	pods, err := ApplyOwnership[O](ctx, r.Term.Client, r.Pods.View, owner, ref, claims)
	if err != nil {
		return nil, err
	}
	known := r.Revisions.By(ControllerIndex, string(owner.GetUID()), OrphansOf(owner.GetNamespace()))
	revisions := SortByOwnership(owner, selector, known)
	if r.kind.KeepsRevisions {
		revisions = adoptRevisions(owner, selector, known)
	}
	_, err = ApplyOwnership[O](ctx, r.Term.Client, r.Revisions.View, owner, ref, revisions)
	return pods, err
}

// adoptRevisions returns the OwnershipDecision for an owner of a kind that keeps all revisions
// (RevisedKind.KeepsRevisions): it releases no revisions. It adopts matching revisions without a
// controller, including revisions that are being deleted.
func adoptRevisions(
	owner api.Object, selector labels.Selector, known []*appsv1.ControllerRevision,
) OwnershipDecision[*appsv1.ControllerRevision] {
	var c OwnershipDecision[*appsv1.ControllerRevision]
	for _, rev := range known {
		switch {
		case metav1.IsControlledBy(rev, owner):
			c.Owned = append(c.Owned, rev)
		case metav1.GetControllerOfNoCopy(rev) == nil && owner.GetDeletionTimestamp() == nil &&
			rev.Namespace == owner.GetNamespace() && selector.Matches(labels.Set(rev.Labels)):
			c.Adopt = append(c.Adopt, rev)
		}
	}
	return c
}

// Sync stores the pod template of owner as its newest revision and returns its revision history.
func (r *RevisedOwners[O]) Sync(ctx context.Context, owner O) (History, error) {
	collisions, _ := r.kind.History(owner)
	return r.Revisions.Sync(ctx, RevisedObject{Owner: owner, Ref: r.controllerRef(owner),
		Selector: SelectorOf(r.kind.Selector(owner)),
		Template: r.kind.Template(owner), Collisions: collisions})
}

// OwnedPods returns the pods of an owner, including the writes of this reconcile.
func (r *RevisedOwners[O]) OwnedPods(owner O) []*corev1.Pod {
	return r.Pods.By(ControllerIndex, string(owner.GetUID()))
}

// Truncate deletes the oldest revisions of owner beyond its revision history limit. Revisions for
// which live returns true are kept and do not count.
func (r *RevisedOwners[O]) Truncate(
	ctx context.Context, owner O, h History, live func(*appsv1.ControllerRevision) bool,
) error {
	limit := 10
	if _, n := r.kind.History(owner); n != nil {
		limit = max(0, int(*n)) // validation accepts a negative limit of a StatefulSet
	}
	return r.Revisions.Truncate(ctx, h, live, limit)
}

func (r *RevisedOwners[O]) controllerRef(owner O) metav1.OwnerReference {
	return *metav1.NewControllerRef(owner, r.kind.GVK)
}
