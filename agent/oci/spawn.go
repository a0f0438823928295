package oci

import (
	"os"
	"path/filepath"
	"runtime"
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
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlock: the thread dies with the goroutine
		if !tree.unified {
			tid := []byte(strconv.Itoa(unix.Gettid()))
			for _, dir := range tree.paths(shimCgroup) {
				// The thread of a hybrid v2 hierarchy cannot move alone; there it stays.
				if err := os.WriteFile(filepath.Join(dir, "tasks"), tid, 0); ignoreMissing(err) != nil && !os.IsPermission(err) {
					failed <- err
					return
				}
			}
		}
		failed <- nil
		for f := range s.work {
			f()
		}
	}()
	if err := <-failed; err != nil {
		return nil, err
	}
	return s, nil
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
