package membership_test

import (
	"sync"
	"testing"

	"keelson.dev/keelson/controlplane/membership"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// plane is a control plane with the test helpers of this package.
type plane struct{ *servertest.Plane }

func newPlane(t *testing.T, replicas int, change func(*server.Config)) *plane {
	t.Helper()
	return &plane{servertest.NewPlane(t, replicas, change)}
}

// wiredReplicas collects the Membership of each replica of a plane, also after the replica has
// stopped.
type wiredReplicas struct {
	mu     sync.Mutex
	byName map[string]*membership.Membership
}

// recordWired changes a configuration so that the Membership of its replica is recorded when the
// replica starts.
func (w *wiredReplicas) recordWired(c *server.Config) {
	name := c.Name
	c.Wired = func(r *server.Replica) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.byName == nil {
			w.byName = map[string]*membership.Membership{}
		}
		w.byName[name] = r.Members()
	}
}

// membershipOf returns the last recorded Membership of a replica.
func (w *wiredReplicas) membershipOf(name string) *membership.Membership {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.byName[name]
}
