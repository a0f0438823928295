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

// spawner starts shims inside a cgroup of their own ("shims" below the root), so
// that stopping the agent's service does not take them along. With cgroup v2 they
// are cloned into it. With v1 that does not exist, and moving a process costs
// milliseconds; but a child is born into the cgroups of the thread that forks, so
// one thread is moved there once and forks all shims.
type spawner struct {
	work chan func()
	v2   *os.File // the cgroup, nil with v1
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

// settle moves the calling thread into the shims' cgroup (v1).
func (s *spawner) settle(tree *cgroupTree) error {
	if tree.unified {
		return nil
	}
	tid := []byte(strconv.Itoa(unix.Gettid()))
	for _, dir := range tree.paths(shimCgroup) {
		// In the v2 hierarchy of a hybrid set-up a thread cannot move alone; there it stays.
		err := os.WriteFile(filepath.Join(dir, "tasks"), tid, 0)
		if ignoreMissing(err) != nil && !errors.Is(err, os.ErrPermission) {
			return err
		}
	}
	return nil
}

// start forks and executes; the caller reaps.
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
