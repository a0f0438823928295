package client

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
)

// Do performs any request as this client's identity and fence: for callers that
// know the kind only at run time (the garbage collector, namespace deletion).
func (c *Client) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	d := *r
	d.User, d.Fence = c.user, c.fence
	return c.backend.Do(ctx, &d)
}

// Kinds are the kinds that the client knows.
func (c *Client) Kinds() *api.Kinds { return c.kinds }

// InformerOf returns the shared informer of a kind known only at run time, creating it. Call before Run.
func InformerOf(i *Informers, k *api.Kind) cache.SharedIndexInformer { panic("unwritten") }
