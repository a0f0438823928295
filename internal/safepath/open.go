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

// maxLookups bounds how often a lookup is repeated after a concurrent rename.
const maxLookups = 16

// OpenInRoot resolves name as a process does that has dir as its root: absolute links and ".." stay
// below dir. The result is an O_PATH descriptor: it has a status and a ProcPath, and cannot be
// read.
func OpenInRoot(dir, name string) (*os.File, error) {
	return openResolved(dir, name, unix.RESOLVE_IN_ROOT)
}

// OpenBeneath resolves name below dir and returns an O_PATH descriptor. A link that leads out of
// dir, and every absolute link, is an error.
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

// ProcPath returns a path to the open file f that stays valid if f's own name is moved or replaced.
func ProcPath(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

// ErrNotRegular is the error for a name that is not a regular file.
var ErrNotRegular = errors.New("not a regular file")

// OpenRegularInRoot opens the regular file with the given name in the root dir for reading.
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

// OpenRegular opens the regular file at path for reading. A symbolic link or any other file is
// ErrNotRegular. If another process holds a lease on the file, the error is unix.EAGAIN.
func OpenRegular(path string) (*os.File, error) {
	held, err := openRegularPath(path)
	if err != nil {
		return nil, err
	}
	defer held.Close()
	return os.OpenFile(ProcPath(held), os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// openRegularPath returns an O_PATH descriptor of the regular file at path. A link, FIFO or device
// is ErrNotRegular.
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
