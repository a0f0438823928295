package image

import (
	"cmp"
	"slices"
	"time"

	"keelson.dev/keelson/internal/reservedspace"
)

// leastIdle is how long an image stays after its last use, as kubelet's --minimum-image-ttl-duration has it: somebody
// who has just asked for it, or pulled it, is making a container. The end of a container is no such use.
const leastIdle = 2 * time.Minute

// room is an amount of a file system.
type room struct{ bytes, inodes int64 }

func (r room) covers(want room) bool { return r.bytes >= want.bytes && r.inodes >= want.inodes }

// fileSystem is how large a file system is and what is free of it.
type fileSystem struct{ size, free room }

// bytes is the file system without its inodes, and inodes one that has its inodes for bytes.
func (f fileSystem) bytes() fileSystem {
	return fileSystem{room{bytes: f.size.bytes}, room{bytes: f.free.bytes}}
}

func (f fileSystem) inodes() fileSystem {
	return fileSystem{room{bytes: f.size.inodes}, room{bytes: f.free.inodes}}
}

// short says how much has to be removed. Nothing as long as there is half as much again as the floor; from there on as
// much as brings it to twice the floor: with the default those are the 85 and 80 percent at which kubelet begins and
// ends. A floor that is most of the disk gets as much above it as there can be.
func (f fileSystem) short(keep reservedspace.Amount) room {
	lack := func(size, free, floor int64) int64 {
		above := min(floor, max(0, size-floor)/2)
		if size <= 0 || floor <= 0 || free >= floor+above/2 {
			return 0
		}
		return floor + above - free
	}
	return room{bytes: lack(f.size.bytes, f.free.bytes, keep.BytesOf(f.size.bytes)),
		inodes: lack(f.size.inodes, f.free.inodes, keep.CountOf(f.size.inodes))}
}

// pressed says that less than the floor is free.
func (f fileSystem) pressed(keep reservedspace.Amount) bool {
	return f.size.bytes > 0 && f.free.bytes < keep.BytesOf(f.size.bytes) ||
		f.size.inodes > 0 && f.free.inodes < keep.CountOf(f.size.inodes)
}

// candidate is an image as the choice of what is removed sees it.
type candidate struct {
	id     string
	layers []string
	idle   time.Duration // since its last use; below zero where the clock was set back since
}

// inventory is what a store holds, and who uses it.
type inventory struct {
	images     []candidate
	containers []container
	needed     map[string]bool // ids of images that pods of the node name
	archived   map[string]bool // ids of images whose archives the next start would import again
	busy       map[string]bool // layers that a pull is about to use
	sizes      map[string]room // by layer
}

// inUse are the ids of images that stay.
func (v *inventory) inUse() map[string]bool {
	out := map[string]bool{}
	for _, c := range v.containers { // one that has ended too: it is there until its pod goes
		out[c.Image] = true
	}
	for _, im := range v.images {
		if v.needed[im.id] || v.archived[im.id] || im.idle >= 0 && im.idle < leastIdle {
			out[im.id] = true
		}
	}
	return out
}

// choose names images that nothing uses, the longest unused first, until want would be free, or all of them. freed is
// what goes with them: only layers that nothing else stands on. Pure.
func (v *inventory) choose(want room) (remove []string, freed room) {
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
	slices.SortFunc(oldest, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.idle, a.idle), cmp.Compare(a.id, b.id))
	})
	for _, im := range oldest {
		if freed.covers(want) {
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
