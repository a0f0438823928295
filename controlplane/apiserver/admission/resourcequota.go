package admission

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
)

// quotas enforces ResourceQuotas exactly. The commit of a write also updates status.used, and
// requires that the quota is unchanged.
//
// When a quota is new or its spec has changed, usage is counted from the objects. This count is
// exact too: the commit of such a quota also writes the namespace, and each write that increases
// usage requires an unchanged namespace. All later commits therefore see the quota and update it.
//
// The exception is a write that decreases usage. It may be admitted without the quota and committed
// after the count. Until the controller recounts, the quota then shows too much usage, never too
// little.
type quotas struct {
	kinds     *api.Kinds
	kind      *api.Kind // the kind ResourceQuota
	namespace *api.Kind
	cluster   Cluster
	held      func(ctx context.Context, k *api.Kind, namespace, resourceVersion string) ([]api.Object, error)
	clock     func() time.Time
}

func newQuotas(c Config) *quotas {
	q := &quotas{kinds: c.Kinds, cluster: c.Cluster, held: c.Held, clock: c.Clock}
	if c.Kinds != nil {
		q.kind, q.namespace = c.Kinds.ByType(&corev1.ResourceQuota{}), c.Kinds.ByType(&corev1.Namespace{})
	}
	return q
}

// Quotas returns the phase that charges quotas. It must be last, so that it charges the object as
// it is stored.
func Quotas(c Config) Phase {
	return Phase{Name: "quota", Plugins: []Plugin{{"ResourceQuota", newQuotas(c).charge}}}
}

// forget clears the status of a quota when its scopes change, because its usage counts other
// objects.
func (q *quotas) forget(_ context.Context, a *Attempt) error {
	old, ok := a.Stored.(*corev1.ResourceQuota)
	if !ok || !a.Updates() {
		return nil
	}
	a.Derive(func(whole api.Object) {
		now := whole.(*corev1.ResourceQuota)
		if !equality.Semantic.DeepEqual(now.Spec.Scopes, old.Spec.Scopes) ||
			!equality.Semantic.DeepEqual(now.Spec.ScopeSelector, old.Spec.ScopeSelector) {
			now.Status = corev1.ResourceQuotaStatus{}
		}
	})
	return nil
}

// charge adds updates of the matching quotas of the namespace to the commit of the attempt.
func (q *quotas) charge(ctx context.Context, a *Attempt) error {
	k := a.Kind
	if q.kind == nil || !k.Namespaced || k.Virtual || k.TTL > 0 || a.Operation == api.Connect {
		return nil
	}
	if k == q.kind {
		q.touch(a)
	}
	e := entry{of: k.GroupResource(), was: a.Stored, is: a.Whole, resize: a.Facet == "resize"}
	switch {
	case a.Removes:
		e.is = nil
	case a.Whole == nil, a.Stored != nil && !quota.Varies(e.of):
		return nil
	}
	e.judged = e.is != nil && (a.Facet == "" || e.resize)
	since := "0"
	if e.judged && q.grows(&e) {
		// This must precede reading the quotas: if a quota is missed, its commit has since written
		// the namespace, and this commit conflicts.
		since = q.fence(ctx, a)
	}
	all, err := q.held(ctx, q.kind, a.Namespace, since)
	if err != nil {
		return asStatus(err)
	}
	for _, o := range all {
		one := o.(*corev1.ResourceQuota)
		if q.concerned(one, &e) && (k != q.kind || one.Name != a.Name) {
			a.Write(api.Change{
				Ref:  api.Ref{Kind: q.kind, Namespace: a.Namespace, Name: one.Name},
				Next: func(stored api.Object) (api.Object, error) { return q.charged(ctx, a, &e, stored) },
			})
		}
	}
	return nil
}

// fence requires that the namespace is unchanged at commit, and returns its resourceVersion.
func (q *quotas) fence(ctx context.Context, a *Attempt) string {
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

// entry is the change of one object that is to be charged.
type entry struct {
	of      schema.GroupResource
	was, is api.Object // nil = does not exist
	judged  bool       // the write may be rejected
	resize  bool
}

// touch adds a write of the namespace to the commit of a quota that is new or has a changed spec.
func (q *quotas) touch(a *Attempt) {
	now, ok := a.Whole.(*corev1.ResourceQuota)
	if !ok || a.Facet != "" {
		return
	}
	if old, ok := a.Stored.(*corev1.ResourceQuota); ok && equality.Semantic.DeepEqual(now.Spec, old.Spec) {
		return
	}
	a.Write(api.Change{Ref: api.Ref{Kind: q.namespace, Name: a.Namespace}, Next: func(stored api.Object) (api.Object, error) {
		if stored == nil {
			return nil, notFound("namespaces", a.Namespace)
		}
		return stored.DeepCopyObject().(api.Object), nil
	}})
}

// grows reports whether a change increases any usage that a quota can limit.
func (q *quotas) grows(e *entry) bool {
	if e.was == nil {
		return true
	}
	if pod, ok := e.is.(*corev1.Pod); ok {
		was, ok := e.was.(*corev1.Pod)
		// Nothing else of a pod that affects usage can change.
		return !ok || !equality.Semantic.DeepEqual(pod.Spec.ActiveDeadlineSeconds, was.Spec.ActiveDeadlineSeconds) || e.resize
	}
	now := q.clock()
	for _, d := range quota.Minus(quota.Usage(e.of, e.is, now), quota.Usage(e.of, e.was, now)) {
		if d.Sign() > 0 {
			return true
		}
	}
	return false
}

// concerned reports whether a quota may need an update or may reject the change.
func (q *quotas) concerned(one *corev1.ResourceQuota, e *entry) bool {
	if !quota.Concerns(&one.Spec, e.of) {
		return false
	}
	return e.was == nil || len(q.delta(one, e)) > 0
}

func (q *quotas) delta(one *corev1.ResourceQuota, e *entry) corev1.ResourceList {
	now := q.clock()
	return quota.Minus(quota.Charge(&one.Spec, e.of, e.is, now), quota.Charge(&one.Spec, e.of, e.was, now))
}

// charged returns the quota after a change, or an error if the change exceeds it.
func (q *quotas) charged(ctx context.Context, a *Attempt, e *entry, stored api.Object) (api.Object, error) {
	old, ok := stored.(*corev1.ResourceQuota)
	if !ok {
		return stored, nil // the quota was deleted meanwhile
	}
	delta := q.delta(old, e)
	if pod, ok := e.is.(*corev1.Pod); ok && e.judged && quota.Charge(&old.Spec, e.of, pod, q.clock()) != nil {
		if lacking := quota.Unstated(&old.Spec, pod); lacking != "" {
			return nil, forbid(a, pod, fmt.Errorf("failed quota: %s: must specify %s", old.Name, lacking))
		}
	}
	if len(delta) == 0 {
		return stored, nil
	}
	now := old.DeepCopy()
	if !quota.Counted(old, q.known) {
		used, err := quota.Count(&old.Spec, q.clock(), func(of schema.GroupResource) ([]api.Object, bool, error) {
			k := q.kindOf(of)
			if k == nil {
				return nil, false, nil
			}
			// From a cache at the quota's revision or later: each change of counted objects updates
			// the quota.
			list, err := q.held(ctx, k, a.Namespace, old.ResourceVersion)
			return list, true, err
		})
		if err != nil {
			return nil, err
		}
		now.Status.Hard, now.Status.Used = now.Spec.DeepCopy().Hard, used
	}
	if e.judged {
		if err := exceeded(now, delta); err != nil {
			return nil, forbid(a, e.is, err)
		}
	}
	settle(now.Status.Used, delta)
	return now, nil
}

// settle adds delta to used. Values do not become negative, in case an object was never counted.
func settle(used, delta corev1.ResourceList) {
	quota.Add(used, delta)
	for name := range delta {
		if q := used[name]; q.Sign() < 0 {
			used[name] = *resource.NewQuantity(0, resource.DecimalSI)
		}
	}
}

// exceeded returns an error that lists the resources of delta that exceed the quota; nil if none
// does.
func exceeded(q *corev1.ResourceQuota, delta corev1.ResourceList) error {
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

func (q *quotas) known(of schema.GroupResource) bool { return q.kindOf(of) != nil }

// kindOf returns the kind with which the objects of a resource are listed; nil if the resource is
// not counted.
func (q *quotas) kindOf(of schema.GroupResource) *api.Kind {
	for _, k := range q.kinds.Table().Stored() {
		if k.Resource == of.Resource && k.GVK.Group == of.Group && k.Namespaced && k.TTL == 0 {
			return k
		}
	}
	return nil
}
