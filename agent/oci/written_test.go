package oci

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Files that containers write to /etc are on the measured storage, not on a tmpfs in the node's
// memory. The pod's next container sees them.
func TestFilesOfEtcAreMeasured(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	script := "for f in resolv.conf hostname hosts; do echo more >> /etc/$f || exit 1; done; echo layer > " +
		"/layer; exec sleep 1000"
	id := r.runContainer(sb, sc, r.containerConfig("a", script))
	own, shared := r.WrittenDirs(id)
	if len(own) != 2 || len(shared) != 1 {
		t.Fatalf("written: %q, %q", own, shared)
	}
	r.waitFile(filepath.Join(own[1], "layer"), "layer\n")
	for _, f := range []string{"resolv.conf", "hostname", "hosts"} {
		path := filepath.Join(shared[0], f)
		b, err := os.ReadFile(path)
		if err != nil || !strings.HasSuffix(string(b), "more\n") || !strings.HasPrefix(path, r.cfg.StateDir) {
			t.Errorf("%s: %q, %v", path, b, err)
		}
	}
	out, _ := r.runToEnd(sb, sc, "b", "cat /etc/hostname")
	if out != "stdout F pod1\nstdout F more\n" {
		t.Errorf("another container sees %q", out)
	}
	if own, shared := r.WrittenDirs("unknown"); own != nil || shared != nil {
		t.Errorf("an unknown container writes to %q, %q", own, shared)
	}
	// /dev/shm and /dev are tmpfs mounts with a size limit.
	out, _ = r.runToEnd(sb, sc, "c", "df -k /dev/shm /dev | tail -n 2 | awk '{print $2}'")
	if out != "stdout F 65536\nstdout F 65536\n" {
		t.Errorf("sizes: %q", out)
	}
}

// An agent of the previous release finds the /etc files of a new sandbox at its own path, beside
// shm. It binds them into containers that it creates there.
func TestFilesOfEtcForTheReleaseBefore(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("a", "echo more >> /etc/hosts; exec sleep 1000"))
	_, shared := r.WrittenDirs(id)
	r.eventually(func() error {
		b, err := os.ReadFile(filepath.Join(shared[0], "hosts"))
		if err == nil && !strings.HasSuffix(string(b), "more\n") {
			err = unix.EAGAIN
		}
		return err
	})
	// The previous release passes these paths to the kernel unchanged.
	over := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(over, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"resolv.conf", "hostname", "hosts"} {
		if err := unix.Mount(filepath.Join(r.cfg.RunDir, "sandboxes", sb, f), over, "", unix.MS_BIND, ""); err != nil {
			t.Fatalf("%s where the release before has it: %v", f, err)
		}
		a, err1 := os.Stat(over)
		b, err2 := os.Stat(filepath.Join(shared[0], f))
		if err := errors.Join(err1, err2, unix.Unmount(over, 0)); err != nil {
			t.Fatal(err)
		}
		if !os.SameFile(a, b) {
			t.Errorf("%s is another file there", f)
		}
	}
}

// A sandbox of the previous release has its /etc files beside shm; a container created by this
// release has its own.
func TestFilesOfEtcOfTheReleaseBefore(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	r.stop()
	for _, f := range []string{"resolv.conf", "hostname", "hosts"} {
		path := filepath.Join(r.cfg.RunDir, "sandboxes", sb, f)
		if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte("old\n"), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.RemoveAll(filepath.Join(r.cfg.StateDir, "etc", sb)); err != nil {
		t.Fatal(err)
	}
	r.startRuntime()
	out, _ := r.runToEnd(sb, sc, "b", "cat /etc/hostname; head -n 1 /etc/hosts")
	if out != "stdout F pod1\nstdout F 127.0.0.1\tlocalhost\n" {
		t.Errorf("a new container sees %q", out)
	}
}

func (r *rig) waitFile(path, text string) {
	r.t.Helper()
	r.eventually(func() error {
		b, err := os.ReadFile(path)
		if err == nil && string(b) != text {
			err = unix.EAGAIN
		}
		return err
	})
}
