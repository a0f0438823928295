package client

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
)

// Do performs any request as this client's identity and fence: for callers that
// know the kind only at run time (the garbage collector, namespace deletion).
func (c *Client) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	d := *r
	d.User, d.Fence, d.TraceParent, d.UserAgent = c.user, c.fence, c.trace, c.user.Name
	return c.backend.Do(ctx, &d)
}

// Kinds are the kinds that the client knows.
func (c *Client) Kinds() *api.Kinds { return c.kinds }

// ListKind lists the objects of a kind known only at run time (an empty namespace means all), shared.
func (c *Client) ListKind(ctx context.Context, k *api.Kind, namespace string) ([]api.Object, error) {
	if !k.Namespaced {
		namespace = ""
	}
	out, err := c.Do(ctx, &api.Request{Verb: api.VerbList, Kind: k, Namespace: namespace, Pointers: true})
	if err != nil {
		return nil, err
	}
	list, ok := out.(*api.ObjectList)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("client: list of %s answered a %T", k.Resource, out))
	}
	return list.Items, nil
}
