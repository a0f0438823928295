package oci

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// inThread runs f on a thread that may change its namespaces and cgroups. The thread exits when f
// returns. The process's first thread cannot exit, so it is never used.
func inThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			done <- inThread(f) // this thread stays locked meanwhile, so the call gets another one
			runtime.UnlockOSThread()
			return
		}
		done <- f() // never unlocked: the Go runtime destroys the thread
	}()
	return <-done
}

// makeNetns creates a network namespace with its loopback up and pins it by a bind mount at path.
// It exists until the mount is removed and its last process has exited.
func makeNetns(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("make network namespace: %w", err)
	}
	f.Close()
	err = inThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := loopbackUp(); err != nil {
			return fmt.Errorf("set up loopback: %w", err)
		}
		if err := ignoreRedirects(); err != nil {
			return err
		}
		own := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
		if err := unix.Mount(own, path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("pin at %s: %w", path, err)
		}
		return nil
	})
	if err != nil {
		os.Remove(path)
		return fmt.Errorf("make network namespace: %w", err)
	}
	return nil
}

// ignoreRedirects disables ICMP redirects for interfaces in the thread's network namespace. With
// redirects, another pod could divert traffic to itself. The pod's own sysctls are set later and
// may override it.
func ignoreRedirects() error {
	for _, family := range []string{"ipv4", "ipv6"} {
		for _, which := range []string{"all", "default"} {
			path := "/proc/sys/net/" + family + "/conf/" + which + "/accept_redirects"
			if err := ignoreMissing(os.WriteFile(path, []byte("0"), 0o644)); err != nil { // a kernel without IPv6 has no such file
				return fmt.Errorf("ignore redirects: %w", err)
			}
		}
	}
	return nil
}

func loopbackUp() error {
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

// removeUnpinned removes the file at path if no namespace is mounted on it: the agent was killed in
// between. Network plugins handle a missing namespace, but fail on a regular file.
func removeUnpinned(path string) error {
	var on unix.Statfs_t
	err := unix.Statfs(path, &on)
	switch {
	case err == unix.ENOENT, err == nil && on.Type == unix.NSFS_MAGIC:
		return nil
	case err != nil:
		return fmt.Errorf("look at network namespace %s: %w", path, err)
	}
	return ignoreMissing(os.Remove(path))
}

// removeNetns unmounts and removes a pinned network namespace; safe if it does not exist.
func removeNetns(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err == unix.EINVAL || err == unix.ENOENT {
			break // not mounted any more
		}
		if err != nil {
			return fmt.Errorf("unpin network namespace %s: %w", path, err)
		}
	}
	return ignoreMissing(os.Remove(path))
}

// PortForward implements agent.Runtime. It connects conn to 127.0.0.1:port (or ::1) in the sandbox,
// and returns when both directions have ended.
func (r *Runtime) PortForward(ctx context.Context, sandboxID string, port int32, conn io.ReadWriteCloser) error {
	defer conn.Close()
	if err := r.wait(ctx); err != nil {
		return err
	}
	s, err := r.sandbox(sandboxID)
	if err != nil {
		return err
	}
	path := ""
	if !s.hostNetwork() {
		path = r.netnsPath(s.rec.ID)
	}
	inside, err := dialInside(ctx, path, port)
	if err != nil {
		return fmt.Errorf("port %d of sandbox %s: %w", port, sandboxID, err)
	}
	defer inside.Close()
	stop := context.AfterFunc(ctx, func() { inside.Close(); conn.Close() })
	defer stop()
	sent := make(chan error, 1)
	go func() {
		_, err := io.Copy(inside, conn)
		if t, ok := inside.(*net.TCPConn); ok {
			_ = t.CloseWrite()
		}
		sent <- err
	}()
	_, err = io.Copy(conn, inside)
	conn.Close() // there will be no more responses, so stop reading from the client
	<-sent
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// dialInside connects to a localhost port in a network namespace; netns "" is the host's. A socket
// belongs to the namespace of the thread that created it, whichever thread uses it.
func dialInside(ctx context.Context, netns string, port int32) (net.Conn, error) {
	if port <= 0 || port > 65535 {
		return nil, fmt.Errorf("port %d is out of range", port)
	}
	var last error
	for _, addr := range []unix.Sockaddr{
		&unix.SockaddrInet4{Port: int(port), Addr: [4]byte{127, 0, 0, 1}},
		&unix.SockaddrInet6{Port: int(port), Addr: [16]byte{15: 1}},
	} {
		c, err := dialOne(ctx, netns, addr)
		if err == nil {
			return c, nil
		}
		if last == nil {
			last = err
		}
	}
	return nil, last
}

func dialOne(ctx context.Context, netns string, addr unix.Sockaddr) (net.Conn, error) {
	family := unix.AF_INET
	if _, six := addr.(*unix.SockaddrInet6); six {
		family = unix.AF_INET6
	}
	fd := -1
	err := inThread(func() error {
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

// installPause copies the pause binary into root, its future root directory. It keeps an identical
// binary, because running pause processes use it.
func installPause(from, root string) error {
	want, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	to := filepath.Join(root, pauseProgram)
	if have, err := os.ReadFile(to); err == nil && string(have) == string(want) {
		return nil
	}
	if err := os.Chmod(root, 0o755); err != nil {
		return err
	}
	tmp := to + ".new"
	if err := os.WriteFile(tmp, want, 0o555); err != nil {
		return err
	}
	if err := os.Chmod(tmp, 0o555); err != nil {
		return err
	}
	return os.Rename(tmp, to)
}

const pauseProgram = "/keelson-pause"
