package registry

import (
	"context"
	"fmt"
	"reflect"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/managedfields"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
)

// Admission admits or rejects each attempt to commit a write. The registry calls it after reading
// the stored object and before the commit, and again for every retry. Mutate is called when the
// defaults and managedFields of the object are set. Validate is called with the object as it would
// be stored. An error must be a *apierrors.StatusError and fails the request.
type Admission interface {
	Mutate(ctx context.Context, a *api.Attempt) error
	Validate(ctx context.Context, a *api.Attempt) error
}

// Stages implements Admission with two functions. A nil function admits every attempt.
type Stages struct {
	Mutating, Validating func(ctx context.Context, a *api.Attempt) error
}

// Mutate calls s.Mutating.
func (s Stages) Mutate(ctx context.Context, a *api.Attempt) error {
	if s.Mutating == nil {
		return nil
	}
	return s.Mutating(ctx, a)
}

// Validate calls s.Validating.
func (s Stages) Validate(ctx context.Context, a *api.Attempt) error {
	if s.Validating == nil {
		return nil
	}
	return s.Validating(ctx, a)
}

// startAttempt resets w.attempt, the input of admission, for a new attempt to commit the write, and
// returns it. whole is the complete new object, or nil. existing is the stored object, or nil.
func (w *write) startAttempt(op api.Operation, whole, existing api.Object) *api.Attempt {
	w.attempt = api.Attempt{
		Kind: w.req.Kind, Facet: w.req.Subresource, Operation: op, Namespace: w.req.Namespace, Name: w.req.Name,
		User: w.req.User, DryRun: w.dryRun, Whole: whole, Stored: existing, Request: w.req,
	}
	a := &w.attempt
	if whole != nil {
		a.Object = whole
	}
	if existing != nil {
		a.OldObject = existing
	}
	return a
}

// runAdmission runs both admission stages for an attempt without an object to mutate, such as a
// deletion. It returns the error of the stage that rejects the attempt.
func (w *write) runAdmission(ctx context.Context, a *api.Attempt) error {
	if w.admission == nil {
		return nil
	}
	if err := w.admission.Mutate(ctx, a); err != nil {
		return err
	}
	return w.admission.Validate(ctx, a)
}

// runMutation runs the mutating stage of admission. Afterwards it restores the metadata that only
// the server may set.
func (w *write) runMutation(ctx context.Context, a *api.Attempt) error {
	body, ok := a.Object.(api.Object)
	if !ok {
		return w.admission.Mutate(ctx, a)
	}
	accessor, kind := body.(metav1.ObjectMetaAccessor).GetObjectMeta(), reflect.TypeOf(body)
	meta, ok := accessor.(*metav1.ObjectMeta)
	if !ok {
		return w.admission.Mutate(ctx, a)
	}
	kept := *meta
	if err := w.admission.Mutate(ctx, a); err != nil {
		return err
	}
	if reflect.TypeOf(a.Object) != kind {
		return apierrors.NewInternalError(fmt.Errorf("%s: admission returned a %T for a %s",
			storeerrors.DescribeRequest(w.req), a.Object, kind))
	}
	restoreIdentity(ctx, api.Meta(a.Object.(api.Object)), &kept)
	return nil
}

// restoreIdentity copies the metadata that admission must not change (such as name, UID and
// timestamps) from old to m. Admission may change managedFields, as in Kubernetes. An invalid
// result is replaced with the managedFields of old, and a warning is added to the response.
func restoreIdentity(ctx context.Context, m, old *metav1.ObjectMeta) {
	m.Name, m.GenerateName, m.Namespace, m.UID, m.SelfLink = old.Name, old.GenerateName, old.Namespace,
		old.UID, old.SelfLink
	m.ResourceVersion, m.Generation, m.CreationTimestamp = old.ResourceVersion, old.Generation, old.CreationTimestamp
	m.DeletionTimestamp, m.DeletionGracePeriodSeconds = old.DeletionTimestamp, old.DeletionGracePeriodSeconds
	if isSameSlice(m.ManagedFields, old.ManagedFields) {
		return
	}
	if err := managedfields.ValidateManagedFields(m.ManagedFields); err != nil {
		m.ManagedFields = old.ManagedFields
		api.Warn(ctx, fmt.Sprintf(".metadata.managedFields was in an invalid state after admission; "+
			"this could be caused by an outdated mutating admission controller; please fix your requests: %v", err))
	}
}

// isSameSlice reports whether two slices have the same length and backing array.
func isSameSlice(a, b []metav1.ManagedFieldsEntry) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// proposal is the new state that a write proposes for the stored object.
type proposal struct {
	obj api.Object // the proposed object; may be modified
	// body is the object of a subresource with its own type (a Scale), and may be modified. old is
	// the stored state of the subresource. merge writes body into obj. All three are nil for a
	// request without such a body: admission then gets obj.
	body, old runtime.Object
	merge     func(obj api.Object, body runtime.Object) error
	// mergeLate means that body is merged into obj only after the mutating stage of admission.
	// Until then, obj is an unmodified copy of the stored object.
	mergeLate bool
	op        api.Operation
}

// proposeUpdate proposes obj as the new state in an update. It is for requests in which admission
// gets the object itself, not the body of a subresource such as a Scale. The error is always nil.
func proposeUpdate(obj api.Object) (proposal, error) { return proposal{obj: obj, op: api.Update}, nil }
