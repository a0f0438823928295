package builtin

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// namespaceLifecycle returns a plugin that rejects creations in a namespace that does not exist or
// is being deleted. It also rejects the deletion of the namespaces that the cluster requires.
func namespaceLifecycle(c admission.Cluster, kind *api.Kind) func(ctx context.Context, a *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		if a.IsCoreResource("namespaces") {
			if a.Operation == api.Delete && isProtectedNamespace(a.Name) {
				return admission.NewForbidden(a, nil, errors.New("this namespace may not be deleted"))
			}
			return nil
		}
		if !a.CreatesObject() || !a.Kind.Namespaced || a.IsSecondRound() {
			return nil
		}
		o, ok := c.Get(ctx, "namespaces", "", a.Namespace)
		if !ok {
			return admission.NewNotFound("namespaces", a.Namespace)
		}
		ns := o.(*corev1.Namespace)
		if ns.Status.Phase != corev1.NamespaceTerminating && ns.DeletionTimestamp == nil {
			// The namespace must be unchanged at commit: nothing is created in it after its
			// deletion has started. Decisions that depend on its labels use the labels at the time
			// of the commit.
			a.Require(api.Check{Ref: api.Ref{Kind: kind, Name: a.Namespace}, Seen: ns})
			return nil
		}
		err := admission.NewForbidden(a, a.Whole,
			fmt.Errorf("unable to create new content in namespace %s because it is being terminated", a.Namespace))
		err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{
			Type:    corev1.NamespaceTerminatingCause,
			Message: fmt.Sprintf("namespace %s is being terminated", a.Namespace),
			Field:   "metadata.namespace",
		})
		return err
	}
}

func isProtectedNamespace(namespace string) bool {
	switch namespace {
	case metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic:
		return true
	}
	return false
}
