package shim

import (
	"syscall"
	"unsafe"
)

// Constants that package syscall lacks.
const (
	prSetChildSubreaper = 36
	prSetNoNewPrivs     = 38
	pAll                = 0
	wNoWait             = 0x1000000
	clockRealtime       = 0
	cloneNewNet         = syscall.CLONE_NEWNET
)

func setSubreaper() error {
	if _, _, e := syscall.RawSyscall6(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0, 0, 0, 0); e != 0 {
		return e
	}
	return nil
}

func setNoNewPrivs() error {
	if _, _, e := syscall.RawSyscall6(syscall.SYS_PRCTL, prSetNoNewPrivs, 1, 0, 0, 0, 0); e != 0 {
		return e
	}
	return nil
}

// waitAny blocks until a child process has exited, without reaping it.
func waitAny() error {
	var info [128]byte
	_, _, e := syscall.Syscall6(syscall.SYS_WAITID, pAll, 0, uintptr(unsafe.Pointer(&info[0])),
		syscall.WEXITED|wNoWait, 0, 0)
	if e != 0 {
		return e
	}
	return nil
}

// unixNano returns the current time in nanoseconds since 1970.
func unixNano() int64 {
	var ts syscall.Timespec
	if _, _, e := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clockRealtime, uintptr(unsafe.Pointer(&ts)),
		0); e != 0 {
		return 0
	}
	return ts.Nano()
}

type winsize struct{ rows, cols, x, y uint16 }

func setSize(fd int, w, h int64) error {
	s := winsize{rows: uint16(h), cols: uint16(w)}
	if _, _, e := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), syscall.TIOCSWINSZ,
		uintptr(unsafe.Pointer(&s))); e != 0 {
		return e
	}
	return nil
}

func setNamespace(fd int, kind uintptr) error {
	if _, _, e := syscall.RawSyscall(sysSetns, uintptr(fd), kind, 0); e != 0 {
		return e
	}
	return nil
}

func setHostname(name string) error { return syscall.Sethostname([]byte(name)) }

// readFile reads a whole small file.
func readFile(path string) ([]byte, error) {
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer syscall.Close(fd)
	var out []byte
	var buf [512]byte
	for {
		n, err := syscall.Read(fd, buf[:])
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return out, err
		}
		out = append(out, buf[:n]...)
	}
}

func writeAll(fd int, data []byte) error {
	for len(data) > 0 {
		n, err := syscall.Write(fd, data)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

// replaceFile replaces a file atomically. If sync is true, the new content also survives a power
// failure. replaceFile does not use internal/durable: the shim does not link package os, to save
// memory.
func replaceFile(path, content string, sync bool) error {
	tmp := path + ".new"
	fd, err := syscall.Open(tmp, syscall.O_WRONLY|syscall.O_CREAT|syscall.O_TRUNC|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	err = writeAll(fd, []byte(content))
	if err == nil && sync {
		err = syscall.Fsync(fd)
	}
	if e := syscall.Close(fd); err == nil {
		err = e
	}
	if err != nil {
		_ = syscall.Unlink(tmp)
		return err
	}
	if err := syscall.Rename(tmp, path); err != nil || !sync {
		return err
	}
	return syncDirectory(path)
}

// syncDirectory syncs the directory that contains path.
func syncDirectory(path string) error {
	i := len(path) - 1
	for i > 0 && path[i] != '/' {
		i--
	}
	fd, err := syscall.Open(path[:max(i, 1)], syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	err = syscall.Fsync(fd)
	syscall.Close(fd)
	return err
}
