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
	"k8s.io/apimachinery/pkg/api/resource"
	helper "k8s.io/component-helpers/resource"

	"keelson.dev/keelson/internal/saturate"
)

// measureEvery is the normal interval between two disk measurements of a pod.
const measureEvery = 10 * time.Second

// measureAtLeast is the longest interval, for pods with so many files that a measurement takes
// long.
const measureAtLeast = 5 * time.Minute

// evictionGrace is the grace period of a pod that exceeded its storage limit or was fenced.
const evictionGrace = time.Second

// storageLimits are the limits of a pod that the agent enforces by measuring.
type storageLimits struct {
	volumes    map[string]resource.Quantity // of emptyDir volumes on disk
	containers map[string]resource.Quantity
	pod        *resource.Quantity // of all its containers together
}

func (l storageLimits) none() bool { return len(l.volumes)+len(l.containers) == 0 && l.pod == nil }

// limitsOf returns a pod's storage limits. An emptyDir in memory is omitted: its tmpfs has that
// size.
func limitsOf(pod *v1.Pod) storageLimits {
	l := storageLimits{volumes: map[string]resource.Quantity{}, containers: map[string]resource.Quantity{}}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if onDisk(v) && v.EmptyDir != nil && v.EmptyDir.SizeLimit != nil && v.EmptyDir.SizeLimit.Sign() > 0 {
			l.volumes[v.Name] = *v.EmptyDir.SizeLimit
		}
	}
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if q, ok := list[i].Resources.Limits[v1.ResourceEphemeralStorage]; ok && q.Sign() > 0 {
				l.containers[list[i].Name] = q
			}
		}
	}
	if q, ok := helper.PodLimits(pod, helper.PodResourcesOptions{})[v1.ResourceEphemeralStorage]; ok && q.Sign() > 0 {
		l.pod = &q
	}
	return l
}

// onDisk reports whether a volume is an emptyDir on the node's disk. A volume without a source is
// one by default.
func onDisk(v *v1.Volume) bool {
	return v.EmptyDir != nil && v.EmptyDir.Medium == v1.StorageMediumDefault || v.VolumeSource == (v1.VolumeSource{})
}

// storageUse is the measured disk usage of a pod, in bytes except for the inodes.
type storageUse struct {
	volumes    map[string]int64
	containers map[string]int64 // layer and logs of the newest instance
	logs       map[string]int64 // the part of containers that is logs
	rest       int64
	inodes     int64 // of the whole pod
}

func (u storageUse) total() int64 {
	sum := u.rest
	for _, m := range []map[string]int64{u.volumes, u.containers} {
		for _, n := range m {
			sum += n
		}
	}
	return sum
}

// overuse returns the eviction message of an exceeded limit, as in Kubernetes; "" if none exists.
func (l storageLimits) overuse(u storageUse) string {
	over := func(n int64, q resource.Quantity) bool { return q.CmpInt64(n) < 0 }
	for _, name := range slices.Sorted(maps.Keys(l.volumes)) {
		if q := l.volumes[name]; over(u.volumes[name], q) {
			return fmt.Sprintf("Usage of EmptyDir volume %q exceeds the limit %q. ", name, q.String())
		}
	}
	if l.pod != nil && over(u.total(), *l.pod) {
		return fmt.Sprintf("Pod ephemeral local storage usage exceeds the total limit of containers %s. ", l.pod)
	}
	for _, name := range slices.Sorted(maps.Keys(l.containers)) {
		if q := l.containers[name]; over(u.containers[name], q) {
			return fmt.Sprintf("Container %s exceeded its local ephemeral storage limit %q. ", name, q.String())
		}
	}
	return ""
}

// most returns the largest limit. A measurement may stop there: any higher usage exceeds a limit
// anyway.
func (l storageLimits) most() int64 {
	var most int64
	for _, m := range []map[string]resource.Quantity{l.volumes, l.containers} {
		for _, q := range m {
			most = max(most, saturate.Value(&q))
		}
	}
	if l.pod != nil {
		most = max(most, saturate.Value(l.pod))
	}
	return most
}

// keepStorage measures a pod with limits until ctx ends, and evicts it if it exceeds a limit.
func (w *worker) keepStorage(ctx context.Context) {
	next := time.NewTimer(measureEvery)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-next.C:
		}
		next.Reset(w.lookAtStorage(ctx))
	}
}

// lookAtStorage measures and checks a pod once. It returns the time until the next measurement,
// which is longer for pods that take long to measure.
func (w *worker) lookAtStorage(ctx context.Context) time.Duration {
	begin := time.Now()
	pod := w.pod()
	limits := limitsOf(pod)
	if limits.none() || final(pod) {
		return measureEvery
	}
	use, err := w.measure(ctx, pod, limits.most())
	if err == nil {
		w.measured(use)
	}
	// A partial result may already exceed a limit.
	message := limits.overuse(use)
	switch {
	case message == "" && errors.Is(err, errTooDeep):
		message = fmt.Sprintf("Usage of local ephemeral storage cannot be held against its limits: %v. ", errTooDeep)
	case err != nil && ctx.Err() == nil:
		w.log.Warn("cannot measure what the pod has on disk", "err", err)
	}
	if message != "" && ctx.Err() == nil {
		w.evict(Stop{Reason: "Evicted", Message: message, Grace: evictionGrace})
	}
	return min(max(measureEvery, 20*time.Since(begin)), measureAtLeast)
}

// measure returns the usage of all directories of the pod on the node's disk. Each directory is
// measured up to enough bytes.
func (w *worker) measure(ctx context.Context, pod *v1.Pod, enough int64) (storageUse, error) {
	use := storageUse{volumes: map[string]int64{}, containers: map[string]int64{}, logs: map[string]int64{}}
	w.mu.Lock()
	mounts, instances := maps.Clone(w.mountsBy), slices.Clone(w.o.Containers)
	w.mu.Unlock()
	var first error
	var all taken
	size := func(dir string, but ...string) int64 {
		n, err := usage(ctx, w.cfg.turns, dir, enough, but...)
		if first == nil || errors.Is(err, errTooDeep) {
			first = err
		}
		all = all.plus(n)
		return n.bytes
	}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if m, ok := mounts[v.Name]; ok && onDisk(v) {
			use.volumes[v.Name] = size(m.HostPath)
		}
	}
	use.rest += size(directory(w.cfg.Paths, pod.UID), subPaths) // skip the subPath mounts: one on an unreachable server would block
	newest, common := map[string]bool{}, map[string]bool{}
	for _, c := range instances { // the newest instance of each name comes first
		sum := int64(0)
		if w.cfg.Written != nil {
			own, shared := w.cfg.Written(c.ID)
			for _, dir := range own {
				sum += size(dir)
			}
			for _, dir := range shared {
				if !common[dir] {
					common[dir] = true
					use.rest += size(dir)
				}
			}
		}
		if newest[c.Name] {
			use.rest += sum
			continue
		}
		newest[c.Name] = true
		use.logs[c.Name] = size(filepath.Join(logDirectory(w.cfg.Paths.Logs, pod), c.Name))
		use.containers[c.Name] = sum + use.logs[c.Name]
	}
	use.inodes = all.milli / 1000
	return use, first
}

// measured stores the measured usage and the time.
func (w *worker) measured(use storageUse) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stored, w.storedAt = use, w.cfg.now()
}
