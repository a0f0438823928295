package membership_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// A join moves existing keys of another cluster aside, such as the keys of a join that was
// interrupted before a key rotation. Then the replica works. If there is a store beside the keys,
// the join fails and changes nothing.
func TestJoinMovesForeignKeysAside(t *testing.T) {
	p := newPlane(t, 1, nil)
	c := p.NewConfig(2)
	folder := filepath.Join(c.DataDir, datadir.PKIFolder)
	if _, err := pki.Init(folder, "other", time.Now()); err != nil {
		t.Fatal(err)
	}
	store := filepath.Join(c.DataDir, datadir.RaftFolder)
	if err := os.Mkdir(store, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(store, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	join := func() error {
		return server.Join(context.Background(), c, p.Founded.ControlPlaneToken,
			[]string{datadir.HostPort(servertest.Address(1), p.Cluster.FleetPort)})
	}
	if err := join(); err == nil || !strings.Contains(err.Error(), c.DataDir) ||
		!strings.Contains(err.Error(), "cluster.json") {
		t.Fatalf("joining over a store of another cluster: %v", err)
	}
	if err := os.RemoveAll(store); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second join finds the keys of this cluster, as after an interrupted join
		if err := os.Remove(filepath.Join(c.DataDir, datadir.ClusterFile)); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		if err := join(); err != nil {
			t.Fatal(err)
		}
	}
	if aside, err := filepath.Glob(folder + ".aside-*"); err != nil || len(aside) != 1 {
		t.Errorf("the folders that were moved aside are %v, error %v, want one folder", aside, err)
	}
	have, err := pki.Load(folder)
	if err != nil || !have.CA.Cert.Equal(p.Trust.CA.Cert) {
		t.Fatalf("the joined replica does not have the keys of the cluster: %v", err)
	}
	p.StartReplica(c)
	p.AwaitReady("cp2")
}

// A join with an address in the pod or Service range of the cluster is refused, before anything is
// written to disk.
func TestJoinFromClusterRangeIsRefused(t *testing.T) {
	p := newPlane(t, 1, nil)
	to := []string{datadir.HostPort(servertest.Address(1), p.Cluster.FleetPort)}
	for a, want := range map[string]string{
		"10.244.7.1": "--advertise-address 10.244.7.1 is in 10.244.0.0/16 of the cluster's pods: nodes " +
			"would look for it among them: give the machine another address",
		"10.96.0.9": "--advertise-address 10.96.0.9 is in 10.96.0.0/16 of the cluster's Services: nodes would look " +
			"for it among them",
	} {
		c := p.NewConfig(2)
		c.Advertise = a
		if err := server.Join(t.Context(), c, p.Founded.ControlPlaneToken, to); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("joining at %s: %v, want %q", a, err, want)
		}
		if _, err := os.Stat(c.DataDir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("joining at %s: the data directory exists: %v", a, err)
		}
	}
}
