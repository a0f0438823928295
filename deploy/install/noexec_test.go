package install

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Programs that cannot run are reported with the machine's error, and nothing is changed.
func TestProgramsThatDoNotRun(t *testing.T) {
	for _, c := range []struct {
		name, program string
		mode          os.FileMode
		want, never   string
	}{
		{"no right to run them", "#!/bin/sh\n", 0o644, "Permission denied: is ", "architecture"},
		{"another architecture", "\x7fELF\x02\x01\x01" + strings.Repeat("\x00", 60), 0o755,
			"are they of another architecture?", "noexec"},
		{"something else", "#!/bin/sh\necho this kernel is too old >&2\nexit 3\n", 0o755,
			"do not run on this machine: this kernel is too old\n", "architecture"},
		{"nothing is said", "#!/bin/sh\nexit 3\n", 0o755, "do not run on this machine: it ended with status 3\n",
			"architecture"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMachine(t)
			unpacked, packed := m.release()
			program := filepath.Join(unpacked, "usr/bin/keelson-controlplane")
			m.file(program, c.program, c.mode)
			if err := os.Chmod(program, c.mode); err != nil {
				t.Fatal(err)
			}
			before := m.tree()
			said, _, err := m.run("install.sh", "server", "--init", "--from", m.packed(packed))
			if err == nil || !strings.Contains(said, c.want) || strings.Contains(said, c.never) {
				t.Errorf("%v: %s\nwant %q", err, said, c.want)
			}
			if !equal(before, m.tree()) {
				t.Errorf("something has changed: %v", m.tree())
			}
			if left, err := filepath.Glob(filepath.Join(m.root, "var/cache/*")); err != nil || len(left) > 0 {
				t.Errorf("it left %v, %v", left, err)
			}
		})
	}
}

// packed packages the test's release again, with its sum.
func (m *machine) packed(folder string) (tarball string) {
	m.t.Helper()
	const name = "keelson-v1-linux-amd64"
	cmd := exec.Command("tar", "-czf", name+".tar.gz", name)
	cmd.Dir = folder
	if out, err := cmd.CombinedOutput(); err != nil {
		m.t.Fatalf("%v\n%s", err, out)
	}
	tarball = filepath.Join(folder, name+".tar.gz")
	raw, err := os.ReadFile(tarball)
	if err != nil {
		m.t.Fatal(err)
	}
	m.file(filepath.Join(folder, "SHA256SUMS"), fmt.Sprintf("%x  %s.tar.gz\n", sha256.Sum256(raw), name), 0o644)
	return tarball
}

// On a machine with noexec on its temporary folder, a release is installed from its tarball. One
// that was unpacked there is refused with the remedy.
func TestTemporaryFilesThatDoNotRun(t *testing.T) {
	m := newMachine(t)
	unpacked, packed := m.release()
	tmp := filepath.Join(m.root, "tmp")
	if err := syscall.Mount("tmpfs", tmp, "tmpfs", syscall.MS_NOEXEC, ""); err != nil {
		t.Skipf("a file system can be mounted by root alone: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(tmp, 0); err != nil {
			t.Errorf("unmounting %s: %v", tmp, err)
		}
	})
	if out, err := exec.Command("cp", "-a", unpacked, tmp).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	there := filepath.Join(tmp, filepath.Base(unpacked))
	said, _, err := m.run(filepath.Join(there, "install.sh"), "server", "--init")
	if want := "Permission denied: is " + there + " mounted noexec?"; err == nil || !strings.Contains(said, want) ||
		!strings.Contains(said, "--from") {
		t.Errorf("a release on %s: %v: %s\nwant %s", tmp, err, said, want)
	}
	if err := os.RemoveAll(there); err != nil {
		t.Fatal(err)
	}
	if said, _, err := m.run("install.sh", "server", "--init", "--from",
		filepath.Join(packed, filepath.Base(unpacked)+".tar.gz")); err != nil ||
		!strings.Contains(said, "install: done;") {
		t.Errorf("from a tarball: %v: %s", err, said)
	}
}

// Unpacked files are removed with the script, also those of a killed run; other files in the folder
// stay.
func TestWhatIsUnpackedGoes(t *testing.T) {
	m := newMachine(t)
	_, packed := m.release()
	cache := filepath.Join(m.root, "var/cache/keelson")
	args := []string{"server", "--init", "--from", filepath.Join(packed, "keelson-v1-linux-amd64.tar.gz")}
	if said, _, err := m.run("install.sh", args...); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	if _, err := os.Stat(cache); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s stays: %v", cache, err)
	}
	former, young := filepath.Join(cache, "work.former"), filepath.Join(cache, "work.young")
	for _, f := range []string{filepath.Join(former, "x"), filepath.Join(young, "x"),
		filepath.Join(cache, "keelson-v1-linux-amd64.tar.gz")} {
		m.file(f, "", 0o600)
	}
	if out, err := exec.Command("touch", "-d", "2 hours ago", former).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if said, _, err := m.run("install.sh", args...); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	left, err := filepath.Glob(filepath.Join(cache, "*"))
	if want := fmt.Sprint([]string{filepath.Join(cache, "keelson-v1-linux-amd64.tar.gz"), young}); err != nil ||
		fmt.Sprint(left) != want {
		t.Errorf("left are %v, want %s", left, want)
	}
}
