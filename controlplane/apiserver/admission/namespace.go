package admission

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// namespaceLifecycle refuses to create in a namespace that is missing or
// ending, and to delete the namespaces that the cluster cannot do without.
func namespaceLifecycle(c Cluster) func(ctx context.Context, r *api.Request, obj, old api.Object) error {
	return func(ctx context.Context, r *api.Request, obj, old api.Object) error {
		if is(r, "namespaces") {
			if obj == nil && old != nil && immortal(old.GetName()) {
				return forbid(r, old, errors.New("this namespace may not be deleted"))
			}
			return nil
		}
		if obj == nil || old != nil || r.Subresource != "" || !r.Kind.Namespaced {
			return nil
		}
		o, ok := c.Get(ctx, "namespaces", "", r.Namespace)
		if !ok {
			return notFound("namespaces", r.Namespace)
		}
		ns := o.(*corev1.Namespace)
		if ns.Status.Phase != corev1.NamespaceTerminating && ns.DeletionTimestamp == nil {
			return nil
		}
		err := forbid(r, obj, fmt.Errorf("unable to create new content in namespace %s because it is being terminated", r.Namespace))
		err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{
			Type:    corev1.NamespaceTerminatingCause,
			Message: fmt.Sprintf("namespace %s is being terminated", r.Namespace),
			Field:   "metadata.namespace",
		})
		return err
	}
}

func immortal(namespace string) bool {
	switch namespace {
	case metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic:
		return true
	}
	return false
}
