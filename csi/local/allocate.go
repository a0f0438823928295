package local

import (
	"os"

	"golang.org/x/sys/unix"
)

// piece is what is asked for at once of a file system that was interrupted.
const piece = 64 * mib

// allocate gives a file the blocks of its first size bytes, and makes it as long as that.
func allocate(f *os.File, size int64) error {
	return inPieces(size, func(at, n int64) error { return unix.Fallocate(int(f.Fd()), 0, at, n) })
}

// inPieces takes all at once. Signals interrupt that, of which Go's runtime sends itself many: tmpfs, before Linux 6.10, then gives
// back all that the call took. So the whole is taken in pieces after that, each as often as it needs.
func inPieces(size int64, take func(at, n int64) error) error {
	err := take(0, size)
	if err != unix.EINTR {
		return err
	}
	for at := int64(0); at < size; {
		n := min(piece, size-at)
		switch err := take(at, n); err {
		case nil:
			at += n
		case unix.EINTR:
		default:
			return err
		}
	}
	return nil
}
