package membership

import (
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/virtual"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// The time of the last successful probe of a replica remains while the replica does not respond.
func TestLastContactIsKeptWhileSilent(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		r := newPeers("cp1", datadir.Cluster{}, nil, func() *tls.Config {
			return new(tls.Config)
		}, slog.New(slog.NewTextHandler(io.Discard, nil)))
		list := []*fleetv1.Replica{{Name: "cp2"}, {Name: "cp3"}}
		silent := errors.New("silent")
		r.recordProbes(list, []error{nil, silent})
		lastProbe := time.Now()
		time.Sleep(time.Minute)
		r.recordProbes(list, []error{silent, silent})
		if got := r.LastContact("cp2"); !got.Equal(lastProbe) {
			t.Errorf("the last contact with cp2 is %v, want %v", got, lastProbe)
		}
		if got := r.LastContact("cp3"); !got.IsZero() {
			t.Errorf("the last contact with cp3, which never responded, is %v", got)
		}
	})
}
