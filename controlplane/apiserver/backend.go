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
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/controlplane/apiserver/subresource"
)

// front is the endpoints.Backend for requests of HTTP clients. It adds trace parents to writes and
// passes all requests to the pipeline.
type front struct{ pipeline *pipeline }

// Serve performs a request of an HTTP client. body decodes the request body; it is called only
// after the request is authorized. It implements endpoints.Backend.
func (f front) Serve(ctx context.Context, r *api.Request, body func(context.Context) error) (endpoints.Result, error) {
	setTraceParent(r)
	return f.pipeline.serveRequest(ctx, r, body)
}

// Watch authorizes a watch request and starts the watch. It implements endpoints.Backend.
func (f front) Watch(ctx context.Context, r *api.Request) (watch.Interface, error) {
	return f.pipeline.Watch(ctx, r)
}

// setTraceParent sets the trace parent of a write to a new value if the client sent none. It clears
// the trace parent of requests that the timeline does not record: reads, dry runs, status updates,
// and writes of leases, events, tokens and virtual kinds.
func setTraceParent(r *api.Request) {
	writes := r.Verb == api.VerbCreate || r.Verb == api.VerbUpdate || r.Verb == api.VerbPatch
	dry := slices.Concat(r.Create.DryRun, r.Update.DryRun, r.Patch.Options.DryRun)
	quiet := r.Kind.Serving.Virtual || r.Kind.Commit.TTL > 0 || r.Kind.Resource == "leases" ||
		r.Subresource == "status" ||
		r.Subresource == "token"
	switch {
	case !writes || quiet || len(dry) > 0:
		r.Client.TraceParent = ""
	case api.TraceID(r.Client.TraceParent) == "":
		r.Client.TraceParent = newTraceParent()
	}
}

// newTraceParent returns a W3C traceparent with random trace and span IDs.
func newTraceParent() string {
	var b [24]byte
	_, _ = rand.Read(b[:]) // rand.Read never fails
	h := hex.EncodeToString(b[:])
	return "00-" + h[:32] + "-" + h[32:] + "-01"
}

// Connect authorizes and admits a connect request, such as exec or port-forward. It returns the
// object to connect to, from the store. It implements endpoints.Backend.
func (f front) Connect(ctx context.Context, r *api.Request) (api.Object, error) {
	if err := f.pipeline.authorize(ctx, r); err != nil {
		return nil, err
	}
	obj, err := f.pipeline.registry.GetObject(ctx,
		&api.Request{User: r.User, Verb: api.VerbGet, Kind: r.Kind, Namespace: r.Namespace, Name: r.Name})
	if err != nil || r.Object == nil {
		return obj, err
	}
	if r.Object, err = subresource.Admit(ctx, r, f.pipeline, r.Object, obj); err != nil {
		return nil, err
	}
	return obj, nil
}

// Unknown returns the error for a request for a resource that is not served. Only authorized users
// get a 404; others get a 403. It implements endpoints.Backend.
func (f front) Unknown(ctx context.Context, u api.User, verb api.Verb, t endpoints.Target) error {
	return f.pipeline.authorizeAttributes(ctx, &authz.Attributes{
		User: u, Verb: string(verb), Namespace: t.Namespace, APIGroup: t.GVR.Group, APIVersion: t.GVR.Version,
		Resource: t.GVR.Resource, Subresource: t.Subresource, Name: t.Name,
	}, nil)
}

// Encoded returns obj encoded for a media type, from the registry's cache of encoded objects if
// possible. It implements endpoints.Backend.
func (f front) Encoded(obj runtime.Object, media string) ([]byte, error) {
	return f.pipeline.registry.Encoded(obj, media)
}

// reviewAccess returns the status of an access review: the authorizer's decision on whether user u
// may perform the reviewed request.
func (c *pipeline) reviewAccess(
	ctx context.Context, u api.User, res *authorizationv1.ResourceAttributes,
	path *authorizationv1.NonResourceAttributes,
) authorizationv1.SubjectAccessReviewStatus {
	a, err := authz.OfReview(u, res, path)
	a.WantReason = true
	d, reason := c.decideWithNewestRules(ctx, a)
	status := authorizationv1.SubjectAccessReviewStatus{Allowed: d == authz.Allow, Denied: d == authz.Deny,
		Reason: reason}
	if err != nil {
		status.EvaluationError = err.Error()
	}
	return status
}

// clusterReader reads cluster objects for admission, authentication and authorization. It reads
// this replica's cache and falls back to the store for objects that the cache does not have.
type clusterReader struct {
	pipeline *pipeline
	// byName holds the built-in kinds by resource name. A custom resource of the same name never
	// replaces an entry.
	byName      map[string]*api.Kind
	flowSchemas flowSchemaIndex
}

func newClusterReader(c *pipeline) *clusterReader {
	k := &clusterReader{pipeline: c, byName: map[string]*api.Kind{}}
	for _, kind := range c.kinds.Table().Stored() {
		if k.byName[kind.Resource] == nil {
			k.byName[kind.Resource] = kind
		}
	}
	return k
}

// Get returns an object from the cache, or from the store if the cache does not have it. The caller
// must not change the object. It implements admission.Cluster.
func (k *clusterReader) Get(ctx context.Context, resource, namespace, name string) (api.Object, bool) {
	kind := k.byName[resource]
	if kind == nil || name == "" {
		return nil, false
	}
	return k.getCached(ctx, &api.Request{Verb: api.VerbGet, Kind: kind, Namespace: namespace, Name: name})
}

// Newest returns the current object from the store. It implements admission.Cluster.
func (k *clusterReader) Newest(ctx context.Context, resource, namespace, name string) (api.Object, bool) {
	kind := k.byName[resource]
	if kind == nil || name == "" {
		return nil, false
	}
	o, err := k.pipeline.registry.GetObject(ctx,
		&api.Request{Verb: api.VerbGet, Kind: kind, Namespace: namespace, Name: name})
	return o, err == nil
}

func (k *clusterReader) getCached(ctx context.Context, r *api.Request) (api.Object, bool) {
	r.Get.ResourceVersion = "0"
	o, err := k.pipeline.registry.GetObject(ctx, r)
	if apierrors.IsNotFound(err) {
		r.Get.ResourceVersion = ""
		o, err = k.pipeline.registry.GetObject(ctx, r)
	}
	return o, err == nil
}

// getDefinition returns a CustomResourceDefinition from the cache or the store. Its schemas may be
// missing; custom.UnpackSchema restores them.
func (k *clusterReader) getDefinition(ctx context.Context, name string) (
	*apiextensionsv1.CustomResourceDefinition, bool,
) {
	o, ok := k.getCached(ctx, &api.Request{Verb: api.VerbGet, Kind: k.byName["customresourcedefinitions"],
		Name: name, Internal: api.InternalOptions{Light: true}})
	c, is := o.(*apiextensionsv1.CustomResourceDefinition)
	return c, ok && is
}

// getSystemSecret returns a Secret of kube-system from this replica's cache only.
func (k *clusterReader) getSystemSecret(ctx context.Context, name string) (*corev1.Secret, bool) {
	kind := k.byName["secrets"]
	if kind == nil {
		return nil, false
	}
	r := &api.Request{Verb: api.VerbGet, Kind: kind, Namespace: metav1.NamespaceSystem, Name: name}
	r.Get.ResourceVersion = "0"
	o, err := k.pipeline.registry.GetObject(ctx, r)
	s, ok := o.(*corev1.Secret)
	return s, err == nil && ok
}

// GetStored returns the current object from the store.
func (k *clusterReader) GetStored(ctx context.Context, resource, namespace, name string) (api.Object, error) {
	return k.pipeline.registry.GetObject(ctx,
		&api.Request{Verb: api.VerbGet, Kind: k.byName[resource], Namespace: namespace, Name: name})
}

// List returns the objects of a namespace ("" = all namespaces), which the caller must not change.
// It reads the store if fresh is true, and otherwise the cache. It implements admission.Cluster.
func (k *clusterReader) List(ctx context.Context, resource, namespace string, fresh bool) ([]api.Object, error) {
	kind := k.byName[resource]
	if kind == nil {
		return nil, nil
	}
	r := &api.Request{Verb: api.VerbList, Kind: kind, Namespace: namespace,
		Internal: api.InternalOptions{Pointers: true}}
	if !fresh {
		r.List.ResourceVersion = "0"
	}
	l, err := k.pipeline.registry.List(ctx, r)
	if err != nil {
		return nil, err
	}
	return l.(*api.ObjectList).Items, nil
}

// UID returns the UID and deletion timestamp of an object, for the validation of service account
// tokens. It implements authn.ObjectReader.
func (k *clusterReader) UID(ctx context.Context, resource, namespace, name string) (
	uid string, deletedAt time.Time, ok bool,
) {
	o, ok := k.Get(ctx, resource, namespace, name)
	if !ok {
		return "", time.Time{}, false
	}
	if t := o.GetDeletionTimestamp(); t != nil {
		deletedAt = t.Time
	}
	return string(o.GetUID()), deletedAt, true
}

// authorizeAction reports whether a user may use a verb on a resource, which need not be served
// here. It also returns the authorizer's reason.
func (k *clusterReader) authorizeAction(
	ctx context.Context, u api.User, verb string, gvr schema.GroupVersionResource,
	subresourceName, namespace, name string,
) (bool, string) {
	d, why := k.pipeline.authorizer.Authorize(ctx, &authz.Attributes{
		User: u, Verb: verb, APIGroup: gvr.Group, APIVersion: gvr.Version, Resource: gvr.Resource,
		Subresource: subresourceName,
		Namespace:   namespace, Name: name, WantReason: true,
	})
	return d == authz.Allow, why
}

func (k *clusterReader) isAuthorized(
	ctx context.Context, u api.User, verb api.Verb, resource, subresourceName, namespace, name string,
) bool {
	d, _ := k.pipeline.authorizer.Authorize(ctx, &authz.Attributes{
		User: u, Verb: string(verb), APIVersion: "v1", Resource: resource, Subresource: subresourceName,
		Namespace: namespace, Name: name,
	})
	return d == authz.Allow
}

// maySign reports whether a user may use a verb on a certificate signer. Signers are a resource for
// authorization only; they are not API objects. It is used as builtin.Access.Signer.
func (k *clusterReader) maySign(ctx context.Context, u api.User, verb, name string) bool {
	d, _ := k.pipeline.authorizer.Authorize(ctx, &authz.Attributes{
		User: u, Verb: verb, APIGroup: "certificates.k8s.io", APIVersion: "*", Resource: "signers", Name: name,
	})
	return d == authz.Allow
}
