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

// chunk is how many entries are looked at in one turn of a walk: pods with millions of files hold up the measuring of
// others no longer than that.
const chunk = 4096

// turns lets one walk at a time do a chunk of its work.
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

// maxDepth is how deep folders may lie in one another in what is measured. A walk keeps one open for each level.
const maxDepth = 256

// errTooDeep says that a walk was given up.
var errTooDeep = fmt.Errorf("folders lie more than %d deep in one another", maxDepth)

// taken is what files have taken of a disk.
type taken struct {
	bytes int64
	milli int64 // inodes, in thousandths: each of its names has a part of a file
}

func (a taken) plus(b taken) taken { return taken{a.bytes + b.bytes, a.milli + b.milli} }

// usage is what lies below dir; nothing where that is not there. It stops early once it has
// found more bytes than enough. Containers write there meanwhile: nothing is followed out of dir or into another mount, and
// what comes and goes is counted or not. Names in dir that are in but are not looked at.
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

// walkFlags open a folder, wait for nothing and follow no link.
const walkFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC

type walk struct {
	ctx     context.Context
	turns   turns
	mount   mountOf
	sum     taken
	enough  int64
	but     []string
	spent   int  // of the chunk
	waiting bool // it is another's turn
}

// spend pays for a look at something, and lets others go first when the chunk is used up.
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

// folder counts what a folder holds, with the folders in it. A folder too deep is given up, the others are counted.
func (w *walk) folder(f *os.File, depth int) error {
	fd := int(f.Fd())
	var deep error
	for w.sum.bytes <= w.enough {
		names, err := f.Readdirnames(64) // few: each level holds that many
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
			// A file with several names is met once for each.
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
		if err != nil { // the end, or it has gone
			break
		}
	}
	return deep
}

// enter counts what the folder of that name holds. It may have gone, or become something else.
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

// mountOf tells one mount from others, also from one of the same file system: a subPath is bound below the pod's own
// folder, and what is in it is not the folder's. Kernels before 5.8 tell file systems only.
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

// look asks for a name in the folder fd, or for the folder itself.
func look(fd int, name string) (st unix.Statx_t, err error) {
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT
	if name == "" {
		flags = unix.AT_EMPTY_PATH
	}
	err = unix.Statx(fd, name, flags, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &st)
	return st, err
}
