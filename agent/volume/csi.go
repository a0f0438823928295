package volume

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/volume/remote"
	"keelson.dev/keelson/csi"
)

// record is what is known of a CSI volume of a pod after a crash.
type record struct {
	Driver  string `json:"driver"`
	Volume  string `json:"volume"`
	Staging string `json:"staging"`
	Target  string `json:"target"`
	Block   bool   `json:"block,omitempty"`
	// Inline: it is the pod's own and was not staged. Staging is a place all the same: a release from before there were
	// such volumes has the driver unstage there, which changes nothing.
	Inline bool `json:"inline,omitempty"`
	Attach bool `json:"attach,omitempty"` // it is attached to the node, which tells that it uses it
	Awaits bool `json:"awaits"`           // it has not been attached for the pod yet, and nothing was done for it
	Ready  bool `json:"ready,omitempty"`  // all that is done to it before a container sees it has been done
}

// kubelet is the folder whose layout drivers know.
func (v *Volumes) kubelet() string {
	if v.cfg.Paths.Kubelet != "" {
		return v.cfg.Paths.Kubelet
	}
	return filepath.Join(v.cfg.Paths.State, "kubelet")
}

// blocks is the folder of block devices, below which drivers stage and publish them.
func (v *Volumes) blocks(sub string) string {
	return filepath.Join(v.kubelet(), "plugins", "kubernetes.io", "csi", "volumeDevices", sub)
}

func (v *Volumes) stagingPath(s source) string {
	if s.block {
		return filepath.Join(v.blocks("staging"), s.name)
	}
	return filepath.Join(v.kubelet(), "plugins", "kubernetes.io", "csi", s.driver,
		fmt.Sprintf("%x", sha256.Sum256([]byte(s.handle))), "globalmount")
}

// targetPath is where a volume is published for a pod; of one that it has twice, the second has a suffix.
func (v *Volumes) targetPath(pod types.UID, s source, suffix string) string {
	if s.block {
		return filepath.Join(v.blocks("publish"), s.name, string(pod)+suffix)
	}
	return filepath.Join(v.kubelet(), "pods", string(pod), "volumes", "kubernetes.io~csi", s.name+suffix, "mount")
}

// place says where a volume is staged and published for a pod: where that was done already, by this release or one with
// other paths, else where kubelet would. The volume is locked.
func (v *Volumes) place(pod types.UID, name string, s source) (record, error) {
	r := record{Driver: s.driver, Volume: s.handle, Block: s.block, Inline: s.inline, Staging: v.stagingPath(s),
		Target: v.targetPath(pod, s, "")}
	pods, err := v.Pods()
	if err != nil {
		return r, err
	}
	for _, p := range pods {
		recs, err := v.records(p)
		if err != nil {
			return r, err
		}
		for file, o := range recs {
			if o.Driver != r.Driver || o.Volume != r.Volume {
				continue
			}
			if o.Block != r.Block {
				return r, fmt.Errorf("CSI volume %s of driver %s is in use on this node in another volumeMode, by pod %s: it has one at a time",
					r.Volume, r.Driver, p)
			}
			r.Staging = o.Staging
			switch {
			case p != pod:
			case file == v.recordFile(pod, name):
				r.Target = o.Target
				return r, nil
			case o.Target == r.Target: // two volumes of the pod are one claim
				r.Target = v.targetPath(pod, s, "~"+name)
			}
		}
	}
	return r, nil
}

func (v *Volumes) recordFile(pod types.UID, name string) string {
	return filepath.Join(v.podDir(pod), "csi", name+".json")
}

// csi prepares a volume of a CSI driver.
func (v *Volumes) csi(ctx context.Context, pod *v1.Pod, name string, s source) (agent.Mount, error) {
	if v.cfg.CSI == nil {
		return agent.Mount{}, fmt.Errorf("%s: %w: %s", s, csi.ErrNoDriver, s.driver)
	}
	if strings.ContainsAny(s.driver, "/\x00") || s.driver == "" || strings.HasPrefix(s.driver, ".") {
		return agent.Mount{}, fmt.Errorf("%s: %q is no name of a driver", s, s.driver)
	}
	defer v.locks.Lock(s.driver + "\x00" + s.handle)()
	r, err := v.place(pod.UID, name, s)
	if err != nil {
		return agent.Mount{}, fmt.Errorf("%s: %w", s, err)
	}
	file, m := v.recordFile(pod.UID, name), agent.Mount{HostPath: r.Target, ReadOnly: s.readonly, Block: s.block}
	if v.ready(file, r) {
		return m, nil
	}
	about, _ := v.cfg.Objects.CSIDriver(s.driver)
	if err := s.allowedBy(about); err != nil {
		return agent.Mount{}, fmt.Errorf("%s: %w", s, err)
	}
	r.Attach = !s.inline && attachRequired(s.driver, about)
	d, err := v.cfg.CSI.Driver(ctx, s.driver)
	if err != nil {
		return agent.Mount{}, fmt.Errorf("%s: %w", s, err)
	}
	cv, err := v.describe(pod, s, r)
	if err != nil {
		return agent.Mount{}, fmt.Errorf("%s: %w", s, err)
	}
	// On disk before the driver hears of it: what it does is undone even when we are killed in the middle.
	r.Awaits = r.Attach && awaits(file, r.untouched)
	if err := writeRecord(file, r); err != nil {
		return agent.Mount{}, err
	}
	if r.Attach {
		if cv.PublishContext, err = v.attached(ctx, s); err != nil {
			return agent.Mount{}, err
		}
	}
	if r.Awaits {
		r.Awaits = false
		if err := writeRecord(file, r); err != nil {
			return agent.Mount{}, err
		}
		v.useChanged()
	}
	if err := v.publish(ctx, pod, d, s, r, cv, about); err != nil {
		v.unanswered(file)
		return agent.Mount{}, err
	}
	r.Ready = true
	if err := writeRecord(file, r); err != nil {
		return agent.Mount{}, err
	}
	v.published(file)
	return m, nil
}

// publish has the driver stage the volume and publish it, and proves that it did.
func (v *Volumes) publish(ctx context.Context, pod *v1.Pod, d *csi.Driver, s source, r record, cv csi.Volume, about *storagev1.CSIDriver) error {
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
	if err := v.addressedTo(ctx, &cv, pod, about, s.inline); err != nil {
		return fmt.Errorf("%s: %w", s, err)
	}
	if err := d.Publish(ctx, cv); err != nil {
		return err
	}
	switch {
	case s.block && !isBlockDevice(r.Target):
		return fmt.Errorf("%s: CSI driver %s says that volume %s is published, but there is no block device at %s: "+
			"a driver in a container needs %s with mountPropagation Bidirectional, and /dev of the node", s, r.Driver, r.Volume, r.Target, v.kubelet())
	case !s.block && !isMounted(r.Target):
		return fmt.Errorf("%s: CSI driver %s says that volume %s is published, but nothing is mounted at %s: "+
			"a driver in a container needs %s with mountPropagation Bidirectional", s, r.Driver, r.Volume, r.Target, v.kubelet())
	}
	v.growPublished(ctx, d, s, cv)
	if !s.block && !s.readonly && !d.AppliesGroup() && groupWanted(about, s) {
		if err := applyGroup(r.Target, pod); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	return nil
}

// untouched says that the driver has not been asked for the volume yet, for this pod: the folder of its place, which is there before
// that, is not. All pods of a block device have one folder.
func (r record) untouched() bool {
	_, err := os.Lstat(filepath.Dir(r.Target))
	return errors.Is(err, os.ErrNotExist)
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
	r.Ready, r.Attach = true, old.Attach
	return old == r && r.there()
}

// there says that what was published is still there.
func (r record) there() bool {
	if r.Block {
		return isBlockDevice(r.Target)
	}
	return isMounted(r.Target)
}

// records lists the CSI volumes of a pod by the path of their record.
func (v *Volumes) records(uid types.UID) (map[string]record, error) {
	return recordsIn[record](filepath.Join(v.podDir(uid), "csi"), "a CSI volume")
}

// releaseCSI unpublishes the pod's CSI volumes and unstages those that no other pod uses.
func (v *Volumes) releaseCSI(ctx context.Context, uid types.UID) error {
	recs, err := v.records(uid)
	if err != nil {
		return err
	}
	defer v.useChanged()
	var errs []error
	for file, r := range recs {
		if err := v.release(ctx, uid, file, r); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (v *Volumes) release(ctx context.Context, uid types.UID, file string, r record) error {
	defer v.locks.Lock(r.Driver + "\x00" + r.Volume)()
	last, err := v.lastUser(file, r)
	if err != nil {
		return err
	}
	if v.cfg.CSI == nil {
		return fmt.Errorf("CSI volume %s: %w: %s", r.Volume, csi.ErrNoDriver, r.Driver)
	}
	d, err := v.cfg.CSI.Driver(ctx, r.Driver)
	if err != nil {
		// Without the driver only what is not mounted (any more) can be forgotten.
		for _, at := range r.places(last) {
			if is, unclear := mounted(at); is || unclear != nil {
				return fmt.Errorf("CSI volume %s: %w", r.Volume, errors.Join(err, unclear))
			}
		}
		if err := v.leave(r, last); err != nil {
			return err
		}
		v.released(file, r.Target)
		return os.Remove(file)
	}
	// A volume that the driver does not know was never published, or is gone: with nothing mounted nothing is to be
	// undone.
	undone := func(err error, at string) bool {
		if err == nil || !csi.IsUnknownVolume(err) {
			return err == nil
		}
		is, unclear := mounted(at)
		return !is && unclear == nil
	}
	if err := d.Unpublish(ctx, r.Volume, r.Target); !undone(err, r.Target) {
		return err
	}
	// No driver is to unstage below what is still mounted, whatever it says.
	if is, err := mounted(r.Target); is || err != nil {
		return errors.Join(fmt.Errorf("CSI driver %s says that volume %s is unpublished, and it is still mounted at %s", r.Driver, r.Volume, r.Target), err)
	}
	if last && !r.Inline {
		if err := d.Unstage(ctx, r.Volume, r.Staging); !undone(err, r.Staging) {
			return err
		}
	}
	if err := v.leave(r, last); err != nil {
		return err
	}
	v.released(file, r.Target)
	return os.Remove(file)
}

// leave removes the folders of a volume that is mounted no more. What is still in one of them is somebody's data:
// nothing is removed but what is empty.
func (v *Volumes) leave(r record, last bool) error {
	for _, p := range r.places(last) {
		is, err := mounted(p)
		if err != nil {
			return fmt.Errorf("volume %s of CSI driver %s: nobody knows whether it is still mounted at %s: %w", r.Volume, r.Driver, p, err)
		}
		if is {
			return fmt.Errorf("volume %s of CSI driver %s is still mounted at %s", r.Volume, r.Driver, p)
		}
		if err := removeEmpty(p); err != nil {
			return fmt.Errorf("volume %s of CSI driver %s is not mounted any more, and there is something left at its place, "+
				"which is not removed: move it away and remove the folder: %w", r.Volume, r.Driver, err)
		}
		for dir := filepath.Dir(p); v.ours(dir) && os.Remove(dir) == nil; dir = filepath.Dir(dir) {
		}
	}
	return nil
}

// places are where the volume is for the pod, and where it is staged when no other pod uses it.
func (r record) places(last bool) []string {
	if last && !r.Inline {
		return []string{r.Target, r.Staging}
	}
	return []string{r.Target}
}

// ours says that a folder stands for one pod or one volume, and goes when it is empty.
func (v *Volumes) ours(dir string) bool {
	if all := v.blocks(""); dir == all || filepath.Dir(dir) == all {
		return false // those of all block devices
	}
	for _, root := range []string{filepath.Join(v.kubelet(), "pods"),
		filepath.Join(v.kubelet(), "plugins", "kubernetes.io", "csi"),
		filepath.Join(v.cfg.Paths.State, "csi"), filepath.Join(v.cfg.Paths.State, "volumes")} {
		if strings.HasPrefix(dir, root+"/") {
			return true
		}
	}
	return false
}

// sweepCSI removes what a pod's CSI volumes left beside their records, as far as it is empty.
func (v *Volumes) sweepCSI(pod types.UID) error {
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
				return fmt.Errorf("something is left at the place of a CSI volume, which is not removed: %w", err)
			}
		}
		if err := os.Remove(p); err != nil {
			return err
		}
	}
	return os.Remove(dir)
}

func isMounted(path string) bool {
	ok, err := mounted(path)
	return err == nil && ok
}

func mounted(path string) (bool, error) { return remote.Mounted(path) }

// isBlockDevice says that there is a block device at a path, or where it leads.
func isBlockDevice(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode()&os.ModeDevice != 0 && st.Mode()&os.ModeCharDevice == 0
}

// removeEmpty removes what holds nothing at the place of a volume that is mounted no more: an empty folder, an empty
// file on which a device was mounted, a link to a device.
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

// lastUser says that nothing else on the node uses the volume: no other pod, and no other volume of the same pod.
func (v *Volumes) lastUser(file string, r record) (bool, error) {
	pods, err := v.Pods()
	if err != nil {
		return false, err
	}
	for _, p := range pods {
		recs, err := v.records(p)
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
