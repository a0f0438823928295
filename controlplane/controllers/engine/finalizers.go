package engine

import (
	"context"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
)

// DesiredFinalizers returns the finalizers that object o must have, and whether they differ from
// its current finalizers. An object that is not being deleted must have finalizer. From an object
// that is being deleted, finalizer is removed once inUse is false.
func DesiredFinalizers(o metav1.Object, finalizer string, inUse bool) (want []string, changed bool) {
	have := o.GetFinalizers()
	marked := slices.Contains(have, finalizer)
	switch {
	case o.GetDeletionTimestamp() == nil && !marked:
		return append(slices.Clone(have), finalizer), true
	case o.GetDeletionTimestamp() != nil && marked && !inUse:
		return slices.DeleteFunc(slices.Clone(have), func(f string) bool { return f == finalizer }), true
	}
	return have, false
}

// UpdateFinalizer adds finalizer to obj, or removes it if obj is being deleted and not in use. It
// writes obj only if the finalizers change.
func UpdateFinalizer[T api.Object](ctx context.Context, c *client.Client, obj T, finalizer string, inUse bool) error {
	want, changed := DesiredFinalizers(obj, finalizer, inUse)
	if !changed {
		return nil
	}
	next := obj.DeepCopyObject().(T)
	next.SetFinalizers(want)
	if _, err := client.Update(ctx, c, next); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("updating the finalizers of %s: %w", obj.GetName(), err)
	}
	return nil
}
