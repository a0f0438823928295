package pod

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/diskusage"
	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/agent/pod/podfiles"
)

// podStorage mounts the pod's volumes, prepares its devices, and measures its disk usage. Its
// fields are guarded by worker.mu.
type podStorage struct {
	w          *worker
	mounts     map[string]agent.Mount // mount of each volume, by volume name; nil: not mounted by this agent process
	devices    agent.ClaimedDevices
	refreshDue bool             // projected volumes may be out of date
	use        diskusage.PodUse // last measured
	measuredAt time.Time        // time of the measurement in use; zero = never
}

// measureInterval is the normal interval between two disk measurements of a pod.
const measureInterval = 10 * time.Second

// maxMeasureInterval is the longest interval between two disk measurements of a pod. It applies to
// pods with so many files that a measurement takes long.
const maxMeasureInterval = 5 * time.Minute

// evictionGrace is the grace period of a pod that exceeded its storage limit or was fenced.
const evictionGrace = time.Second

// monitorStorage measures the disk usage of a pod with storage limits until ctx ends. It evicts the
// pod if it exceeds a limit.
func (ps *podStorage) monitorStorage(ctx context.Context) {
	next := time.NewTimer(measureInterval)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-next.C:
		}
		next.Reset(ps.checkStorage(ctx))
	}
}

// checkStorage measures the pod's disk usage once and evicts the pod if it exceeds a limit. It
// returns the time until the next measurement, which is longer for pods that take long to measure.
func (ps *podStorage) checkStorage(ctx context.Context) time.Duration {
	start := time.Now()
	pod := ps.w.desiredPod()
	limits := diskusage.PodLimits(pod)
	if limits.IsEmpty() || lifecycle.IsTerminal(pod) {
		return measureInterval
	}
	use, err := ps.measureStorage(ctx, pod, limits.LargestLimit())
	if err == nil {
		ps.recordStorage(use)
	}
	// A partial result may already exceed a limit.
	message := limits.OveruseMessage(use)
	switch {
	case message == "" && errors.Is(err, diskusage.ErrTooDeep):
		message = fmt.Sprintf("Usage of local ephemeral storage cannot be compared with its limits: %v. ",
			diskusage.ErrTooDeep)
	case err != nil && ctx.Err() == nil:
		ps.w.log.Warn("cannot measure the disk usage of the pod", "err", err)
	}
	if message != "" && ctx.Err() == nil {
		ps.w.evictor.evictPod(lifecycle.Stop{Reason: "Evicted", Message: message, Grace: evictionGrace})
	}
	return min(max(measureInterval, 20*time.Since(start)), maxMeasureInterval)
}

// measureStorage returns the usage of all directories of the pod on the node's disk. Each directory
// is measured up to byteLimit bytes.
func (ps *podStorage) measureStorage(ctx context.Context, pod *v1.Pod, byteLimit int64) (diskusage.PodUse, error) {
	use := diskusage.PodUse{Volumes: map[string]int64{}, Containers: map[string]int64{}, Logs: map[string]int64{}}
	ps.w.mu.Lock()
	mounts, instances := maps.Clone(ps.mounts), slices.Clone(ps.w.observed.Containers)
	ps.w.mu.Unlock()
	var first error
	var sum diskusage.TreeUse
	size := func(dir string, but ...string) int64 {
		n, err := diskusage.MeasureDirectory(ctx, ps.w.cfg.walkTurns, dir, byteLimit, but...)
		if first == nil || errors.Is(err, diskusage.ErrTooDeep) {
			first = err
		}
		sum = sum.AddUse(n)
		return n.Bytes
	}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if m, ok := mounts[v.Name]; ok && diskusage.IsDiskEmptyDir(v) {
			use.Volumes[v.Name] = size(m.HostPath)
		}
	}
	// skip the subPath mounts: a mount from an unreachable server would block
	use.Rest += size(podfiles.PodDirectory(ps.w.cfg.Paths, pod.UID), podfiles.SubPathsDir)
	newest, common := map[string]bool{}, map[string]bool{}
	for _, c := range instances { // the newest instance of each name comes first
		sum := int64(0)
		if ps.w.cfg.WrittenDirs != nil {
			own, shared := ps.w.cfg.WrittenDirs(c.ID)
			for _, dir := range own {
				sum += size(dir)
			}
			for _, dir := range shared {
				if !common[dir] {
					common[dir] = true
					use.Rest += size(dir)
				}
			}
		}
		if newest[c.Name] {
			use.Rest += sum
			continue
		}
		newest[c.Name] = true
		use.Logs[c.Name] = size(filepath.Join(podfiles.LogDirectory(ps.w.cfg.Paths.Logs, pod), c.Name))
		use.Containers[c.Name] = sum + use.Logs[c.Name]
	}
	use.Inodes = sum.MilliInodes / 1000
	return use, first
}

// recordStorage stores the measured usage and the time of the measurement.
func (ps *podStorage) recordStorage(use diskusage.PodUse) {
	ps.w.mu.Lock()
	defer ps.w.mu.Unlock()
	ps.use, ps.measuredAt = use, ps.w.cfg.currentTime()
}

// lastStorage returns the disk usage of the last measurement. The map contains the mount paths of
// volumes with their own file system by volume name. Such volumes are not part of the measurement.
func (ps *podStorage) lastStorage() (agent.PodStorage, map[string]string) {
	ps.w.mu.Lock()
	defer ps.w.mu.Unlock()
	var out agent.PodStorage
	if !ps.measuredAt.IsZero() {
		out = ps.use.ToPodStorage()
		out.At = ps.measuredAt
	}
	own := map[string]string{}
	for i := range ps.w.desired.Pod.Spec.Volumes {
		v := &ps.w.desired.Pod.Spec.Volumes[i]
		one := agent.VolumeStorage{Name: v.Name, At: ps.measuredAt}
		n, measured := ps.use.Volumes[v.Name]
		m, mounted := ps.mounts[v.Name]
		switch {
		case measured:
			one.Used = uint64(n)
		case mounted && diskusage.HasOwnFileSystem(v):
			own[v.Name] = m.HostPath
			one.Claim = diskusage.ClaimName(ps.w.desired.Pod, v)
		default:
			continue
		}
		out.Volumes = append(out.Volumes, one)
	}
	return out, own
}
