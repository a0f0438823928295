package api

import (
	"context"

	"k8s.io/apimachinery/pkg/watch"
)

// Follower is what Backend.Watch returns for Request.Follow: a watch whose reader has the state of the kind beside its
// changes, without a copy of its own.
type Follower interface {
	watch.Interface
	// Follow waits until there is something new and returns the state, and what has changed since the state before; the
	// first call returns the state at once and no changes. When so much has changed that the history does not tell all of
	// it, the changes are the difference between both states, in the order of keys. Call it from one goroutine, and not
	// beside ResultChan. An error ends it.
	Follow(ctx context.Context) (View, []Delta, error)
}

// View is the objects of a kind at one moment. It never changes. Objects are shared: copy before modifying. They are in the
// version that the kind's storage is kept in, and may be in the light form.
type View interface {
	// Revision is that of the newest change that it shows, as a resourceVersion.
	Revision() string
	// Len is how many objects there are.
	Len() int
	// Get returns the object with the key "namespace/name", or "name" where there are no namespaces; nil = none.
	Get(key string) Object
	// Scan calls visit with the objects whose keys begin with prefix, in the order of keys, until it returns false.
	Scan(prefix string, visit func(key string, obj Object) bool)
}

// Delta is what became of one object.
type Delta struct {
	Key string
	Old Object // nil when it is new
	New Object // as it is now; of one that is gone, its last state with the revision of the deletion, where that is known
	// Gone says that it was deleted.
	Gone bool
	// Guessed says that the deletion was not seen: Old and New are the last state that was.
	Guessed bool
}
