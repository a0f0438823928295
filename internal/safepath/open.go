//go:build linux

// Package safepath opens, and removes, what somebody else chose: names inside a container's root, an image or a volume,
// where any name may be a link that leads out, a FIFO that nobody writes to, or a device that acts on being opened.
//
// What a name leads to is first held by a descriptor that can only be looked at (O_PATH), and opened for reading when
// it is known to be a regular file.
package safepath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// maxLookups bounds how often a look-up is repeated that a rename on the way has disturbed.
const maxLookups = 16

// OpenInRoot finds name as a process does whose root is dir: absolute links and ".." stay below it. The file can be asked
// for its status, and named by Path; it cannot be read.
func OpenInRoot(dir, name string) (*os.File, error) {
	return openResolved(dir, name, unix.RESOLVE_IN_ROOT)
}

// OpenBeneath finds name below dir. A link that leads out of dir is an error, and so is an absolute one.
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

// ProcPath names what f holds, whatever its own name leads to by now.
func ProcPath(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

// ErrNotRegular says that a name is no regular file, which alone is read.
var ErrNotRegular = errors.New("not a regular file")

// OpenRegularInRoot opens the regular file that name leads to in the root dir.
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

// OpenRegular opens the regular file at path for reading, and neither what a link there leads to nor anything else. It does
// not wait for a process that holds a lease on the file: the error is then unix.EAGAIN.
func OpenRegular(path string) (*os.File, error) {
	held, err := openRegularPath(path)
	if err != nil {
		return nil, err
	}
	defer held.Close()
	return os.OpenFile(ProcPath(held), os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// openRegularPath returns an O_PATH descriptor of the regular file at path. A link, FIFO or device is ErrNotRegular.
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
