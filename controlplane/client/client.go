// Package client is the road to the API for what lives in the same process:
// typed calls that pass authorization and admission without a socket, and
// informers that share the watch cache's objects.
package client

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
)

// Client calls the API as one identity. It is immutable and safe for concurrent use.
type Client struct {
	backend api.Backend
	kinds   *api.Kinds
	user    api.User
	fence   uint64
}

// New returns a client of backend without an identity; use As.
func New(backend api.Backend, kinds *api.Kinds) *Client {
	return &Client{backend: backend, kinds: kinds}
}

// As returns a client that calls as u.
func (c *Client) As(u api.User) *Client { d := *c; d.user = u; return &d }

// Fenced returns a client whose writes apply only in the leadership term.
func (c *Client) Fenced(term uint64) *Client { d := *c; d.fence = term; return &d }

// Get returns the object, shared: copy before modifying.
func Get[T api.Object](ctx context.Context, c *Client, namespace, name string) (T, error) {
	panic("unwritten")
}

// List returns the objects that match (an empty namespace means all), shared.
func List[T api.Object](ctx context.Context, c *Client, namespace string, o metav1.ListOptions) ([]T, error) {
	panic("unwritten")
}

// Create stores obj and returns it as stored.
func Create[T api.Object](ctx context.Context, c *Client, obj T) (T, error) { panic("unwritten") }

// Update replaces the object at its resourceVersion.
func Update[T api.Object](ctx context.Context, c *Client, obj T) (T, error) { panic("unwritten") }

// UpdateStatus replaces the status at its resourceVersion.
func UpdateStatus[T api.Object](ctx context.Context, c *Client, obj T) (T, error) { panic("unwritten") }

// Patch patches the object (subresource "" for the object itself).
func Patch[T api.Object](ctx context.Context, c *Client, namespace, name, subresource string, t types.PatchType, data []byte) (T, error) {
	panic("unwritten")
}

// Delete deletes the object.
func Delete[T api.Object](ctx context.Context, c *Client, namespace, name string, o metav1.DeleteOptions) error {
	panic("unwritten")
}

// Sub creates a subresource body (a Binding on pods, an Eviction, a TokenRequest on serviceaccounts) and returns the answer.
func Sub[T api.Object, B metav1.Object](ctx context.Context, c *Client, namespace, name, subresource string, body B) (B, error) {
	panic("unwritten")
}

// Informers is one shared informer per kind, started by Run. Objects are the watch cache's own: never modify them.
type Informers struct{}

// NewInformers returns informers that list and watch as c's identity.
func NewInformers(c *Client) *Informers { panic("unwritten") }

// Informer returns the shared informer of T, creating it. Call before Run.
func Informer[T api.Object](i *Informers) cache.SharedIndexInformer { panic("unwritten") }

// Run runs every informer until ctx ends.
func (i *Informers) Run(ctx context.Context) error { panic("unwritten") }

// WaitForSync blocks until every informer holds its initial list and has reached the
// revision that the store had when WaitForSync was called.
func (i *Informers) WaitForSync(ctx context.Context) error { panic("unwritten") }
