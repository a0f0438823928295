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
	d.User, d.Fence, d.TraceParent, d.UserAgent = c.user, c.fence, c.trace, c.user.Name
	out, err := c.backend.Do(ctx, &d)
	if apierrors.IsNotFound(err) && !c.kinds.Table().Has(r.Kind) {
		return nil, fmt.Errorf("%s of %s: %w", r.Verb, r.Kind.GVK, ErrNotServed)
	}
	return out, err
}

// ServedAs returns the kind under which the API currently serves the group and resource of k. It
// returns nil if no version is served.
func (c *Client) ServedAs(k *api.Kind) *api.Kind {
	for _, now := range c.kinds.Table().Stored() {
		if now.GroupResource() == k.GroupResource() {
			return now
		}
	}
	return nil
}

// Dropped reports whether err is ErrNotServed and no other version of k's resource is served
// either.
func (c *Client) Dropped(k *api.Kind, err error) bool {
	return errors.Is(err, ErrNotServed) && c.ServedAs(k) == nil
}

// Kinds returns the kinds of the API that this client calls.
func (c *Client) Kinds() *api.Kinds { return c.kinds }

// ListKind lists the objects of a kind that is known only at run time; an empty namespace means all
// namespaces. The objects are shared. Objects that cannot be decoded are omitted.
func (c *Client) ListKind(ctx context.Context, k *api.Kind, namespace string) ([]api.Object, error) {
	list, err := c.listKind(ctx, k, namespace)
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// ListWhole is like ListKind, but returns an error if objects cannot be decoded. The error contains
// the errors of the first few of them.
func (c *Client) ListWhole(ctx context.Context, k *api.Kind, namespace string) ([]api.Object, error) {
	list, err := c.listKind(ctx, k, namespace)
	if err != nil {
		return nil, err
	}
	if n := len(list.Unreadable); n > maxUnreadable {
		return nil, fmt.Errorf("%w and %d more", utilerrors.NewAggregate(list.Unreadable[:maxUnreadable]), n-maxUnreadable)
	}
	if len(list.Unreadable) > 0 {
		return nil, utilerrors.NewAggregate(list.Unreadable)
	}
	return list.Items, nil
}

// maxUnreadable is how many objects that cannot be decoded are listed in the error of ListWhole.
const maxUnreadable = 3

func (c *Client) listKind(ctx context.Context, k *api.Kind, namespace string) (*api.ObjectList, error) {
	if !k.Namespaced {
		namespace = ""
	}
	out, err := c.Do(ctx, &api.Request{Verb: api.VerbList, Kind: k, Namespace: namespace, Pointers: true})
	if err != nil {
		return nil, err
	}
	list, ok := out.(*api.ObjectList)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("client: list of %s returned a %T", k.Resource, out))
	}
	return list, nil
}
