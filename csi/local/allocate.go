package local

import (
	"os"

	"golang.org/x/sys/unix"
)

// piece is what is asked for at once of a file system that was interrupted.
const piece = 64 * mib

// allocate gives a file the blocks of its first size bytes, and makes it as long as that. Signals interrupt it, and Go's runtime
// sends itself many: tmpfs then gives back all that the call took. So the rest is taken in pieces, each as often as it needs.
func allocate(f *os.File, size int64) error {
	err := unix.Fallocate(int(f.Fd()), 0, 0, size)
	if err != unix.EINTR {
		return err
	}
	for at := int64(0); at < size; {
		n := min(piece, size-at)
		switch err := unix.Fallocate(int(f.Fd()), 0, at, n); err {
		case nil:
			at += n
		case unix.EINTR:
		default:
			return err
		}
	}
	return nil
}
