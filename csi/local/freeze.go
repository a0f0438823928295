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
	// ioctlFreeze and ioctlThaw are FIFREEZE and FITHAW, _IOWR('X', 119, int) and _IOWR('X', 120,
	// int).
	ioctlFreeze = 0xc0045877
	ioctlThaw   = 0xc0045878
	// maxFreeze is how long the writers of a volume may be paused for a copy.
	maxFreeze = 20 * time.Second
	// guardTimeout is how long a guard waits for its driver: longer than any freeze.
	guardTimeout = maxFreeze + 5*time.Second
)

// GuardCommand is the argument with which a program that serves the driver runs RunThawGuard and
// nothing else.
const GuardCommand = "thaw-when-alone"

// RunThawGuard thaws the file system of the folder that is its file descriptor 3. It does so when
// its standard input is closed without a byte, or after a time longer than any freeze: the process
// that froze it was killed or hangs.
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

// withFrozen runs do while the file system at a path is frozen, for at most maxFreeze. A file
// system stays frozen if the process that froze it is killed. Therefore a guard process is started
// before.
func (d *Driver) withFrozen(ctx context.Context, at string, do func(context.Context) error) (err error) {
	dir, err := os.Open(at)
	if err != nil {
		return err
	}
	defer dir.Close()
	release, err := d.startThawGuard(dir)
	if err != nil {
		return fmt.Errorf("starting the guard that thaws %s if this process is killed: %w", at, err)
	}
	defer release()
	ctx, cancel := context.WithTimeout(ctx, maxFreeze)
	defer cancel()
	var none int32
	if err := ioctlPointer(dir, ioctlFreeze, &none); err != nil {
		return fmt.Errorf("freezing the file system at %s: %w", at, err)
	}
	err = do(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("its data could not be compared within %s, the longest pause of its writers: it can be copied while no pod uses it", maxFreeze)
	}
	if undone := thawFileSystem(dir); undone != nil {
		return errors.Join(err, fmt.Errorf("the file system at %s did not stay frozen: %w", at, undone))
	}
	return err
}

// startThawGuard starts a process that runs RunThawGuard. release stops it; without release it
// thaws.
func (d *Driver) startThawGuard(dir *os.File) (release func(), err error) {
	c := exec.Command("/proc/self/exe", GuardCommand)
	c.ExtraFiles = []*os.File{dir}
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // signals to the driver's process group do not reach it
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

// thawAll thaws file systems that stayed frozen because a driver was killed together with its
// guard: the sources of unfinished copies.
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
	return errors.Join(append(errs, d.eachRecord(func(_ string, r volumeRecord) { begun(r) }))...)
}
