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

// measureEvery is the time between two looks at what a pod has on disk.
const measureEvery = 10 * time.Second

// measureAtLeast is the longest time between two looks, at pods with so many files that a look takes long.
const measureAtLeast = 5 * time.Minute

// evictionGrace is what containers get that took more space than they may.
const evictionGrace = time.Second

// storageLimits are the limits of a pod that only measuring can keep.
type storageLimits struct {
	volumes    map[string]resource.Quantity // emptyDir on disk
	containers map[string]resource.Quantity
	pod        *resource.Quantity // of its containers together
}

func (l storageLimits) none() bool { return len(l.volumes)+len(l.containers) == 0 && l.pod == nil }

// limitsOf reads a pod's limits. An emptyDir in memory needs no measuring: its tmpfs has that size.
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

// onDisk says that a volume is an emptyDir on the node's disk, or the API's default, which is the same.
func onDisk(v *v1.Volume) bool {
	return v.EmptyDir != nil && v.EmptyDir.Medium == v1.StorageMediumDefault || v.VolumeSource == (v1.VolumeSource{})
}

// storageUse is what a pod has on disk, in bytes but for its inodes.
type storageUse struct {
	volumes    map[string]int64
	containers map[string]int64 // layer and logs of the newest instance
	logs       map[string]int64 // what of that is logs
	rest       int64
	inodes     int64 // of all of it
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

// overuse words why a pod has to go, as Kubernetes does; "" = it keeps within its limits.
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

// most is the largest limit: whoever uses more of anything has to go, so nothing beyond it needs to be counted.
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

// keepStorage measures a pod with limits until ctx ends, and evicts it when it uses more than it may.
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

// lookAtStorage does it once and says when to do it next: who has so much that a look takes long is looked at less
// often.
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
	// What was counted is there, whatever could not be.
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

// measure looks at all places where the pod's containers can write to the node's disk.
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
	use.rest += size(directory(w.cfg.Paths, pod.UID), subPaths) // mounts: one of a server that is gone does not answer
	newest, common := map[string]bool{}, map[string]bool{}
	for _, c := range instances { // of each name the newest comes first
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

// measured notes what was found.
func (w *worker) measured(use storageUse) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stored, w.storedAt = use, w.cfg.now()
}
