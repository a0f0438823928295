package local

import (
	"os"

	"golang.org/x/sys/unix"
)

// allocationStep is the number of bytes that allocateInSteps allocates at a time after a signal has
// interrupted the allocation of the whole file.
const allocationStep = 64 * mib

// allocateBlocks allocates disk blocks for the first size bytes of a file. If the file is shorter,
// it is extended to size.
func allocateBlocks(f *os.File, size int64) error {
	return allocateInSteps(size, func(at, n int64) error { return unix.Fallocate(int(f.Fd()), 0, at, n) })
}

// allocateInSteps calls allocate for all size bytes at once. If a signal interrupts this call, it
// calls allocate for one allocationStep after the other, and repeats each interrupted step. The Go
// runtime sends itself many signals. On tmpfs before Linux 6.10, an interrupted call releases
// everything that it has allocated.
func allocateInSteps(size int64, allocate func(at, n int64) error) error {
	err := allocate(0, size)
	if err != unix.EINTR {
		return err
	}
	for at := int64(0); at < size; {
		n := min(allocationStep, size-at)
		switch err := allocate(at, n); err {
		case nil:
			at += n
		case unix.EINTR:
		default:
			return err
		}
	}
	return nil
}
