package pod

import (
	"context"

	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/diskusage"
)

// volumeKey identifies a volume of a pod.
type volumeKey struct {
	pod    types.UID
	volume string
}

// Storage returns the disk and volume usage of all pods from the last measurements. Only pods with
// storage limits are measured regularly. The usage of a volume with its own file system is read
// from that file system.
func (s *Set) Storage() map[types.UID]agent.PodStorage {
	var workers []*worker
	s.forEachWorker(func(e *podEntry) {
		if e.worker != nil {
			workers = append(workers, e.worker)
		}
	})
	out := make(map[types.UID]agent.PodStorage, len(workers))
	places := map[types.UID]map[string]string{}
	var paths []string
	keys := map[string]volumeKey{}
	for _, w := range workers {
		p, own := w.storage.lastStorage()
		uid := w.desiredPod().UID
		out[uid], places[uid] = p, own
		for name, path := range own {
			paths = append(paths, path)
			keys[path] = volumeKey{uid, name}
		}
	}
	samples := s.disks.FetchSamples(paths, func(path string) (agent.Disk, error) {
		if s.cfg.VolumeDisk != nil {
			disk, ok, err := s.cfg.VolumeDisk(context.Background(), keys[path].pod, keys[path].volume)
			if ok || err != nil {
				return disk, err
			}
		}
		return diskusage.StatFileSystem(path)
	})
	for uid, p := range out {
		volumes := p.Volumes[:0]
		for _, v := range p.Volumes {
			if path, own := places[uid][v.Name]; own {
				l, ok := samples[path]
				if !ok {
					continue
				}
				v.At, v.FileSystem, v.Used = l.At, &l.Disk, l.Disk.Capacity-min(l.Disk.Capacity, l.Disk.Available)
			}
			volumes = append(volumes, v)
		}
		p.Volumes = volumes
		out[uid] = p
	}
	return out
}
