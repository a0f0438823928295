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
)

// Admission admits or rejects write attempts. The registry calls it after reading the stored object
// and before the commit, again on every retry. Mutate is called when the object has its defaults
// and managers, Validate when it is as it would be stored. An error must be a
// *apierrors.StatusError and fails the request.
type Admission interface {
	Mutate(ctx context.Context, a *api.Attempt) error
	Validate(ctx context.Context, a *api.Attempt) error
}

// Stages implements Admission with two functions. A nil function admits everything.
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

// begin resets w.attempt for a new attempt, and returns it. whole is the new object, stored the
// existing one.
func (w *write) begin(op api.Operation, whole, stored api.Object) *api.Attempt {
	w.attempt = api.Attempt{
		Kind: w.req.Kind, Facet: w.req.Subresource, Operation: op, Namespace: w.req.Namespace, Name: w.req.Name,
		User: w.req.User, DryRun: w.dryRun, Whole: whole, Stored: stored, Request: w.req,
	}
	a := &w.attempt
	if whole != nil {
		a.Object = whole
	}
	if stored != nil {
		a.OldObject = stored
	}
	return a
}

// judge runs both admission stages for an attempt without an object to mutate, such as a deletion.
func (w *write) judge(ctx context.Context, a *api.Attempt) error {
	if w.a == nil {
		return nil
	}
	if err := w.a.Mutate(ctx, a); err != nil {
		return err
	}
	return w.a.Validate(ctx, a)
}

// mutate runs the mutating stage. It restores metadata that only the server may set.
func (w *write) mutate(ctx context.Context, a *api.Attempt) error {
	body, ok := a.Object.(api.Object)
	if !ok {
		return w.a.Mutate(ctx, a)
	}
	was, kind := body.(metav1.ObjectMetaAccessor).GetObjectMeta(), reflect.TypeOf(body)
	meta, ok := was.(*metav1.ObjectMeta)
	if !ok {
		return w.a.Mutate(ctx, a)
	}
	kept := *meta
	if err := w.a.Mutate(ctx, a); err != nil {
		return err
	}
	if reflect.TypeOf(a.Object) != kind {
		return apierrors.NewInternalError(fmt.Errorf("%s: admission made a %T of a %s", describe(w.req), a.Object, kind))
	}
	keepIdentity(ctx, api.Meta(a.Object.(api.Object)), &kept)
	return nil
}

// keepIdentity restores metadata that admission must not change. Admission may change
// managedFields, as in Kubernetes, unless the result is invalid.
func keepIdentity(ctx context.Context, m, was *metav1.ObjectMeta) {
	m.Name, m.GenerateName, m.Namespace, m.UID, m.SelfLink = was.Name, was.GenerateName, was.Namespace, was.UID, was.SelfLink
	m.ResourceVersion, m.Generation, m.CreationTimestamp = was.ResourceVersion, was.Generation, was.CreationTimestamp
	m.DeletionTimestamp, m.DeletionGracePeriodSeconds = was.DeletionTimestamp, was.DeletionGracePeriodSeconds
	if sameEntries(m.ManagedFields, was.ManagedFields) {
		return
	}
	if err := managedfields.ValidateManagedFields(m.ManagedFields); err != nil {
		m.ManagedFields = was.ManagedFields
		api.Warn(ctx, fmt.Sprintf(".metadata.managedFields was in an invalid state after admission; "+
			"this could be caused by an outdated mutating admission controller; please fix your requests: %v", err))
	}
}

// sameEntries reports whether two slices are the same slice.
func sameEntries(a, b []metav1.ManagedFieldsEntry) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// proposal is the new state that a write proposes for the stored object.
type proposal struct {
	obj api.Object // the proposed object; may be modified
	// body is the object of a subresource with its own type (scale), and may be modified. old is
	// its stored state. merge writes body into obj. All three are nil if admission judges obj
	// itself.
	body, old runtime.Object
	merge     func(obj api.Object, body runtime.Object) error
	// late means that obj is a copy of the stored object, and body is merged into it only after the
	// mutating stage.
	late bool
	op   api.Operation
}

// whole returns a proposal of an object without a separate body.
func whole(obj api.Object) (proposal, error) { return proposal{obj: obj, op: api.Update}, nil }
