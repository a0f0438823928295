package volume

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/volume/remote"
	"keelson.dev/keelson/csi"
	"keelson.dev/keelson/internal/keylock"
)

// csiRecord is the record on disk of a pod's CSI volume. It is written before the driver is called,
// so that the volume can be unpublished after a crash.
type csiRecord struct {
	Driver  string `json:"driver"`
	Volume  string `json:"volume"`
	Staging string `json:"staging"`
	Target  string `json:"target"`
	Block   bool   `json:"block,omitempty"`
	// Inline volumes belong to the pod and are not staged. Staging is set nevertheless: an agent of
	// a release without inline volumes makes the driver unstage there, which has no effect.
	Inline bool `json:"inline,omitempty"`
	Attach bool `json:"attach,omitempty"` // the volume requires an attachment and is listed in volumesInUse
	Awaits bool `json:"awaits"`           // the volume waits for its attachment, and its driver was not called yet
	Ready  bool `json:"ready,omitempty"`  // the volume is completely set up
}

// csiVolumes mounts CSI volumes through their drivers, and unmounts them.
type csiVolumes struct {
	*layout
	attachments *attachments
	locks       keylock.Locks // by driver and volume handle
	mu          sync.Mutex
	// publishedAt is the time of the last driver call that published a volume. Keys are paths of
	// records.
	publishedAt map[string]time.Time
	// unconfirmed has the paths of the records of volumes for which the driver did not confirm a
	// publish call.
	unconfirmed map[string]bool
	// lateTargets has the time of removal of volumes that had been unconfirmed, by target path.
	lateTargets map[string]time.Time
}

// csiPaths returns the record of a pod's volume, with the paths at which the volume is staged and
// published. If a record exists on disk, its paths are kept, even those of other releases. New
// paths follow the kubelet's layout. The caller holds the lock of the volume.
func (v *csiVolumes) csiPaths(pod types.UID, name string, s csiSource) (csiRecord, error) {
	r := csiRecord{Driver: s.driver, Volume: s.handle, Block: s.block, Inline: s.inline, Staging: v.stagingPath(s),
		Target: v.targetPath(pod, s, "")}
	pods, err := v.Pods()
	if err != nil {
		return r, err
	}
	for _, p := range pods {
		recs, err := v.csiRecords(p)
		if err != nil {
			return r, err
		}
		for file, o := range recs {
			if o.Driver != r.Driver || o.Volume != r.Volume {
				continue
			}
			if o.Block != r.Block {
				return r,
					fmt.Errorf("CSI volume %s of driver %s is in use on this node in another volumeMode, by pod %s: "+
						"only one volumeMode at a time is possible",
						r.Volume, r.Driver, p)
			}
			r.Staging = o.Staging
			switch {
			case p != pod:
			case file == v.csiRecordFile(pod, name):
				r.Target = o.Target
				return r, nil
			case o.Target == r.Target: // two volumes of the pod use the same claim
				r.Target = v.targetPath(pod, s, "~"+name)
			}
		}
	}
	return r, nil
}

// mountCSI mounts a CSI volume for a pod: it waits for the attachment if one is required, and makes
// the driver stage and publish the volume. A volume that is already set up is not published again.
func (v *csiVolumes) mountCSI(ctx context.Context, pod *v1.Pod, name string, s csiSource) (agent.Mount, error) {
	if v.cfg.CSI == nil {
		return agent.Mount{}, fmt.Errorf("%s: %w: %s", s, csi.ErrNoDriver, s.driver)
	}
	if strings.ContainsAny(s.driver, "/\x00") || s.driver == "" || strings.HasPrefix(s.driver, ".") {
		return agent.Mount{}, fmt.Errorf("%s: %q is not a valid driver name", s, s.driver)
	}
	defer v.locks.Lock(s.driver + "\x00" + s.handle)()
	r, err := v.csiPaths(pod.UID, name, s)
	if err != nil {
		return agent.Mount{}, fmt.Errorf("%s: %w", s, err)
	}
	file, m := v.csiRecordFile(pod.UID, name), agent.Mount{HostPath: r.Target, ReadOnly: s.readonly, Block: s.block}
	if v.isReady(file, r) {
		return m, nil
	}
	about, _ := v.cfg.Objects.CSIDriver(s.driver)
	if err := s.checkLifecycleMode(about); err != nil {
		return agent.Mount{}, fmt.Errorf("%s: %w", s, err)
	}
	r.Attach = !s.inline && attachRequired(s.driver, about)
	d, err := v.cfg.CSI.Driver(ctx, s.driver)
	if err != nil {
		return agent.Mount{}, fmt.Errorf("%s: %w", s, err)
	}
	cv, err := v.driverVolume(pod, s, r)
	if err != nil {
		return agent.Mount{}, fmt.Errorf("%s: %w", s, err)
	}
	// The record is on disk before the driver is called, so that the calls are undone even after a
	// crash in between.
	r.Awaits = r.Attach && isAwaitingAttach(file, r.isUntouched)
	if err := writeRecord(file, r); err != nil {
		return agent.Mount{}, err
	}
	if r.Attach {
		if cv.PublishContext, err = v.attachments.awaitAttached(ctx, s); err != nil {
			return agent.Mount{}, err
		}
	}
	if r.Awaits {
		r.Awaits = false
		if err := writeRecord(file, r); err != nil {
			return agent.Mount{}, err
		}
		v.attachments.signalUses()
	}
	if err := v.publishCSI(ctx, pod, d, s, r, cv, about); err != nil {
		v.recordUnanswered(file)
		return agent.Mount{}, err
	}
	r.Ready = true
	if err := writeRecord(file, r); err != nil {
		return agent.Mount{}, err
	}
	v.recordPublished(file)
	return m, nil
}

// publishCSI makes the driver stage and publish a CSI volume for a pod, and verifies that the
// volume is then mounted.
func (v *csiVolumes) publishCSI(
	ctx context.Context, pod *v1.Pod, d *csi.Driver, s csiSource, r csiRecord, cv csi.Volume,
	about *storagev1.CSIDriver,
) error {
	dirs := []string{r.Staging, filepath.Dir(r.Target)}
	if s.inline {
		dirs = dirs[1:]
	}
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return err
		}
	}
	if !s.inline {
		if err := d.Stage(ctx, cv); err != nil {
			return err
		}
	}
	if err := v.addPodInfo(ctx, &cv, pod, about, s.inline); err != nil {
		return fmt.Errorf("%s: %w", s, err)
	}
	if err := d.Publish(ctx, cv); err != nil {
		return err
	}
	switch {
	case s.block && !isBlockDevice(r.Target):
		return fmt.Errorf("%s: CSI driver %s reports that volume %s is published, but there is no block device at %s: "+
			"a driver in a container needs %s with mountPropagation Bidirectional, and /dev of the node", s, r.Driver,
			r.Volume, r.Target, v.kubeletDir())
	case !s.block && !isMountedNow(r.Target):
		return fmt.Errorf("%s: CSI driver %s reports that volume %s is published, but nothing is mounted at %s: "+
			"a driver in a container needs %s with mountPropagation Bidirectional", s, r.Driver, r.Volume, r.Target,
			v.kubeletDir())
	}
	v.expandPublished(ctx, d, s, cv)
	if !s.block && !s.readonly && !d.AppliesGroup() && needsGroup(about, s) {
		if err := applyGroup(r.Target, pod); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	return nil
}

// isUntouched reports whether the driver has not been called for this pod's volume yet. It checks
// that the parent folder of the target, which is created first, does not exist. All pods that use a
// block device share that folder.
func (r csiRecord) isUntouched() bool {
	_, err := os.Lstat(filepath.Dir(r.Target))
	return errors.Is(err, os.ErrNotExist)
}

// isReady reports whether an earlier call set up the volume of the record r completely and it is
// still mounted. A pod may then be using it. file is the path of the record.
func (v *csiVolumes) isReady(file string, r csiRecord) bool {
	b, err := os.ReadFile(file)
	if err != nil {
		return false
	}
	var old csiRecord
	if json.Unmarshal(b, &old) != nil {
		return false
	}
	r.Ready, r.Attach = true, old.Attach
	return old == r && r.isPublished()
}

// isPublished reports whether the volume is still mounted, or its block device exists, at the
// target path.
func (r csiRecord) isPublished() bool {
	if r.Block {
		return isBlockDevice(r.Target)
	}
	return isMountedNow(r.Target)
}

// releaseCSI makes the drivers unpublish all CSI volumes of a pod, and unstage the volumes that no
// other pod uses. It then removes their records.
func (v *csiVolumes) releaseCSI(ctx context.Context, uid types.UID) error {
	recs, err := v.csiRecords(uid)
	if err != nil {
		return err
	}
	defer v.attachments.signalUses()
	var errs []error
	for file, r := range recs {
		if err := v.releaseCSIVolume(ctx, uid, file, r); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (v *csiVolumes) releaseCSIVolume(ctx context.Context, uid types.UID, file string, r csiRecord) error {
	defer v.locks.Lock(r.Driver + "\x00" + r.Volume)()
	last, err := v.isLastUser(file, r)
	if err != nil {
		return err
	}
	if v.cfg.CSI == nil {
		return fmt.Errorf("CSI volume %s: %w: %s", r.Volume, csi.ErrNoDriver, r.Driver)
	}
	d, err := v.cfg.CSI.Driver(ctx, r.Driver)
	if err != nil {
		// Without the driver, a record can be removed only if nothing is mounted.
		for _, at := range r.mountPaths(last) {
			if is, unclear := isMountPoint(at); is || unclear != nil {
				return fmt.Errorf("CSI volume %s: %w", r.Volume, errors.Join(err, unclear))
			}
		}
		if err := v.removeCSIFolders(r, last); err != nil {
			return err
		}
		v.recordReleased(file, r.Target)
		return os.Remove(file)
	}
	// A volume that the driver does not know was never published, or no longer exists. If nothing
	// is mounted, nothing must be undone.
	undone := func(err error, at string) bool {
		if err == nil || !csi.IsUnknownVolume(err) {
			return err == nil
		}
		is, unclear := isMountPoint(at)
		return !is && unclear == nil
	}
	if err := d.Unpublish(ctx, r.Volume, r.Target); !undone(err, r.Target) {
		return err
	}
	// A volume must not be unstaged while it is mounted, even if the driver reports success.
	if is, err := isMountPoint(r.Target); is || err != nil {
		return errors.Join(fmt.Errorf("CSI driver %s reports that volume %s is unpublished, but it is still mounted "+
			"at %s", r.Driver, r.Volume, r.Target), err)
	}
	if last && !r.Inline {
		if err := d.Unstage(ctx, r.Volume, r.Staging); !undone(err, r.Staging) {
			return err
		}
	}
	if err := v.removeCSIFolders(r, last); err != nil {
		return err
	}
	v.recordReleased(file, r.Target)
	return os.Remove(file)
}

// removeCSIFolders removes the target folder of a volume that is no longer mounted. With last, no
// other volume uses it, and its staging folder is removed too. Only empty folders are removed,
// because remaining content may be user data.
func (v *csiVolumes) removeCSIFolders(r csiRecord, last bool) error {
	for _, p := range r.mountPaths(last) {
		is, err := isMountPoint(p)
		if err != nil {
			return fmt.Errorf("volume %s of CSI driver %s: cannot determine whether it is still mounted at %s: %w",
				r.Volume, r.Driver, p, err)
		}
		if is {
			return fmt.Errorf("volume %s of CSI driver %s is still mounted at %s", r.Volume, r.Driver, p)
		}
		if err := removeEmpty(p); err != nil {
			return fmt.Errorf("volume %s of CSI driver %s is unmounted, but its folder is not empty and "+
				"is not removed: move the content away and remove the folder: %w", r.Volume, r.Driver, err)
		}
		for dir := filepath.Dir(p); v.isRemovableFolder(dir) && os.Remove(dir) == nil; dir = filepath.Dir(dir) {
		}
	}
	return nil
}

// mountPaths returns the target path of the volume. With last, the result also contains its staging
// path.
func (r csiRecord) mountPaths(last bool) []string {
	if last && !r.Inline {
		return []string{r.Target, r.Staging}
	}
	return []string{r.Target}
}

// removeCSILeftovers removes empty folders that a pod's CSI volumes left beside their records.
func (v *csiVolumes) removeCSILeftovers(pod types.UID) error {
	dir := filepath.Join(v.podDir(pod), "csi")
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		p := filepath.Join(dir, e.Name())
		if e.IsDir() {
			if err := os.Remove(filepath.Join(p, "mount")); err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("the folder of a CSI volume is not empty and is not removed: %w", err)
			}
		}
		if err := os.Remove(p); err != nil {
			return err
		}
	}
	return os.Remove(dir)
}

func isMountedNow(path string) bool {
	ok, err := isMountPoint(path)
	return err == nil && ok
}

func isMountPoint(path string) (bool, error) { return remote.Mounted(path) }

// isBlockDevice reports whether a path is a block device or a link to one.
func isBlockDevice(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode()&os.ModeDevice != 0 && st.Mode()&os.ModeCharDevice == 0
}

// removeEmpty removes the path of a volume if it is empty: an empty folder, an empty file at which
// a device was mounted, or a link to a device. It returns an error for a file with content.
func removeEmpty(path string) error {
	st, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if st.Mode().IsRegular() && st.Size() > 0 {
		return fmt.Errorf("%s is a file of %d bytes", path, st.Size())
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// isLastUser reports whether no other volume on the node uses the CSI volume of r, neither of
// another pod nor of the same pod. file is the path of the record r.
func (v *csiVolumes) isLastUser(file string, r csiRecord) (bool, error) {
	pods, err := v.Pods()
	if err != nil {
		return false, err
	}
	for _, p := range pods {
		recs, err := v.csiRecords(p)
		if err != nil {
			return false, err
		}
		for other, o := range recs {
			if other != file && o.Driver == r.Driver && o.Volume == r.Volume {
				return false, nil
			}
		}
	}
	return true, nil
}
