package shim

import (
	"runtime"
	"syscall"

	"keelson.dev/keelson/agent/oci/wire"
)

// nobody is the user ID of pause. It owns no files.
const nobody = 65535

// startPause executes the shim's own binary as a helper. The helper enters the pod's namespaces,
// confines itself to an empty root, and executes pause.
func (l *loop) startPause(c *conn, id uint32, m *wire.Pause) {
	if l.pausePID != 0 {
		c.started(id, 0, "", failure("pause has been started already"))
		return
	}
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		c.started(id, 0, "", err)
		return
	}
	sys := &syscall.SysProcAttr{Setsid: true}
	if m.NewPID {
		sys.Cloneflags |= syscall.CLONE_NEWPID
	}
	if m.NewIPC {
		sys.Cloneflags |= syscall.CLONE_NEWIPC
	}
	if m.NewUTS {
		sys.Cloneflags |= syscall.CLONE_NEWUTS
	}
	args := append([]string{"keelson-shim", "pause", m.Root, m.Program, m.NetNS, m.Hostname}, m.Sysctls...)
	pid, err := syscall.ForkExec(l.self, args, &syscall.ProcAttr{
		Dir: "/", Env: []string{"GOMAXPROCS=1"},
		Files: []uintptr{uintptr(l.devNull), uintptr(l.devNull), uintptr(l.devNull), uintptr(p[1])},
		Sys:   sys,
	})
	syscall.Close(p[1])
	if err != nil {
		syscall.Close(p[0])
		c.started(id, 0, "", failure(describe("start the pause helper", err)))
		return
	}
	l.pausePID = pid
	l.own(pid, func(code int, at int64) {
		l.pauseEnded = true
		l.announce(&wire.Exited{Code: int64(code), Time: at})
	})
	l.expect()
	// The helper writes its error to the pipe, or the pipe closes when it executes pause.
	l.collect(p[0], func(text string) {
		if text != "" {
			c.started(id, 0, "", failure("pause: "+text))
			return
		}
		c.started(id, pid, "", nil)
	})
}

// collect reads fd to its end without blocking the loop, then calls done with the text.
func (l *loop) collect(fd int, done func(text string)) {
	var text []byte
	_ = syscall.SetNonblock(fd, true)
	err := l.add(fd, syscall.EPOLLIN, func(uint32) {
		n, err := syscall.Read(fd, l.scratch)
		if err == syscall.EINTR || err == syscall.EAGAIN {
			return
		}
		if err == nil && n > 0 {
			if text = append(text, l.scratch[:n]...); len(text) < wire.MaxFrame/2 {
				return
			}
		}
		closing := fd
		l.drop(&closing)
		done(string(text))
	})
	if err != nil {
		syscall.Close(fd)
		done(describe("watch a pipe", err))
	}
}

// BecomePause is the main function of the pause helper. args are root, program, network namespace,
// host name and sysctls. It returns only on an error. New IPC, UTS and PID namespaces were created
// when the helper was cloned.
func BecomePause(args []string) error {
	runtime.LockOSThread() // namespaces and credentials belong to the thread; exec keeps this one
	if len(args) < 4 {
		return failure("arguments are missing")
	}
	root, program, netns, hostname, sysctls := args[0], args[1], args[2], args[3], args[4:]
	syscall.CloseOnExec(3)
	if netns != "" {
		fd, err := syscall.Open(netns, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
		if err != nil {
			return failure(describe("open network namespace "+netns, err))
		}
		if err := setns(fd, cloneNewNet); err != nil {
			return failure(describe("enter network namespace "+netns, err))
		}
	}
	if hostname != "" {
		if err := setHostname(hostname); err != nil {
			return failure(describe("set host name "+hostname, err))
		}
	}
	for _, s := range sysctls {
		if err := setSysctl(s); err != nil {
			return err
		}
	}
	if err := enterRoot(root); err != nil {
		return err
	}
	if err := dropRights(); err != nil {
		return err
	}
	return failure(describe("exec "+program, syscall.Exec(program, []string{program}, nil)))
}

// setSysctl writes a sysctl "a.b.c=value". Names may contain slashes, as in sysctl(8).
func setSysctl(s string) error {
	for i := range len(s) {
		if s[i] != '=' {
			continue
		}
		path := []byte("/proc/sys/" + s[:i])
		for j := len("/proc/sys/"); j < len(path); j++ {
			switch path[j] {
			case '.':
				path[j] = '/'
			case '/':
				path[j] = '.'
			}
		}
		fd, err := syscall.Open(string(path), syscall.O_WRONLY|syscall.O_CLOEXEC, 0)
		if err == nil {
			err = writeAll(fd, []byte(s[i+1:]))
			syscall.Close(fd)
		}
		if err != nil {
			return failure(describe("set sysctl "+s, err))
		}
		return nil
	}
	return failure("sysctl without value: " + s)
}

// enterRoot moves the process into a mount namespace that contains only root. A container in a
// shared PID namespace therefore cannot reach the host through /proc/1/root.
func enterRoot(root string) error {
	if err := syscall.Unshare(syscall.CLONE_NEWNS); err != nil {
		return failure(describe("unshare mounts", err))
	}
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_SLAVE, ""); err != nil {
		return failure(describe("detach mounts", err))
	}
	if err := syscall.Mount(root, root, "", syscall.MS_BIND, ""); err != nil {
		return failure(describe("bind "+root, err))
	}
	if err := syscall.Mount("", root, "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY|syscall.MS_NOSUID|syscall.MS_NODEV, ""); err != nil {
		return failure(describe("remount "+root, err))
	}
	if err := syscall.Chdir(root); err != nil {
		return failure(describe("enter "+root, err))
	}
	if err := syscall.PivotRoot(".", "."); err != nil {
		return failure(describe("pivot to "+root, err))
	}
	if err := syscall.Unmount(".", syscall.MNT_DETACH); err != nil {
		return failure(describe("leave the old root", err))
	}
	return nil
}

// dropRights changes the credentials of this thread only; exec applies them to the process.
func dropRights() error {
	if err := setNoNewPrivs(); err != nil {
		return failure(describe("no_new_privs", err))
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETGROUPS, 0, 0, 0); e != 0 {
		return failure(describe("setgroups", e))
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESGID, nobody, nobody, nobody); e != 0 {
		return failure(describe("setgid", e))
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, nobody, nobody, nobody); e != 0 {
		return failure(describe("setuid", e))
	}
	return nil
}
