package oci

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// What containers write to /etc lies where it is measured, not on a tmpfs that takes the node's memory; the next
// container of the pod sees it.
func TestFilesOfEtcAreMeasured(t *testing.T) {
	r := newRig(t)
	sb, sc := r.sandbox()
	script := "for f in resolv.conf hostname hosts; do echo more >> /etc/$f || exit 1; done; echo layer > /layer; exec sleep 1000"
	id := r.run(sb, sc, r.containerConfig("a", script))
	own, shared := r.Written(id)
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
	out, _ := r.output(sb, sc, "b", "cat /etc/hostname")
	if out != "stdout F pod1\nstdout F more\n" {
		t.Errorf("another container sees %q", out)
	}
	if own, shared := r.Written("unknown"); own != nil || shared != nil {
		t.Errorf("an unknown container writes to %q, %q", own, shared)
	}
	// /dev/shm and /dev are tmpfs of their own, with a size.
	out, _ = r.output(sb, sc, "c", "df -k /dev/shm /dev | tail -n 2 | awk '{print $2}'")
	if out != "stdout F 65536\nstdout F 65536\n" {
		t.Errorf("sizes: %q", out)
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
