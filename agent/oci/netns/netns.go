// Package netns creates network namespaces that outlive their processes, and connects to ports in
// them.
package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// RunInThread calls run on a thread of its own and returns the result of run. The thread exits when
// run returns, so run may change its namespaces and cgroups. The process's first thread cannot
// exit, so it is never used.
func RunInThread(run func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			done <- RunInThread(run) // this thread stays locked meanwhile, so the call gets another one
			runtime.UnlockOSThread()
			return
		}
		done <- run() // never unlocked: the Go runtime destroys the thread
	}()
	return <-done
}

// CreatePinned creates a network namespace with its loopback up, and pins it by a bind mount at
// path. The namespace exists until the mount is removed and its last process has exited.
func CreatePinned(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("create network namespace: %w", err)
	}
	f.Close()
	err = RunInThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := setLoopbackUp(); err != nil {
			return fmt.Errorf("set up loopback: %w", err)
		}
		if err := disableRedirects(); err != nil {
			return err
		}
		ownPath := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
		if err := unix.Mount(ownPath, path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("pin at %s: %w", path, err)
		}
		return nil
	})
	if err != nil {
		os.Remove(path)
		return fmt.Errorf("create network namespace: %w", err)
	}
	return nil
}

// disableRedirects disables ICMP redirects for interfaces in the thread's network namespace. With
// redirects, another pod could divert traffic to itself. The pod's own sysctls are set later and
// may enable redirects again.
func disableRedirects() error {
	for _, family := range []string{"ipv4", "ipv6"} {
		for _, which := range []string{"all", "default"} {
			path := "/proc/sys/net/" + family + "/conf/" + which + "/accept_redirects"
			// a kernel without IPv6 has no such file
			if err := ignoreNotExist(os.WriteFile(path, []byte("0"), 0o644)); err != nil {
				return fmt.Errorf("ignore redirects: %w", err)
			}
		}
	}
	return nil
}

func setLoopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}

// RemoveUnpinned removes the file at path if no namespace is mounted on it. Such a file is left if
// the agent was killed before the mount. Network plugins handle a missing namespace, but fail on a
// regular file.
func RemoveUnpinned(path string) error {
	var fs unix.Statfs_t
	err := unix.Statfs(path, &fs)
	switch {
	case err == unix.ENOENT, err == nil && fs.Type == unix.NSFS_MAGIC:
		return nil
	case err != nil:
		return fmt.Errorf("stat network namespace %s: %w", path, err)
	}
	return ignoreNotExist(os.Remove(path))
}

// RemovePinned unmounts a pinned network namespace and removes its file. It succeeds if the file
// does not exist.
func RemovePinned(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err == unix.EINVAL || err == unix.ENOENT {
			break // not mounted any more
		}
		if err != nil {
			return fmt.Errorf("unpin network namespace %s: %w", path, err)
		}
	}
	return ignoreNotExist(os.Remove(path))
}

// DialPort connects to a localhost port in a network namespace; netns "" is the host's. A socket
// belongs to the namespace of the thread that created it, whichever thread uses it.
func DialPort(ctx context.Context, netns string, port int32) (net.Conn, error) {
	if port <= 0 || port > 65535 {
		return nil, fmt.Errorf("port %d is out of range", port)
	}
	var last error
	for _, addr := range []unix.Sockaddr{
		&unix.SockaddrInet4{Port: int(port), Addr: [4]byte{127, 0, 0, 1}},
		&unix.SockaddrInet6{Port: int(port), Addr: [16]byte{15: 1}},
	} {
		c, err := dialAddress(ctx, netns, addr)
		if err == nil {
			return c, nil
		}
		if last == nil {
			last = err
		}
	}
	return nil, last
}

func dialAddress(ctx context.Context, netns string, addr unix.Sockaddr) (net.Conn, error) {
	family := unix.AF_INET
	if _, six := addr.(*unix.SockaddrInet6); six {
		family = unix.AF_INET6
	}
	fd := -1
	err := RunInThread(func() error {
		if netns != "" {
			ns, err := unix.Open(netns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(ns)
			if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
				return err
			}
		}
		var err error
		fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	// Localhost accepts or refuses at once; the timeout is for a full backlog.
	timeout := 10 * time.Second
	if d, ok := ctx.Deadline(); ok {
		timeout = min(timeout, max(time.Until(d), time.Millisecond))
	}
	tv := unix.NsecToTimeval(timeout.Nanoseconds())
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv)
	if err := unix.Connect(fd, addr); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("connect", err)
	}
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{})
	f := os.NewFile(uintptr(fd), "port-forward")
	defer f.Close()
	return net.FileConn(f)
}

// ignoreNotExist returns nil for a "does not exist" error, else err.
func ignoreNotExist(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
