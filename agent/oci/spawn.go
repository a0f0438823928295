package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
	"keelson.dev/keelson/agent/oci/netns"
	"keelson.dev/keelson/agent/oci/podcgroup"
	"keelson.dev/keelson/agent/oci/shimclient"
)

// spawner starts shims in their own cgroup ("shims" below the root), so that stopping the agent's
// service does not kill them. With cgroup v2, shims are cloned into the cgroup. Cgroup v1 does not
// support that, and moving a process takes milliseconds. But a child process inherits the cgroups
// of the thread that forks it. Therefore one thread is moved into the cgroup once and forks all
// shims.
type spawner struct {
	work chan func()
	v2   *os.File // directory of the shims' cgroup; nil with cgroup v1
}

const shimCgroup = "shims"

func newSpawner(tree *podcgroup.Tree) (*spawner, error) {
	s := &spawner{work: make(chan func())}
	if err := tree.CreatePlainCgroup(shimCgroup); err != nil {
		return nil, err
	}
	if tree.Unified {
		f, err := os.OpenFile(tree.CgroupPaths(shimCgroup)[0], unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		s.v2 = f
	}
	ready := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- netns.RunInThread(func() error {
			if err := s.moveThread(tree); err != nil {
				return err
			}
			close(ready)
			for f := range s.work {
				f()
			}
			return nil
		})
	}()
	select {
	case <-ready:
		return s, nil
	case err := <-ended:
		return nil, fmt.Errorf("move the thread that starts shims: %w", err)
	}
}

// moveThread moves the calling thread into the cgroup of the shims (v1 only).
func (s *spawner) moveThread(tree *podcgroup.Tree) error {
	if tree.Unified {
		return nil
	}
	tid := []byte(strconv.Itoa(unix.Gettid()))
	for _, dir := range tree.CgroupPaths(shimCgroup) {
		// In a hybrid setup, the v2 hierarchy does not allow moving a single thread, so it stays
		// there.
		err := os.WriteFile(filepath.Join(dir, "tasks"), tid, 0)
		if ignoreMissing(err) != nil && !errors.Is(err, os.ErrPermission) {
			return err
		}
	}
	return nil
}

// startProcess executes a program and returns its PID. The caller must reap it.
func (s *spawner) startProcess(path string, argv []string, attr *syscall.ProcAttr) (pid int, err error) {
	attr.Sys = &syscall.SysProcAttr{Setsid: true}
	if s.v2 != nil {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, int(s.v2.Fd())
	}
	done := make(chan struct{})
	s.work <- func() {
		pid, err = syscall.ForkExec(path, argv, attr)
		close(done)
	}
	<-done
	return pid, err
}

func (s *spawner) stopThread() {
	close(s.work)
	if s.v2 != nil {
		s.v2.Close()
	}
}

// startShim starts the shim of the sandbox with directory dir and returns its PID. It does not
// connect to the shim.
func (r *Runtime) startShim(dir string) (pid int, err error) {
	socket, err := shimclient.Listen(dir)
	if err != nil {
		return 0, err
	}
	defer socket.Close()
	log, err := os.OpenFile(filepath.Join(dir, "shim.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return 0, err
	}
	defer log.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	pid, err = r.spawner.startProcess(r.cfg.ShimPath, []string{"keelson-shim"}, &syscall.ProcAttr{
		Dir: "/",
		// Saves memory: one thread runs Go code, and garbage is collected early.
		Env:   []string{"GOMAXPROCS=1", "GOGC=20"},
		Files: []uintptr{null.Fd(), null.Fd(), log.Fd(), socket.Fd()},
	})
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", r.cfg.ShimPath, err)
	}
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte("-998"), 0); err != nil {
		r.oomOnce.Do(func() { r.log.Warn("cannot protect shims from the OOM killer", "error", err) })
	}
	// The shim is a child of this process until either exits: reap it.
	go func() {
		var ws syscall.WaitStatus
		for {
			if _, err := syscall.Wait4(pid, &ws, 0, nil); err != syscall.EINTR {
				return
			}
		}
	}()
	return pid, nil
}
