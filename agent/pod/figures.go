package pod

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

// DiskOf returns the capacity and the free space of the file system that contains path.
func DiskOf(path string) (agent.Disk, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return agent.Disk{}, fmt.Errorf("looking at the file system of %s: %w", path, err)
	}
	size := uint64(st.Bsize)
	return agent.Disk{Capacity: st.Blocks * size, Available: st.Bavail * size, Inodes: st.Files, InodesFree: st.Ffree}, nil
}

// diskPatience is how long to wait for the statistics of all volumes' file systems.
const diskPatience = 2 * time.Second

// disks caches file system statistics. A statfs call may hang, for example if an NFS server is
// gone. At most one scan runs at a time. While a scan hangs, callers get the results of the
// previous scan.
type disks struct {
	mu    sync.Mutex
	busy  bool
	found map[string]looked
}

type looked struct {
	at   time.Time
	disk agent.Disk
}

// look returns the latest known statistics of file systems. It starts a scan of paths with the
// function of, unless one is running, and waits at most diskPatience for it.
func (d *disks) look(paths []string, of func(string) (agent.Disk, error)) map[string]looked {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.busy && len(paths) > 0 {
		d.busy = true
		done := make(chan struct{})
		go func() {
			defer close(done)
			d.all(paths, of)
		}()
		d.mu.Unlock()
		late := time.NewTimer(diskPatience)
		select {
		case <-done:
		case <-late.C:
		}
		late.Stop()
		d.mu.Lock()
	}
	return maps.Clone(d.found)
}

// all scans each path and replaces the cached results. Unmounted paths are dropped.
func (d *disks) all(paths []string, of func(string) (agent.Disk, error)) {
	found := make(map[string]looked, len(paths))
	for _, p := range paths {
		if disk, err := of(p); err == nil { // on an error, the volume may have been unmounted
			found[p] = looked{time.Now(), disk}
		}
	}
	d.mu.Lock()
	d.found, d.busy = found, false
	d.mu.Unlock()
}

// volumeAt identifies a volume of a pod.
type volumeAt struct {
	pod    types.UID
	volume string
}

// Storage returns the disk and volume usage of all pods without measuring again. Usage that counts
// against limits was measured recently, and a volume with its own file system reports its usage
// directly.
func (s *Set) Storage() map[types.UID]agent.PodStorage {
	var workers []*worker
	s.each(func(e *entry) {
		if e.w != nil {
			workers = append(workers, e.w)
		}
	})
	out := make(map[types.UID]agent.PodStorage, len(workers))
	places := map[types.UID]map[string]string{}
	var paths []string
	of := map[string]volumeAt{}
	for _, w := range workers {
		p, own := w.storage()
		uid := w.pod().UID
		out[uid], places[uid] = p, own
		for name, path := range own {
			paths = append(paths, path)
			of[path] = volumeAt{uid, name}
		}
	}
	found := s.disks.look(paths, func(path string) (agent.Disk, error) {
		if s.cfg.VolumeDisk != nil {
			disk, ok, err := s.cfg.VolumeDisk(context.Background(), of[path].pod, of[path].volume)
			if ok || err != nil {
				return disk, err
			}
		}
		return DiskOf(path)
	})
	for uid, p := range out {
		known := p.Volumes[:0]
		for _, v := range p.Volumes {
			if path, own := places[uid][v.Name]; own {
				l, ok := found[path]
				if !ok {
					continue
				}
				v.At, v.FileSystem, v.Used = l.at, &l.disk, l.disk.Capacity-min(l.disk.Capacity, l.disk.Available)
			}
			known = append(known, v)
		}
		p.Volumes = known
		out[uid] = p
	}
	return out
}

// storage converts the measured usage of a pod and its containers.
func (u storageUse) storage() agent.PodStorage {
	out := agent.PodStorage{Used: uint64(u.total()), Inodes: uint64(u.inodes), Containers: make(map[string]agent.ContainerStorage, len(u.containers))}
	for name, n := range u.containers {
		logs := u.logs[name]
		out.Containers[name] = agent.ContainerStorage{Layer: uint64(n - logs), Logs: uint64(logs)}
	}
	return out
}

// storage returns the last measured usage. It also returns the mount paths, by volume name, of
// volumes with their own file system.
func (w *worker) storage() (agent.PodStorage, map[string]string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out agent.PodStorage
	if !w.storedAt.IsZero() {
		out = w.stored.storage()
		out.At = w.storedAt
	}
	own := map[string]string{}
	for i := range w.desired.Pod.Spec.Volumes {
		v := &w.desired.Pod.Spec.Volumes[i]
		one := agent.VolumeStorage{Name: v.Name, At: w.storedAt}
		n, measured := w.stored.volumes[v.Name]
		m, mounted := w.mountsBy[v.Name]
		switch {
		case measured:
			one.Used = uint64(n)
		case mounted && ownFileSystem(v):
			own[v.Name] = m.HostPath
			one.Claim = claimOf(w.desired.Pod, v)
		default:
			continue
		}
		out.Volumes = append(out.Volumes, one)
	}
	return out, own
}

// ownFileSystem reports whether a volume has its own file system: it is persistent, CSI, NFS or in
// memory.
func ownFileSystem(v *v1.Volume) bool {
	return v.PersistentVolumeClaim != nil || v.Ephemeral != nil || v.CSI != nil || v.NFS != nil ||
		v.EmptyDir != nil && v.EmptyDir.Medium == v1.StorageMediumMemory
}

// claimOf returns the name of the volume's PersistentVolumeClaim; "" if it has none.
func claimOf(pod *v1.Pod, v *v1.Volume) string {
	switch {
	case v.PersistentVolumeClaim != nil:
		return v.PersistentVolumeClaim.ClaimName
	case v.Ephemeral != nil:
		return pod.Name + "-" + v.Name
	}
	return ""
}
