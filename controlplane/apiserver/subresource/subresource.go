// Package subresource holds the verbs that are more than storing an object:
// binding and evicting a pod, minting a token, and the reviews, which are
// answered and never stored.
package subresource

import (
	"context"
	"net/http"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	Allowed func(ctx context.Context, u api.User, res *authorizationv1.ResourceAttributes, path *authorizationv1.NonResourceAttributes) (allowed, denied bool, reason string)
	// Rules lists what the user may do in a namespace.
	Rules func(u api.User, namespace string) []rbacv1.PolicyRule
}

func success() *metav1.Status {
	return &metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusSuccess, Code: http.StatusCreated,
	}
}

// get reads an object as this replica knows it, asking the store when it knows none.
func (v *Verbs) get(ctx context.Context, gvr schema.GroupVersionResource, namespace, name string) (api.Object, error) {
	kind := v.Kinds.ByResource(gvr)
	if kind == nil {
		return nil, apierrors.NewNotFound(gvr.GroupResource(), name)
	}
	r := &api.Request{Verb: api.VerbGet, Kind: kind, Namespace: namespace, Name: name}
	r.Get.ResourceVersion = "0"
	o, err := v.Registry.Get(ctx, r)
	if apierrors.IsNotFound(err) {
		r.Get.ResourceVersion = ""
		o, err = v.Registry.Get(ctx, r)
	}
	return o, err
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
