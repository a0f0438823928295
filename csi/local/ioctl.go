package local

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctl asks the kernel with a pointer to what it reads or writes.
func ioctl[T any](f *os.File, request uintptr, arg *T) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(arg))); errno != 0 {
		return errno
	}
	return nil
}
