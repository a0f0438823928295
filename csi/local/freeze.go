package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// ioctlFreeze and ioctlThaw are the requests FIFREEZE and FITHAW, which freeze and thaw a file
	// system: _IOWR('X', 119, int) and _IOWR('X', 120, int).
	ioctlFreeze = 0xc0045877
	ioctlThaw   = 0xc0045878
	// maxFreeze is the maximum time for which a file system is frozen for a copy. Writes to the
	// file system block during this time.
	maxFreeze = 20 * time.Second
	// guardTimeout is the time after which RunThawGuard thaws a file system in any case. It is
	// longer than maxFreeze.
	guardTimeout = maxFreeze + 5*time.Second
)

// GuardCommand is the argument with which the driver starts its own program as a helper process. A
// program with this only argument must call RunThawGuard and then exit.
const GuardCommand = "thaw-when-alone"

// RunThawGuard is the main function of the helper process that runs while a file system is frozen.
// It returns when it reads a byte from standard input. If standard input is closed without a byte,
// the driver was killed. If guardTimeout elapses, the driver hangs. In both cases, RunThawGuard
// thaws the file system of the folder that is file descriptor 3.
func RunThawGuard() error {
	dir := os.NewFile(3, "frozen")
	if dir == nil {
		return errors.New("the guard needs a folder as file descriptor 3")
	}
	released := make(chan bool, 1)
	go func() {
		var b [1]byte
		n, _ := os.Stdin.Read(b[:])
		released <- n == 1
	}()
	late := time.NewTimer(guardTimeout)
	defer late.Stop()
	select {
	case ok := <-released:
		if ok {
			return nil
		}
	case <-late.C:
	}
	if err := thawFileSystem(dir); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("thawing: %w", err)
	}
	return nil
}

func thawFileSystem(dir *os.File) error { var none int32; return ioctlPointer(dir, ioctlThaw, &none) }

// withFrozen freezes the file system at mountPoint, calls do with a context that ends after
// maxFreeze, and thaws the file system. A helper process (see startThawGuard) thaws it if the
// driver is killed meanwhile.
func (d *Driver) withFrozen(ctx context.Context, mountPoint string, do func(context.Context) error) (err error) {
	dir, err := os.Open(mountPoint)
	if err != nil {
		return err
	}
	defer dir.Close()
	release, err := d.startThawGuard(dir)
	if err != nil {
		return fmt.Errorf("starting the guard that thaws %s if this process is killed: %w", mountPoint, err)
	}
	defer release()
	ctx, cancel := context.WithTimeout(ctx, maxFreeze)
	defer cancel()
	var none int32
	if err := ioctlPointer(dir, ioctlFreeze, &none); err != nil {
		return fmt.Errorf("freezing the file system at %s: %w", mountPoint, err)
	}
	err = do(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("its data could not be compared within %s, the longest pause of its writers: it can be "+
			"copied while no pod uses it", maxFreeze)
	}
	if undone := thawFileSystem(dir); undone != nil {
		return errors.Join(err, fmt.Errorf("the file system at %s did not stay frozen: %w", mountPoint, undone))
	}
	return err
}

// startThawGuard starts a process that runs RunThawGuard for the file system of dir. If the driver
// exits or hangs, that process thaws the file system. The function release stops the process
// without thawing.
func (d *Driver) startThawGuard(dir *os.File) (release func(), err error) {
	c := exec.Command("/proc/self/exe", GuardCommand)
	c.ExtraFiles = []*os.File{dir}
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // signals to the driver do not reach it
	in, err := c.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	return func() {
		_, _ = io.WriteString(in, "x")
		_ = in.Close()
		if err := c.Wait(); err != nil {
			d.cfg.Log.Warn("the thaw guard failed", "err", err)
		}
	}, nil
}

// thawAll thaws the file systems that are still frozen because a previous driver process and its
// helper process were killed. These are the volumes that have an unfinished copy.
func (d *Driver) thawAll() error {
	var errs []error
	begun := func(r volumeRecord) {
		if r.Ready || r.SourceVolume == "" {
			return
		}
		at, _, err := d.mountpointOf(r.SourceVolume)
		if err != nil || at == "" {
			errs = append(errs, err)
			return
		}
		dir, err := os.Open(at)
		if err != nil {
			errs = append(errs, err)
			return
		}
		defer dir.Close()
		if err := thawFileSystem(dir); err == nil {
			d.cfg.Log.Warn("thawed a volume that was left frozen", "volume", r.SourceVolume)
		} else if !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("thawing %s: %w", at, err))
		}
	}
	return errors.Join(append(errs, d.store.eachRecord(func(_ string, r volumeRecord) { begun(r) }))...)
}
