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

// Admission judges attempts. The registry calls it between reading the stored object and committing the new one, again
// on every retry: Mutate when the object has its defaults and its managers, Validate when it is as it would be stored.
// An error is a *apierrors.StatusError and ends the request.
type Admission interface {
	Mutate(ctx context.Context, a *api.Attempt) error
	Validate(ctx context.Context, a *api.Attempt) error
}

// Stages are functions as an Admission; nil admits.
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

// begin starts an attempt at the whole object; nothing of an earlier one is left.
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

// judge admits an attempt that changes no object of its own.
func (w *write) judge(ctx context.Context, a *api.Attempt) error {
	if w.a == nil {
		return nil
	}
	if err := w.a.Mutate(ctx, a); err != nil {
		return err
	}
	return w.a.Validate(ctx, a)
}

// mutate runs the mutating stage, and takes back what it may not set: what the server keeps in the metadata.
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

// keepIdentity restores what admission may not change. Managed fields it may, as in Kubernetes, as long as they can be read.
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

// sameEntries says that nobody has put another slice in the place of one.
func sameEntries(a, b []metav1.ManagedFieldsEntry) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// proposal is what a write makes of the stored object.
type proposal struct {
	obj api.Object // the wanted object, ours to change
	// body is that of a facet with a body of its own, ours to change, and old what stands there in the same form.
	// merge writes it into obj. All are nil where obj itself is judged.
	body, old runtime.Object
	merge     func(obj api.Object, body runtime.Object) error
	// late says that obj is a copy of what is stored, into which body is written only once it has been admitted.
	late bool
	op   api.Operation
}

// whole is a proposal of an object itself.
func whole(obj api.Object) (proposal, error) { return proposal{obj: obj, op: api.Update}, nil }
