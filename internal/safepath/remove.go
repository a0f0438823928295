//go:build linux

package safepath

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// maxOpenDepth is how many levels of directories RemoveAll descends. It keeps one descriptor open
// per level. Deeper directories are first moved to the top directory.
const maxOpenDepth = 64

// RemoveAll removes path and everything below it, like os.RemoveAll. No other process may create
// files there at the same time. It uses few descriptors and little memory, however deeply
// directories are nested: it moves deeper directories to the top first. It follows no symbolic
// link, and removes nothing from another mount.
func RemoveAll(path string) error {
	err := unix.Unlink(path)
	if err == nil || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	if !errors.Is(err, unix.EISDIR) {
		return &os.PathError{Op: "remove", Path: path, Err: err}
	}
	fd, err := unix.Open(path, removeFlags, 0)
	if err != nil {
		return &os.PathError{Op: "remove", Path: path, Err: err}
	}
	r := remover{top: os.NewFile(uintptr(fd), path)}
	defer r.top.Close()
	if err := r.removeContents(r.top, 1); err != nil {
		return err
	}
	if err := unix.Rmdir(path); err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "remove", Path: path, Err: err}
	}
	return nil
}

// RemoveContents removes the contents of the directory path like RemoveAll, and keeps the directory
// itself. It stops after it has removed about limit names, and then returns remaining as true. A
// missing directory counts as empty.
func RemoveContents(path string, limit int) (remaining bool, err error) {
	fd, err := unix.Open(path, removeFlags, 0)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, &os.PathError{Op: "empty", Path: path, Err: err}
	}
	r := remover{top: os.NewFile(uintptr(fd), path), limit: limit}
	defer r.top.Close()
	if err := r.removeContents(r.top, 1); errors.Is(err, errLimitReached) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	return false, nil
}

// errLimitReached means that the maximum number of names has been removed.
var errLimitReached = errors.New("limit of removed names reached")

const removeFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC

type remover struct {
	top     *os.File
	moved   int // number of directories moved to the top
	limit   int // maximum number of names to remove; 0 = no limit
	removed int // number of names removed
}

// removeContents removes the contents of the directory f, which is at the given depth. It removes
// everything that can be removed, and returns an error if any entry remains.
func (r *remover) removeContents(f *os.File, depth int) error {
	for {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return err
		}
		removed := 0
		var failed error
		for {
			names, err := f.Readdirnames(256)
			for _, n := range names {
				if r.limit > 0 && r.removed >= r.limit {
					return errLimitReached
				}
				switch err := r.removeEntry(f, n, depth); {
				case errors.Is(err, errLimitReached):
					return err
				case err != nil:
					failed = err
				default:
					removed++
					r.removed++
				}
			}
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
		}
		// Removing entries changes the order of a directory that is being read. It is empty only if
		// a complete read finds nothing.
		if removed == 0 {
			return failed
		}
	}
}

// removeEntry removes one entry of the directory f. A directory below maxOpenDepth is not removed
// but moved to the top directory.
func (r *remover) removeEntry(f *os.File, name string, depth int) error {
	parent := int(f.Fd())
	fail := func(err error) error {
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		return &os.PathError{Op: "remove", Path: filepath.Join(f.Name(), name), Err: err}
	}
	err := unix.Unlinkat(parent, name, 0)
	if !errors.Is(err, unix.EISDIR) {
		return fail(err)
	}
	if err = unix.Unlinkat(parent, name, unix.AT_REMOVEDIR); !errors.Is(err, unix.ENOTEMPTY) {
		return fail(err)
	}
	if depth == maxOpenDepth {
		for {
			r.moved++
			err := unix.Renameat2(parent, name, int(r.top.Fd()), ".deep-"+strconv.Itoa(r.moved), unix.RENAME_NOREPLACE)
			if !errors.Is(err, unix.EEXIST) {
				return fail(err)
			}
		}
	}
	fd, err := unix.Openat(parent, name, removeFlags, 0)
	if err != nil {
		return fail(err)
	}
	sub := os.NewFile(uintptr(fd), filepath.Join(f.Name(), name))
	defer sub.Close()
	if err := r.removeContents(sub, depth+1); err != nil {
		return err
	}
	return fail(unix.Unlinkat(parent, name, unix.AT_REMOVEDIR))
}
