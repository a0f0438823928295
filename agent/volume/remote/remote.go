// Package remote mounts and unmounts file systems whose server may not answer, those on disks of a server among them. The kernel
// waits for such a server for as long as it likes, and only the end of the process that asked ends that wait: so each call
// is made by a process of its own, which can be ended, and left where even that does not help. Who calls waits no longer
// than its context lasts.
//
// The process is this program again: its main function calls Main first.
package remote

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent/volume/disk"
)

// Command is the only argument of a process that makes one call.
const Command = "mount-remote"

// Mount is what mount(2) is asked for.
type Mount struct {
	Source string  `json:"source,omitempty"`
	Target string  `json:"target"`
	Type   string  `json:"type,omitempty"`
	Flags  uintptr `json:"flags,omitempty"`
	Data   string  `json:"data,omitempty"`
}

// call is what the process reads, and answer what it writes.
type (
	call struct {
		Mount
		Unmount bool `json:"unmount,omitempty"`
		Apart   bool `json:"apart,omitempty"` // in a mount namespace of its own, which ends with the process
		// Disk is mounted, and may be given a file system and mended first.
		Disk *disk.Mount `json:"disk,omitempty"`
		// Text is written to Target, a file of the kernel's.
		Text string `json:"text,omitempty"`
	}
	answer struct {
		Errno syscall.Errno `json:"errno"`
		Said  string        `json:"said,omitempty"` // of errors that say more than a number
	}
)

// Main makes the call that is read and reports true, where this process was started for that.
func Main() bool {
	if len(os.Args) != 2 || os.Args[1] != Command {
		return false
	}
	var c call
	if err := json.NewDecoder(io.LimitReader(os.Stdin, 1<<20)).Decode(&c); err != nil {
		fmt.Fprintln(os.Stderr, "reading what is to be mounted:", err)
		os.Exit(1)
	}
	_, err := io.WriteString(os.Stdout, "\n") // it has begun: what a machine takes to start it is no time of the kernel's
	switch {
	case err != nil:
	case c.Disk != nil:
		if err := c.Disk.Do(context.Background()); err != nil { // it is ended from outside
			_ = json.NewEncoder(os.Stdout).Encode(answer{Said: err.Error()})
			return true
		}
	case c.Text != "":
		err = write(c.Target, c.Text)
	case c.Unmount:
		err = unix.Unmount(c.Target, int(c.Flags))
	default:
		err = unix.Mount(c.Source, c.Target, c.Type, c.Flags, c.Data)
	}
	var a answer
	if err != nil && !errors.As(err, &a.Errno) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_ = json.NewEncoder(os.Stdout).Encode(a)
	return true
}

// Program is how the process is started: this program again.
func Program() *exec.Cmd { return exec.Command("/proc/self/exe", Command) }

// lastBreath is how long a process that was killed is waited for: the kernel ends most of its waits at once then.
const lastBreath = 2 * time.Second

// stuck are the places where a process that was killed has not ended yet: what it was to mount may still come.
var stuck sync.Map

// ErrStuck says that an earlier call for the same place has not ended, although its process was killed.
var ErrStuck = errors.New("an earlier attempt still hangs in the kernel")

// Do mounts. The error of the kernel is a syscall.Errno; where ctx ends first it is that of ctx, and nothing is mounted
// then, unless the error is ErrStuck too: what comes late is refused by the kernel once the folder has been removed, and
// found by whoever tries again.
func (m Mount) Do(ctx context.Context) error {
	if _, busy := stuck.Load(m.Target); busy {
		return fmt.Errorf("mounting at %s: %w", m.Target, ErrStuck)
	}
	err := ask(ctx, call{Mount: m})
	if ctx.Err() != nil && err != nil {
		// It may have been done just before its process ended.
		if is, merr := Mounted(m.Target); is || merr != nil {
			return errors.Join(err, merr, Unmount(context.WithoutCancel(ctx), m.Target))
		}
	}
	return err
}

// Disk mounts the file system on a block device whose server may not answer, as disk.Mount does.
func Disk(ctx context.Context, m disk.Mount) error {
	if _, busy := stuck.Load(m.Dir); busy {
		return fmt.Errorf("mounting at %s: %w", m.Dir, ErrStuck)
	}
	err := ask(ctx, call{Mount: Mount{Target: m.Dir}, Disk: &m})
	if ctx.Err() != nil && err != nil {
		if is, merr := Mounted(m.Dir); is || merr != nil {
			return errors.Join(err, merr, UnmountWhole(context.WithoutCancel(ctx), m.Dir))
		}
	}
	return err
}

// Write writes a text to a file of the kernel's that it may take its time to read.
func Write(ctx context.Context, file, text string) error {
	if _, busy := stuck.Load(file); busy {
		return fmt.Errorf("writing to %s: %w", file, ErrStuck)
	}
	if err := ask(ctx, call{Mount: Mount{Target: file}, Text: text}); err != nil {
		return fmt.Errorf("writing to %s: %w", file, err)
	}
	return nil
}

func write(file, text string) error {
	fd, err := unix.Open(file, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte(text))
	return err
}

// UnmountWhole takes away a file system that is mounted nowhere else, and returns when the kernel has written all of it: before
// that its disk must not be taken away. The error says where it is in use or is waited for still; it may be asked again.
func UnmountWhole(ctx context.Context, target string) error {
	if _, busy := stuck.Load(target); busy {
		return fmt.Errorf("unmounting %s: %w", target, ErrStuck)
	}
	err := askWithin(ctx, call{Mount: Mount{Target: target, Flags: unix.UMOUNT_NOFOLLOW}, Unmount: true})
	switch is, merr := Mounted(target); {
	case err == nil, errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
		if is || merr != nil {
			return errors.Join(fmt.Errorf("something is mounted at %s still", target), merr)
		}
		return nil
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("unmounting %s: a process of the node uses it: %w", target, err)
	}
	return fmt.Errorf("unmounting %s: what was written to it has not come to its server yet, for which the kernel waits a while: %w", target, err)
}

// patience is how long a server is waited for when a file system of it is unmounted, to which the kernel may yet have
// something to write; and then how long the kernel is. Starting is how long the process that asks may take besides to start, on a
// machine that has no time for it: who gave it up earlier would do so each time that it is tried again.
const (
	patience = 10 * time.Second
	starting = time.Minute
)

// allow gives a process the time that it may take to start, and from when it has begun what the kernel may take. The cause of the
// context's end is context.DeadlineExceeded then.
func allow(ctx context.Context) (bounded context.Context, begun func(), done func()) {
	bounded, giveUp := context.WithCancelCause(ctx)
	end := time.AfterFunc(starting, func() { giveUp(context.DeadlineExceeded) })
	return bounded, func() { end.Reset(patience) }, func() {
		end.Stop()
		giveUp(nil)
	}
}

// askWithin has a process make the call, for which the kernel is waited for no longer than patience.
func askWithin(ctx context.Context, c call) error {
	bounded, begun, done := allow(ctx)
	defer done()
	return askNoting(bounded, c, begun)
}

// Unmount takes away what is mounted at a place, whether its server answers or not. What the kernel had yet to write is
// lost only where the server does not take it in time.
func Unmount(ctx context.Context, target string) error {
	for _, flags := range []int{unix.UMOUNT_NOFOLLOW, unix.UMOUNT_NOFOLLOW | unix.MNT_FORCE | unix.MNT_DETACH} {
		err := askWithin(ctx, call{Mount: Mount{Target: target, Flags: uintptr(flags)}, Unmount: true})
		if errors.Is(err, unix.EBUSY) {
			// Somebody on the node looks into it. The pod is dead: nothing is lost by letting go later.
			err = askWithin(ctx, call{Mount: Mount{Target: target, Flags: unix.UMOUNT_NOFOLLOW | unix.MNT_DETACH}, Unmount: true})
		}
		if err == nil || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if is, merr := Mounted(target); !is && merr == nil {
			return nil // it is gone from here, and the kernel is left to do the rest
		}
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			return fmt.Errorf("unmounting %s: %w", target, err)
		}
	}
	return fmt.Errorf("unmounting %s: its server does not answer, and the kernel does not let go of it", target)
}

// GiveUp has the kernel give up what it has asked the server of a mount for, so that processes go on that wait for one that
// does not answer, with an error: those that were killed end. The mount stays. Where the kernel shares a server's folder
// between several mounts, all of them are meant.
func GiveUp(ctx context.Context, target string) error {
	// MNT_FORCE gives up and unmounts: here what the process has of the mount, and nobody else.
	err := askWithin(ctx, call{Mount: Mount{Target: target, Flags: unix.UMOUNT_NOFOLLOW | unix.MNT_FORCE}, Unmount: true, Apart: true})
	if err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("giving up what is waited for at %s: %w", target, err)
	}
	return nil
}

// ask has a process make the call.
func ask(ctx context.Context, c call) error { return askNoting(ctx, c, nil) }

// askNoting calls begun as well, when the process is about to make the call.
func askNoting(ctx context.Context, c call, begun func()) error {
	in, err := json.Marshal(c)
	if err != nil {
		return err
	}
	cmd := Program()
	cmd.Stdin = bytes.NewReader(in)
	if c.Apart {
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS} // and what it mounts is seen by nobody
	}
	if c.Disk != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // nothing comes of which nobody knows
	}
	out, err := run(ctx, cmd, c.Target, begun)
	if err != nil {
		return err
	}
	var a answer
	if err := json.Unmarshal(out, &a); err != nil {
		return fmt.Errorf("what %s answered: %w", Command, err)
	}
	switch {
	case a.Errno != 0:
		return a.Errno
	case a.Said != "":
		return errors.New(a.Said)
	}
	return nil
}

// most is how much of what a program says is kept.
const most = 64 << 10

// bounded keeps the beginning of what is written.
type bounded struct {
	begun func() // called at the first byte; may be nil
	mu    sync.Mutex
	buf   bytes.Buffer
}

func (b *bounded) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.begun != nil && b.buf.Len() == 0 && len(p) > 0 {
		b.begun()
	}
	b.buf.Write(p[:min(len(p), most-b.buf.Len())])
	return len(p), nil
}

func (b *bounded) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// Failed is a program that ended badly.
type Failed struct {
	Program string
	Code    int
	Said    string // on both streams
}

func (e *Failed) Error() string {
	if e.Said == "" {
		return fmt.Sprintf("%s: exit status %d", e.Program, e.Code)
	}
	return fmt.Sprintf("%s: %s (exit status %d)", e.Program, e.Said, e.Code)
}

// Run runs a program that may hang in the kernel, about a place, and returns what it wrote on its standard output. When
// ctx ends it is killed with what it started; one that does not end by that is left, and the error is ErrStuck as well.
// A program that ends badly is a *Failed.
func Run(ctx context.Context, cmd *exec.Cmd, about string) ([]byte, error) {
	return run(ctx, cmd, about, nil)
}

// run calls begun as well, when the program says its first byte.
func run(ctx context.Context, cmd *exec.Cmd, about string, begun func()) ([]byte, error) {
	name := filepath.Base(cmd.Path)
	if len(cmd.Args) > 1 && cmd.Args[1] == Command {
		name = Command
	}
	out, said := bounded{begun: begun}, bounded{}
	cmd.Stdout, cmd.Stderr = &out, &said
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	cmd.WaitDelay = lastBreath // for what holds the pipes
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	ended := make(chan error, 1)
	go func() {
		ended <- cmd.Wait()
		stuck.CompareAndDelete(about, cmd)
	}()
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
		late := time.NewTimer(lastBreath)
		defer late.Stop()
		stuck.Store(about, cmd)
		select {
		case <-ended:
			stuck.CompareAndDelete(about, cmd)
			return nil, context.Cause(ctx)
		case <-late.C:
			return nil, errors.Join(context.Cause(ctx), ErrStuck)
		}
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil, &Failed{Program: name, Code: exit.ExitCode(), Said: string(bytes.TrimSpace([]byte(said.String() + out.String())))}
	}
	if err != nil && !errors.Is(err, exec.ErrWaitDelay) { // a daemon that it started may hold its streams
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return []byte(out.String()), nil
}

// Mounted says whether a path is a mount. What is mounted there is not touched: it may hang, as the file system of a server or
// of a process that is gone.
func Mounted(path string) (bool, error) {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	found, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(filepath.Join(dir, filepath.Base(path))))
	return len(found) > 0, err
}
