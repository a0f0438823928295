package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// spawner starts shims in their own cgroup ("shims" below the root), so that stopping the agent's
// service does not kill them. With cgroup v2, they are cloned into it. Cgroup v1 does not support
// that, and moving a process takes milliseconds. But a child inherits the cgroups of the thread
// that forks. So one thread is moved there once and forks all shims.
type spawner struct {
	work chan func()
	v2   *os.File // the cgroup directory, nil with v1
}

const shimCgroup = "shims"

func newSpawner(tree *cgroupTree) (*spawner, error) {
	s := &spawner{work: make(chan func())}
	if err := tree.makePlain(shimCgroup); err != nil {
		return nil, err
	}
	if tree.unified {
		f, err := os.OpenFile(tree.paths(shimCgroup)[0], unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		s.v2 = f
	}
	ready := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- inThread(func() error {
			if err := s.settle(tree); err != nil {
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

// settle moves the calling thread into the cgroup of the shims (v1 only).
func (s *spawner) settle(tree *cgroupTree) error {
	if tree.unified {
		return nil
	}
	tid := []byte(strconv.Itoa(unix.Gettid()))
	for _, dir := range tree.paths(shimCgroup) {
		// In a hybrid setup, the v2 hierarchy does not allow moving a single thread, so it stays
		// there.
		err := os.WriteFile(filepath.Join(dir, "tasks"), tid, 0)
		if ignoreMissing(err) != nil && !errors.Is(err, os.ErrPermission) {
			return err
		}
	}
	return nil
}

// start executes a program and returns its PID. The caller must reap it.
func (s *spawner) start(path string, argv []string, attr *syscall.ProcAttr) (pid int, err error) {
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

func (s *spawner) stop() {
	close(s.work)
	if s.v2 != nil {
		s.v2.Close()
	}
}
