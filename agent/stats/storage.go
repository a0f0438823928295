package stats

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	summary "k8s.io/kubelet/pkg/apis/stats/v1alpha1"

	"keelson.dev/keelson/agent"
)

// podStorage is the disk and volume usage of the node's pods. The zero value means that the usage
// is unknown.
type podStorage struct {
	pods map[types.UID]agent.PodStorage
	disk *agent.Disk // file system of the node; nil = unknown
}

func (s *Source) readStorage() (out podStorage) {
	if s.cfg.Storage != nil {
		out.pods = s.cfg.Storage()
	}
	if s.cfg.Disk != nil {
		if d, err := s.cfg.Disk(); err == nil {
			out.disk = &d
		}
	}
	return out
}

// addTo adds the usage of a pod's volumes, and the disk usage of the pod and its containers, to the
// pod's statistics out.
func (s podStorage) addTo(out *summary.PodStats, uid types.UID) {
	p, ok := s.pods[uid]
	if !ok {
		return
	}
	for _, v := range p.Volumes {
		one := summary.VolumeStats{Name: v.Name, FsStats: s.nodeFsStats(v.At, v.Used)}
		if v.FileSystem != nil {
			one.FsStats = fsStats(v.At, v.FileSystem, v.Used)
			files := v.FileSystem.Inodes - min(v.FileSystem.Inodes, v.FileSystem.InodesFree)
			one.InodesUsed = &files
		}
		if v.Claim != "" {
			one.PVCRef = &summary.PVCReference{Name: v.Claim, Namespace: out.PodRef.Namespace}
		}
		out.VolumeStats = append(out.VolumeStats, one)
	}
	if p.At.IsZero() {
		return
	}
	whole := s.nodeFsStats(p.At, p.Used)
	out.EphemeralStorage = &whole
	for i := range out.Containers {
		if c, ok := p.Containers[out.Containers[i].Name]; ok {
			layer, logs := s.nodeFsStats(p.At, c.Layer), s.nodeFsStats(p.At, c.Logs)
			out.Containers[i].Rootfs, out.Containers[i].Logs = &layer, &logs
		}
	}
}

// nodeFsStats returns statistics of the node's file system in which a part of it, for example the
// images, uses used bytes.
func (s podStorage) nodeFsStats(at time.Time, used uint64) summary.FsStats {
	return fsStats(at, s.disk, used)
}

func fsStats(at time.Time, d *agent.Disk, used uint64) summary.FsStats {
	out := summary.FsStats{Time: metav1.NewTime(at), UsedBytes: &used}
	if d != nil {
		out.AvailableBytes, out.CapacityBytes = &d.Available, &d.Capacity
		out.Inodes, out.InodesFree = &d.Inodes, &d.InodesFree
	}
	return out
}
