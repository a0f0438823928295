package local

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// copyGrain is how much is compared and written at once, in bytes.
const copyGrain = 1 << 20

// mountOf is where the file system of a volume is mounted; "" when it is not. busy says that its device is used in
// another way: as the raw device that a pod has, or by a mount that is not seen here.
func (d *Driver) mountOf(id string) (at string, busy bool, err error) {
	l, err := attached(d.image(id))
	if errors.Is(err, os.ErrNotExist) || err == nil && l == nil {
		return "", false, nil
	}
	if err != nil {
		return "", false, err
	}
	defer l.Close()
	all, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.Major != loopMajor || m.Minor != int(l.number) || m.Root != "/", false
	})
	if err != nil {
		return "", false, err
	}
	if len(all) == 0 {
		return "", true, nil
	}
	return all[0].Mountpoint, false, nil
}

// copyVolume makes a file hold what a volume holds at one moment. Where the disk has reflinks the files share their blocks
// from then on, which takes no time. Elsewhere the data are copied while they change, and what changed meanwhile is copied
// again while nothing may be written. The source is locked.
func (d *Driver) copyVolume(ctx context.Context, id, path string) (shared bool, err error) {
	at, busy, err := d.mountOf(id)
	switch {
	case err != nil:
		return false, err
	case busy:
		return false, errBusy
	}
	return copyImage(ctx, d.image(id), path, func(do func(context.Context) error) error {
		if at == "" {
			return do(ctx)
		}
		return d.frozen(ctx, at, do)
	})
}

// errBusy says that nobody can have the writers of a volume wait.
var errBusy = errors.New("it is in use in a way that cannot be held still for a moment: it can be copied while no pod uses it")

// copyImage makes a file hold what an image holds at the moment at which still runs a function.
func copyImage(ctx context.Context, from, to string, still func(func(context.Context) error) error) (shared bool, err error) {
	src, err := os.OpenFile(from, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return false, err
	}
	defer src.Close()
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return false, err
	}
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	// The first copy is of something that nobody wants, and tells whether there are reflinks.
	shared = unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) == nil
	if !shared {
		if err := alike(ctx, dst, src); err != nil {
			return false, err
		}
	}
	err = still(func(ctx context.Context) error {
		if shared {
			return unix.IoctlFileClone(int(dst.Fd()), int(src.Fd()))
		}
		return alike(ctx, dst, src)
	})
	if err != nil {
		return shared, err
	}
	return shared, dst.Sync()
}

// alike makes a file hold what another holds. What is the same already is not written, and what is empty in both not read.
func alike(ctx context.Context, dst, src *os.File) error {
	end, err := src.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if st, err := dst.Stat(); err != nil {
		return err
	} else if st.Size() < end {
		if err := dst.Truncate(end); err != nil {
			return err
		}
	}
	a, b := make([]byte, copyGrain), make([]byte, copyGrain)
	for off := int64(0); ; off += copyGrain {
		if err := ctx.Err(); err != nil {
			return err
		}
		if off, err = nextData(off, end, src, dst); err != nil || off >= end {
			return err
		}
		n := min(copyGrain, end-off)
		if _, err := src.ReadAt(a[:n], off); err != nil {
			return fmt.Errorf("reading %s: %w", src.Name(), err)
		}
		if _, err := dst.ReadAt(b[:n], off); err != nil {
			return fmt.Errorf("reading %s: %w", dst.Name(), err)
		}
		if bytes.Equal(a[:n], b[:n]) {
			continue
		}
		if _, err := dst.WriteAt(a[:n], off); err != nil {
			return fmt.Errorf("writing %s: %w", dst.Name(), err)
		}
	}
}

// nextData is the first grain from an offset on in which one of the files has data; end when none has.
func nextData(off, end int64, files ...*os.File) (int64, error) {
	next := end
	for _, f := range files {
		at, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		switch {
		case errors.Is(err, unix.ENXIO):
		case err != nil:
			return 0, fmt.Errorf("looking for data in %s: %w", f.Name(), err)
		default:
			next = min(next, at)
		}
	}
	if next == end {
		return end, nil
	}
	return next / copyGrain * copyGrain, nil
}

// each calls a function with the record of every volume and every snapshot, of later releases too.
func (d *Driver) each(f func(id string, r record)) error {
	for _, dir := range []string{recordsDir, snapshotsDir} {
		entries, err := os.ReadDir(filepath.Join(d.cfg.Root, dir))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		for _, e := range entries {
			id, whole := strings.CutSuffix(e.Name(), ".json")
			if !whole {
				continue // half of a record
			}
			r, ok, err := read(filepath.Join(d.cfg.Root, dir, e.Name()))
			if err != nil && !errors.Is(err, errLater) {
				return fmt.Errorf("record of %s: %w", id, err)
			}
			if ok {
				f(id, r)
			}
		}
	}
	return nil
}
