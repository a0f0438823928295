package vagrant

import (
	"fmt"
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
	if n, m := len(c.HostsWithRole(machines.ControlPlane)), len(c.HostsWithRole(machines.Worker)); n != 3 || m != 3 {
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
	dir := ofItsOwn(t)
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(vagrant, args...)
		cmd.Dir = dir
		// It works offline, and leaves nothing in the home folder.
		cmd.Env = append(os.Environ(), "VAGRANT_HOME="+filepath.Join(dir, "home"), "VAGRANT_CHECKPOINT_DISABLE=1",
			"VAGRANT_NO_PLUGINS=1")
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
	if err := os.WriteFile(filepath.Join(dir, "Vagrantfile"),
		[]byte(strings.Replace(string(raw), `"private_network", ip:`, `"private_netwerk", ip:`, 1)), 0o600); err !=
		nil {
		t.Fatal(err)
	}
	cmd := exec.Command(vagrant, "validate", "--ignore-provider")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "VAGRANT_HOME="+filepath.Join(dir, "home"),
		"VAGRANT_CHECKPOINT_DISABLE=1", "VAGRANT_NO_PLUGINS=1")
	if out, err := cmd.CombinedOutput(); err == nil {
		t.Errorf("a network of no sort is taken: %s", out)
	}
}

// ofItsOwn returns a new folder with the Vagrantfile and its cluster file.
func ofItsOwn(t *testing.T) string {
	t.Helper()
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
	return dir
}

// Machines that come up at once have one key between them, of which both halves are one pair, and all are known afterwards; those of
// before under the same addresses are forgotten.
func TestMachinesComeUpAtOnce(t *testing.T) {
	ruby, err := exec.LookPath("ruby")
	if err != nil {
		t.Skip("ruby is not installed: 'scripts/setup vagrant' installs Debian's")
	}
	keygen, err := exec.LookPath("ssh-keygen")
	if err != nil {
		t.Fatal("ssh-keygen is missing: apt-get install openssh-client")
	}
	harness, err := filepath.Abs("testdata/up.rb")
	if err != nil {
		t.Fatal(err)
	}
	c, err := machines.Load("cluster.yaml")
	if err != nil {
		t.Fatal(err)
	}
	dir := ofItsOwn(t)
	bin, made := filepath.Join(dir, "bin"), filepath.Join(dir, "made")
	keys := filepath.Join(dir, ".vagrant", "keelson")
	key, known := filepath.Join(keys, "key"), filepath.Join(keys, "known_hosts")
	// It is slow, as on a machine that has much else to do, and asks nobody what to do with a file that is there.
	slow := fmt.Sprintf("#!/bin/sh\necho once >>%s\nsleep 0.3\nexec %s \"$@\" </dev/null\n", made, keygen)
	for path, text := range map[string]string{
		filepath.Join(bin, "ssh-keygen"): slow,
		known:                            c.Hosts[0].Address + " ssh-ed25519 BEFORE\n192.0.2.1 ssh-ed25519 ANOTHER\n",
	} {
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // the second time there is a key
		cmd := exec.Command(ruby, harness)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	if raw, err := os.ReadFile(made); err != nil || string(raw) != "once\n" {
		t.Errorf("the key was made %q, %v", raw, err)
	}
	public, err := os.ReadFile(key + ".pub")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(keygen, "-y", "-f", key).Output(); err != nil ||
		!strings.HasPrefix(string(public), strings.TrimSpace(string(out))) {
		t.Errorf("of the key %s is public, and the file says %s (%v)", out, public, err)
	}
	raw, err := os.ReadFile(known)
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range c.Hosts {
		if line := h.Address + " ssh-ed25519 AAAA" + h.Name + "\n"; strings.Count(string(raw), line) != 1 {
			t.Errorf("%s is not known once", h.Name)
		}
	}
	if n := strings.Count(string(raw), "\n"); n != len(c.Hosts)+1 || !strings.Contains(string(raw), "ANOTHER") ||
		strings.Contains(string(raw), "BEFORE") {
		t.Errorf("known are\n%s", raw)
	}
}
