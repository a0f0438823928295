package server

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
)

// A folder of keys that is there when a replica joins is not taken for the cluster's: one that is another's, as of a join
// that was cut off before an exchange, is moved aside, and the replica works. With a store beside it nothing is touched.
func TestJoinOverKeysOfAnother(t *testing.T) {
	p := newPlane(t, 1, nil)
	c := p.config(2)
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
		return Join(context.Background(), c, p.founded.ControlPlaneToken, []string{datadir.HostPort(address(1), p.cluster.FleetPort)})
	}
	if err := join(); err == nil || !strings.Contains(err.Error(), c.DataDir) || !strings.Contains(err.Error(), "cluster.json") {
		t.Fatalf("over a store of another cluster: %v", err)
	}
	if err := os.RemoveAll(store); err != nil {
		t.Fatal(err)
	}
	for range 2 { // again over the cluster's own, as when it was cut off behind them
		if err := os.Remove(filepath.Join(c.DataDir, datadir.ClusterFile)); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		if err := join(); err != nil {
			t.Fatal(err)
		}
	}
	if aside, err := filepath.Glob(folder + ".aside-*"); err != nil || len(aside) != 1 {
		t.Errorf("moved aside are %v, %v", aside, err)
	}
	have, err := pki.Load(folder)
	if err != nil || !have.CA.Cert.Equal(p.ca.CA.Cert) {
		t.Fatalf("the keys are not the cluster's: %v", err)
	}
	p.start(c)
	p.ready("cp2")
}

// Who joins with an address of the cluster's pods or Services is refused before anything is on its disk.
func TestJoinFromARangeOfTheCluster(t *testing.T) {
	p := newPlane(t, 1, nil)
	to := []string{datadir.HostPort(address(1), p.cluster.FleetPort)}
	for a, want := range map[string]string{
		"10.244.7.1": "--advertise-address 10.244.7.1 is in 10.244.0.0/16 of the cluster's pods: nodes would look for it among them: give the machine another address",
		"10.96.0.9":  "--advertise-address 10.96.0.9 is in 10.96.0.0/16 of the cluster's Services: nodes would look for it among them",
	} {
		c := p.config(2)
		c.Advertise = a
		if err := Join(t.Context(), c, p.founded.ControlPlaneToken, to); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", a, err, want)
		}
		if _, err := os.Stat(c.DataDir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: something is on its disk: %v", a, err)
		}
	}
}
