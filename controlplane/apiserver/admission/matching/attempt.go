// Package matching decides which attempts a webhook or admission policy applies to, and in which
// version it receives the object.
package matching

import (
	"context"
	"fmt"
	"slices"

	admissionv1 "k8s.io/api/admission/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// Attempt is a write or connect request with the data that webhooks and admission policies receive.
type Attempt struct {
	User        api.User
	Operation   api.Operation
	Kind        schema.GroupVersionKind // of Object and Old
	Resource    schema.GroupVersionResource
	Subresource string
	Namespace   string // for a Namespace object, its own name
	Name        string
	// Object is the new object, or the request body of a connect; nil on delete. Old is the stored
	// object; nil on create and connect.
	Object, Old runtime.Object
	Options     runtime.Object // of the verb, with their type; nil = none
	DryRun      bool
	// Leads is true if the write comes from a component that runs only on the leader replica.
	// Requests of other clients cannot set it.
	Leads bool

	equivalents      []Target // cached result of Versions.Equivalents
	equivalentsKnown bool
}

// Target is a resource and its kind, both in the API version that a webhook or policy receives.
type Target struct {
	Resource schema.GroupVersionResource
	Kind     schema.GroupVersionKind
}

// View is an attempt with its objects converted to the API version of a Target.
type View struct {
	Target
	Object, Old runtime.Object
}

// Target returns the resource and kind of the request.
func (a *Attempt) Target() Target { return Target{a.Resource, a.Kind} }

// adminGroup is the API group of the webhook configurations and admission policies.
const adminGroup = "admissionregistration.k8s.io"

// reviews are the resources, such as tokenreviews, with which clients check identities and
// permissions. Neither webhooks nor policies apply to them.
var reviews = map[schema.GroupResource]bool{
	{Group: "authentication.k8s.io", Resource: "tokenreviews"}:             true,
	{Group: "authentication.k8s.io", Resource: "selfsubjectreviews"}:       true,
	{Group: "authorization.k8s.io", Resource: "subjectaccessreviews"}:      true,
	{Group: "authorization.k8s.io", Resource: "localsubjectaccessreviews"}: true,
	{Group: "authorization.k8s.io", Resource: "selfsubjectaccessreviews"}:  true,
	{Group: "authorization.k8s.io", Resource: "selfsubjectrulesreviews"}:   true,
}

// Exempt reports whether neither webhooks nor policies apply to the attempt. This is the case for
// reviews of identities and permissions, and for writes of webhook configurations and policies,
// which could otherwise block their own removal.
func (a *Attempt) Exempt() bool {
	return a.Resource.Group == adminGroup || reviews[a.Resource.GroupResource()]
}

// Request returns the AdmissionRequest of the attempt for a target, without the objects.
func (a *Attempt) Request(t Target) *admissionv1.AdmissionRequest {
	user := authenticationv1.UserInfo{Username: a.User.Name, UID: a.User.UID, Groups: a.User.Groups}
	if len(a.User.Extra) > 0 {
		user.Extra = make(map[string]authenticationv1.ExtraValue, len(a.User.Extra))
		for key, values := range a.User.Extra {
			user.Extra[key] = values
		}
	}
	asked, kind := metav1.GroupVersionResource(a.Resource), metav1.GroupVersionKind(a.Kind)
	return &admissionv1.AdmissionRequest{
		Kind: metav1.GroupVersionKind(t.Kind), Resource: metav1.GroupVersionResource(t.Resource),
		SubResource: a.Subresource,
		RequestKind: &kind, RequestResource: &asked, RequestSubResource: a.Subresource,
		Name: a.Name, Namespace: a.Namespace, Operation: admissionv1.Operation(a.Operation), UserInfo: user,
		DryRun:  &a.DryRun,
		Options: runtime.RawExtension{Object: a.Options},
	}
}

// Cluster reads objects on which matching depends, such as namespaces. admission.Cluster implements
// it.
type Cluster interface {
	// Get returns an object, which the caller must not change. ok is false if the object does not
	// exist.
	Get(ctx context.Context, resource, namespace, name string) (o api.Object, ok bool)
}

// isNamespace reports whether the object of the attempt is a Namespace.
func (a *Attempt) isNamespace() bool {
	return a.Resource.Group == "" && a.Resource.Resource == "namespaces"
}

// Home returns the Namespace of the attempt's object; nil for cluster-scoped objects and for
// Namespaces.
func (a *Attempt) Home(ctx context.Context, c Cluster) (*corev1.Namespace, error) {
	if a.Namespace == "" || a.isNamespace() {
		return nil, nil
	}
	o, ok := c.Get(ctx, "namespaces", "", a.Namespace)
	ns, is := o.(*corev1.Namespace)
	if !ok || !is {
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, a.Namespace)
	}
	return ns, nil
}

// Versions converts objects between the served versions of their kind.
type Versions struct{ Kinds *api.Kinds }

// Equivalents returns the other resources, such as other API versions, through which the same
// stored object is served. Their kinds are those of the attempt's subresource. The result is cached
// in a.
func (v Versions) Equivalents(a *Attempt) []Target {
	if !a.equivalentsKnown {
		a.equivalents, a.equivalentsKnown = v.equivalentTargets(a), true
	}
	return a.equivalents
}

func (v Versions) equivalentTargets(a *Attempt) []Target {
	table := v.Kinds.Table()
	own := table.ByResource(a.Resource)
	if own == nil || own.Storage == nil {
		return nil
	}
	var out []Target
	for _, k := range table.All() {
		if k == own || k.Storage != own.Storage {
			continue
		}
		t := Target{Resource: k.GVR(), Kind: k.GVK}
		if a.Subresource != "" {
			sub := k.Subresources[a.Subresource]
			if sub == nil {
				continue
			}
			if !sub.GVK.Empty() {
				t.Kind = sub.GVK
			}
		}
		out = append(out, t)
	}
	return out
}

// View returns the attempt with its objects converted to the version of t.
func (v Versions) View(ctx context.Context, a *Attempt, t Target) (*View, error) {
	view := &View{Target: t, Object: a.Object, Old: a.Old}
	if t.Kind == a.Kind {
		return view, nil
	}
	for _, o := range []*runtime.Object{&view.Object, &view.Old} {
		if err := v.convertObject(ctx, o, a.Kind, t.Kind); err != nil {
			return nil, fmt.Errorf("failed to convert object version: %w", err)
		}
	}
	return view, nil
}

// ToStored returns the object of a view, converted back to the API version of the attempt.
func (v Versions) ToStored(ctx context.Context, a *Attempt, view *View) (runtime.Object, error) {
	out := view.Object
	if view.Kind == a.Kind {
		return out, nil
	}
	return out, v.convertObject(ctx, &out, view.Kind, a.Kind)
}

func (v Versions) convertObject(ctx context.Context, o *runtime.Object, source, target schema.GroupVersionKind) error {
	obj, ok := (*o).(api.Object)
	if !ok || obj == nil {
		return nil // values that are not API objects have a single version
	}
	table := v.Kinds.Table()
	a, b := table.ByGVK(source), table.ByGVK(target)
	if a == nil || b == nil || a.Storage != b.Storage {
		return fmt.Errorf("unable to convert to %v: unknown kind", target)
	}
	obj = a.Type.Ops.Shallow(obj)
	if a.GVK != a.Storage.Hub.GVK {
		var err error
		if obj, err = a.Conversion.To(ctx, obj); err != nil {
			return err
		}
	}
	if b.GVK != b.Storage.Hub.GVK {
		objs, err := b.Conversion.From(ctx, []api.Object{obj})
		if err != nil {
			return err
		}
		obj = objs[0]
	}
	b.SetTypeMeta(obj)
	*o = obj
	return nil
}

// New returns an empty object of a kind, or an empty body of the attempt's subresource; nil if the
// kind is unknown.
func (v Versions) New(a *Attempt, gvk schema.GroupVersionKind) runtime.Object {
	table := v.Kinds.Table()
	if a.Subresource != "" {
		if k := table.ByResource(a.Resource); k != nil {
			if sub := k.Subresources[a.Subresource]; sub != nil && sub.New != nil && sub.GVK == gvk {
				return sub.New()
			}
		}
	}
	if k := table.ByGVK(gvk); k != nil {
		return k.Type.New()
	}
	return nil
}

// Default sets the API defaults of an object that a webhook or policy has changed.
func (v Versions) Default(a *Attempt, gvk schema.GroupVersionKind, o runtime.Object) {
	k := v.Kinds.ByGVK(gvk)
	if obj, ok := o.(api.Object); ok && k != nil && k.Writes.Default != nil && a.Subresource == "" {
		k.Writes.Default(obj)
	}
}

func containsAny[T comparable](list []T, wanted ...T) bool {
	return slices.ContainsFunc(list, func(v T) bool { return slices.Contains(wanted, v) })
}
