package api

import (
	"context"

	"k8s.io/apimachinery/pkg/watch"
)

// Follower is the result of Backend.Watch for InternalOptions.Follow: a watch that also gives
// access to the current objects of the kind, so that the reader needs no copy of its own.
type Follower interface {
	watch.Interface
	// Follow waits for a change and returns the current state and the changes since the previously
	// returned state. The first call returns the state without waiting, and no changes. If the
	// watch history no longer covers all changes, the changes are the difference of both states,
	// sorted by key.
	//
	// Follow must be called from one goroutine, and not together with ResultChan. After an error
	// the Follower cannot be used any further.
	Follow(ctx context.Context) (View, []Delta, error)
}

// View is an immutable snapshot of the objects of a kind. The objects are shared: copy them before
// modifying them. They are in the version of the kind's storage. They may be in the light form, in
// which some fields are still encoded (see Light).
type View interface {
	// Revision returns the resourceVersion of the newest change in the snapshot.
	Revision() string
	// Len returns the number of objects.
	Len() int
	// Get returns the object with the key "namespace/name", or "name" for a cluster-scoped kind, or
	// nil.
	Get(key string) Object
	// Scan calls visit with each object that has a key with the prefix, sorted by key, until visit
	// returns false.
	Scan(prefix string, visit func(key string, obj Object) bool)
}

// Delta is the change of one object between two snapshots of a Follower.
type Delta struct {
	Key string
	Old Object // nil if the object is new
	// the current object; for a deleted object its last state, with the revision of the deletion if
	// that is known
	New Object
	// Gone reports whether the object was deleted.
	Gone bool
	// Guessed reports whether the deletion was inferred and not observed. Old and New are then the
	// last observed state.
	Guessed bool
}
