package apiserver

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"slices"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/controlplane/apiserver/subresource"
)

// front is the pipeline for HTTP requests: the chain, extended by trace parents for writes and by
// the methods of endpoints.Backend.
type front struct{ *chain }

// Serve performs a request of an HTTP client. body decodes the request body and is called after
// authorization. It implements endpoints.Backend.
func (f front) Serve(ctx context.Context, r *api.Request, body func(context.Context) error) (endpoints.Result, error) {
	traceable(r)
	return f.chain.serve(ctx, r, body)
}

// traceable sets the trace parent of a write to a new one if the client sent none. It clears the
// trace parent of requests that are not recorded as steps of an apply: reads, dry runs, status
// updates, and writes of leases, events, tokens and virtual kinds.
func traceable(r *api.Request) {
	writes := r.Verb == api.VerbCreate || r.Verb == api.VerbUpdate || r.Verb == api.VerbPatch
	dry := slices.Concat(r.Create.DryRun, r.Update.DryRun, r.PatchO.DryRun)
	quiet := r.Kind.Virtual || r.Kind.TTL > 0 || r.Kind.Resource == "leases" || r.Subresource == "status" || r.Subresource == "token"
	switch {
	case !writes || quiet || len(dry) > 0:
		r.TraceParent = ""
	case api.TraceID(r.TraceParent) == "":
		r.TraceParent = newTraceParent()
	}
}

// newTraceParent returns a W3C traceparent with random trace and span IDs.
func newTraceParent() string {
	var b [24]byte
	_, _ = rand.Read(b[:]) // rand.Read never fails
	h := hex.EncodeToString(b[:])
	return "00-" + h[:32] + "-" + h[32:] + "-01"
}

// Connect authorizes and admits a connect request, such as exec or port-forward, and returns the
// object from the store. It implements endpoints.Backend.
func (f front) Connect(ctx context.Context, r *api.Request) (api.Object, error) {
	if err := f.authorize(ctx, r); err != nil {
		return nil, err
	}
	obj, err := f.registry.Get(ctx, &api.Request{User: r.User, Verb: api.VerbGet, Kind: r.Kind, Namespace: r.Namespace, Name: r.Name})
	if err != nil || r.Object == nil {
		return obj, err
	}
	if r.Object, err = subresource.Judge(ctx, r, f.chain, r.Object, obj); err != nil {
		return nil, err
	}
	return obj, nil
}

// Unknown authorizes a request for a resource that is not served, so that only authorized users get
// a 404. It implements endpoints.Backend.
func (f front) Unknown(ctx context.Context, u api.User, verb api.Verb, t endpoints.Target) error {
	return f.decide(ctx, &authz.Attributes{
		User: u, Verb: string(verb), Namespace: t.Namespace, APIGroup: t.GVR.Group, APIVersion: t.GVR.Version,
		Resource: t.GVR.Resource, Subresource: t.Subresource, Name: t.Name,
	}, nil)
}

// Encoded returns obj encoded for a media type, from the registry's cache of encoded objects if
// possible. It implements endpoints.Backend.
func (f front) Encoded(obj runtime.Object, media string) ([]byte, error) {
	return f.registry.Encoded(obj, media)
}

// allowed returns the status of an access review: the authorizer's decision on the attributes for
// user u.
func (c *chain) allowed(
	ctx context.Context, u api.User, res *authorizationv1.ResourceAttributes, path *authorizationv1.NonResourceAttributes,
) authorizationv1.SubjectAccessReviewStatus {
	a, err := authz.OfReview(u, res, path)
	a.WantReason = true
	d, reason := c.judge(ctx, a)
	status := authorizationv1.SubjectAccessReviewStatus{Allowed: d == authz.Allow, Denied: d == authz.Deny, Reason: reason}
	if err != nil {
		status.EvaluationError = err.Error()
	}
	return status
}

// known reads cluster objects for admission, authentication and authorization. It reads this
// replica's cache and falls back to the store for objects that the cache does not have.
type known struct {
	chain *chain
	// byName holds the built-in kinds by resource name. A custom resource of the same name never
	// replaces an entry.
	byName map[string]*api.Kind
}

func newKnown(c *chain) *known {
	k := &known{chain: c, byName: map[string]*api.Kind{}}
	for _, kind := range c.kinds.Table().Stored() {
		if k.byName[kind.Resource] == nil {
			k.byName[kind.Resource] = kind
		}
	}
	return k
}

// Get returns a shared object from the cache, or from the store if the cache does not have it. It
// implements admission.Cluster.
func (k *known) Get(ctx context.Context, resource, namespace, name string) (api.Object, bool) {
	kind := k.byName[resource]
	if kind == nil || name == "" {
		return nil, false
	}
	return k.get(ctx, &api.Request{Verb: api.VerbGet, Kind: kind, Namespace: namespace, Name: name})
}

// Newest returns the current object from the store. It implements admission.Cluster.
func (k *known) Newest(ctx context.Context, resource, namespace, name string) (api.Object, bool) {
	kind := k.byName[resource]
	if kind == nil || name == "" {
		return nil, false
	}
	o, err := k.chain.registry.Get(ctx, &api.Request{Verb: api.VerbGet, Kind: kind, Namespace: namespace, Name: name})
	return o, err == nil
}

func (k *known) get(ctx context.Context, r *api.Request) (api.Object, bool) {
	r.Get.ResourceVersion = "0"
	o, err := k.chain.registry.Get(ctx, r)
	if apierrors.IsNotFound(err) {
		r.Get.ResourceVersion = ""
		o, err = k.chain.registry.Get(ctx, r)
	}
	return o, err == nil
}

// definition returns a CustomResourceDefinition from the cache or the store. Its schemas may be
// missing; custom.SchemaOf returns them.
func (k *known) definition(ctx context.Context, name string) (*apiextensionsv1.CustomResourceDefinition, bool) {
	o, ok := k.get(ctx, &api.Request{Verb: api.VerbGet, Kind: k.byName["customresourcedefinitions"], Name: name, Light: true})
	c, is := o.(*apiextensionsv1.CustomResourceDefinition)
	return c, ok && is
}

// systemSecret returns a Secret of kube-system from this replica's cache only.
func (k *known) systemSecret(ctx context.Context, name string) (*corev1.Secret, bool) {
	kind := k.byName["secrets"]
	if kind == nil {
		return nil, false
	}
	r := &api.Request{Verb: api.VerbGet, Kind: kind, Namespace: metav1.NamespaceSystem, Name: name}
	r.Get.ResourceVersion = "0"
	o, err := k.chain.registry.Get(ctx, r)
	s, ok := o.(*corev1.Secret)
	return s, err == nil && ok
}

// Fresh returns the current object from the store.
func (k *known) Fresh(ctx context.Context, resource, namespace, name string) (api.Object, error) {
	return k.chain.registry.Get(ctx, &api.Request{Verb: api.VerbGet, Kind: k.byName[resource], Namespace: namespace, Name: name})
}

// List returns the shared objects of a namespace ("" = all), from the store if fresh is set and
// else from the cache. It implements admission.Cluster.
func (k *known) List(ctx context.Context, resource, namespace string, fresh bool) ([]api.Object, error) {
	kind := k.byName[resource]
	if kind == nil {
		return nil, nil
	}
	r := &api.Request{Verb: api.VerbList, Kind: kind, Namespace: namespace, Pointers: true}
	if !fresh {
		r.List.ResourceVersion = "0"
	}
	l, err := k.chain.registry.List(ctx, r)
	if err != nil {
		return nil, err
	}
	return l.(*api.ObjectList).Items, nil
}

// UID returns the UID and deletion timestamp of an object, for the validation of service account
// tokens. It implements authn.Living.
func (k *known) UID(ctx context.Context, resource, namespace, name string) (uid string, deletedAt time.Time, ok bool) {
	o, ok := k.Get(ctx, resource, namespace, name)
	if !ok {
		return "", time.Time{}, false
	}
	if t := o.GetDeletionTimestamp(); t != nil {
		deletedAt = t.Time
	}
	return string(o.GetUID()), deletedAt, true
}

// may reports whether a user may use a verb on any resource, and returns the authorizer's reason.
func (k *known) may(
	ctx context.Context, u api.User, verb string, gvr schema.GroupVersionResource, sub, namespace, name string,
) (bool, string) {
	d, why := k.chain.authorizer.Authorize(ctx, &authz.Attributes{
		User: u, Verb: verb, APIGroup: gvr.Group, APIVersion: gvr.Version, Resource: gvr.Resource, Subresource: sub,
		Namespace: namespace, Name: name, WantReason: true,
	})
	return d == authz.Allow, why
}

func (k *known) authorized(ctx context.Context, u api.User, verb api.Verb, resource, sub, namespace, name string) bool {
	d, _ := k.chain.authorizer.Authorize(ctx, &authz.Attributes{
		User: u, Verb: string(verb), APIVersion: "v1", Resource: resource, Subresource: sub, Namespace: namespace, Name: name,
	})
	return d == authz.Allow
}

// signer reports whether a user may use a verb on a certificate signer. "signers" is a resource for
// authorization only; no object exists. It is admission.Config.Signer.
func (k *known) signer(ctx context.Context, u api.User, verb, name string) bool {
	d, _ := k.chain.authorizer.Authorize(ctx, &authz.Attributes{
		User: u, Verb: verb, APIGroup: "certificates.k8s.io", APIVersion: "*", Resource: "signers", Name: name,
	})
	return d == authz.Allow
}
