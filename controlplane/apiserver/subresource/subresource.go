// Package subresource implements the requests that do more than store an object: binding and
// eviction of pods, service account tokens, and virtual kinds such as access reviews, which are not
// stored.
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

// Verbs implements the requests of this package. It reads and writes objects in a registry.
type Verbs struct {
	Registry *registry.Registry
	Kinds    *api.Kinds
	Tokens   *pki.ServiceTokens // nil = token requests get a 503
	Clock    func() time.Time
	// TokenCeiling returns the maximum lifetime of a token that the user may request; 0 = no limit.
	// May be nil.
	TokenCeiling func(u api.User) time.Duration
	// Review authenticates a bearer token. It returns the user of the token, and those of the given
	// audiences for which the token is valid.
	Review func(ctx context.Context, token string, audiences []string) (api.User, []string, error)
	// Allowed returns the status of an access review.
	Allowed func(
		ctx context.Context, u api.User, res *authorizationv1.ResourceAttributes,
		path *authorizationv1.NonResourceAttributes,
	) authorizationv1.SubjectAccessReviewStatus
	// Rules returns the RBAC rules that apply to a user in a namespace.
	Rules func(u api.User, namespace string) []rbacv1.PolicyRule
	// Charge adds the updates of ResourceQuotas that a deletion requires to its commit. May be nil.
	Charge func(ctx context.Context, a *api.Attempt) error
	// Components returns the health of the cluster's components, sorted by name. nil = no component
	// is reported.
	Components func(ctx context.Context) []corev1.ComponentStatus
	// Usage returns the NodeMetrics of Nodes and the PodMetrics of pods. It omits objects without
	// known metrics. nil = no metrics are known.
	Usage func(of []api.Object) []api.Object
	// Unlisted returns the reason why users may have permissions that Rules does not return; "" if
	// Rules returns all permissions. May be nil.
	Unlisted func() string
}

// Admit runs admission for a body that is not stored, and returns the body as admission has changed
// it. stored is the object that the request is about; may be nil. If admission requests a write,
// Admit returns an error, because nothing is committed.
func Admit(ctx context.Context, r *api.Request, a registry.Admission, body runtime.Object, stored api.Object) (
	runtime.Object, error,
) {
	t, err := admittedAttempt(ctx, r, a, body, stored)
	if err != nil {
		return nil, err
	}
	if len(t.Changes()) > 0 {
		return nil, apierrors.NewInternalError(fmt.Errorf("admission requests a change with a %T, which is not stored",
			body))
	}
	return t.Object, nil
}

func admittedAttempt(
	ctx context.Context, r *api.Request, a registry.Admission, body runtime.Object, stored api.Object,
) (*api.Attempt, error) {
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
		return nil, apierrors.NewInternalError(fmt.Errorf("admission returned a %T for a %T", t.Object, body))
	}
	return t, a.Validate(ctx, t)
}

// withAttempt returns admission stages for a deletion that attempt t requires, such as that of an
// evicted pod. They add the preconditions and writes that admission requested for t, and the quota
// changes of the deletion.
func (v *Verbs) withAttempt(t *api.Attempt) registry.Admission {
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

func successStatus() *metav1.Status {
	return &metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusSuccess, Code: http.StatusCreated,
	}
}

// getStored returns the current object from the store, because a decision based on a cached object
// could be outdated. The caller must not change the object.
func (v *Verbs) getStored(ctx context.Context, gvr schema.GroupVersionResource, namespace, name string) (
	api.Object, error,
) {
	kind := v.Kinds.ByResource(gvr)
	if kind == nil {
		return nil, apierrors.NewNotFound(gvr.GroupResource(), name)
	}
	return v.Registry.GetObject(ctx, &api.Request{Verb: api.VerbGet, Kind: kind, Namespace: namespace, Name: name})
}

// listStored returns the current objects of a kind from the store, which the caller must not
// change. The result is empty if the kind is not served.
func (v *Verbs) listStored(ctx context.Context, gvr schema.GroupVersionResource, namespace string) (
	[]api.Object, error,
) {
	kind := v.Kinds.ByResource(gvr)
	if kind == nil {
		return nil, nil
	}
	l, err := v.Registry.List(ctx, &api.Request{Verb: api.VerbList, Kind: kind, Namespace: namespace,
		Internal: api.InternalOptions{Pointers: true}})
	if err != nil {
		return nil, err
	}
	return l.(*api.ObjectList).Items, nil
}
