package local

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctlPointer calls ioctl on f with a request and the address of arg. The kernel reads or writes
// arg.
func ioctlPointer[T any](f *os.File, request uintptr, arg *T) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(arg))); errno != 0 {
		return errno
	}
	return nil
}
