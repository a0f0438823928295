// Package client gives components in the API server's process access to the API. It has typed calls
// that pass authorization and admission without a network connection, and informers that share the
// objects of the watch cache.
package client

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

// Client calls the API with the identity of one user. It is immutable and safe for concurrent use.
//
// Objects that Get and List return are shared with the watch cache: copy them before modifying
// them. Objects that Create, Update, UpdateStatus and Patch return belong to the caller. These
// functions do not modify the object that is passed to them.
type Client struct {
	backend api.Backend
	kinds   *api.Kinds
	user    api.User
	fence   uint64
	verb    bool
	trace   string
}

// New returns a client of the API server's backend. Its calls have no identity until As sets one.
func New(backend api.Backend, kinds *api.Kinds) *Client {
	return &Client{backend: backend, kinds: kinds}
}

// As returns a copy of the client that calls the API as the given user.
func (c *Client) As(user api.User) *Client { d := *c; d.user = user; return &d }

// Fenced returns a copy of the client. Writes of the copy are stored only while the given raft term
// lasts. The scheduler and the controllers use such a client, so that a replica that has lost
// leadership cannot write.
func (c *Client) Fenced(raftTerm uint64) *Client { d := *c; d.fence = raftTerm; return &d }

// ForClusterVerb returns a copy of the client for the code that implements cluster commands, such
// as "kctl cluster token create". It may write the Secrets in which the cluster records join
// tokens, joining machines and revocations. Admission refuses such writes by other clients,
// whatever their permissions.
func (c *Client) ForClusterVerb() *Client { d := *c; d.verb = true; return &d }

// Traced returns a copy of the client that makes its calls in the given W3C trace context.
func (c *Client) Traced(traceParent string) *Client { d := *c; d.trace = traceParent; return &d }

// newRequest returns a request for the kind of T with the client's identity. The namespace is
// ignored if the kind is not namespaced.
func newRequest[T api.Object](c *Client, verb api.Verb, namespace, name string) (*api.Request, error) {
	var zero T
	k := c.kinds.ByType(zero)
	if k == nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("client: %T is not a kind of this API", zero))
	}
	if !k.Namespaced {
		namespace = ""
	}
	return &api.Request{User: c.user, Verb: verb, Kind: k, Namespace: namespace, Name: name,
		Internal: api.InternalOptions{Fence: c.fence, ClusterVerb: c.verb},
		Client:   api.ClientInfo{TraceParent: c.trace, UserAgent: c.user.Name}}, nil
}

// callForObject performs the request and returns the response, which must be a T.
func callForObject[T api.Object](ctx context.Context, c *Client, r *api.Request) (T, error) {
	var zero T
	out, err := c.backend.Do(ctx, r)
	if err != nil {
		return zero, err
	}
	obj, ok := out.(T)
	if !ok {
		return zero, apierrors.NewInternalError(fmt.Errorf("client: %s of %s returned a %T", r.Verb,
			r.Kind.Resource, out))
	}
	return obj, nil
}

// callForCopy performs a write and returns a copy of the stored object. The copy belongs to the
// caller.
func callForCopy[T api.Object](ctx context.Context, c *Client, r *api.Request) (T, error) {
	obj, err := callForObject[T](ctx, c, r)
	if err != nil {
		return obj, err
	}
	return obj.DeepCopyObject().(T), nil
}

// Get returns the object of T's kind with the given name. It is shared with the watch cache: copy
// it before modifying it.
func Get[T api.Object](ctx context.Context, c *Client, namespace, name string) (T, error) {
	r, err := newRequest[T](c, api.VerbGet, namespace, name)
	if err != nil {
		var zero T
		return zero, err
	}
	return callForObject[T](ctx, c, r)
}

// List returns the objects of T's kind that match the options. An empty namespace means all
// namespaces. The objects are shared with the watch cache.
func List[T api.Object](ctx context.Context, c *Client, namespace string, options metav1.ListOptions) ([]T, error) {
	r, err := newRequest[T](c, api.VerbList, namespace, "")
	if err != nil {
		return nil, err
	}
	r.List, r.Internal.Pointers = options, true
	out, err := c.backend.Do(ctx, r)
	if err != nil {
		return nil, err
	}
	list, ok := out.(*api.ObjectList)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("client: list of %s returned a %T", r.Kind.Resource, out))
	}
	items := make([]T, len(list.Items))
	for i, o := range list.Items {
		items[i] = o.(T)
	}
	return items, nil
}

// Create creates the object obj and returns the stored object, which the caller owns.
func Create[T api.Object](ctx context.Context, c *Client, obj T) (T, error) {
	made, err := CreateGiven(ctx, c, obj.DeepCopyObject().(T))
	if err != nil {
		return made, err
	}
	return made.DeepCopyObject().(T), nil
}

// CreateGiven is like Create, but copies no objects. The caller must not use obj after the call,
// nor modify the result, which is shared with the watch cache. It is for creating many objects.
func CreateGiven[T api.Object](ctx context.Context, c *Client, obj T) (T, error) {
	r, err := newRequest[T](c, api.VerbCreate, obj.GetNamespace(), obj.GetName())
	if err != nil {
		return obj, err
	}
	r.Object = obj
	return callForObject[T](ctx, c, r)
}

// Update replaces the stored object with obj and returns the result. The resourceVersion of obj is
// a precondition.
func Update[T api.Object](ctx context.Context, c *Client, obj T) (T, error) {
	return updateSubresource(ctx, c, obj, "")
}

// UpdateStatus replaces the status of the stored object with the status of obj, and returns the
// stored object. The resourceVersion of obj is a precondition.
func UpdateStatus[T api.Object](ctx context.Context, c *Client, obj T) (T, error) {
	return updateSubresource(ctx, c, obj, "status")
}

// UpdateSub replaces the given subresource of the object, such as "finalize", and returns the
// result. The resourceVersion of obj is a precondition.
func UpdateSub[T api.Object](ctx context.Context, c *Client, obj T, subresource string) (T, error) {
	return updateSubresource(ctx, c, obj, subresource)
}

func updateSubresource[T api.Object](ctx context.Context, c *Client, obj T, subresource string) (T, error) {
	r, err := newRequest[T](c, api.VerbUpdate, obj.GetNamespace(), obj.GetName())
	if err != nil {
		return obj, err
	}
	r.Subresource, r.Object = subresource, obj.DeepCopyObject()
	return callForCopy[T](ctx, c, r)
}

// Patch applies a patch to the object with the given name, or to the given subresource if it is not
// "". It returns the result. A server-side apply patch is forced, with the client's user as field
// manager.
func Patch[T api.Object](
	ctx context.Context, c *Client, namespace, name, subresource string, patchType types.PatchType, data []byte,
) (T, error) {
	r, err := newRequest[T](c, api.VerbPatch, namespace, name)
	if err != nil {
		var zero T
		return zero, err
	}
	r.Subresource, r.Patch.Type, r.Patch.Body = subresource, patchType, data
	if patchType == types.ApplyPatchType {
		force := true
		r.Patch.Options.FieldManager, r.Patch.Options.Force = c.user.Name, &force
	}
	return callForCopy[T](ctx, c, r)
}

// Delete deletes the object of T's kind with the given name, with the given options.
func Delete[T api.Object](ctx context.Context, c *Client, namespace, name string, options metav1.DeleteOptions) error {
	r, err := newRequest[T](c, api.VerbDelete, namespace, name)
	if err != nil {
		return err
	}
	r.Delete = options
	_, err = c.backend.Do(ctx, r)
	return err
}

// Sub creates a subresource of the object with the given name, for example a Binding of a pod, an
// Eviction or a TokenRequest. It returns the response. If the API returns only a success status, as
// for a Binding, the result is body.
func Sub[T api.Object, B metav1.Object](ctx context.Context, c *Client, namespace, name, subresource string, body B) (
	B, error,
) {
	r, err := newRequest[T](c, api.VerbCreate, namespace, name)
	if err != nil {
		return body, err
	}
	obj, ok := any(body).(runtime.Object)
	if !ok {
		return body, apierrors.NewInternalError(fmt.Errorf("client: a %T is not an API object", body))
	}
	r.Subresource, r.Object = subresource, obj.DeepCopyObject()
	out, err := c.backend.Do(ctx, r)
	if err != nil {
		return body, err
	}
	if answer, ok := out.(B); ok {
		return answer, nil
	}
	return body, nil
}
