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
	// freezeFS and thawFS are FIFREEZE and FITHAW, _IOWR('X', 119, int) and _IOWR('X', 120, int).
	freezeFS = 0xc0045877
	thawFS   = 0xc0045878
	// mostFrozen bounds how long the writers of a volume wait for a copy of it.
	mostFrozen = 20 * time.Second
	// guardFor is how long a guard waits for its driver: longer than any freeze.
	guardFor = mostFrozen + 5*time.Second
)

// GuardCommand is the one argument with which a program that serves the driver runs Guard, and nothing else.
const GuardCommand = "thaw-when-alone"

// Guard thaws the file system of a folder, its file 3, when its standard input ends without a byte, or when nothing
// comes from there for longer than a file system is ever frozen: whoever froze it was killed, or hangs.
func Guard() error {
	dir := os.NewFile(3, "frozen")
	if dir == nil {
		return errors.New("a guard has a folder as file 3")
	}
	released := make(chan bool, 1)
	go func() {
		var b [1]byte
		n, _ := os.Stdin.Read(b[:])
		released <- n == 1
	}()
	late := time.NewTimer(guardFor)
	defer late.Stop()
	select {
	case ok := <-released:
		if ok {
			return nil
		}
	case <-late.C:
	}
	if err := thaw(dir); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("thawing: %w", err)
	}
	return nil
}

func thaw(dir *os.File) error { var none int32; return ioctl(dir, thawFS, &none) }

// frozen runs a copy while nothing is written to the file system that is mounted at a path, for mostFrozen at most. A
// file system stays frozen when its freezer is killed: hence a guard, a process of its own, which is there before.
func (d *Driver) frozen(ctx context.Context, at string, do func(context.Context) error) (err error) {
	dir, err := os.Open(at)
	if err != nil {
		return err
	}
	defer dir.Close()
	release, err := d.guard(dir)
	if err != nil {
		return fmt.Errorf("starting what thaws %s if this process is killed: %w", at, err)
	}
	defer release()
	ctx, cancel := context.WithTimeout(ctx, mostFrozen)
	defer cancel()
	var none int32
	if err := ioctl(dir, freezeFS, &none); err != nil {
		return fmt.Errorf("freezing the file system at %s: %w", at, err)
	}
	err = do(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("its data cannot be compared within %s, for which its writers wait: it can be copied while no pod uses it", mostFrozen)
	}
	if undone := thaw(dir); undone != nil {
		return errors.Join(err, fmt.Errorf("the file system at %s did not stay frozen: %w", at, undone))
	}
	return err
}

// guard starts a process that runs Guard. release ends it; without a call it thaws.
func (d *Driver) guard(dir *os.File) (release func(), err error) {
	c := exec.Command("/proc/self/exe", GuardCommand)
	c.ExtraFiles = []*os.File{dir}
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a signal to the driver's group leaves it
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
			d.cfg.Log.Warn("what thaws file systems ended badly", "err", err)
		}
	}, nil
}

// thawAll thaws what a driver that was killed with its guard left frozen: the sources of copies that it had begun.
func (d *Driver) thawAll() error {
	var errs []error
	begun := func(r record) {
		if r.Ready || r.From == "" {
			return
		}
		at, _, err := d.mountOf(r.From)
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
		if err := thaw(dir); err == nil {
			d.cfg.Log.Warn("a volume was left frozen and is thawed", "volume", r.From)
		} else if !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("thawing %s: %w", at, err))
		}
	}
	return errors.Join(append(errs, d.each(func(_ string, r record) { begun(r) }))...)
}
