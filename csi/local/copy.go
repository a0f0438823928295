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

// copyBlockBytes is the number of bytes that copyDifferences compares and writes at a time.
const copyBlockBytes = 1 << 20

// mountpointOf returns a path at which the file system of the volume with this ID is mounted, or
// "". busy is true if the volume is in use without such a path. It is then a block device, or is
// mounted in another mount namespace.
func (d *Driver) mountpointOf(id string) (mountPoint string, busy bool, err error) {
	l, err := findLoopDevice(d.store.imageFile(id))
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

// copyVolume writes a point-in-time copy of the backing file of the volume with this ID to path. On
// a disk with reflinks, both files share their blocks (shared is true), and the copy takes no time.
// Otherwise it first copies the data while the volume is in use. Then it freezes the file system
// and copies the differences. The caller must hold the lock of the volume.
func (d *Driver) copyVolume(ctx context.Context, id, path string) (shared bool, err error) {
	at, busy, err := d.mountpointOf(id)
	switch {
	case err != nil:
		return false, err
	case busy:
		return false, errBusy
	}
	return copyImage(ctx, d.store.imageFile(id), path, func(do func(context.Context) error) error {
		if at == "" {
			return do(ctx)
		}
		return d.withFrozen(ctx, at, do)
	})
}

// errBusy is returned if a volume that is in use cannot be copied, because it has no file system
// that can be frozen.
var errBusy = errors.New("it is in use in a way that cannot be frozen: it can be copied while no pod uses it")

// copyImage copies the backing file at the path source to a file at the path target. It copies once
// while the file may change, and then calls whileUnchanged with a function that copies the
// differences. The file must not change while that function runs, so that the result is a
// point-in-time copy. shared reports whether the files share blocks.
func copyImage(ctx context.Context, source, target string, whileUnchanged func(func(context.Context) error) error) (
	shared bool, err error,
) {
	src, err := os.OpenFile(source, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return false, err
	}
	defer src.Close()
	if err := os.MkdirAll(filepath.Dir(target), 0o700); err != nil {
		return false, err
	}
	dst, err := os.OpenFile(target, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	// This first clone only tests whether the disk supports reflinks; the last clone replaces it.
	shared = unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) == nil
	if !shared {
		if err := copyDifferences(ctx, dst, src); err != nil {
			return false, err
		}
	}
	err = whileUnchanged(func(ctx context.Context) error {
		if shared {
			return unix.IoctlFileClone(int(dst.Fd()), int(src.Fd()))
		}
		return copyDifferences(ctx, dst, src)
	})
	if err != nil {
		return shared, err
	}
	return shared, dst.Sync()
}

// copyDifferences copies the content of src to dst. It does not write blocks that are equal, and
// does not read blocks that are holes in both files.
func copyDifferences(ctx context.Context, dst, src *os.File) error {
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
	a, b := make([]byte, copyBlockBytes), make([]byte, copyBlockBytes)
	for off := int64(0); ; off += copyBlockBytes {
		if err := ctx.Err(); err != nil {
			return err
		}
		if off, err = nextData(off, end, src, dst); err != nil || off >= end {
			return err
		}
		n := min(copyBlockBytes, end-off)
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

// nextData returns the offset of the first block at or after off that contains data in one of the
// files. It returns end if no such block precedes end.
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
	return next / copyBlockBytes * copyBlockBytes, nil
}

// eachRecord calls f with the record of each volume and each snapshot. It includes records that a
// later release has written.
func (s *volumeStore) eachRecord(f func(id string, r volumeRecord)) error {
	for _, dir := range []string{recordsDir, snapshotsDir} {
		entries, err := os.ReadDir(filepath.Join(s.cfg.Root, dir))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		for _, e := range entries {
			id, whole := strings.CutSuffix(e.Name(), ".json")
			if !whole {
				continue // an unfinished write of a record
			}
			r, ok, err := readRecord(filepath.Join(s.cfg.Root, dir, e.Name()))
			if err != nil && !errors.Is(err, errNewerRelease) {
				return fmt.Errorf("record of %s: %w", id, err)
			}
			if ok {
				f(id, r)
			}
		}
	}
	return nil
}
