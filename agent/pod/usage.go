package pod

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// chunk is the number of entries that a walk visits in one turn. It bounds how long a pod with
// millions of files delays the measurement of other pods.
const chunk = 4096

// turns is a semaphore that lets one walk at a time visit a chunk of entries.
type turns chan struct{}

func newTurns() turns { return make(turns, 1) }

func (t turns) take(ctx context.Context) error {
	select {
	case t <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t turns) pass() { <-t }

// maxDepth is the maximum directory depth of a walk, which keeps one directory open per level.
const maxDepth = 256

// errTooDeep is the error of a walk that skipped directories deeper than maxDepth.
var errTooDeep = fmt.Errorf("folders lie more than %d deep in one another", maxDepth)

// taken is the disk usage of files.
type taken struct {
	bytes int64
	milli int64 // inodes in thousandths: a file with n links counts 1/n for each of its names
}

func (a taken) plus(b taken) taken { return taken{a.bytes + b.bytes, a.milli + b.milli} }

// usage returns the disk usage below dir; zero if dir does not exist. It stops early above enough
// bytes. The names in but, directly in dir, are skipped. Containers may change the files meanwhile.
// The walk never leaves dir or enters another mount; files created or deleted meanwhile may be
// missed.
func usage(ctx context.Context, t turns, dir string, enough int64, but ...string) (taken, error) {
	fd, err := unix.Open(dir, walkFlags&^unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return taken{}, nil
	}
	if err != nil {
		return taken{}, fmt.Errorf("opening %s: %w", dir, err)
	}
	root := os.NewFile(uintptr(fd), dir)
	defer root.Close()
	st, err := look(fd, "")
	if err != nil {
		return taken{}, fmt.Errorf("looking at %s: %w", dir, err)
	}
	if err := t.take(ctx); err != nil {
		return taken{}, err
	}
	w := walk{ctx: ctx, turns: t, mount: mountIn(&st), sum: taken{int64(st.Blocks) * 512, 1000}, enough: enough, but: but}
	defer func() {
		if !w.waiting {
			t.pass()
		}
	}()
	if err := w.folder(root, 1); err != nil {
		return w.sum, fmt.Errorf("measuring %s: %w", dir, err)
	}
	return w.sum, nil
}

// walkFlags open a directory without blocking and without following a link.
const walkFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC

type walk struct {
	ctx     context.Context
	turns   turns
	mount   mountOf
	sum     taken
	enough  int64
	but     []string
	spent   int  // entries visited in the current chunk
	waiting bool // the walk does not hold the semaphore
}

// spend counts n visited entries, and lets other walks go first when the chunk is used up.
func (w *walk) spend(n int) error {
	if w.spent += n; w.spent < chunk {
		return nil
	}
	w.spent = 0
	w.turns.pass()
	w.waiting = true
	if err := w.turns.take(w.ctx); err != nil {
		return err
	}
	w.waiting = false
	return nil
}

// folder adds the usage of the entries of f, recursively. A directory that is too deep is skipped;
// the others are counted.
func (w *walk) folder(f *os.File, depth int) error {
	fd := int(f.Fd())
	var deep error
	for w.sum.bytes <= w.enough {
		names, err := f.Readdirnames(64) // few, because each level holds a batch in memory
		if e := w.spend(1 + len(names)); e != nil {
			return e
		}
		for _, n := range names {
			if depth == 1 && slices.Contains(w.but, n) {
				continue
			}
			st, err := look(fd, n)
			if err != nil || mountIn(&st) != w.mount {
				continue
			}
			// A file with several hard links is visited once for each.
			folder := st.Mode&unix.S_IFMT == unix.S_IFDIR
			names := int64(1)
			if !folder {
				names = max(1, int64(st.Nlink))
			}
			w.sum = w.sum.plus(taken{int64(st.Blocks) * 512 / names, 1000 / names})
			if !folder {
				continue
			}
			switch err := w.enter(fd, n, depth); {
			case errors.Is(err, errTooDeep):
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

// enter adds the usage of a subdirectory. It may have been removed or replaced by another file.
func (w *walk) enter(parent int, name string, depth int) error {
	if depth == maxDepth {
		return errTooDeep
	}
	fd, err := unix.Openat(parent, name, walkFlags, 0)
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	if st, err := look(fd, ""); err != nil || mountIn(&st) != w.mount {
		return nil
	}
	return w.folder(f, depth+1)
}

// mountOf identifies a mount, even among mounts of one file system. A subPath is bind-mounted below
// the pod's directory, and its content does not belong to that directory. Kernels before 5.8
// distinguish only file systems.
type mountOf struct {
	major, minor uint32
	id           uint64
}

func mountIn(st *unix.Statx_t) mountOf {
	m := mountOf{major: st.Dev_major, minor: st.Dev_minor}
	if st.Mask&unix.STATX_MNT_ID != 0 {
		m.id = st.Mnt_id
	}
	return m
}

// look returns the status of a name in the directory fd, or of fd itself if name is "".
func look(fd int, name string) (st unix.Statx_t, err error) {
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT
	if name == "" {
		flags = unix.AT_EMPTY_PATH
	}
	err = unix.Statx(fd, name, flags, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &st)
	return st, err
}
