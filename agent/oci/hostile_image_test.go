package oci

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// imageLayerDir is the directory of the rig's only image.
func (r *rig) imageLayerDir() string { return filepath.Join(r.cfg.Images.(*fakeImages).dir, "layer") }

// Some images, for example those of Nix, have /etc/passwd behind an absolute symlink.
func TestPasswdBehindAnAbsoluteLink(t *testing.T) {
	r := newRig(t)
	passwd := filepath.Join(r.imageLayerDir(), "etc/passwd")
	for _, err := range []error{os.MkdirAll(r.imageLayerDir()+"/nix", 0o755),
		os.Rename(passwd, r.imageLayerDir()+"/nix/passwd"), os.Symlink("/nix/passwd", passwd),
		os.Rename(r.imageLayerDir()+"/data", r.imageLayerDir()+"/nix/data"),
		os.Symlink("/nix/data", r.imageLayerDir()+"/data")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	sb, sc := r.runSandbox()
	out, st := r.runToEnd(sb, sc, "a", "id -u; id -g; cat /data/file", func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.RunAsUsername = "app"
		c.Linux.SecurityContext.ReadonlyRootfs = true
	})
	if out != "stdout F 1000\nstdout F 1001\nstdout F from the image\n" || st.User.GetLinux().GetUid() != 1000 {
		t.Errorf("%q, %v", out, st)
	}
}

// An image with an /etc/passwd that is not a regular file is rejected without blocking.
func TestPasswdThatIsNoFile(t *testing.T) {
	r := newRig(t)
	passwd := filepath.Join(r.imageLayerDir(), "etc/passwd")
	for what, plant := range map[string]func() error{
		"a FIFO":          func() error { return unix.Mkfifo(passwd, 0o644) },
		"a device":        func() error { return unix.Mknod(passwd, unix.S_IFCHR|0o644, int(unix.Mkdev(1, 5))) },
		"a link to proc":  func() error { return os.Symlink("/proc/1/root/etc/passwd", passwd) },
		"a link upwards":  func() error { return os.Symlink("../../../../../../etc/passwd", passwd) },
		"a link to /proc": func() error { return os.Symlink("/proc/self/fd/0", passwd) },
	} {
		if err := os.RemoveAll(passwd); err != nil {
			t.Fatal(err)
		}
		if err := plant(); err != nil {
			t.Fatal(err)
		}
		sb, sc := r.runSandbox()
		_, err := r.CreateContainer(r.ctx(), &cri.CreateContainerRequest{PodSandboxId: sb, SandboxConfig: sc,
			Config: r.containerConfig("a", "exit 0", func(c *cri.ContainerConfig) {
				c.Linux.SecurityContext.RunAsUsername = "root"
			})})
		if err == nil || !strings.Contains(err.Error(), "/etc/passwd") {
			t.Errorf("%s: %v", what, err)
		}
	}
}
