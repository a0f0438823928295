package keyrotation_test

import (
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
