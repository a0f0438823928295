package oci

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// The restrictive mount options of a volume also hold in containers; the node's other mounts do not
// change. F110
func TestMountsKeepWhatTheyForbid(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	restricted := uintptr(unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC)
	at := map[string]string{}
	for name, m := range map[string]struct {
		kind  string
		flags uintptr
	}{"volume": {"ramfs", restricted | unix.MS_NOATIME}, "plain": {"ramfs", 0}, "secrets": {"tmpfs", restricted}} {
		at[name] = t.TempDir()
		if err := unix.Mount(m.kind, at[name], m.kind, m.flags, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(at[name], 0); err != nil {
				t.Error(err)
			}
		})
		if err := errors.Join(os.Chmod(at[name], 0o755), os.Mkdir(filepath.Join(at[name], "part"), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	out, _ := r.runToEnd(sb, sc, "a", "grep ' /v/' /proc/mounts", func(c *cri.ContainerConfig) {
		c.Mounts = []*cri.Mount{{ContainerPath: "/v/volume", HostPath: at["volume"]},
			{ContainerPath: "/v/reader", HostPath: at["volume"], Readonly: true},
			{ContainerPath: "/v/part", HostPath: filepath.Join(at["volume"], "part")},
			{ContainerPath: "/v/plain", HostPath: at["plain"]},
			{ContainerPath: "/v/secrets", HostPath: at["secrets"]}}
	})
	for place, want := range map[string]string{"volume": "rw,nosuid,nodev,noexec,noatime",
		"reader": "ro,nosuid,nodev,noexec,noatime",
		"part":   "rw,noatime", "plain": "rw,relatime", "secrets": "rw,relatime"} {
		if !strings.Contains(out, " /v/"+place+" ramfs "+want+" ") &&
			!strings.Contains(out, " /v/"+place+" tmpfs "+want) {
			t.Errorf("the container has no %s with %s:\n%s", place, want, out)
		}
	}
}

// A container can open as many pseudoterminals as its request allows: all pods share those of the
// machine. F105
func TestTerminalsAreBounded(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	script := "exec 3<>/dev/ptmx 4<>/dev/ptmx 5<>/dev/ptmx && echo three; (exec 6<>/dev/ptmx) || echo refused; exec " +
		"5>&-; (exec 6<>/dev/ptmx) && echo again"
	out, st := r.runToEnd(sb, sc, "taker", script, func(c *cri.ContainerConfig) {
		c.Annotations = map[string]string{agent.AnnotationTerminals: "3"}
	})
	for _, word := range []string{"three", "refused", "again"} {
		if !strings.Contains(out, word) {
			t.Errorf("exit code %d, without %q: %s", st.ExitCode, word, out)
		}
	}
	if out, _ = r.runToEnd(sb, sc, "plain", "grep ' /dev/pts ' /proc/mounts"); !strings.Contains(out, "max=256") {
		t.Errorf("without an annotation: %s", out)
	}
}
