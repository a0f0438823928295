package builtin

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/quota"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// quotaPlugin enforces ResourceQuotas without races between concurrent writes. The transaction that
// commits a write also updates status.used of the quotas, and requires that they are unchanged.
//
// When a quota is new or its spec has changed, usage is counted from the objects. This count is
// exact too: the commit of such a quota also writes the namespace, and each write that increases
// usage requires an unchanged namespace. All later commits therefore include the quota and update
// it.
//
// The exception is a write that decreases usage. It may be admitted without the quota and committed
// after the count. Until the controller recounts, the quota then shows too much usage, never too
// little.
type quotaPlugin struct {
	kinds     *api.Kinds
	kind      *api.Kind // the kind ResourceQuota
	namespace *api.Kind
	cluster   admission.Cluster
	listHeld  func(ctx context.Context, k *api.Kind, namespace, resourceVersion string) ([]api.Object, error)
	clock     func() time.Time
}

func newQuotaPlugin(c Config) *quotaPlugin {
	q := &quotaPlugin{kinds: c.Kinds, cluster: c.Cluster, listHeld: c.ListHeld, clock: c.Clock}
	if c.Kinds != nil {
		q.kind, q.namespace = c.Kinds.ByType(&corev1.ResourceQuota{}), c.Kinds.ByType(&corev1.Namespace{})
	}
	return q
}

// Quotas returns the phase that adds the usage of an attempt's object to the ResourceQuotas. It
// must be the last phase, so that it counts the object as it will be stored.
func Quotas(c Config) admission.Phase {
	return admission.Phase{Name: "quota", Plugins: []admission.Plugin{{Name: "ResourceQuota",
		Admit: newQuotaPlugin(c).chargeQuotas}}}
}

// clearStatusOnScopeChange clears the status of a quota when its scopes change. The usage in the
// status was counted for the objects that the previous scopes selected.
func (q *quotaPlugin) clearStatusOnScopeChange(_ context.Context, a *admission.Attempt) error {
	old, ok := a.Stored.(*corev1.ResourceQuota)
	if !ok || !a.UpdatesObject() {
		return nil
	}
	a.DeriveFields(func(whole api.Object) {
		now := whole.(*corev1.ResourceQuota)
		if !equality.Semantic.DeepEqual(now.Spec.Scopes, old.Spec.Scopes) ||
			!equality.Semantic.DeepEqual(now.Spec.ScopeSelector, old.Spec.ScopeSelector) {
			now.Status = corev1.ResourceQuotaStatus{}
		}
	})
	return nil
}

// chargeQuotas adds the new status of each ResourceQuota that the attempt's object affects to the
// store transaction that commits the attempt.
func (q *quotaPlugin) chargeQuotas(ctx context.Context, a *admission.Attempt) error {
	k := a.Kind
	if q.kind == nil || !k.Namespaced || k.Serving.Virtual || k.Commit.TTL > 0 || a.Operation == api.Connect {
		return nil
	}
	if k == q.kind {
		q.touchNamespace(a)
	}
	e := quotaChange{resource: k.GroupResource(), oldObject: a.Stored, newObject: a.Whole, resize: a.Facet == "resize"}
	switch {
	case a.Removes:
		e.newObject = nil
	case a.Whole == nil, a.Stored != nil && !quota.IsUsageVariable(e.resource):
		return nil
	}
	e.checked = e.newObject != nil && (a.Facet == "" || e.resize)
	since := "0"
	if e.checked && q.increasesUsage(&e) {
		// This must precede reading the quotas: if a quota is missed, its commit has since written
		// the namespace, and this commit conflicts.
		since = q.requireNamespace(ctx, a)
	}
	all, err := q.listHeld(ctx, q.kind, a.Namespace, since)
	if err != nil {
		return admission.AsStatus(err)
	}
	for _, o := range all {
		one := o.(*corev1.ResourceQuota)
		if q.isAffected(one, &e) && (k != q.kind || one.Name != a.Name) {
			a.Write(api.Change{
				Ref:  api.Ref{Kind: q.kind, Namespace: a.Namespace, Name: one.Name},
				Next: func(stored api.Object) (api.Object, error) { return q.chargeQuota(ctx, a, &e, stored) },
			})
		}
	}
	return nil
}

// requireNamespace adds the precondition that the namespace is unchanged at commit, and returns its
// resourceVersion. It returns "0" if the namespace does not exist.
func (q *quotaPlugin) requireNamespace(ctx context.Context, a *admission.Attempt) string {
	for _, c := range a.Checks() {
		if c.Kind == q.namespace && c.Name == a.Namespace && c.Seen != nil {
			return c.Seen.GetResourceVersion() // creations already have this precondition
		}
	}
	ns, ok := q.cluster.Get(ctx, "namespaces", "", a.Namespace)
	if !ok {
		return "0" // the namespace no longer exists, so no quota is created in it
	}
	a.Require(api.Check{Ref: api.Ref{Kind: q.namespace, Name: a.Namespace}, Seen: ns})
	return ns.GetResourceVersion()
}

// quotaChange is the write of one object, for which usage is added to or removed from quotas.
type quotaChange struct {
	resource             schema.GroupResource
	oldObject, newObject api.Object // nil = does not exist
	checked              bool       // the write may be rejected
	resize               bool
}

// touchNamespace adds a write of the namespace to the commit of a new quota or of a change of a
// quota's spec. The write does not change the namespace, but it makes concurrent commits that
// require an unchanged namespace conflict.
func (q *quotaPlugin) touchNamespace(a *admission.Attempt) {
	now, ok := a.Whole.(*corev1.ResourceQuota)
	if !ok || a.Facet != "" {
		return
	}
	if old, ok := a.Stored.(*corev1.ResourceQuota); ok && equality.Semantic.DeepEqual(now.Spec, old.Spec) {
		return
	}
	a.Write(api.Change{Ref: api.Ref{Kind: q.namespace, Name: a.Namespace},
		Next: func(stored api.Object) (api.Object, error) {
			if stored == nil {
				return nil, admission.NewNotFound("namespaces", a.Namespace)
			}
			return stored.DeepCopyObject().(api.Object), nil
		}})
}

// increasesUsage reports whether a change increases any usage that a quota can limit.
func (q *quotaPlugin) increasesUsage(e *quotaChange) bool {
	if e.oldObject == nil {
		return true
	}
	if pod, ok := e.newObject.(*corev1.Pod); ok {
		was, ok := e.oldObject.(*corev1.Pod)
		// Nothing else of a pod that affects usage can change.
		return !ok || !equality.Semantic.DeepEqual(pod.Spec.ActiveDeadlineSeconds, was.Spec.ActiveDeadlineSeconds) ||
			e.resize
	}
	now := q.clock()
	for _, d := range quota.Subtract(quota.ObjectUsage(e.resource, e.newObject, now),
		quota.ObjectUsage(e.resource, e.oldObject, now)) {
		if d.Sign() > 0 {
			return true
		}
	}
	return false
}

// isAffected reports whether a quota may need an update or may reject the change.
func (q *quotaPlugin) isAffected(resourceQuota *corev1.ResourceQuota, e *quotaChange) bool {
	if !quota.LimitsResource(&resourceQuota.Spec, e.resource) {
		return false
	}
	return e.oldObject == nil || len(q.usageDelta(resourceQuota, e)) > 0
}

func (q *quotaPlugin) usageDelta(resourceQuota *corev1.ResourceQuota, e *quotaChange) corev1.ResourceList {
	now := q.clock()
	return quota.Subtract(quota.ChargedUsage(&resourceQuota.Spec, e.resource, e.newObject, now),
		quota.ChargedUsage(&resourceQuota.Spec, e.resource, e.oldObject, now))
}

// chargeQuota returns the stored quota with its status updated by the change e, or an error if the
// change exceeds the quota.
func (q *quotaPlugin) chargeQuota(ctx context.Context, a *admission.Attempt, e *quotaChange, stored api.Object) (
	api.Object, error,
) {
	old, ok := stored.(*corev1.ResourceQuota)
	if !ok {
		return stored, nil // the quota was deleted meanwhile
	}
	delta := q.usageDelta(old, e)
	if pod, ok := e.newObject.(*corev1.Pod); ok && e.checked &&
		quota.ChargedUsage(&old.Spec, e.resource, pod, q.clock()) != nil {
		if lacking := quota.DescribeUnset(&old.Spec, pod); lacking != "" {
			return nil, admission.NewForbidden(a, pod,
				fmt.Errorf("failed quota: %s: must specify %s", old.Name, lacking))
		}
	}
	if len(delta) == 0 {
		return stored, nil
	}
	now := old.DeepCopy()
	if !quota.IsStatusComplete(old, q.isCounted) {
		used, err := quota.TotalUsage(&old.Spec, q.clock(), func(of schema.GroupResource) ([]api.Object, bool, error) {
			k := q.resourceKindOf(of)
			if k == nil {
				return nil, false, nil
			}
			// From a cache at the quota's revision or later: each change of counted objects updates
			// the quota.
			list, err := q.listHeld(ctx, k, a.Namespace, old.ResourceVersion)
			return list, true, err
		})
		if err != nil {
			return nil, err
		}
		now.Status.Hard, now.Status.Used = now.Spec.DeepCopy().Hard, used
	}
	if e.checked {
		if err := checkExceeded(now, delta); err != nil {
			return nil, admission.NewForbidden(a, e.newObject, err)
		}
	}
	addUsage(now.Status.Used, delta)
	return now, nil
}

// addUsage adds delta to used. The values of delta may be negative. A sum below 0, which an object
// that was never counted can cause, becomes 0.
func addUsage(used, delta corev1.ResourceList) {
	quota.Add(used, delta)
	for name := range delta {
		if q := used[name]; q.Sign() < 0 {
			used[name] = *resource.NewQuantity(0, resource.DecimalSI)
		}
	}
}

// checkExceeded returns an error that lists the resources for which the increase in delta would
// exceed the quota; nil if no increase would exceed the quota.
func checkExceeded(q *corev1.ResourceQuota, delta corev1.ResourceList) error {
	asked, used, hard := corev1.ResourceList{}, corev1.ResourceList{}, corev1.ResourceList{}
	for name, d := range delta {
		limit, bounded := q.Spec.Hard[name]
		after := q.Status.Used[name].DeepCopy()
		after.Add(d)
		if d.Sign() > 0 && bounded && after.Cmp(limit) > 0 {
			asked[name], used[name], hard[name] = d, q.Status.Used[name], limit
		}
	}
	if len(asked) == 0 {
		return nil
	}
	return errors.New("exceeded quota: " + q.Name + ", requested: " + quota.Format(asked) +
		", used: " + quota.Format(used) + ", limited: " + quota.Format(hard))
}

func (q *quotaPlugin) isCounted(groupResource schema.GroupResource) bool {
	return q.resourceKindOf(groupResource) != nil
}

// resourceKindOf returns a stored, namespaced kind with which the objects of a resource can be
// listed. It returns nil for resources that quotas do not count.
func (q *quotaPlugin) resourceKindOf(groupResource schema.GroupResource) *api.Kind {
	for _, k := range q.kinds.Table().Stored() {
		if k.Resource == groupResource.Resource && k.GVK.Group == groupResource.Group && k.Namespaced &&
			k.Commit.TTL == 0 {
			return k
		}
	}
	return nil
}
