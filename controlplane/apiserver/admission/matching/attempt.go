// Package matching says which attempts to write concern a webhook or an admission policy, and in which version of the
// object it looks at them.
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

// Attempt is an attempt to change something, or to connect, as those outside of the chain are told of it.
type Attempt struct {
	User        api.User
	Operation   api.Operation
	Kind        schema.GroupVersionKind // of Object and Old
	Resource    schema.GroupVersionResource
	Subresource string
	Namespace   string // a Namespace lies in itself
	Name        string
	// Object is what is to be, or the body of the verb; nil on delete. Old is what is; nil on create and connect.
	Object, Old runtime.Object
	Options     runtime.Object // of the verb, with its type; nil = none
	DryRun      bool
	// Leads says that a part of the leader writes, which no request from elsewhere can claim.
	Leads bool

	others []Target // Versions.Equivalents, once they are asked for
	known  bool
}

// Target is a resource and its kind.
type Target struct {
	Resource schema.GroupVersionResource
	Kind     schema.GroupVersionKind
}

// View is an attempt in the version in which somebody looks at it.
type View struct {
	Target
	Object, Old runtime.Object
}

// Target is what the client asked for.
func (a *Attempt) Target() Target { return Target{a.Resource, a.Kind} }

// adminGroup has the kinds that say who is asked.
const adminGroup = "admissionregistration.k8s.io"

// reviews are questions about rights, which no answer from outside may hold up.
var reviews = map[schema.GroupResource]bool{
	{Group: "authentication.k8s.io", Resource: "tokenreviews"}:             true,
	{Group: "authentication.k8s.io", Resource: "selfsubjectreviews"}:       true,
	{Group: "authorization.k8s.io", Resource: "subjectaccessreviews"}:      true,
	{Group: "authorization.k8s.io", Resource: "localsubjectaccessreviews"}: true,
	{Group: "authorization.k8s.io", Resource: "selfsubjectaccessreviews"}:  true,
	{Group: "authorization.k8s.io", Resource: "selfsubjectrulesreviews"}:   true,
}

// Exempt says that nobody is asked: who is asked must not depend on an answer, nor must the reviews of rights.
func (a *Attempt) Exempt() bool {
	return a.Resource.Group == adminGroup || reviews[a.Resource.GroupResource()]
}

// Request is the attempt without its objects, as it is asked about at a target.
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
		Kind: metav1.GroupVersionKind(t.Kind), Resource: metav1.GroupVersionResource(t.Resource), SubResource: a.Subresource,
		RequestKind: &kind, RequestResource: &asked, RequestSubResource: a.Subresource,
		Name: a.Name, Namespace: a.Namespace, Operation: admissionv1.Operation(a.Operation), UserInfo: user, DryRun: &a.DryRun,
		Options: runtime.RawExtension{Object: a.Options},
	}
}

// Cluster is what is looked at besides: admission.Cluster.
type Cluster interface {
	// Get returns a shared object; ok is false when none exists.
	Get(ctx context.Context, resource, namespace, name string) (o api.Object, ok bool)
}

// isNamespace says that the attempt is about a Namespace itself.
func (a *Attempt) isNamespace() bool {
	return a.Resource.Group == "" && a.Resource.Resource == "namespaces"
}

// Home is the Namespace in which the object of the attempt lies; nil when it lies in none.
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

// Versions are the versions in which objects are served.
type Versions struct{ Kinds *api.Kinds }

// Equivalents are the further resources under which the same object may be written, with the kinds of its facet.
func (v Versions) Equivalents(a *Attempt) []Target {
	if !a.known {
		a.others, a.known = v.equivalents(a), true
	}
	return a.others
}

func (v Versions) equivalents(a *Attempt) []Target {
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

// View shows the attempt at a target.
func (v Versions) View(ctx context.Context, a *Attempt, t Target) (*View, error) {
	view := &View{Target: t, Object: a.Object, Old: a.Old}
	if t.Kind == a.Kind {
		return view, nil
	}
	for _, o := range []*runtime.Object{&view.Object, &view.Old} {
		if err := v.convert(ctx, o, a.Kind, t.Kind); err != nil {
			return nil, fmt.Errorf("failed to convert object version: %w", err)
		}
	}
	return view, nil
}

// Back is the object of a view in the version of the attempt.
func (v Versions) Back(ctx context.Context, a *Attempt, view *View) (runtime.Object, error) {
	out := view.Object
	if view.Kind == a.Kind {
		return out, nil
	}
	return out, v.convert(ctx, &out, view.Kind, a.Kind)
}

func (v Versions) convert(ctx context.Context, o *runtime.Object, from, to schema.GroupVersionKind) error {
	obj, ok := (*o).(api.Object)
	if !ok || obj == nil {
		return nil // what is no object of its own has one version
	}
	table := v.Kinds.Table()
	a, b := table.ByGVK(from), table.ByGVK(to)
	if a == nil || b == nil || a.Storage != b.Storage {
		return fmt.Errorf("unable to convert to %v: unknown kind", to)
	}
	obj = a.Ops.Shallow(obj)
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

// New returns an empty object of a kind, or the body of a facet; nil when none exists.
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
		return k.New()
	}
	return nil
}

// Default fills what an object lacks that came from outside.
func (v Versions) Default(a *Attempt, gvk schema.GroupVersionKind, o runtime.Object) {
	k := v.Kinds.ByGVK(gvk)
	if obj, ok := o.(api.Object); ok && k != nil && k.Default != nil && a.Subresource == "" {
		k.Default(obj)
	}
}

func has[T comparable](of []T, wanted ...T) bool {
	return slices.ContainsFunc(of, func(v T) bool { return slices.Contains(wanted, v) })
}
