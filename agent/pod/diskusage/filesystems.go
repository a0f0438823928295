package diskusage

import (
	"fmt"
	"maps"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// IsDiskEmptyDir reports whether a volume is an emptyDir on the node's disk. A volume without a
// source is one by default.
func IsDiskEmptyDir(volume *v1.Volume) bool {
	return volume.EmptyDir != nil && volume.EmptyDir.Medium == v1.StorageMediumDefault ||
		volume.VolumeSource == (v1.VolumeSource{})
}

// StatFileSystem returns the capacity and the free space of the file system that contains path.
func StatFileSystem(path string) (agent.Disk, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return agent.Disk{}, fmt.Errorf("stat the file system of %s: %w", path, err)
	}
	size := uint64(st.Bsize)
	return agent.Disk{Capacity: st.Blocks * size, Available: st.Bavail * size, Inodes: st.Files,
		InodesFree: st.Ffree}, nil
}

// diskPatience is how long FetchSamples waits for the statistics of all file systems.
const diskPatience = 2 * time.Second

// FileSystemCache caches file system statistics. At most one scan of file systems runs at a time. A
// statfs call may hang, for example if an NFS server is gone. While a scan hangs, callers get the
// results of the previous scan.
type FileSystemCache struct {
	mu       sync.Mutex
	scanning bool
	samples  map[string]FileSystemSample
}

// FetchSamples returns the latest known statistics of file systems. It starts a scan of paths with
// the function stat, unless one is running, and waits at most diskPatience for it.
func (d *FileSystemCache) FetchSamples(paths []string,
	stat func(string) (agent.Disk, error)) map[string]FileSystemSample {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.scanning && len(paths) > 0 {
		d.scanning = true
		done := make(chan struct{})
		go func() {
			defer close(done)
			d.scanPaths(paths, stat)
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
	return maps.Clone(d.samples)
}

// FileSystemSample is the usage of a file system at a time.
type FileSystemSample struct {
	At   time.Time
	Disk agent.Disk
}

// scanPaths calls stat for each path and replaces the cached results. A path for which stat fails
// is missing from the cache then.
func (d *FileSystemCache) scanPaths(paths []string, stat func(string) (agent.Disk, error)) {
	samples := make(map[string]FileSystemSample, len(paths))
	for _, p := range paths {
		if disk, err := stat(p); err == nil { // on an error, the volume may have been unmounted
			samples[p] = FileSystemSample{time.Now(), disk}
		}
	}
	d.mu.Lock()
	d.samples, d.scanning = samples, false
	d.mu.Unlock()
}

// HasOwnFileSystem reports whether a volume has its own file system: it is persistent, CSI, NFS or
// in memory.
func HasOwnFileSystem(volume *v1.Volume) bool {
	return volume.PersistentVolumeClaim != nil || volume.Ephemeral != nil || volume.CSI != nil || volume.NFS != nil ||
		volume.EmptyDir != nil && volume.EmptyDir.Medium == v1.StorageMediumMemory
}

// ClaimName returns the name of the volume's PersistentVolumeClaim; "" if it has none.
func ClaimName(pod *v1.Pod, volume *v1.Volume) string {
	switch {
	case volume.PersistentVolumeClaim != nil:
		return volume.PersistentVolumeClaim.ClaimName
	case volume.Ephemeral != nil:
		return pod.Name + "-" + volume.Name
	}
	return ""
}
