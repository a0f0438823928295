package shim

import (
	"runtime"
	"syscall"

	"keelson.dev/keelson/agent/oci/wire"
)

// nobody is the user ID of pause. It owns no files.
const nobody = 65535

// startPause starts the pod's pause process. It executes the shim's own binary as a helper, which
// enters the pod's namespaces, confines itself to an empty root, and executes pause.
func (l *loop) startPause(c *conn, id uint32, request *wire.Pause) {
	if l.pause.pid != 0 {
		c.sendStarted(id, 0, "", failure("pause is already started"))
		return
	}
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		c.sendStarted(id, 0, "", err)
		return
	}
	sys := &syscall.SysProcAttr{Setsid: true}
	if request.NewPID {
		sys.Cloneflags |= syscall.CLONE_NEWPID
	}
	if request.NewIPC {
		sys.Cloneflags |= syscall.CLONE_NEWIPC
	}
	if request.NewUTS {
		sys.Cloneflags |= syscall.CLONE_NEWUTS
	}
	args := append([]string{"keelson-shim", "pause", request.Root, request.Program, request.NetNS, request.Hostname},
		request.Sysctls...)
	pid, err := syscall.ForkExec(l.self, args, &syscall.ProcAttr{
		Dir: "/", Env: []string{"GOMAXPROCS=1"},
		Files: []uintptr{uintptr(l.devNull), uintptr(l.devNull), uintptr(l.devNull), uintptr(p[1])},
		Sys:   sys,
	})
	syscall.Close(p[1])
	if err != nil {
		syscall.Close(p[0])
		c.sendStarted(id, 0, "", failure(describeError("start the pause helper", err)))
		return
	}
	l.pause.pid = pid
	l.registerChild(pid, func(code int, at int64) {
		l.pause.ended = true
		l.announceExit(&wire.Exited{Code: int64(code), Time: at})
	})
	l.expectChild()
	// The helper writes its error to the pipe, or the pipe closes when it executes pause.
	l.collectOutput(p[0], func(text string) {
		if text != "" {
			c.sendStarted(id, 0, "", failure("pause: "+text))
			return
		}
		c.sendStarted(id, pid, "", nil)
	})
}

// collectOutput reads fd to its end without blocking the loop, then calls done with the text.
func (l *loop) collectOutput(fd int, done func(text string)) {
	var text []byte
	_ = syscall.SetNonblock(fd, true)
	err := l.watchDescriptor(fd, syscall.EPOLLIN, func(uint32) {
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
		l.closeDescriptor(&closing)
		done(string(text))
	})
	if err != nil {
		syscall.Close(fd)
		done(describeError("watch a pipe", err))
	}
}

// BecomePause turns the calling helper process into the pause process. args are the root directory,
// the program, the network namespace, the host name and the sysctls. It returns only on an error.
// The new IPC, UTS and PID namespaces exist already, because the helper was cloned with them.
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
			return failure(describeError("open network namespace "+netns, err))
		}
		if err := setNamespace(fd, cloneNewNet); err != nil {
			return failure(describeError("enter network namespace "+netns, err))
		}
	}
	if hostname != "" {
		if err := setHostname(hostname); err != nil {
			return failure(describeError("set host name "+hostname, err))
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
	return failure(describeError("exec "+program, syscall.Exec(program, []string{program}, nil)))
}

// setSysctl writes a sysctl "a.b.c=value". Names may contain slashes, as in sysctl(8).
func setSysctl(text string) error {
	for i := range len(text) {
		if text[i] != '=' {
			continue
		}
		path := []byte("/proc/sys/" + text[:i])
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
			err = writeAll(fd, []byte(text[i+1:]))
			syscall.Close(fd)
		}
		if err != nil {
			return failure(describeError("set sysctl "+text, err))
		}
		return nil
	}
	return failure("sysctl without value: " + text)
}

// enterRoot moves the process into a mount namespace that contains only the directory root. A
// container in a shared PID namespace therefore cannot access the host's files through
// /proc/1/root.
func enterRoot(root string) error {
	if err := syscall.Unshare(syscall.CLONE_NEWNS); err != nil {
		return failure(describeError("unshare mounts", err))
	}
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_SLAVE, ""); err != nil {
		return failure(describeError("detach mounts", err))
	}
	if err := syscall.Mount(root, root, "", syscall.MS_BIND, ""); err != nil {
		return failure(describeError("bind "+root, err))
	}
	if err := syscall.Mount("", root, "",
		syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY|syscall.MS_NOSUID|syscall.MS_NODEV, ""); err != nil {
		return failure(describeError("remount "+root, err))
	}
	if err := syscall.Chdir(root); err != nil {
		return failure(describeError("enter "+root, err))
	}
	if err := syscall.PivotRoot(".", "."); err != nil {
		return failure(describeError("pivot to "+root, err))
	}
	if err := syscall.Unmount(".", syscall.MNT_DETACH); err != nil {
		return failure(describeError("unmount the old root", err))
	}
	return nil
}

// dropRights sets no_new_privs, and changes the user and group of this thread to nobody, without
// supplementary groups. exec applies the thread's credentials to the process.
func dropRights() error {
	if err := setNoNewPrivs(); err != nil {
		return failure(describeError("no_new_privs", err))
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETGROUPS, 0, 0, 0); e != 0 {
		return failure(describeError("setgroups", e))
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESGID, nobody, nobody, nobody); e != 0 {
		return failure(describeError("setgid", e))
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, nobody, nobody, nobody); e != 0 {
		return failure(describeError("setuid", e))
	}
	return nil
}
