package volume

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/csi"
)

// claim prepares the PersistentVolume that a claim is bound to.
func (v *Volumes) claim(ctx context.Context, pod *v1.Pod, vol *v1.Volume, name string, readonly bool) (agent.Mount, error) {
	ns := pod.Namespace
	pvc, ok := v.cfg.Objects.Claim(ns, name)
	if !ok {
		return agent.Mount{}, fmt.Errorf("persistentvolumeclaim \"%s/%s\" not found", ns, name)
	}
	if pvc.Spec.VolumeName == "" || pvc.Status.Phase == v1.ClaimPending {
		return agent.Mount{}, fmt.Errorf("persistentvolumeclaim \"%s/%s\" is not bound", ns, name)
	}
	pv, ok := v.cfg.Objects.PersistentVolume(pvc.Spec.VolumeName)
	if !ok {
		return agent.Mount{}, fmt.Errorf("persistentvolume %q of claim \"%s/%s\" not found", pvc.Spec.VolumeName, ns, name)
	}
	if r := pv.Spec.ClaimRef; r == nil || r.Namespace != ns || r.Name != name || r.UID != "" && r.UID != pvc.UID {
		return agent.Mount{}, fmt.Errorf("persistentvolume %q is not bound to claim \"%s/%s\"", pv.Name, ns, name)
	}
	if pv.Spec.VolumeMode != nil && *pv.Spec.VolumeMode == v1.PersistentVolumeBlock {
		return agent.Mount{}, fmt.Errorf("persistentvolume %q is a raw block device, which this node cannot give to pods", pv.Name)
	}
	switch s := &pv.Spec; {
	case s.HostPath != nil:
		m, err := hostPath(s.HostPath)
		m.ReadOnly = readonly
		return m, err
	case s.Local != nil:
		st, err := os.Stat(s.Local.Path)
		if err != nil {
			return agent.Mount{}, fmt.Errorf("local persistentvolume %q: %w", pv.Name, err)
		}
		if st.IsDir() && !readonly && fsGroup(pod) != nil {
			err := v.once(pod.UID, vol.Name, func() error { return applyGroup(s.Local.Path, pod) })
			if err != nil {
				return agent.Mount{}, fmt.Errorf("local persistentvolume %q: %w", pv.Name, err)
			}
		}
		return agent.Mount{HostPath: s.Local.Path, ReadOnly: readonly, IsFile: !st.IsDir()}, nil
	case s.CSI != nil:
		return v.csi(ctx, pod, vol.Name, pv, readonly || s.CSI.ReadOnly)
	}
	return agent.Mount{}, fmt.Errorf("persistentvolume %q is of a kind that this node does not support", pv.Name)
}

// once does what is done to a pod's volume a single time, however often the agent starts anew: afterwards the volume
// is the pod's, which may have changed what was set up.
func (v *Volumes) once(pod types.UID, volume string, f func() error) error {
	mark := filepath.Join(v.podDir(pod), "done", volume)
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

// record is what is known of a CSI volume of a pod after a crash.
type record struct {
	Driver  string `json:"driver"`
	Volume  string `json:"volume"`
	Staging string `json:"staging"`
	Target  string `json:"target"`
	Ready   bool   `json:"ready,omitempty"` // all that is done to it before a container sees it has been done
}

func (v *Volumes) stagingPath(driver, handle string) string {
	h := fnv.New128a()
	h.Write([]byte(handle))
	return filepath.Join(v.cfg.Paths.State, "csi", driver, fmt.Sprintf("%x", h.Sum(nil)), "mount")
}

func (v *Volumes) csi(ctx context.Context, pod *v1.Pod, name string, pv *v1.PersistentVolume, readonly bool) (agent.Mount, error) {
	src := pv.Spec.CSI
	if v.cfg.CSI == nil {
		return agent.Mount{}, fmt.Errorf("persistentvolume %q: %w: %s", pv.Name, csi.ErrNoDriver, src.Driver)
	}
	if strings.ContainsAny(src.Driver, "/\x00") || src.Driver == "" || strings.HasPrefix(src.Driver, ".") {
		return agent.Mount{}, fmt.Errorf("persistentvolume %q: %q is no name of a driver", pv.Name, src.Driver)
	}
	base := filepath.Join(v.podDir(pod.UID), "csi", name)
	r := record{Driver: src.Driver, Volume: src.VolumeHandle, Staging: v.stagingPath(src.Driver, src.VolumeHandle), Target: filepath.Join(base, "mount")}
	defer v.locks.lock(r.Driver + "\x00" + r.Volume)()
	if v.ready(base+".json", r) {
		return agent.Mount{HostPath: r.Target, ReadOnly: readonly}, nil
	}
	d, err := v.cfg.CSI.Driver(ctx, src.Driver)
	if err != nil {
		return agent.Mount{}, fmt.Errorf("persistentvolume %q: %w", pv.Name, err)
	}
	about, _ := v.cfg.Objects.CSIDriver(src.Driver)
	cv, err := v.describe(pod, pv, about, r, readonly)
	if err != nil {
		return agent.Mount{}, fmt.Errorf("persistentvolume %q: %w", pv.Name, err)
	}
	// On disk before the driver hears of it: what it does is undone even when we are killed in the middle.
	if err := writeRecord(base+".json", r); err != nil {
		return agent.Mount{}, err
	}
	for _, dir := range []string{r.Staging, base} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return agent.Mount{}, err
		}
	}
	if err := d.Stage(ctx, cv); err != nil {
		return agent.Mount{}, err
	}
	if err := d.Publish(ctx, cv); err != nil {
		return agent.Mount{}, err
	}
	if !readonly && !d.AppliesGroup() && groupWanted(about, pv) {
		if err := applyGroup(r.Target, pod); err != nil {
			return agent.Mount{}, fmt.Errorf("persistentvolume %q: %w", pv.Name, err)
		}
	}
	r.Ready = true
	if err := writeRecord(base+".json", r); err != nil {
		return agent.Mount{}, err
	}
	return agent.Mount{HostPath: r.Target, ReadOnly: readonly}, nil
}

// ready says that the volume was set up by an earlier run and is still mounted: the pod may be running on it.
func (v *Volumes) ready(file string, r record) bool {
	b, err := os.ReadFile(file)
	if err != nil {
		return false
	}
	var old record
	if json.Unmarshal(b, &old) != nil {
		return false
	}
	r.Ready = true
	return old == r && isMounted(r.Target)
}

// describe puts together what the driver is told.
func (v *Volumes) describe(pod *v1.Pod, pv *v1.PersistentVolume, about *storagev1.CSIDriver, r record, readonly bool) (csi.Volume, error) {
	src := pv.Spec.CSI
	cv := csi.Volume{ID: r.Volume, StagingPath: r.Staging, TargetPath: r.Target, FSType: src.FSType, MountFlags: pv.Spec.MountOptions, ReadOnly: readonly, FSGroup: fsGroup(pod), VolumeContext: map[string]string{}}
	for k, s := range src.VolumeAttributes {
		cv.VolumeContext[k] = s
	}
	if len(pv.Spec.AccessModes) > 0 {
		cv.AccessMode = string(pv.Spec.AccessModes[0])
	}
	if about != nil && about.Spec.PodInfoOnMount != nil && *about.Spec.PodInfoOnMount {
		cv.VolumeContext["csi.storage.k8s.io/pod.name"] = pod.Name
		cv.VolumeContext["csi.storage.k8s.io/pod.namespace"] = pod.Namespace
		cv.VolumeContext["csi.storage.k8s.io/pod.uid"] = string(pod.UID)
		cv.VolumeContext["csi.storage.k8s.io/serviceAccount.name"] = pod.Spec.ServiceAccountName
		cv.VolumeContext["csi.storage.k8s.io/ephemeral"] = "false"
	}
	var err error
	if cv.StageSecrets, err = v.driverSecret(src.NodeStageSecretRef); err != nil {
		return cv, err
	}
	cv.PublishSecrets, err = v.driverSecret(src.NodePublishSecretRef)
	return cv, err
}

func (v *Volumes) driverSecret(ref *v1.SecretReference) (map[string]string, error) {
	if ref == nil {
		return nil, nil
	}
	s, ok := v.cfg.Objects.Secret(ref.Namespace, ref.Name)
	if !ok {
		return nil, fmt.Errorf("secret \"%s/%s\" not found", ref.Namespace, ref.Name)
	}
	out := map[string]string{}
	for k, b := range s.Data {
		out[k] = string(b)
	}
	return out, nil
}

// groupWanted follows fsGroupPolicy; by default a group is applied to volumes with a file system for one node.
func groupWanted(about *storagev1.CSIDriver, pv *v1.PersistentVolume) bool {
	policy := storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy
	if about != nil && about.Spec.FSGroupPolicy != nil {
		policy = *about.Spec.FSGroupPolicy
	}
	switch policy {
	case storagev1.NoneFSGroupPolicy:
		return false
	case storagev1.FileFSGroupPolicy:
		return true
	default:
		return pv.Spec.CSI.FSType != "" && slices.Contains(pv.Spec.AccessModes, v1.ReadWriteOnce)
	}
}

func writeRecord(path string, r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return err
	}
	if old, err := os.ReadFile(path); err == nil && string(old) == string(b) {
		return nil
	}
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// records lists the CSI volumes of a pod by the path of their record.
func (v *Volumes) records(uid types.UID) (map[string]record, error) {
	files, err := filepath.Glob(filepath.Join(v.podDir(uid), "csi", "*.json"))
	if err != nil {
		return nil, err
	}
	out := map[string]record{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var r record
		if err := json.Unmarshal(b, &r); err != nil {
			return nil, fmt.Errorf("record of a CSI volume %s: %w", f, err)
		}
		out[f] = r
	}
	return out, nil
}

// releaseCSI unpublishes the pod's CSI volumes and unstages those that no other pod uses.
func (v *Volumes) releaseCSI(ctx context.Context, uid types.UID) error {
	recs, err := v.records(uid)
	if err != nil {
		return err
	}
	var errs []error
	for file, r := range recs {
		if err := v.release(ctx, uid, file, r); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (v *Volumes) release(ctx context.Context, uid types.UID, file string, r record) error {
	defer v.locks.lock(r.Driver + "\x00" + r.Volume)()
	last, err := v.lastUser(uid, r)
	if err != nil {
		return err
	}
	if v.cfg.CSI == nil {
		return fmt.Errorf("CSI volume %s: %w: %s", r.Volume, csi.ErrNoDriver, r.Driver)
	}
	d, err := v.cfg.CSI.Driver(ctx, r.Driver)
	if err != nil {
		// Without the driver only what is not mounted (any more) can be forgotten.
		if isMounted(r.Target) || last && isMounted(r.Staging) {
			return fmt.Errorf("CSI volume %s: %w", r.Volume, err)
		}
		return os.Remove(file)
	}
	if err := d.Unpublish(ctx, r.Volume, r.Target); err != nil {
		return err
	}
	if last {
		if err := d.Unstage(ctx, r.Volume, r.Staging); err != nil {
			return err
		}
		for _, dir := range []string{r.Staging, filepath.Dir(r.Staging)} {
			if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	return os.Remove(file)
}

func isMounted(path string) bool {
	ok, err := mountinfo.Mounted(path)
	return err == nil && ok
}

// lastUser says that no other pod of the node has the volume.
func (v *Volumes) lastUser(uid types.UID, r record) (bool, error) {
	pods, err := v.Pods()
	if err != nil {
		return false, err
	}
	for _, p := range pods {
		if p == uid {
			continue
		}
		recs, err := v.records(p)
		if err != nil {
			return false, err
		}
		for _, o := range recs {
			if o.Driver == r.Driver && o.Volume == r.Volume {
				return false, nil
			}
		}
	}
	return true, nil
}

// applyGroup makes a volume belong to the pod's fsGroup. Links inside are never followed out of it.
func applyGroup(dir string, pod *v1.Pod) error {
	group := fsGroup(pod)
	if group == nil {
		return nil
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	policy := pod.Spec.SecurityContext.FSGroupChangePolicy
	if policy != nil && *policy == v1.FSGroupChangeOnRootMismatch {
		if st, err := root.Stat("."); err == nil && groupOf(st) == *group && st.Mode()&os.ModeSetgid != 0 && st.Mode().Perm()&0o070 == 0o070 {
			return nil
		}
	}
	return walkGroup(root, ".", int(*group))
}

func walkGroup(root *os.Root, path string, gid int) error {
	st, err := root.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil // deleted meanwhile by another pod
	}
	if err != nil {
		return err
	}
	if err := root.Lchown(path, -1, gid); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("giving %s to group %s: %w", path, strconv.Itoa(gid), err)
	}
	if st.Mode()&os.ModeSymlink != 0 {
		return nil
	}
	mode := st.Mode() | 0o660
	if st.IsDir() {
		mode |= 0o110 | os.ModeSetgid
	}
	if err := root.Chmod(path, mode.Perm()|mode&(os.ModeSetgid|os.ModeSetuid|os.ModeSticky)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("giving %s to group %d: %w", path, gid, err)
	}
	if !st.IsDir() {
		return nil
	}
	// It may have become something else, which must not be waited for.
	f, err := root.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if err != nil {
		return err
	}
	names, err := f.Readdirnames(-1)
	f.Close()
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := walkGroup(root, filepath.Join(path, n), gid); err != nil {
			return err
		}
	}
	return nil
}
