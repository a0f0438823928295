// Package subresource holds the verbs that are more than storing an object:
// binding and evicting a pod, minting a token, and the reviews, which are
// answered and never stored.
package subresource

import (
	"context"
	"fmt"
	"net/http"
	"reflect"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/registry"
)

// Verbs performs them on a registry.
type Verbs struct {
	Registry *registry.Registry
	Kinds    *api.Kinds
	Tokens   *pki.ServiceTokens // nil = no token is minted
	Clock    func() time.Time
	// TokenCeiling is the longest life of a token that the user may ask for; 0 = any. May be nil.
	TokenCeiling func(u api.User) time.Duration
	// Review says whom a bearer token names, and for which of the asked audiences.
	Review func(ctx context.Context, token string, audiences []string) (api.User, []string, error)
	// Allowed answers what an access review asks.
	Allowed func(
		ctx context.Context, u api.User, res *authorizationv1.ResourceAttributes, path *authorizationv1.NonResourceAttributes,
	) authorizationv1.SubjectAccessReviewStatus
	// Rules lists what the user may do in a namespace.
	Rules func(u api.User, namespace string) []rbacv1.PolicyRule
	// Charge has the commit of a deletion change the quotas. May be nil.
	Charge func(ctx context.Context, a *api.Attempt) error
	// Components tells how the parts of the cluster are, in the order of their names. nil = nothing is known of any.
	Components func(ctx context.Context) []corev1.ComponentStatus
	// Usage is the NodeMetrics of Nodes and the PodMetrics of pods, for those of which some are known. nil = for none.
	Usage func(of []api.Object) []api.Object
	// Unlisted says why Rules are not all that the user may do; "" when they are. May be nil.
	Unlisted func() string
}

// Judge has admission judge a body that is not stored, and returns it as admission left it: what it is about is stored,
// or nil. Nothing is committed, so that admission cannot ask for more than a verdict.
func Judge(ctx context.Context, r *api.Request, a registry.Admission, body runtime.Object, stored api.Object) (runtime.Object, error) {
	t, err := judged(ctx, r, a, body, stored)
	if err != nil {
		return nil, err
	}
	if len(t.Changes()) > 0 {
		return nil, apierrors.NewInternalError(fmt.Errorf("admission asks for a change with a %T, which stores nothing", body))
	}
	return t.Object, nil
}

func judged(ctx context.Context, r *api.Request, a registry.Admission, body runtime.Object, stored api.Object) (*api.Attempt, error) {
	t := &api.Attempt{
		Kind: r.Kind, Facet: r.Subresource, Operation: api.Create, Namespace: r.Namespace, Name: r.Name, User: r.User,
		DryRun: len(r.Create.DryRun) > 0, Object: body, Stored: stored, Request: r,
	}
	if r.Verb == api.VerbConnect {
		t.Operation = api.Connect
	}
	if err := a.Mutate(ctx, t); err != nil {
		return nil, err
	}
	if reflect.TypeOf(t.Object) != reflect.TypeOf(body) {
		return nil, apierrors.NewInternalError(fmt.Errorf("admission made a %T of a %T", t.Object, body))
	}
	return t, a.Validate(ctx, t)
}

// with has the commit of a deletion bring what was asked for by t, and what the deletion itself changes.
func (v *Verbs) with(t *api.Attempt) registry.Admission {
	return registry.Stages{Validating: func(ctx context.Context, a *api.Attempt) error {
		for _, c := range t.Checks() {
			a.Require(c)
		}
		for _, c := range t.Changes() {
			a.Write(c)
		}
		if v.Charge == nil {
			return nil
		}
		return v.Charge(ctx, a)
	}}
}

func success() *metav1.Status {
	return &metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusSuccess, Code: http.StatusCreated,
	}
}

// get reads the shared object as it is now: what is decided by it is not undone when this replica hears of a change.
func (v *Verbs) get(ctx context.Context, gvr schema.GroupVersionResource, namespace, name string) (api.Object, error) {
	kind := v.Kinds.ByResource(gvr)
	if kind == nil {
		return nil, apierrors.NewNotFound(gvr.GroupResource(), name)
	}
	return v.Registry.Get(ctx, &api.Request{Verb: api.VerbGet, Kind: kind, Namespace: namespace, Name: name})
}

// list reads the shared objects of a kind as they are now. A kind that is not served has none.
func (v *Verbs) list(ctx context.Context, gvr schema.GroupVersionResource, namespace string) ([]api.Object, error) {
	kind := v.Kinds.ByResource(gvr)
	if kind == nil {
		return nil, nil
	}
	l, err := v.Registry.List(ctx, &api.Request{Verb: api.VerbList, Kind: kind, Namespace: namespace, Pointers: true})
	if err != nil {
		return nil, err
	}
	return l.(*api.ObjectList).Items, nil
}
