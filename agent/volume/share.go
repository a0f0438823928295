package volume

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// ShareKubeletMounts creates the folders below kubelet in which CSI drivers mount volumes, and
// makes the mounts that contain them shared. Drivers run in containers and mount with propagation
// Bidirectional, which requires shared mounts. On most machines all mounts are already shared.
func ShareKubeletMounts(kubelet string) error {
	for _, sub := range []string{"plugins_registry", "plugins", "pods"} {
		if err := os.MkdirAll(filepath.Join(kubelet, sub), 0o750); err != nil {
			return fmt.Errorf("folders of CSI drivers: %w", err)
		}
	}
	resolved, err := filepath.EvalSymlinks(kubelet)
	if err != nil {
		return fmt.Errorf("folders of CSI drivers: %w", err)
	}
	for _, dir := range []string{resolved, filepath.Join(resolved, "plugins"), filepath.Join(resolved, "pods")} {
		m, err := topmostMount(dir)
		if err != nil {
			return fmt.Errorf("sharing mounts of CSI drivers: %w", err)
		}
		if strings.Contains(m.Optional, "shared:") {
			continue
		}
		if m.Mountpoint != dir {
			if err := unix.Mount(dir, dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
				return fmt.Errorf("sharing mounts of CSI drivers: binding %s: %w", dir, err)
			}
		}
		if err := unix.Mount("", dir, "", unix.MS_SHARED, ""); err != nil {
			return fmt.Errorf("sharing mounts of CSI drivers: %s: %w", dir, err)
		}
	}
	return nil
}

// topmostMount returns the mount that contains a folder. If several mounts are stacked, it returns
// the topmost.
func topmostMount(dir string) (*mountinfo.Info, error) {
	all, err := mountinfo.GetMounts(mountinfo.ParentsFilter(dir))
	if err != nil {
		return nil, err
	}
	var best *mountinfo.Info
	for _, m := range all {
		if best == nil || len(m.Mountpoint) >= len(best.Mountpoint) {
			best = m
		}
	}
	if best == nil {
		return nil, fmt.Errorf("no mount holds %s", dir)
	}
	return best, nil
}
