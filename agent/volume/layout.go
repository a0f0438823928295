package volume

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/volume/iscsi"
)

// layout returns the paths of the folders and records of volumes, and reads the records. It keeps
// no state.
type layout struct {
	cfg *Config
}

func (l *layout) podDir(uid types.UID) string {
	return filepath.Join(l.cfg.Paths.State, "volumes", string(uid))
}

func (l *layout) secretRoot() string { return filepath.Join(l.cfg.Paths.Run, "secrets") }

// Pods returns the UIDs of the pods that still have mounted or stored volumes on this node. It
// implements agent.Volumes.
func (l *layout) Pods() ([]types.UID, error) {
	seen := map[types.UID]bool{}
	var out []types.UID
	for _, d := range []string{filepath.Join(l.cfg.Paths.State, "volumes"), l.secretRoot()} {
		entries, err := os.ReadDir(d)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("listing pods with volumes: %w", err)
		}
		for _, e := range entries {
			if uid := types.UID(e.Name()); e.IsDir() && !seen[uid] {
				seen[uid] = true
				out = append(out, uid)
			}
		}
	}
	slices.Sort(out)
	return out, nil
}

// kubeletDir returns the folder with the directory layout of the kubelet, which CSI drivers expect.
func (l *layout) kubeletDir() string {
	if l.cfg.Paths.Kubelet != "" {
		return l.cfg.Paths.Kubelet
	}
	return filepath.Join(l.cfg.Paths.State, "kubelet")
}

// blockDeviceDir returns the folder sub of the kubelet's folder for CSI block devices. Drivers
// stage or publish block devices there.
func (l *layout) blockDeviceDir(sub string) string {
	return filepath.Join(l.kubeletDir(), "plugins", "kubernetes.io", "csi", "volumeDevices", sub)
}

func (l *layout) stagingPath(s csiSource) string {
	if s.block {
		return filepath.Join(l.blockDeviceDir("staging"), s.name)
	}
	return filepath.Join(l.kubeletDir(), "plugins", "kubernetes.io", "csi", s.driver,
		fmt.Sprintf("%x", sha256.Sum256([]byte(s.handle))), "globalmount")
}

// targetPath returns the path at which a CSI volume is published for a pod. The suffix
// distinguishes a second volume of the pod with the same claim.
func (l *layout) targetPath(pod types.UID, s csiSource, suffix string) string {
	if s.block {
		return filepath.Join(l.blockDeviceDir("publish"), s.name, string(pod)+suffix)
	}
	return filepath.Join(l.kubeletDir(), "pods", string(pod), "volumes", "kubernetes.io~csi", s.name+suffix, "mount")
}

// isRemovableFolder reports whether a folder may be removed when it is empty, because it belongs to
// one pod or one volume.
func (l *layout) isRemovableFolder(dir string) bool {
	if all := l.blockDeviceDir(""); dir == all || filepath.Dir(dir) == all {
		return false // folders of all block devices
	}
	for _, root := range []string{filepath.Join(l.kubeletDir(), "pods"),
		filepath.Join(l.kubeletDir(), "plugins", "kubernetes.io", "csi"),
		filepath.Join(l.cfg.Paths.State, "csi"), filepath.Join(l.cfg.Paths.State, "volumes")} {
		if strings.HasPrefix(dir, root+"/") {
			return true
		}
	}
	return false
}

func (l *layout) csiRecordFile(pod types.UID, name string) string {
	return filepath.Join(l.podDir(pod), "csi", name+".json")
}

// csiRecords returns the records of a pod's CSI volumes. The keys are the paths of the record
// files.
func (l *layout) csiRecords(uid types.UID) (map[string]csiRecord, error) {
	return recordsIn[csiRecord](filepath.Join(l.podDir(uid), "csi"), "a CSI volume")
}

// targetPaths returns the set of target paths of the CSI volumes of all pods on this node.
func (l *layout) targetPaths() (map[string]bool, error) {
	pods, err := l.Pods()
	if err != nil {
		return nil, err
	}
	out := map[string]bool{}
	for _, p := range pods {
		recs, err := l.csiRecords(p)
		if err != nil {
			return nil, err
		}
		for _, r := range recs {
			out[r.Target] = true
		}
	}
	return out, nil
}

// iscsiDir returns the folder on this node for the target and the iscsiadm interface of r. It
// contains the mount points of the target's disks and the state of the logins.
func (l *layout) iscsiDir(r iscsiRecord) string {
	return filepath.Join(iscsiRoot(l.kubeletDir()),
		iscsi.FolderName(iscsi.Disk{Target: r.Target, Interface: r.Interface}))
}

// iscsiGlobalPath returns the path at which the file system of the disk in r is mounted once for
// all pods of the node.
func (l *layout) iscsiGlobalPath(r iscsiRecord) string {
	return filepath.Join(l.iscsiDir(r), fmt.Sprintf("lun-%d", r.LUN))
}

// iscsiRecords returns the records of a pod's iSCSI volumes. The keys are the paths of the records.
func (l *layout) iscsiRecords(uid types.UID) (map[string]iscsiRecord, error) {
	return recordsIn[iscsiRecord](filepath.Join(l.podDir(uid), "iscsi"), "an iSCSI volume")
}

func (l *layout) claimMarkPath(h agent.HeldClaim) string {
	return filepath.Join(l.podDir(h.Pod), "alone", string(h.Claim))
}

// runOnce calls f unless an earlier call of f for this volume of the pod succeeded, even before a
// restart of the agent. It must not repeat f, because the pod may have changed the result of f
// since.
func (l *layout) runOnce(pod types.UID, volume string, f func() error) error {
	mark := filepath.Join(l.podDir(pod), "done", volume)
	if _, err := os.Lstat(mark); err == nil {
		return nil
	}
	if err := f(); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(mark), 0o750); err != nil {
		return err
	}
	return os.WriteFile(mark, nil, 0o600)
}
