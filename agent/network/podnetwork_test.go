package network

import (
	"os"
	"path/filepath"
	"testing"

	"keelson.dev/keelson/cni"
)

// A node reports Keelson's network only while no pod can have an address of another network.
func TestAllOwn(t *testing.T) {
	conf, run := t.TempDir(), t.TempDir()
	write := func(path string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := func(own bool, when string) {
		t.Helper()
		if got := AllPodsOnOwnNetwork(conf, run); got != own {
			t.Errorf("%s: AllOwn is %v", when, got)
		}
	}
	want(true, "nothing is attached")
	write(filepath.Join(run, "cache", "results", cni.Name+"-0123-eth0"))
	want(true, "a pod of Keelson's network")
	other := filepath.Join(conf, "10-calico.conflist")
	write(other)
	want(false, "another configuration is installed")
	if err := os.Remove(other); err != nil {
		t.Fatal(err)
	}
	want(true, "it is removed")
	write(filepath.Join(run, "cache", "results", "calico-4567-eth0"))
	want(false, "a pod still has the other network")
	if AllPodsOnOwnNetwork(filepath.Join(run, "cache", "results", "calico-4567-eth0"), t.TempDir()) {
		t.Error("a folder that cannot be read counts as Keelson's")
	}
}
