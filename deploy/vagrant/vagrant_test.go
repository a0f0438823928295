package vagrant

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/deploy/machines"
)

// The cluster file is one, of three control planes and three workers, and Vagrant takes the machines that are made of it.
func TestVagrantfile(t *testing.T) {
	c, err := machines.Load("cluster.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if n, m := len(c.With(machines.ControlPlane)), len(c.With(machines.Worker)); n != 3 || m != 3 {
		t.Errorf("%d control planes and %d workers: want 3 of each", n, m)
	}
	for _, h := range c.Hosts {
		// VirtualBox lets nobody have other addresses without more ado.
		if !strings.HasPrefix(h.Address, "192.168.56.") {
			t.Errorf("%s has the address %s: want one of 192.168.56.0/21", h.Name, h.Address)
		}
	}
	vagrant, err := exec.LookPath("vagrant")
	if err != nil {
		t.Skip("vagrant is not installed: 'scripts/setup vagrant' installs Debian's")
	}
	dir := t.TempDir()
	for _, f := range []string{"Vagrantfile", "cluster.yaml"} {
		raw, err := os.ReadFile(f)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, f), raw, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(vagrant, args...)
		cmd.Dir = dir
		// It works offline, and leaves nothing in the home folder.
		cmd.Env = append(os.Environ(), "VAGRANT_HOME="+filepath.Join(dir, "home"), "VAGRANT_CHECKPOINT_DISABLE=1", "VAGRANT_NO_PLUGINS=1")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("vagrant %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	if said := run("validate", "--ignore-provider"); !strings.Contains(said, "validated successfully") {
		t.Errorf("vagrant validate says %s", said)
	}
	// Broken, it is refused: what validate says means something.
	raw, err := os.ReadFile("Vagrantfile")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "Vagrantfile"), []byte(strings.Replace(string(raw), `"private_network", ip:`, `"private_netwerk", ip:`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(vagrant, "validate", "--ignore-provider")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "VAGRANT_HOME="+filepath.Join(dir, "home"), "VAGRANT_CHECKPOINT_DISABLE=1", "VAGRANT_NO_PLUGINS=1")
	if out, err := cmd.CombinedOutput(); err == nil {
		t.Errorf("a network of no sort is taken: %s", out)
	}
}
