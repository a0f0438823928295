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

// watchEvery is the time between two looks at whether volumes are well, and at what drivers mounted late.
const watchEvery = time.Minute

// Run watches the CSI volumes of the node until ctx ends.
func (v *Volumes) Run(ctx context.Context) error {
	t := time.NewTicker(watchEvery)
	defer t.Stop()
	told := map[string]string{}
	for {
		if err := v.sweepLate(); err != nil {
			v.cfg.Log.Warn("looking for what CSI drivers mounted late", "err", err)
		}
		v.askHealth(ctx, told)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// lateFor is how long the place of a volume is looked at, whose driver had not answered when it was asked to publish it.
const lateFor = time.Hour

// unanswered notes that a driver was asked to publish a volume and did not say that it did: it may do so later.
func (v *Volumes) unanswered(file string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.doubtful == nil {
		v.doubtful = map[string]bool{}
	}
	v.doubtful[file] = true
}

// released forgets a volume of which nothing is left, but for its place where the driver may yet mount something.
func (v *Volumes) released(file, target string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.publishedAt, file)
	if v.doubtful[file] {
		delete(v.doubtful, file)
		if v.late == nil {
			v.late = map[string]time.Time{}
		}
		v.late[target] = time.Now()
	}
}

// sweepLate unmounts what a driver mounted at the place of a volume after it had said that it is unmounted. Nothing is
// deleted but what is empty then. Places are looked at that this process knows of: other mounts are not its own.
func (v *Volumes) sweepLate() error {
	v.mu.Lock()
	maps.DeleteFunc(v.late, func(_ string, at time.Time) bool { return time.Since(at) > lateFor })
	late := slices.Collect(maps.Keys(v.late))
	v.mu.Unlock()
	if len(late) == 0 {
		return nil
	}
	kept, err := v.targets()
	if err != nil {
		return err
	}
	var errs []error
	for _, target := range late {
		is, err := mounted(target)
		switch {
		case kept[target]: // its pod tries again
			v.mu.Lock()
			delete(v.late, target)
			v.mu.Unlock()
			continue
		case err == nil && is:
			v.cfg.Log.Warn("unmounting what a CSI driver mounted after it had said that it is unmounted", "path", target)
			err = unix.Unmount(target, unix.UMOUNT_NOFOLLOW)
		}
		if err == nil {
			err = v.leave(record{Target: target}, false)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("what was mounted late at %s: %w", target, err))
		}
	}
	return errors.Join(errs...)
}

// targets are the places of all volumes of pods.
func (v *Volumes) targets() (map[string]bool, error) {
	pods, err := v.Pods()
	if err != nil {
		return nil, err
	}
	out := map[string]bool{}
	for _, p := range pods {
		recs, err := v.records(p)
		if err != nil {
			return nil, err
		}
		for _, r := range recs {
			out[r.Target] = true
		}
	}
	return out, nil
}

// askHealth asks the drivers that tell it whether the volumes of pods are well, and says what is wrong in an event of the
// pod, once for each trouble. told is what was said, by record.
func (v *Volumes) askHealth(ctx context.Context, told map[string]string) {
	if v.cfg.CSI == nil || v.cfg.Report == nil {
		return
	}
	var files []string
	for _, pod := range v.cfg.Objects.Pods() {
		recs, err := v.records(pod.UID)
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
			st, err := d.Stats(ctx, r.Volume, r.Target, stagedAt(r))
			if err != nil {
				v.cfg.Log.Debug("whether a volume is well is not known", "volume", r.Volume, "err", err)
				continue
			}
			if st.Problem != "" && told[file] != st.Problem {
				v.cfg.Report(v.event(pod, "VolumeConditionAbnormal", fmt.Sprintf("volume %s of CSI driver %s: %s", r.Volume, r.Driver, st.Problem)))
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

func stagedAt(r record) string {
	if r.Inline {
		return ""
	}
	return r.Staging
}

// event is one of a pod, as kubelet tells of volumes.
func (v *Volumes) event(pod *v1.Pod, reason, message string) *v1.Event {
	return &v1.Event{
		InvolvedObject: v1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Reason:         reason, Message: message, Type: v1.EventTypeWarning, Count: 1, Source: v1.EventSource{Component: "kubelet"},
		ReportingController: "kubelet",
		ObjectMeta:          metav1.ObjectMeta{Namespace: pod.Namespace},
	}
}

// Disk says how full the volume of a pod is as its driver tells it; ok is false where the driver does not, and the file
// system is to be asked. The error says that neither is of use.
func (v *Volumes) Disk(ctx context.Context, uid types.UID, volume string) (disk agent.Disk, ok bool, err error) {
	if v.cfg.CSI == nil {
		return disk, false, nil
	}
	recs, err := v.records(uid)
	if err != nil {
		return disk, false, err
	}
	r, has := recs[v.recordFile(uid, volume)]
	if !has {
		return disk, false, nil
	}
	var st *csi.Stats
	if d := v.cfg.CSI.FoundDriver(r.Driver); d != nil && d.ReportsUsage() {
		if st, err = d.Stats(ctx, r.Volume, r.Target, stagedAt(r)); err != nil {
			return disk, false, err
		}
	}
	switch {
	case st == nil && r.Block, st != nil && r.Block && (st.Bytes == nil || st.Bytes.Available == 0 && st.Bytes.Used == 0):
		return disk, false, fmt.Errorf("CSI driver %s does not say how full the block device %s is", r.Driver, r.Volume)
	case st == nil || st.Bytes == nil:
		return disk, false, nil
	}
	disk = agent.Disk{Capacity: st.Bytes.Total, Available: st.Bytes.Available}
	if st.Inodes != nil {
		disk.Inodes, disk.InodesFree = st.Inodes.Total, st.Inodes.Available
	}
	return disk, true, nil
}
