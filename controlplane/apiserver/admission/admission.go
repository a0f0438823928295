// Package admission contains the types of admission: plugins, and the phases in which they run.
// Mutating plugins may change the object of a request; validating plugins may only reject the
// request. The decision of a plugin depends only on the attempt and on objects in the cluster. A
// plugin can add preconditions and further writes to the store transaction that commits the
// attempt. Package builtin lists the built-in plugins.
package admission

import (
	"context"
	"errors"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// Attempt is a write or connect request under admission. The registry creates it.
type Attempt = api.Attempt

// Plugin is an admission plugin. Admit returns nil to admit an attempt, or a *apierrors.StatusError
// to reject it. Admit of a mutating plugin may change a.Object; changes of fields that no client
// may set have no effect.
type Plugin struct {
	Name  string
	Admit func(ctx context.Context, a *Attempt) error
}

// Cluster reads the objects on which plugins depend, from this replica's cache. An object that is
// not cached is read from the store.
type Cluster interface {
	// Get returns an object, which is shared: the caller must not change it. ok is false if the
	// object does not exist.
	Get(ctx context.Context, resource, namespace, name string) (o api.Object, ok bool)
	// Newest is like Get, but always reads the store. Plugins use it before they reject a request
	// because of an object that may have changed recently.
	Newest(ctx context.Context, resource, namespace, name string) (o api.Object, ok bool)
	// List returns the objects of a namespace ("" = all namespaces), which the caller must not
	// change. It reads the store if fresh is true, and otherwise the cache.
	List(ctx context.Context, resource, namespace string, fresh bool) ([]api.Object, error)
}

// NewForbidden returns the 403 error with which a plugin rejects an attempt.
func NewForbidden(a *Attempt, obj api.Object, err error) *apierrors.StatusError {
	name := a.Request.Name
	if name == "" && obj != nil {
		if name = obj.GetName(); name == "" {
			name = obj.GetGenerateName()
		}
	}
	return apierrors.NewForbidden(a.Kind.GroupResource(), name, err)
}

// NewNotFound returns the 404 error for a missing object of the core group.
func NewNotFound(resource, name string) *apierrors.StatusError {
	return apierrors.NewNotFound(schema.GroupResource{Resource: resource}, name)
}

func AsStatus(err error) *apierrors.StatusError {
	var s *apierrors.StatusError
	if errors.As(err, &s) {
		return s
	}
	return apierrors.NewInternalError(err)
}
