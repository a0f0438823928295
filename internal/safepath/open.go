//go:build linux

// Package safepath opens and removes files with names that an untrusted party chose: inside a
// container's root, an image or a volume. Any name may be a symbolic link that leads outside, a
// FIFO without a writer, or a device that acts on open.
//
// A name is first opened with O_PATH, which has no side effects. It is opened for reading only if
// it is a regular file.
package safepath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// maxLookups is how many times openat2 is called for a path if concurrent renames make it fail.
const maxLookups = 16

// OpenInRoot opens name as a process with the root directory dir would: absolute symbolic links and
// ".." stay below dir. It returns an O_PATH descriptor, which has a status and a ProcPath but
// cannot be read.
func OpenInRoot(dir, name string) (*os.File, error) {
	return openResolved(dir, name, unix.RESOLVE_IN_ROOT)
}

// OpenBeneath opens name below dir and returns an O_PATH descriptor. A name with a symbolic link
// that leads out of dir, or with an absolute symbolic link, is an error.
func OpenBeneath(dir, name string) (*os.File, error) {
	return openResolved(dir, name, unix.RESOLVE_BENEATH)
}

func openResolved(dir, name string, how uint64) (*os.File, error) {
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(root)
	for range maxLookups {
		fd, err := unix.Openat2(root, name, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC,
			Resolve: how | unix.RESOLVE_NO_MAGICLINKS})
		if err == nil {
			return os.NewFile(uintptr(fd), name), nil
		}
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return nil, &fs.PathError{Op: "open", Path: name, Err: err}
		}
	}
	return nil, &fs.PathError{Op: "open", Path: name, Err: unix.EAGAIN}
}

// ProcPath returns a path to the open file f. It stays valid if the file is renamed or its name is
// replaced.
func ProcPath(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

// ErrNotRegular is returned for a path that is not a regular file.
var ErrNotRegular = errors.New("not a regular file")

// OpenRegularInRoot opens a regular file for reading. name is resolved as by OpenInRoot. For any
// other kind of file the error is ErrNotRegular.
func OpenRegularInRoot(dir, name string) (*os.File, error) {
	held, err := OpenInRoot(dir, name)
	if err != nil {
		return nil, err
	}
	defer held.Close()
	st, err := held.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: %w", name, ErrNotRegular)
	}
	return os.OpenFile(ProcPath(held), os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// OpenRegular opens the regular file at path for reading. For a symbolic link or any other kind of
// file the error is ErrNotRegular. If another process holds a lease on the file, the error is
// unix.EAGAIN.
func OpenRegular(path string) (*os.File, error) {
	held, err := openRegularPath(path)
	if err != nil {
		return nil, err
	}
	defer held.Close()
	return os.OpenFile(ProcPath(held), os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// openRegularPath returns an O_PATH descriptor of the regular file at path. For a symbolic link,
// FIFO, device or directory the error is ErrNotRegular.
func openRegularPath(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	held := os.NewFile(uintptr(fd), path)
	st, err := held.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s: %w", path, ErrNotRegular)
	}
	if err != nil {
		held.Close()
		return nil, err
	}
	return held, nil
}
