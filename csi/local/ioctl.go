package local

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctlPointer calls ioctl with a pointer to the data that the kernel reads or writes.
func ioctlPointer[T any](f *os.File, request uintptr, arg *T) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(arg))); errno != 0 {
		return errno
	}
	return nil
}
