package api

import (
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// Operation is what an attempt would do, in the words of webhooks and policies.
type Operation string

// The operations.
const (
	Create  Operation = "CREATE"
	Update  Operation = "UPDATE"
	Delete  Operation = "DELETE"
	Connect Operation = "CONNECT"
)

// Attempt is one attempt at what admission judges: a write of an object or of a facet of it, the question to a virtual
// kind, or a connection. When its commit meets a conflict, there is a new attempt from what is stored by then. Plugins
// read it; what they may change is said at each field. What they want besides a verdict they add by Require and Write:
// it is part of the same commit.
type Attempt struct {
	Kind      *Kind
	Facet     string // the subresource; "" is the object itself
	Operation Operation
	Namespace string
	// Name is the name in the request: "" when the server is to generate it.
	Name   string
	User   User
	DryRun bool

	// Object is the body that is judged: of a facet with a body of its own that body (Scale, Binding, Eviction,
	// TokenRequest, PodExecOptions), else the whole object. nil on delete. A mutating plugin changes it in place.
	// OldObject is what stands there now in the same form, nil where none exists; it is shared.
	Object, OldObject runtime.Object

	// Whole is the object as it is to be stored, nil when the attempt stores none of this kind. Where Object is another
	// body, it has been written into Whole by the time of validation. Stored is the stored object, shared; nil when there
	// is none. It is there also where nothing is stored: on delete, connect, eviction and for tokens.
	Whole, Stored Object
	// Removes says that the commit removes the stored object: a deletion for which nothing has to wait, or the update that
	// takes away what the deletion waited for. It is known by the time of validation.
	Removes bool

	// Request is what was asked, for what is not said above. It is not to be changed.
	Request *Request

	mu       sync.Mutex
	checks   []Check
	one      [1]Check // where checks begin: most attempts have one
	changes  []Change
	picked   map[string]bool // reservations by "space/value"
	derived  func(Object)
	again    bool
	reinvoke bool
	kept     map[any]any
}

// Ref names one object.
type Ref struct {
	Kind      *Kind
	Namespace string
	Name      string
}

// Check is the condition that an object is, when the attempt is committed, as it was when it was looked at: there, in
// the very state seen, or absent. When it is not, the attempt is repeated.
type Check struct {
	Ref
	Seen Object // with its resourceVersion; nil: there must be none
}

// Change is another object that is written in the commit of the attempt.
type Change struct {
	Ref
	// Next says what becomes of it. It is given what is stored, or what an earlier change of the attempt makes of it; nil
	// when there is nothing, or what cannot be read. It returns what is to be stored; the same again leaves it, nil
	// removes it. An error, of which one that is no API status is a 500, refuses the attempt once it is known that what
	// was judged is the newest state. It may be asked more than once, must not change what it is given, and is asked in
	// dry runs too, whose result is dropped.
	Next func(stored Object) (Object, error)
}

// Require makes the attempt depend on another object.
func (a *Attempt) Require(c Check) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.checks == nil {
		a.checks = a.one[:0]
	}
	a.checks = append(a.checks, c)
}

// Write changes another object together with that of the attempt.
func (a *Attempt) Write(c Change) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.changes = append(a.changes, c)
}

// Pick says that admission has picked a value of a space of reservations for the object: when another object gets it
// first, the attempt is repeated, where a value that the client chose is refused.
func (a *Attempt) Pick(space, value string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.picked == nil {
		a.picked = make(map[string]bool)
	}
	a.picked[space+"/"+value] = true
}

// Picked says whether admission has picked a value.
func (a *Attempt) Picked(space, value string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.picked[space+"/"+value]
}

// Checks and Changes are what admission asked for.
func (a *Attempt) Checks() []Check { return a.checks }

// Changes are in the order in which they were asked for.
func (a *Attempt) Changes() []Change { return a.changes }

// Replace puts another body, of the same Go type, in the place of Object.
func (a *Attempt) Replace(body runtime.Object) {
	if whole, ok := a.Object.(Object); ok && whole == a.Whole {
		a.Whole, _ = body.(Object)
	}
	a.Object = body
}

// Derive has f fill in what follows from the object as it is to be stored: it runs after all mutating plugins, and after
// what a client may not set has been taken out again. It is for what is built in.
func (a *Attempt) Derive(f func(whole Object)) { a.derived = f }

// Finish does what Derive asked for.
func (a *Attempt) Finish() {
	if a.derived != nil {
		a.derived(a.Whole)
	}
}

// Reinvoke is called by a mutating plugin that has changed Object and before which others ran, who may want to see
// that: all mutating plugins are called once more, with Again.
func (a *Attempt) Reinvoke() { a.reinvoke = true }

// Again says that the mutating plugins are called for the second time. Those that are part of the apiserver do what
// they do; others act only when they asked for it.
func (a *Attempt) Again() bool { return a.again }

// NextRound begins the second round of the mutating plugins, if one of them asked for it and this is the first.
func (a *Attempt) NextRound() bool {
	if a.again || !a.reinvoke {
		return false
	}
	a.again = true
	return true
}

// Kept is what a plugin keeps from the first round of the mutating plugins to the second, made when it is asked for
// first; key is the plugin's own.
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

// Options are those of the request in the form that belongs to the operation: CreateOptions, UpdateOptions (of a patch
// too) or DeleteOptions; nil for connections.
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

// BodyKind is the kind of Object and OldObject.
func (a *Attempt) BodyKind() schema.GroupVersionKind {
	if s := a.Kind.Subresources[a.Facet]; s != nil && !s.GVK.Empty() {
		return s.GVK
	}
	if a.Operation == Connect && a.Object != nil {
		return a.Object.GetObjectKind().GroupVersionKind()
	}
	return a.Kind.GVK
}

// Is says whether the attempt is about a resource of the core group or a facet of it.
func (a *Attempt) Is(resource string) bool {
	return a.Kind.GVK.Group == "" && a.Kind.Resource == resource
}

// Creates says whether the attempt is to create a stored object.
func (a *Attempt) Creates() bool {
	return a.Operation == Create && a.Facet == "" && a.Whole != nil
}

// Updates says whether the attempt is to change a stored object itself, not a facet of it.
func (a *Attempt) Updates() bool {
	return a.Operation == Update && a.Facet == "" && a.Whole != nil
}

// Presence says of which object's existence a kind's depends: who, and with which uid ("" = any). Objects of the kind
// are committed only while it is there.
type Presence func() (Ref, types.UID)
