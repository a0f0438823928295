package server

import (
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery"
)

// F108: a second address family is added to a cluster with one family. The command can be repeated
// with the same ranges only.
func TestAddFamily(t *testing.T) {
	c := Config{Name: "a", DataDir: t.TempDir(), Advertise: "192.0.2.1"}
	if _, err := Init(c, datadir.Cluster{}, InitOptions{}); err != nil {
		t.Fatal(err)
	}
	checkRefused := func(pods, services, want string) {
		t.Helper()
		if _, err := recovery.AddFamily(c.Dir(), pods, services); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s %s: %v, want %q", pods, services, err, want)
		}
	}
	checkRefused("10.245.0.0/16", "10.97.0.0/16", "one of IPv4 and one of IPv6")
	checkRefused("fd44::/48", "fd44::/112", "overlap")
	for range 2 {
		got, err := recovery.AddFamily(c.Dir(), "fd44::/48", "fd96::/112")
		if err != nil || got.ClusterCIDR != "10.244.0.0/16,fd44::/48" || got.ServiceCIDR != "10.96.0.0/16,fd96::/112" {
			t.Errorf("%+v, %v", got, err)
		}
	}
	checkRefused("fd45::/48", "fd96::/112", "already has two address families")
	var stored datadir.Cluster
	if _, err := datadir.ReadJSON(filepath.Join(c.DataDir, datadir.ClusterFile), &stored); err != nil ||
		stored.APIServiceIP().String() != "10.96.0.1" {
		t.Errorf("%+v, %v", stored, err)
	}
	release, err := c.Dir().Lock()
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	checkRefused("fd44::/48", "fd96::/112", "stop it first")
}
