// Package diskusage measures the disk usage of pods and compares it with their limits.
package diskusage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// chunkEntries is the number of directory entries that a walk visits before it lets another walk
// continue. It limits how long a pod with millions of files delays the measurement of other pods.
const chunkEntries = 4096

// Turns is a semaphore for concurrent walks. Only its holder visits directory entries, and it
// releases the semaphore after chunkEntries entries.
type Turns chan struct{}

// NewTurns returns the semaphore that all measurements of a node share.
func NewTurns() Turns { return make(Turns, 1) }

func (t Turns) acquireTurn(ctx context.Context) error {
	select {
	case t <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t Turns) releaseTurn() { <-t }

// MaxDepth is the maximum directory depth of a walk, which keeps one directory open per level.
const MaxDepth = 256

// ErrTooDeep is the error of a walk that skipped directories deeper than MaxDepth.
var ErrTooDeep = fmt.Errorf("directories are nested more than %d levels deep", MaxDepth)

// TreeUse is the disk usage of files: the bytes that are allocated for them, and their inodes.
type TreeUse struct {
	Bytes       int64
	MilliInodes int64 // inodes in thousandths: a file with n links counts 1/n for each of its names
}

// AddUse returns the sum of two usages.
func (a TreeUse) AddUse(other TreeUse) TreeUse {
	return TreeUse{a.Bytes + other.Bytes, a.MilliInodes + other.MilliInodes}
}

// MeasureDirectory returns the disk usage of dir and everything below it; zero if dir does not
// exist. It stops early when the usage exceeds byteLimit. It skips the entries of dir with names in
// skipped. The walk never leaves dir or enters another mount. Containers may change files during
// the walk; files created or deleted meanwhile may be missed.
func MeasureDirectory(ctx context.Context, t Turns, dir string, byteLimit int64, skipped ...string) (TreeUse, error) {
	fd, err := unix.Open(dir, walkFlags&^unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return TreeUse{}, nil
	}
	if err != nil {
		return TreeUse{}, fmt.Errorf("opening %s: %w", dir, err)
	}
	root := os.NewFile(uintptr(fd), dir)
	defer root.Close()
	st, err := statEntry(fd, "")
	if err != nil {
		return TreeUse{}, fmt.Errorf("stat %s: %w", dir, err)
	}
	if err := t.acquireTurn(ctx); err != nil {
		return TreeUse{}, err
	}
	w := walk{ctx: ctx, turns: t, mount: mountOfFile(&st), sum: TreeUse{int64(st.Blocks) * 512, 1000},
		byteLimit: byteLimit, skipped: skipped}
	defer func() {
		if !w.waiting {
			t.releaseTurn()
		}
	}()
	if err := w.walkDirectory(root, 1); err != nil {
		return w.sum, fmt.Errorf("measuring %s: %w", dir, err)
	}
	return w.sum, nil
}

// walkFlags open a directory without blocking and without following a link.
const walkFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC

type walk struct {
	ctx       context.Context
	turns     Turns
	mount     mountID
	sum       TreeUse
	byteLimit int64
	skipped   []string
	visited   int  // entries visited in the current chunk
	waiting   bool // the walk does not hold the semaphore
}

// countEntries adds newEntries to the number of visited entries. After chunkEntries entries, it
// releases the semaphore and waits until it gets it again, so that other walks can continue.
func (w *walk) countEntries(newEntries int) error {
	if w.visited += newEntries; w.visited < chunkEntries {
		return nil
	}
	w.visited = 0
	w.turns.releaseTurn()
	w.waiting = true
	if err := w.turns.acquireTurn(w.ctx); err != nil {
		return err
	}
	w.waiting = false
	return nil
}

// walkDirectory adds the usage of the entries of directory, recursively. depth is the level of
// directory; the root of the walk has depth 1. A directory deeper than MaxDepth is skipped; then
// walkDirectory returns ErrTooDeep after it has counted all other entries.
func (w *walk) walkDirectory(directory *os.File, depth int) error {
	fd := int(directory.Fd())
	var deep error
	for w.sum.Bytes <= w.byteLimit {
		names, err := directory.Readdirnames(64) // few, because each level holds a batch in memory
		if e := w.countEntries(1 + len(names)); e != nil {
			return e
		}
		for _, n := range names {
			if depth == 1 && slices.Contains(w.skipped, n) {
				continue
			}
			st, err := statEntry(fd, n)
			if err != nil || mountOfFile(&st) != w.mount {
				continue
			}
			// A file with several hard links is visited once for each.
			folder := st.Mode&unix.S_IFMT == unix.S_IFDIR
			names := int64(1)
			if !folder {
				names = max(1, int64(st.Nlink))
			}
			w.sum = w.sum.AddUse(TreeUse{int64(st.Blocks) * 512 / names, 1000 / names})
			if !folder {
				continue
			}
			switch err := w.walkSubdirectory(fd, n, depth); {
			case errors.Is(err, ErrTooDeep):
				deep = err
			case err != nil:
				return err
			}
		}
		if err != nil { // end of the directory, or it was removed
			break
		}
	}
	return deep
}

// walkSubdirectory adds the usage of a subdirectory of the open directory parent, which has the
// given depth. It ignores a subdirectory that was removed or replaced by another file meanwhile.
func (w *walk) walkSubdirectory(parent int, subdirectory string, depth int) error {
	if depth == MaxDepth {
		return ErrTooDeep
	}
	fd, err := unix.Openat(parent, subdirectory, walkFlags, 0)
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), subdirectory)
	defer f.Close()
	if st, err := statEntry(fd, ""); err != nil || mountOfFile(&st) != w.mount {
		return nil
	}
	return w.walkDirectory(f, depth+1)
}

// mountID identifies a mount, even among several mounts of one file system: a subPath is
// bind-mounted below the pod's directory, and its content does not belong to that directory. On
// kernels before 5.8 it identifies only the file system.
type mountID struct {
	major, minor uint32
	id           uint64
}

func mountOfFile(stat *unix.Statx_t) mountID {
	m := mountID{major: stat.Dev_major, minor: stat.Dev_minor}
	if stat.Mask&unix.STATX_MNT_ID != 0 {
		m.id = stat.Mnt_id
	}
	return m
}

// statEntry returns the statx result for a name in the directory fd, or for fd itself if name is
// "".
func statEntry(fd int, name string) (st unix.Statx_t, err error) {
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT
	if name == "" {
		flags = unix.AT_EMPTY_PATH
	}
	err = unix.Statx(fd, name, flags, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &st)
	return st, err
}
