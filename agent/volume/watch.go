package volume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/csi"
)

// watchInterval is the time between two checks of the CSI volumes of this node: their health, and
// mounts that a driver made too late.
const watchInterval = time.Minute

// Run monitors the CSI volumes of the node until ctx ends. It reports abnormal volume conditions as
// events, and unmounts volumes that a driver mounted after their removal.
func (v *Volumes) Run(ctx context.Context) error {
	t := time.NewTicker(watchInterval)
	defer t.Stop()
	told := map[string]string{}
	for {
		if err := v.csi.unmountLate(); err != nil {
			v.cfg.Log.Warn("checking for late mounts of CSI drivers", "err", err)
		}
		v.csi.reportHealth(ctx, told)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// lateMountWindow is how long the target of a removed volume is monitored if its driver never
// confirmed the publishing.
const lateMountWindow = time.Hour

// recordUnanswered records that a driver did not confirm the publish call for the volume with the
// record file. The driver may still mount the volume.
func (v *csiVolumes) recordUnanswered(file string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.unconfirmed == nil {
		v.unconfirmed = map[string]bool{}
	}
	v.unconfirmed[file] = true
}

// recordReleased forgets the volume with the record file, which has been removed. If its driver
// never confirmed the publish call, the target path is monitored for lateMountWindow.
func (v *csiVolumes) recordReleased(file, target string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.publishedAt, file)
	if v.unconfirmed[file] {
		delete(v.unconfirmed, file)
		if v.lateTargets == nil {
			v.lateTargets = map[string]time.Time{}
		}
		v.lateTargets[target] = time.Now()
	}
}

// unmountLate unmounts file systems that a driver mounted at a target path after the volume was
// removed. It removes only empty folders. It checks only the targets that this process recorded,
// because other mounts do not belong to it.
func (v *csiVolumes) unmountLate() error {
	v.mu.Lock()
	maps.DeleteFunc(v.lateTargets, func(_ string, at time.Time) bool { return time.Since(at) > lateMountWindow })
	late := slices.Collect(maps.Keys(v.lateTargets))
	v.mu.Unlock()
	if len(late) == 0 {
		return nil
	}
	kept, err := v.targetPaths()
	if err != nil {
		return err
	}
	var errs []error
	for _, target := range late {
		is, err := isMountPoint(target)
		switch {
		case kept[target]: // a pod uses the target again
			v.mu.Lock()
			delete(v.lateTargets, target)
			v.mu.Unlock()
			continue
		case err == nil && is:
			v.cfg.Log.Warn("unmounting a volume that a CSI driver mounted after it had reported it as unpublished",
				"path", target)
			err = unix.Unmount(target, unix.UMOUNT_NOFOLLOW)
		}
		if err == nil {
			err = v.removeCSIFolders(csiRecord{Target: target}, false)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("late mount at %s: %w", target, err))
		}
	}
	return errors.Join(errs...)
}

// reportHealth queries the drivers that report volume conditions. It reports an abnormal condition
// as an event of the pod, once per message. told stores the last message by path of the volume's
// record.
func (v *csiVolumes) reportHealth(ctx context.Context, told map[string]string) {
	if v.cfg.CSI == nil || v.cfg.Report == nil {
		return
	}
	var files []string
	for _, pod := range v.cfg.Objects.Pods() {
		recs, err := v.csiRecords(pod.UID)
		if err != nil {
			continue
		}
		for file, r := range recs {
			if !r.Ready {
				continue
			}
			files = append(files, file)
			d := v.cfg.CSI.FoundDriver(r.Driver)
			if d == nil || !d.ReportsHealth() {
				continue
			}
			st, err := d.Stats(ctx, r.Volume, r.Target, stagingPathOf(r))
			if err != nil {
				v.cfg.Log.Debug("the health of a volume is unknown", "volume", r.Volume, "err", err)
				continue
			}
			if st.Problem != "" && told[file] != st.Problem {
				v.cfg.Report(newPodEvent(pod, "VolumeConditionAbnormal",
					fmt.Sprintf("volume %s of CSI driver %s: %s", r.Volume, r.Driver, st.Problem)))
			}
			told[file] = st.Problem
		}
	}
	for file := range told {
		if !slices.Contains(files, file) {
			delete(told, file)
		}
	}
}

func stagingPathOf(r csiRecord) string {
	if r.Inline {
		return ""
	}
	return r.Staging
}

// newPodEvent returns a warning event about a pod, in the form in which the kubelet reports it.
func newPodEvent(pod *v1.Pod, reason, message string) *v1.Event {
	return &v1.Event{
		InvolvedObject: v1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: pod.Namespace,
			Name: pod.Name, UID: pod.UID},
		Reason: reason, Message: message, Type: v1.EventTypeWarning, Count: 1,
		Source:              v1.EventSource{Component: "kubelet"},
		ReportingController: "kubelet",
		ObjectMeta:          metav1.ObjectMeta{Namespace: pod.Namespace},
	}
}

// diskUsage returns the usage of a pod's volume as reported by its CSI driver. ok is false if the
// volume is not a CSI volume, or its driver does not report the usage. The caller then measures the
// file system. It returns an error if the usage cannot be determined in either way.
func (v *csiVolumes) diskUsage(ctx context.Context, uid types.UID, volume string) (
	disk agent.Disk, ok bool, err error,
) {
	if v.cfg.CSI == nil {
		return disk, false, nil
	}
	recs, err := v.csiRecords(uid)
	if err != nil {
		return disk, false, err
	}
	r, has := recs[v.csiRecordFile(uid, volume)]
	if !has {
		return disk, false, nil
	}
	var st *csi.Stats
	if d := v.cfg.CSI.FoundDriver(r.Driver); d != nil && d.ReportsUsage() {
		if st, err = d.Stats(ctx, r.Volume, r.Target, stagingPathOf(r)); err != nil {
			return disk, false, err
		}
	}
	switch {
	case st == nil && r.Block, st != nil && r.Block &&
		(st.Bytes == nil || st.Bytes.Available == 0 && st.Bytes.Used == 0):
		return disk, false, fmt.Errorf("CSI driver %s does not report the usage of the block device %s",
			r.Driver, r.Volume)
	case st == nil || st.Bytes == nil:
		return disk, false, nil
	}
	disk = agent.Disk{Capacity: st.Bytes.Total, Available: st.Bytes.Available}
	if st.Inodes != nil {
		disk.Inodes, disk.InodesFree = st.Inodes.Total, st.Inodes.Available
	}
	return disk, true, nil
}
