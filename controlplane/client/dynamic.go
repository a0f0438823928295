package client

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"

	"keelson.dev/keelson/controlplane/api"
)

// ErrNotServed is returned in place of NotFound if the API no longer serves the kind of the
// request: its version was removed, or its definition was replaced. It therefore does not mean that
// the object was deleted.
var ErrNotServed = errors.New("the version is not served")

// Do performs a request with this client's identity, fence and trace context. It is for callers
// that determine the kind only at run time, such as the garbage collector and namespace deletion.
// If the API no longer serves the request's kind, the error is ErrNotServed and not NotFound.
func (c *Client) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	d := *r
	d.User, d.Internal.Fence = c.user, c.fence
	d.Client.TraceParent, d.Client.UserAgent = c.trace, c.user.Name
	out, err := c.backend.Do(ctx, &d)
	if apierrors.IsNotFound(err) && !c.kinds.Table().Has(r.Kind) {
		return nil, fmt.Errorf("%s of %s: %w", r.Verb, r.Kind.GVK, ErrNotServed)
	}
	return out, err
}

// ServedAs returns the kind as which the API currently serves the group and resource of the given
// kind. The result may have another version. It is nil if no version is served.
func (c *Client) ServedAs(kind *api.Kind) *api.Kind {
	for _, served := range c.kinds.Table().Stored() {
		if served.GroupResource() == kind.GroupResource() {
			return served
		}
	}
	return nil
}

// Dropped reports whether err is ErrNotServed because no version of the kind's resource is served.
// It returns false if another version of the resource is served.
func (c *Client) Dropped(kind *api.Kind, err error) bool {
	return errors.Is(err, ErrNotServed) && c.ServedAs(kind) == nil
}

// Kinds returns the kinds of the API that this client calls.
func (c *Client) Kinds() *api.Kinds { return c.kinds }

// ListKind lists the objects of a kind that is known only at run time. An empty namespace means all
// namespaces. The objects are shared with the watch cache. Objects that cannot be decoded are
// omitted.
func (c *Client) ListKind(ctx context.Context, kind *api.Kind, namespace string) ([]api.Object, error) {
	list, err := c.listKind(ctx, kind, namespace)
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// ListWhole is like ListKind, but returns an error if objects cannot be decoded. The error contains
// the errors of the first objects, at most maxUnreadable, and the number of the others.
func (c *Client) ListWhole(ctx context.Context, kind *api.Kind, namespace string) ([]api.Object, error) {
	list, err := c.listKind(ctx, kind, namespace)
	if err != nil {
		return nil, err
	}
	if n := len(list.Unreadable); n > maxUnreadable {
		return nil, fmt.Errorf("%w and %d more", utilerrors.NewAggregate(list.Unreadable[:maxUnreadable]),
			n-maxUnreadable)
	}
	if len(list.Unreadable) > 0 {
		return nil, utilerrors.NewAggregate(list.Unreadable)
	}
	return list.Items, nil
}

// maxUnreadable is the maximum number of undecodable objects that an error of ListWhole lists.
const maxUnreadable = 3

func (c *Client) listKind(ctx context.Context, k *api.Kind, namespace string) (*api.ObjectList, error) {
	if !k.Namespaced {
		namespace = ""
	}
	out, err := c.Do(ctx, &api.Request{Verb: api.VerbList, Kind: k, Namespace: namespace,
		Internal: api.InternalOptions{Pointers: true}})
	if err != nil {
		return nil, err
	}
	list, ok := out.(*api.ObjectList)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("client: list of %s returned a %T", k.Resource, out))
	}
	return list, nil
}
