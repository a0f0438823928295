package api

import (
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// Operation is the operation of an Attempt, named as in admission webhooks and policies.
type Operation string

// The operations.
const (
	Create  Operation = "CREATE"
	Update  Operation = "UPDATE"
	Delete  Operation = "DELETE"
	Connect Operation = "CONNECT"
)

// Attempt is one attempt to commit a request that passes admission: a write of an object or of a
// subresource, the creation of a virtual kind, or a connection. If its commit has a conflict, a new
// attempt starts from the newly stored state.
//
// Admission plugins read an Attempt; each field states whether they may change it. A plugin adds
// further conditions and writes to the same commit with Require and Write.
type Attempt struct {
	Kind      *Kind
	Facet     string // the subresource; "" is the object itself
	Operation Operation
	Namespace string
	// Name is the name in the request, "" if the server is to generate it.
	Name   string
	User   User
	DryRun bool

	// Object is the body that admission checks, nil on delete. For a subresource with its own type
	// it is that body (Scale, Binding, Eviction, TokenRequest, PodExecOptions), otherwise the whole
	// object. Mutating plugins change it in place. OldObject is the stored state in the same form,
	// nil if none exists; it is shared and must not be changed.
	Object, OldObject runtime.Object

	// Whole is the object to be stored, nil if the attempt stores no object of this kind. Where
	// Object has another type, its changes have been written into Whole before validation. Stored
	// is the currently stored object, shared, nil if none exists. Stored is also set where nothing
	// is stored: on delete, connect, eviction and token requests.
	Whole, Stored Object
	// Removes reports whether the commit removes the stored object: a deletion that waits for
	// nothing, or the update that removes the last obstacle, such as a finalizer. It is set
	// before validation.
	Removes bool

	// Request is the request of this attempt. It must not be changed.
	Request *Request

	mu       sync.Mutex
	checks   []Check
	one      [1]Check // backing array of checks: most attempts have one check
	changes  []Change
	picked   map[string]bool // reservations that admission has chosen, as "space/value"
	derived  func(Object)
	again    bool
	reinvoke bool
	kept     map[any]any
}

// Ref identifies one object.
type Ref struct {
	Kind      *Kind
	Namespace string
	Name      string
}

// Check is a precondition of a commit: the object is unchanged since it was read, or is still
// absent. If the precondition fails, the attempt is repeated.
type Check struct {
	Ref
	Seen Object // the state that was read, with its resourceVersion; nil: the object must not exist
}

// Change is a write of another object in the commit of an attempt.
type Change struct {
	Ref
	// Next returns the object to be stored, given the stored object or the result of an earlier
	// Change of the attempt. stored is nil if the object does not exist or cannot be read.
	//
	// Returning stored itself writes nothing, and nil removes the object. An error rejects the
	// attempt once it is certain that admission saw the newest state. An error that is not an API
	// status becomes a 500.
	//
	// Next may be called more than once, must not modify stored, and is called in dry runs too,
	// where the result is discarded.
	Next func(stored Object) (Object, error)
}

// Require adds a precondition on another object to the commit of the attempt.
func (a *Attempt) Require(c Check) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.checks == nil {
		a.checks = a.one[:0]
	}
	a.checks = append(a.checks, c)
}

// Write adds a write of another object to the commit of the attempt.
func (a *Attempt) Write(c Change) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.changes = append(a.changes, c)
}

// Pick records that admission, not the client, chose the value of a reservation of the object. If
// another object gets the value first, the attempt is repeated; a value chosen by the client is
// rejected instead.
func (a *Attempt) Pick(space, value string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.picked == nil {
		a.picked = make(map[string]bool)
	}
	a.picked[space+"/"+value] = true
}

// Picked reports whether admission chose the value of a reservation: see Pick.
func (a *Attempt) Picked(space, value string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.picked[space+"/"+value]
}

// Checks returns the preconditions added by Require, in the order of the calls.
func (a *Attempt) Checks() []Check { return a.checks }

// Changes returns the writes added by Write, in the order of the calls.
func (a *Attempt) Changes() []Change { return a.changes }

// Replace replaces Object by another body of the same Go type. If Object was Whole, Whole is
// replaced too.
func (a *Attempt) Replace(body runtime.Object) {
	if whole, ok := a.Object.(Object); ok && whole == a.Whole {
		a.Whole, _ = body.(Object)
	}
	a.Object = body
}

// Derive registers f to compute derived fields of the object to be stored. Finish calls f after all
// mutating plugins, when fields that clients may not set have been reset. Only built-in plugins use
// it.
func (a *Attempt) Derive(f func(whole Object)) { a.derived = f }

// Finish calls the function registered by Derive.
func (a *Attempt) Finish() {
	if a.derived != nil {
		a.derived(a.Whole)
	}
}

// Reinvoke requests a second round of the mutating plugins. A plugin calls it if it has changed
// Object and plugins that ran earlier may need to see the change. Again returns true in that round.
func (a *Attempt) Reinvoke() { a.reinvoke = true }

// Again reports whether this is the second round of the mutating plugins. Built-in plugins run as
// in the first; webhooks and policies run only if they asked for reinvocation.
func (a *Attempt) Again() bool { return a.again }

// NextRound starts the second round of the mutating plugins and returns true, if Reinvoke was
// called in the first round. Otherwise it returns false.
func (a *Attempt) NextRound() bool {
	if a.again || !a.reinvoke {
		return false
	}
	a.again = true
	return true
}

// Kept returns a plugin's state that is shared by both rounds of the mutating plugins. made creates
// the state on the first call. key identifies the plugin.
func (a *Attempt) Kept(key any, made func() any) any {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.kept == nil {
		a.kept = make(map[any]any)
	}
	if a.kept[key] == nil {
		a.kept[key] = made()
	}
	return a.kept[key]
}

// Options returns the options of the request as the type for the operation: CreateOptions,
// UpdateOptions or DeleteOptions. Options of a patch are converted to those of the operation. It
// returns nil for connections.
func (a *Attempt) Options() runtime.Object {
	r := a.Request
	meta := func(kind string) metav1.TypeMeta {
		return metav1.TypeMeta{APIVersion: metav1.SchemeGroupVersion.String(), Kind: kind}
	}
	switch a.Operation {
	case Create:
		o := r.Create
		if r.Verb == VerbPatch {
			o = metav1.CreateOptions{DryRun: r.PatchO.DryRun, FieldManager: r.PatchO.FieldManager, FieldValidation: r.PatchO.FieldValidation}
		}
		o.TypeMeta = meta("CreateOptions")
		return &o
	case Update:
		o := r.Update
		if r.Verb == VerbPatch {
			o = metav1.UpdateOptions{DryRun: r.PatchO.DryRun, FieldManager: r.PatchO.FieldManager, FieldValidation: r.PatchO.FieldValidation}
		}
		o.TypeMeta = meta("UpdateOptions")
		return &o
	case Delete:
		o := r.Delete
		o.TypeMeta = meta("DeleteOptions")
		return &o
	}
	return nil
}

// BodyKind returns the group, version and kind of Object and OldObject.
func (a *Attempt) BodyKind() schema.GroupVersionKind {
	if s := a.Kind.Subresources[a.Facet]; s != nil && !s.GVK.Empty() {
		return s.GVK
	}
	if a.Operation == Connect && a.Object != nil {
		return a.Object.GetObjectKind().GroupVersionKind()
	}
	return a.Kind.GVK
}

// Is reports whether the attempt concerns a resource of the core group, or a subresource of it.
func (a *Attempt) Is(resource string) bool {
	return a.Kind.GVK.Group == "" && a.Kind.Resource == resource
}

// Creates reports whether the attempt creates a stored object.
func (a *Attempt) Creates() bool {
	return a.Operation == Create && a.Facet == "" && a.Whole != nil
}

// Updates reports whether the attempt updates a stored object itself, not a subresource of it.
func (a *Attempt) Updates() bool {
	return a.Operation == Update && a.Facet == "" && a.Whole != nil
}

// Presence returns the object on which a kind depends, such as its CustomResourceDefinition, and
// the required UID ("" = any). Objects of the kind are committed only while that object exists.
type Presence func() (Ref, types.UID)
