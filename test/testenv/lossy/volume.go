package lossy

import (
	"maps"
	"path"
	"slices"
	"sync"
	"syscall"
)

// volume is what a disk holds: a tree of files as processes see it, and beside
// it what the platter has of it. It knows nothing of FUSE.
//
// The platter follows the strict reading of POSIX: data and size of a file are
// on it after an fsync of the file, the entries of a folder after an fsync of
// the folder, and neither brings the other along. A rename is one step also
// there; the steps of one folder get there in order.
type volume struct {
	faults *faults

	mu     sync.Mutex
	root   *inode
	lastID uint64
	moves  []move // of entries, not synced, oldest first
	used   int64
	dark   chan struct{} // closed when the power is cut
	out    bool          // it is
}

// inode is a file or a folder.
type inode struct {
	id   uint64
	mode uint32
	name string // under which it was seen last, for rules and traces

	// Of a folder.
	now, disk map[string]*inode
	// Of a file.
	file *content
}

func (i *inode) folder() bool { return i.file == nil }

// step sets one entry of a folder; to is nil when it is removed.
type step struct {
	in   *inode
	name string
	to   *inode
}

// move is what reaches the platter whole or not at all.
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

// name is that under which an inode was seen last.
func (v *volume) name(i *inode) string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return i.name
}

// cut takes the power away: whatever is asked from now on fails and changes nothing.
func (v *volume) cut() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.out {
		v.out = true
		close(v.dark)
	}
}

// begin says whether an operation may go on, and if so holds v.mu from then on.
func (v *volume) begin(o Operation, name string) syscall.Errno {
	if o != Read {
		cut, resumed := v.faults.counted(o, name)
		if cut {
			v.cut()
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

func (v *volume) lookup(in *inode, name string) *inode {
	v.mu.Lock()
	defer v.mu.Unlock()
	return in.now[name]
}

// listed is an entry of a folder.
type listed struct {
	name string
	is   *inode
}

func (v *volume) list(in *inode) []listed {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []listed
	for _, name := range slices.Sorted(maps.Keys(in.now)) {
		out = append(out, listed{name, in.now[name]})
	}
	return out
}

// stat is the mode and size of an inode.
func (v *volume) stat(i *inode) (mode uint32, size int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !i.folder() {
		size = int64(len(i.file.now))
	}
	return i.mode, size
}

func (v *volume) chmod(i *inode, perm uint32) {
	v.mu.Lock()
	defer v.mu.Unlock()
	i.mode = i.mode&syscall.S_IFMT | perm&^syscall.S_IFMT
}

func (v *volume) create(in *inode, name string, mode uint32) (*inode, syscall.Errno) {
	if errno := v.begin(Create, name); errno != 0 {
		return nil, errno
	}
	defer v.mu.Unlock()
	if in.now[name] != nil {
		return nil, syscall.EEXIST
	}
	made := v.newInode(mode, name)
	v.move(step{in, name, made})
	return made, 0
}

func (v *volume) remove(in *inode, name string) syscall.Errno {
	if errno := v.begin(Remove, name); errno != 0 {
		return errno
	}
	defer v.mu.Unlock()
	i := in.now[name]
	if i == nil {
		return syscall.ENOENT
	}
	if i.folder() && len(i.now) > 0 {
		return syscall.ENOTEMPTY
	}
	v.release(i)
	v.move(step{in, name, nil})
	return 0
}

func (v *volume) rename(from *inode, name string, to *inode, newName string) syscall.Errno {
	if errno := v.begin(Rename, name); errno != 0 {
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
	case over != nil && over.folder() && len(over.now) > 0:
		return syscall.ENOTEMPTY
	case over != nil:
		v.release(over)
	}
	i.name = newName
	v.move(step{from, name, nil}, step{to, newName, i})
	return 0
}

// move changes entries for those who look, and notes it for the platter.
func (v *volume) move(steps ...step) {
	for _, s := range steps {
		s.take(s.in.now)
	}
	v.moves = append(v.moves, steps)
}

func (s step) take(table map[string]*inode) {
	if s.to == nil {
		delete(table, s.name)
	} else {
		table[s.name] = s.to
	}
}

// release gives the room of a file without a name back, though somebody may have it open.
func (v *volume) release(i *inode) {
	if !i.folder() {
		v.used -= i.file.room()
		i.file.blocks = make(map[int64]bool)
	}
}

// read copies what is at an offset into b.
func (v *volume) read(i *inode, b []byte, at int64) (int, syscall.Errno) {
	if errno := v.begin(Read, v.name(i)); errno != 0 {
		return 0, errno
	}
	defer v.mu.Unlock()
	if v.faults.hit(Read, i.name) {
		return 0, syscall.EIO
	}
	if at >= int64(len(i.file.now)) {
		return 0, 0
	}
	return copy(b, i.file.now[at:]), 0
}

// write changes a file at an offset. It may stop short when the disk is full.
func (v *volume) write(i *inode, b []byte, at int64) (int, syscall.Errno) {
	if errno := v.begin(Write, v.name(i)); errno != 0 {
		return 0, errno
	}
	defer v.mu.Unlock()
	if v.faults.hit(Write, i.name) {
		return 0, syscall.EIO
	}
	n := v.allocate(i.file, at, len(b))
	if n == 0 && len(b) > 0 {
		return 0, syscall.ENOSPC
	}
	i.file.write(at, b[:n])
	return n, 0
}

// allocate takes room for n bytes at an offset and says for how many it was enough.
func (v *volume) allocate(c *content, at int64, n int) int {
	limit := v.faults.capacity()
	end := at + int64(n)
	for b := at / blockBytes; b*blockBytes < end; b++ {
		if c.blocks[b] {
			continue
		}
		if limit > 0 && v.used+blockBytes > limit {
			return int(max(0, b*blockBytes-at))
		}
		c.blocks[b] = true
		v.used += blockBytes
	}
	return n
}

// resize changes a file's length. A hole takes no room.
func (v *volume) resize(i *inode, size int64) syscall.Errno {
	if errno := v.begin(Resize, v.name(i)); errno != 0 {
		return errno
	}
	defer v.mu.Unlock()
	before := i.file.room()
	i.file.resize(size)
	v.used += i.file.room() - before
	return 0
}

// reserve is fallocate without flags: room is taken and the file is at least so long.
func (v *volume) reserve(i *inode, at, n int64) syscall.Errno {
	if errno := v.begin(Resize, v.name(i)); errno != 0 {
		return errno
	}
	defer v.mu.Unlock()
	if int64(v.allocate(i.file, at, int(n))) < n {
		return syscall.ENOSPC
	}
	i.file.resize(max(int64(len(i.file.now)), at+n))
	return 0
}

// sync brings a file's data or a folder's entries to the platter.
func (v *volume) sync(i *inode) syscall.Errno {
	if errno := v.begin(Sync, v.name(i)); errno != 0 {
		return errno
	}
	v.mu.Unlock()
	v.faults.wait(v.dark)
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.out {
		return syscall.EIO
	}
	failed := v.faults.hit(Sync, i.name)
	switch {
	case failed && i.folder():
		return syscall.EIO
	case failed:
		i.file.forget()
		return syscall.EIO
	case i.folder():
		v.syncFolder(i)
	default:
		i.file.sync()
	}
	return 0
}

// syncFolder takes the steps of a folder, and those of other folders that come
// before them and hang on them by a rename.
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
			s.take(s.in.disk)
		}
	}
	v.moves = rest
}

// unsynced names what a power cut could take: files with data, folders with entries.
func (v *volume) unsynced() []string {
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
		if waits[i] || !i.folder() && len(i.file.waiting) > 0 {
			out = append(out, at)
		}
		for _, name := range slices.Sorted(maps.Keys(i.now)) {
			walk(path.Join(at, name), i.now[name])
		}
	}
	walk("/", v.root)
	return out
}
