package local

import (
	"os"

	"golang.org/x/sys/unix"
)

// allocationStep is the number of bytes of each allocation after a larger one was interrupted by a
// signal.
const allocationStep = 64 * mib

// allocateBlocks allocates disk blocks for the first size bytes of a file. If the file is shorter,
// it is extended to size.
func allocateBlocks(f *os.File, size int64) error {
	return allocateInSteps(size, func(at, n int64) error { return unix.Fallocate(int(f.Fd()), 0, at, n) })
}

// allocateInSteps calls take to allocate size bytes at once. If a signal interrupts this call, it
// calls take for one allocationStep after the other, and repeats each interrupted step. The Go
// runtime sends itself many signals, and tmpfs before Linux 6.10 releases everything when a call is
// interrupted.
func allocateInSteps(size int64, take func(at, n int64) error) error {
	err := take(0, size)
	if err != unix.EINTR {
		return err
	}
	for at := int64(0); at < size; {
		n := min(allocationStep, size-at)
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
