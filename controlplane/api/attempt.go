package api

import (
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// Operation is the operation of an Attempt, with the same value as in admission webhooks and
// policies.
type Operation string

// The operations of an Attempt.
const (
	Create  Operation = "CREATE"
	Update  Operation = "UPDATE"
	Delete  Operation = "DELETE"
	Connect Operation = "CONNECT"
)

// Attempt is one attempt to commit a request that passes admission: a write of an object or of a
// subresource, the creation of an object of a virtual kind (not stored), or a connection. If the
// commit conflicts, a new attempt starts from the newly stored state.
//
// Admission plugins read an Attempt. The comment of each field states whether they may change it. A
// plugin adds further conditions and writes to the same commit with Require and Write.
type Attempt struct {
	Kind      *Kind
	Facet     string // the subresource; "" is the object itself
	Operation Operation
	Namespace string
	// Name is the name in the request. It is "" if the server has to generate the name.
	Name   string
	User   User
	DryRun bool

	// Object is the body that admission checks; nil for a deletion. For a subresource with its own
	// type it is the body of that type (Scale, Binding, Eviction, TokenRequest, PodExecOptions),
	// otherwise the whole object. Mutating plugins change it in place. OldObject is the stored
	// state of the same type, nil if no object is stored. It is shared and must not be changed.
	Object, OldObject runtime.Object

	// Whole is the object to be stored, nil if the attempt stores no object of this kind. If Object
	// has another type, its changes have been written into Whole before validation. Stored is the
	// currently stored object, nil if no object is stored; it is shared. Stored is also set for
	// requests that store nothing: deletions, connections, evictions and token requests.
	Whole, Stored Object
	// Removes reports whether the commit removes the stored object: a deletion without finalizers
	// or grace period, or the update that removes the last finalizer of a terminating object. It is
	// set before validation.
	Removes bool

	// Request is the request of this attempt. It must not be changed.
	Request *Request

	commit commitParts
	rounds secondRound
}

// commitParts contains what admission plugins add to the commit of an attempt. The plugins of one
// stage may run concurrently; until they have ended, mu guards checks, changes, picked, and
// pluginState.
type commitParts struct {
	mu           sync.Mutex
	checks       []Check
	firstCheck   [1]Check // backing array of checks: most attempts have one check
	changes      []Change
	picked       map[string]bool // reserved values that admission has chosen, as "space/value" (see Reservation)
	deriveFields func(Object)
	pluginState  map[any]any
}

// secondRound contains whether mutating plugins run for the second time, and whether a plugin has
// requested this second run.
type secondRound struct {
	running   bool
	requested bool
}

// Ref identifies one object.
type Ref struct {
	Kind      *Kind
	Namespace string
	Name      string
}

// Check is a precondition of a commit: the object has not changed since it was read, or still does
// not exist. If the precondition fails, the attempt is repeated.
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
	// If Next returns stored itself, nothing is written. If it returns nil, the object is removed.
	// An error rejects the attempt if admission has read the newest state; otherwise the attempt is
	// repeated. An error that is not an API status becomes a 500.
	//
	// Next may be called more than once and must not modify stored. It is called in dry runs too,
	// where the result is discarded.
	Next func(stored Object) (Object, error)
}

// Require adds a precondition on another object to the commit of the attempt.
func (a *Attempt) Require(check Check) {
	a.commit.mu.Lock()
	defer a.commit.mu.Unlock()
	if a.commit.checks == nil {
		a.commit.checks = a.commit.firstCheck[:0]
	}
	a.commit.checks = append(a.commit.checks, check)
}

// Write adds a write of another object to the commit of the attempt.
func (a *Attempt) Write(change Change) {
	a.commit.mu.Lock()
	defer a.commit.mu.Unlock()
	a.commit.changes = append(a.commit.changes, change)
}

// RecordPick records that admission, not the client, chose a unique value that the object reserves
// in a space (see Reservation), such as a cluster IP. If another object reserves the value first,
// the attempt is repeated. For a value that the client chose, the request is rejected instead.
func (a *Attempt) RecordPick(space, value string) {
	a.commit.mu.Lock()
	defer a.commit.mu.Unlock()
	if a.commit.picked == nil {
		a.commit.picked = make(map[string]bool)
	}
	a.commit.picked[space+"/"+value] = true
}

// IsPicked reports whether RecordPick was called for a value in a space, that is, whether admission
// chose the value.
func (a *Attempt) IsPicked(space, value string) bool {
	a.commit.mu.Lock()
	defer a.commit.mu.Unlock()
	return a.commit.picked[space+"/"+value]
}

// Checks returns the preconditions added by Require, in the order of the calls.
func (a *Attempt) Checks() []Check { return a.commit.checks }

// Changes returns the writes added by Write, in the order of the calls.
func (a *Attempt) Changes() []Change { return a.commit.changes }

// ReplaceBody replaces Object by another body of the same Go type. If Object was Whole, Whole is
// replaced too.
func (a *Attempt) ReplaceBody(body runtime.Object) {
	if whole, ok := a.Object.(Object); ok && whole == a.Whole {
		a.Whole, _ = body.(Object)
	}
	a.Object = body
}

// DeriveFields sets a function that computes fields of the object to be stored from its other
// fields. Finish calls it after all mutating plugins, when fields that clients may not set have
// been reset. Only built-in plugins use it.
func (a *Attempt) DeriveFields(derive func(whole Object)) { a.commit.deriveFields = derive }

// Finish calls the function that DeriveFields has set, if any, with Whole.
func (a *Attempt) Finish() {
	if a.commit.deriveFields != nil {
		a.commit.deriveFields(a.Whole)
	}
}

// RequestSecondRound requests a second round of the mutating plugins. A plugin calls it if it has
// changed Object and plugins that ran earlier may need to see the change. IsSecondRound returns
// true in that round.
func (a *Attempt) RequestSecondRound() { a.rounds.requested = true }

// IsSecondRound reports whether this is the second round of the mutating plugins. Built-in plugins
// run as in the first round. Webhooks and policies run only if their reinvocationPolicy requires
// it.
func (a *Attempt) IsSecondRound() bool { return a.rounds.running }

// StartSecondRound starts the second round of the mutating plugins and returns true, if
// RequestSecondRound was called in the first round. Otherwise it returns false.
func (a *Attempt) StartSecondRound() bool {
	if a.rounds.running || !a.rounds.requested {
		return false
	}
	a.rounds.running = true
	return true
}

// PluginState returns a plugin's state that both rounds of the mutating plugins share. The first
// call for a key calls create and stores its result. key identifies the plugin.
func (a *Attempt) PluginState(key any, create func() any) any {
	a.commit.mu.Lock()
	defer a.commit.mu.Unlock()
	if a.commit.pluginState == nil {
		a.commit.pluginState = make(map[any]any)
	}
	if a.commit.pluginState[key] == nil {
		a.commit.pluginState[key] = create()
	}
	return a.commit.pluginState[key]
}

// Options returns the options of the request as the type for the attempt's operation:
// CreateOptions, UpdateOptions or DeleteOptions. Options of a patch are converted to that type. It
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
			o = metav1.CreateOptions{DryRun: r.Patch.Options.DryRun, FieldManager: r.Patch.Options.FieldManager,
				FieldValidation: r.Patch.Options.FieldValidation}
		}
		o.TypeMeta = meta("CreateOptions")
		return &o
	case Update:
		o := r.Update
		if r.Verb == VerbPatch {
			o = metav1.UpdateOptions{DryRun: r.Patch.Options.DryRun, FieldManager: r.Patch.Options.FieldManager,
				FieldValidation: r.Patch.Options.FieldValidation}
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

// IsCoreResource reports whether the attempt concerns a resource of the core group, or a
// subresource of it.
func (a *Attempt) IsCoreResource(resource string) bool {
	return a.Kind.GVK.Group == "" && a.Kind.Resource == resource
}

// CreatesObject reports whether the attempt creates a stored object.
func (a *Attempt) CreatesObject() bool {
	return a.Operation == Create && a.Facet == "" && a.Whole != nil
}

// UpdatesObject reports whether the attempt updates a stored object itself, not a subresource of
// it.
func (a *Attempt) UpdatesObject() bool {
	return a.Operation == Update && a.Facet == "" && a.Whole != nil
}

// Presence returns the object on which a kind depends, such as its CustomResourceDefinition, and
// the required UID ("" = any). Objects of the kind are committed only while that object exists.
type Presence func() (Ref, types.UID)
