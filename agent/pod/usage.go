package pod

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

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

// usage is the space on disk of what lies below dir, in bytes; 0 when there is nothing. It stops early once it has
// found more than enough. Containers write there meanwhile: nothing is followed out of dir or into another mount, and
// what comes and goes is counted or not.
func usage(ctx context.Context, t turns, dir string, enough int64) (int64, error) {
	root, err := os.OpenRoot(dir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer root.Close()
	w := walk{ctx: ctx, turns: t, root: root, todo: []string{"."}, enough: enough}
	if err := t.take(ctx); err != nil {
		return 0, err
	}
	defer func() {
		if !w.waiting {
			t.pass()
		}
	}()
	for len(w.todo) > 0 && w.sum <= enough {
		next := w.todo[len(w.todo)-1]
		w.todo = w.todo[:len(w.todo)-1]
		if err := w.folder(next); err != nil {
			return w.sum, err
		}
	}
	return w.sum, nil
}

type walk struct {
	ctx     context.Context
	turns   turns
	root    *os.Root
	device  uint64
	todo    []string // folders, below the root
	sum     int64
	enough  int64
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

// folder counts what a folder holds, and notes the folders in it.
func (w *walk) folder(name string) error {
	f, err := w.root.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil // it has gone, or become something else
	}
	defer f.Close()
	fd := int(f.Fd())
	if name == "." {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return err
		}
		w.device, w.sum = st.Dev, w.sum+st.Blocks*512
	}
	if err := w.spend(1 + strings.Count(name, "/")); err != nil {
		return err
	}
	for w.sum <= w.enough {
		names, err := f.Readdirnames(512)
		for _, n := range names {
			var st unix.Stat_t
			if unix.Fstatat(fd, n, &st, unix.AT_SYMLINK_NOFOLLOW) != nil || st.Dev != w.device {
				continue
			}
			// A file with several names is met once for each.
			folder := st.Mode&unix.S_IFMT == unix.S_IFDIR
			if size := st.Blocks * 512; folder || st.Nlink < 2 {
				w.sum += size
			} else {
				w.sum += size / int64(st.Nlink)
			}
			if folder {
				w.todo = append(w.todo, path.Join(name, n))
			}
		}
		if e := w.spend(len(names)); e != nil {
			return e
		}
		if err == io.EOF || err != nil {
			return nil
		}
	}
	return nil
}
