package lossy

import (
	"maps"
	"path"
	"slices"
	"sync"
	"syscall"
)

// volume is the content of a disk: a tree of files as processes see it, and the durable state of
// each inode. It does not depend on FUSE.
//
// Durability follows the strict reading of POSIX. An fsync of a file makes the file's data and
// length durable. An fsync of a folder makes the folder's entries durable. Neither implies the
// other. A rename is atomic. The changes of one folder become durable in order.
type volume struct {
	faults *faults

	mu     sync.Mutex
	root   *inode
	lastID uint64
	moves  []move // unsynced changes of entries, oldest first
	used   int64
	dark   chan struct{} // closed when the power is cut
	out    bool          // the power is cut
}

// inode is a file or a folder.
type inode struct {
	id   uint64
	mode uint32
	name string // last name, for rules and traces

	// entries of a folder: visible and durable
	now, disk map[string]*inode
	// content of a file; nil for a folder
	file *content
}

func (i *inode) isFolder() bool { return i.file == nil }

// step sets the entry of this name in a folder to an inode, or removes the entry if the inode is
// nil.
type step struct {
	in   *inode
	name string
	to   *inode
}

// move is a set of steps that becomes durable atomically.
type move []step

func newVolume(f *faults) *volume {
	v := &volume{faults: f, dark: make(chan struct{})}
	v.root = v.newInode(syscall.S_IFDIR|0o755, "/")
	return v
}

func (v *volume) newInode(mode uint32, name string) *inode {
	v.lastID++
	i := &inode{id: v.lastID, mode: mode, name: name}
	if mode&syscall.S_IFMT == syscall.S_IFDIR {
		i.now, i.disk = make(map[string]*inode), make(map[string]*inode)
	} else {
		i.file = newContent(nil)
	}
	return i
}

// lastName returns the last name that an inode had, for rules and traces.
func (v *volume) lastName(i *inode) string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return i.name
}

// cutPower cuts the power: every later operation fails and changes nothing.
func (v *volume) cutPower() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.out {
		v.out = true
		close(v.dark)
	}
}

// beginOperation counts an operation on a file of this name. If the operation is allowed, it
// returns 0 and holds v.mu. Otherwise it returns the error of the operation and does not hold v.mu.
func (v *volume) beginOperation(o Operation, name string) syscall.Errno {
	if o != Read {
		cut, resumed := v.faults.countChange(o, name)
		if cut {
			v.cutPower()
		}
		if resumed != nil {
			select {
			case <-resumed:
			case <-v.dark:
			}
			return syscall.EIO
		}
	}
	v.mu.Lock()
	if v.out {
		v.mu.Unlock()
		return syscall.EIO
	}
	return 0
}

func (v *volume) lookupEntry(in *inode, name string) *inode {
	v.mu.Lock()
	defer v.mu.Unlock()
	return in.now[name]
}

// folderEntry is an entry of a folder.
type folderEntry struct {
	name string
	is   *inode
}

func (v *volume) listEntries(in *inode) []folderEntry {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []folderEntry
	for _, name := range slices.Sorted(maps.Keys(in.now)) {
		out = append(out, folderEntry{name, in.now[name]})
	}
	return out
}

// statInode returns the mode and size of an inode.
func (v *volume) statInode(i *inode) (mode uint32, size int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !i.isFolder() {
		size = int64(len(i.file.visible))
	}
	return i.mode, size
}

func (v *volume) changeMode(i *inode, perm uint32) {
	v.mu.Lock()
	defer v.mu.Unlock()
	i.mode = i.mode&syscall.S_IFMT | perm&^syscall.S_IFMT
}

func (v *volume) createEntry(in *inode, name string, mode uint32) (*inode, syscall.Errno) {
	if errno := v.beginOperation(Create, name); errno != 0 {
		return nil, errno
	}
	defer v.mu.Unlock()
	if in.now[name] != nil {
		return nil, syscall.EEXIST
	}
	made := v.newInode(mode, name)
	v.recordMove(step{in, name, made})
	return made, 0
}

func (v *volume) removeEntry(in *inode, name string) syscall.Errno {
	if errno := v.beginOperation(Remove, name); errno != 0 {
		return errno
	}
	defer v.mu.Unlock()
	i := in.now[name]
	if i == nil {
		return syscall.ENOENT
	}
	if i.isFolder() && len(i.now) > 0 {
		return syscall.ENOTEMPTY
	}
	v.freeBlocks(i)
	v.recordMove(step{in, name, nil})
	return 0
}

func (v *volume) renameEntry(from *inode, name string, to *inode, newName string) syscall.Errno {
	if errno := v.beginOperation(Rename, name); errno != 0 {
		return errno
	}
	defer v.mu.Unlock()
	i, over := from.now[name], to.now[newName]
	if i == nil {
		return syscall.ENOENT
	}
	switch {
	case over == i:
		return 0
	case over != nil && over.isFolder() && len(over.now) > 0:
		return syscall.ENOTEMPTY
	case over != nil:
		v.freeBlocks(over)
	}
	i.name = newName
	v.recordMove(step{from, name, nil}, step{to, newName, i})
	return 0
}

// recordMove changes the visible entries, and records the change as not durable. The caller holds
// mu.
func (v *volume) recordMove(steps ...step) {
	for _, s := range steps {
		s.applyTo(s.in.now)
	}
	v.moves = append(v.moves, steps)
}

func (s step) applyTo(table map[string]*inode) {
	if s.to == nil {
		delete(table, s.name)
	} else {
		table[s.name] = s.to
	}
}

// freeBlocks frees the blocks of a file that is removed, even if a process still has it open.
func (v *volume) freeBlocks(i *inode) {
	if !i.isFolder() {
		v.used -= i.file.allocatedBytes()
		i.file.blocks = make(map[int64]bool)
	}
}

// readFile copies data at an offset into b. It returns 0 bytes at the end of the file.
func (v *volume) readFile(i *inode, b []byte, offset int64) (int, syscall.Errno) {
	if errno := v.beginOperation(Read, v.lastName(i)); errno != 0 {
		return 0, errno
	}
	defer v.mu.Unlock()
	if v.faults.mustFail(Read, i.name) {
		return 0, syscall.EIO
	}
	if offset >= int64(len(i.file.visible)) {
		return 0, 0
	}
	return copy(b, i.file.visible[offset:]), 0
}

// writeFile writes data at an offset. It may write less than b if the disk becomes full.
func (v *volume) writeFile(i *inode, b []byte, offset int64) (int, syscall.Errno) {
	if errno := v.beginOperation(Write, v.lastName(i)); errno != 0 {
		return 0, errno
	}
	defer v.mu.Unlock()
	if v.faults.mustFail(Write, i.name) {
		return 0, syscall.EIO
	}
	n := v.allocateBlocks(i.file, offset, len(b))
	if n == 0 && len(b) > 0 {
		return 0, syscall.ENOSPC
	}
	i.file.addWrite(offset, b[:n])
	return n, 0
}

// allocateBlocks allocates blocks for n bytes at an offset. It returns how many of these bytes fit
// on the disk.
func (v *volume) allocateBlocks(c *content, offset int64, n int) int {
	limit := v.faults.capacity()
	end := offset + int64(n)
	for b := offset / blockBytes; b*blockBytes < end; b++ {
		if c.blocks[b] {
			continue
		}
		if limit > 0 && v.used+blockBytes > limit {
			return int(max(0, b*blockBytes-offset))
		}
		c.blocks[b] = true
		v.used += blockBytes
	}
	return n
}

// resizeFile changes a file's length. A hole takes no space.
func (v *volume) resizeFile(i *inode, size int64) syscall.Errno {
	if errno := v.beginOperation(Resize, v.lastName(i)); errno != 0 {
		return errno
	}
	defer v.mu.Unlock()
	before := i.file.allocatedBytes()
	i.file.addResize(size)
	v.used += i.file.allocatedBytes() - before
	return 0
}

// reserveSpace is fallocate with mode 0: it allocates space for n bytes at an offset, and extends
// the file to contain them.
func (v *volume) reserveSpace(i *inode, offset, n int64) syscall.Errno {
	if errno := v.beginOperation(Resize, v.lastName(i)); errno != 0 {
		return errno
	}
	defer v.mu.Unlock()
	if int64(v.allocateBlocks(i.file, offset, int(n))) < n {
		return syscall.ENOSPC
	}
	i.file.addResize(max(int64(len(i.file.visible)), offset+n))
	return 0
}

// syncInode makes a file's data or a folder's entries durable.
func (v *volume) syncInode(i *inode) syscall.Errno {
	if errno := v.beginOperation(Sync, v.lastName(i)); errno != 0 {
		return errno
	}
	v.mu.Unlock()
	v.faults.waitForDelay(v.dark)
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.out {
		return syscall.EIO
	}
	failed := v.faults.mustFail(Sync, i.name)
	switch {
	case failed && i.isFolder():
		return syscall.EIO
	case failed:
		i.file.failSync()
		return syscall.EIO
	case i.isFolder():
		v.syncFolder(i)
	default:
		i.file.makeDurable()
	}
	return 0
}

// syncFolder makes the changes of a folder durable. A rename between folders also makes the earlier
// changes of the other folder durable.
func (v *volume) syncFolder(i *inode) {
	due := make([]bool, len(v.moves))
	folders := map[*inode]bool{i: true}
	for n, m := range slices.Backward(v.moves) {
		if slices.ContainsFunc(m, func(s step) bool { return folders[s.in] }) {
			due[n] = true
			for _, s := range m {
				folders[s.in] = true
			}
		}
	}
	var rest []move
	for n, m := range v.moves {
		if !due[n] {
			rest = append(rest, m)
			continue
		}
		for _, s := range m {
			s.applyTo(s.in.disk)
		}
	}
	v.moves = rest
}

// unsyncedPaths returns the paths of files with unsynced data and of folders with unsynced entries.
func (v *volume) unsyncedPaths() []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	waits := make(map[*inode]bool)
	for _, m := range v.moves {
		for _, s := range m {
			waits[s.in] = true
		}
	}
	var out []string
	var walk func(at string, i *inode)
	walk = func(at string, i *inode) {
		if waits[i] || !i.isFolder() && len(i.file.waiting) > 0 {
			out = append(out, at)
		}
		for _, name := range slices.Sorted(maps.Keys(i.now)) {
			walk(path.Join(at, name), i.now[name])
		}
	}
	walk("/", v.root)
	return out
}
