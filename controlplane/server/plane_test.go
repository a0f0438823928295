package server_test

import (
	"sync"
	"testing"

	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// plane is a control plane with the checks of this package.
type plane struct{ *servertest.Plane }

func newPlane(t *testing.T, replicas int, change func(*server.Config)) *plane {
	t.Helper()
	return &plane{servertest.NewPlane(t, replicas, change)}
}

// replicaCollector has the current or last replica of each member of a plane.
type replicaCollector struct {
	mu     sync.Mutex
	byName map[string]*server.Replica
}

// collect collects the replicas that are started with a configuration.
func (w *replicaCollector) collect(c *server.Config) {
	name := c.Name
	c.Wired = func(r *server.Replica) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.byName == nil {
			w.byName = map[string]*server.Replica{}
		}
		w.byName[name] = r
	}
}

func (w *replicaCollector) get(name string) *server.Replica {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.byName[name]
}
