package image

import (
	"cmp"
	"slices"
	"time"

	"keelson.dev/keelson/internal/reservedspace"
)

// minIdle is how long an image stays after its last use, like the kubelet's
// --minimum-image-ttl-duration. A pull or a status request counts as a use, because a container is
// usually created next. The end of a container does not count.
const minIdle = 2 * time.Minute

// diskSpace is an amount of disk space: bytes and inodes.
type diskSpace struct{ bytes, inodes int64 }

func (r diskSpace) isAtLeast(want diskSpace) bool {
	return r.bytes >= want.bytes && r.inodes >= want.inodes
}

// fileSystem has the size and the free space of a file system.
type fileSystem struct{ size, free diskSpace }

// withoutInodes returns the file system's bytes without its inodes. inodesAsBytes returns the
// numbers of inodes in place of bytes, so that the same computation applies to both.
func (f fileSystem) withoutInodes() fileSystem {
	return fileSystem{diskSpace{bytes: f.size.bytes}, diskSpace{bytes: f.free.bytes}}
}

func (f fileSystem) inodesAsBytes() fileSystem {
	return fileSystem{diskSpace{bytes: f.size.inodes}, diskSpace{bytes: f.free.inodes}}
}

// missingSpace returns how much disk space must be freed on the file system. reserved is the floor,
// the space that must stay free. The result is zero while at least 1.5 times the floor is free.
// Otherwise it is the amount that is missing to twice the floor.
//
// With the default floor, these limits are 85 % and 80 % of the disk, the kubelet's image garbage
// collection thresholds. If the floor is most of the disk, the target is the floor plus half of the
// rest of the disk.
func (f fileSystem) missingSpace(reserved reservedspace.Amount) diskSpace {
	lack := func(size, free, floor int64) int64 {
		above := min(floor, max(0, size-floor)/2)
		if size <= 0 || floor <= 0 || free >= floor+above/2 {
			return 0
		}
		return floor + above - free
	}
	return diskSpace{bytes: lack(f.size.bytes, f.free.bytes, reserved.BytesOf(f.size.bytes)),
		inodes: lack(f.size.inodes, f.free.inodes, reserved.CountOf(f.size.inodes))}
}

// isBelowFloor reports whether the file system has less free space than the floor, in bytes or in
// inodes.
func (f fileSystem) isBelowFloor(floor reservedspace.Amount) bool {
	return f.size.bytes > 0 && f.free.bytes < floor.BytesOf(f.size.bytes) ||
		f.size.inodes > 0 && f.free.inodes < floor.CountOf(f.size.inodes)
}

// removalCandidate is an image that may be removed to free disk space.
type removalCandidate struct {
	id     string
	layers []string
	idle   time.Duration // since its last use; negative if the clock was set back
}

// inventory lists the images and layers of a store, with the containers, pods and pulls that use
// them.
type inventory struct {
	images     []removalCandidate
	containers []containerRecord
	needed     map[string]bool      // IDs of images that pods of the node refer to
	archived   map[string]bool      // IDs of images from archives that the next start would import again
	busy       map[string]bool      // layers that a pull will use
	sizes      map[string]diskSpace // key: layer
}

// inUse returns the IDs of the images that must not be removed.
func (v *inventory) inUse() map[string]bool {
	out := map[string]bool{}
	for _, c := range v.containers { // includes exited containers, which exist until their pod is removed
		out[c.Image] = true
	}
	for _, im := range v.images {
		if v.needed[im.id] || v.archived[im.id] || im.idle >= 0 && im.idle < minIdle {
			out[im.id] = true
		}
	}
	return out
}

// chooseImages returns unused images to remove, least recently used first, until the required space
// is freed or no unused image is left. freed is the space of the layers that no image, container or
// pull uses after the removal. It is pure.
func (v *inventory) chooseImages(required diskSpace) (remove []string, freed diskSpace) {
	stands := map[string]int{}
	for _, im := range v.images {
		for _, k := range im.layers {
			stands[k]++
		}
	}
	for _, c := range v.containers {
		for _, k := range c.Layers {
			stands[k]++
		}
	}
	for k := range v.busy {
		stands[k]++
	}
	used := v.inUse()
	oldest := slices.Clone(v.images)
	slices.SortFunc(oldest, func(a, b removalCandidate) int {
		return cmp.Or(cmp.Compare(b.idle, a.idle), cmp.Compare(a.id, b.id))
	})
	for _, im := range oldest {
		if freed.isAtLeast(required) {
			break
		}
		if used[im.id] {
			continue
		}
		remove = append(remove, im.id)
		for _, k := range im.layers {
			if stands[k]--; stands[k] == 0 {
				freed.bytes += v.sizes[k].bytes
				freed.inodes += v.sizes[k].inodes
			}
		}
	}
	return remove, freed
}
