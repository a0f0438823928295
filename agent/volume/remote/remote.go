// Package remote mounts and unmounts file systems on servers, and on disks of servers, that may not
// respond. The kernel waits for such a server without a time limit; only the death of the calling
// process ends the wait. Each call is therefore made by a child process. It is killed when the
// context ends, and abandoned if even that does not help.
//
// The child process runs the same program: its main function calls Main first.
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

// Command is the command-line argument that selects the child process's role. It is the only
// argument.
const Command = "mount-remote"

// Mount has the arguments of mount(2).
type Mount struct {
	Source string  `json:"source,omitempty"`
	Target string  `json:"target"`
	Type   string  `json:"type,omitempty"`
	Flags  uintptr `json:"flags,omitempty"`
	Data   string  `json:"data,omitempty"`
}

// request is sent to the child process on its stdin as JSON. response is the JSON that the child
// process writes to stdout.
type (
	request struct {
		Mount
		Unmount bool `json:"unmount,omitempty"`
		Apart   bool `json:"apart,omitempty"` // run in a separate mount namespace, which ends with the process
		// Disk is mounted, and formatted or repaired first if necessary.
		Disk *disk.Mount `json:"disk,omitempty"`
		// Text is written to the kernel file Target.
		Text string `json:"text,omitempty"`
	}
	response struct {
		Errno syscall.Errno `json:"errno"`
		Said  string        `json:"said,omitempty"` // message of an error that is not an errno
	}
)

// Main must be called first in the main function. In the child process it performs the request on
// stdin and returns true. In any other process it returns false.
func Main() bool {
	if len(os.Args) != 2 || os.Args[1] != Command {
		return false
	}
	var c request
	if err := json.NewDecoder(io.LimitReader(os.Stdin, 1<<20)).Decode(&c); err != nil {
		fmt.Fprintln(os.Stderr, "reading what is to be mounted:", err)
		os.Exit(1)
	}
	// signals the start: the time to start a process does not count as the kernel's time
	_, err := io.WriteString(os.Stdout, "\n")
	switch {
	case err != nil:
	case c.Disk != nil:
		if err := c.Disk.Do(context.Background()); err != nil { // the parent kills this process
			_ = json.NewEncoder(os.Stdout).Encode(response{Said: err.Error()})
			return true
		}
	case c.Text != "":
		err = writeFile(c.Target, c.Text)
	case c.Unmount:
		err = unix.Unmount(c.Target, int(c.Flags))
	default:
		err = unix.Mount(c.Source, c.Target, c.Type, c.Flags, c.Data)
	}
	var a response
	if err != nil && !errors.As(err, &a.Errno) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_ = json.NewEncoder(os.Stdout).Encode(a)
	return true
}

// Program returns the command that starts the child process: this executable with the argument
// Command.
func Program() *exec.Cmd { return exec.Command("/proc/self/exe", Command) }

// killGrace is how long to wait until a killed child process exits. The kernel ends most waits of a
// killed process at once.
const killGrace = 2 * time.Second

// stuckTargets contains the mount targets for which a killed child process has not exited. Its
// mount may still complete.
var stuckTargets sync.Map

// ErrStuck is returned if the child process of an earlier call for the same target was killed but
// has not exited.
var ErrStuck = errors.New("an earlier attempt is still blocked in the kernel")

// Do mounts m in a child process. If the kernel refuses the mount, the error is a syscall.Errno. If
// ctx ends first, it returns the error of ctx, and nothing is mounted. If that error is also
// ErrStuck, the mount may still complete later. The kernel then refuses the mount if the target
// folder was removed; otherwise the next attempt finds it.
func (m Mount) Do(ctx context.Context) error {
	if _, busy := stuckTargets.Load(m.Target); busy {
		return fmt.Errorf("mounting at %s: %w", m.Target, ErrStuck)
	}
	err := runRequest(ctx, request{Mount: m})
	if ctx.Err() != nil && err != nil {
		// The mount may have completed just before the process was killed.
		if is, merr := Mounted(m.Target); is || merr != nil {
			return errors.Join(err, merr, Unmount(context.WithoutCancel(ctx), m.Target))
		}
	}
	return err
}

// Disk calls disk.Mount.Do in a child process. It is for a block device on a server that may not
// respond.
func Disk(ctx context.Context, m disk.Mount) error {
	if _, busy := stuckTargets.Load(m.Dir); busy {
		return fmt.Errorf("mounting at %s: %w", m.Dir, ErrStuck)
	}
	err := runRequest(ctx, request{Mount: Mount{Target: m.Dir}, Disk: &m})
	if ctx.Err() != nil && err != nil {
		if is, merr := Mounted(m.Dir); is || merr != nil {
			return errors.Join(err, merr, UnmountWhole(context.WithoutCancel(ctx), m.Dir))
		}
	}
	return err
}

// Write writes text to a kernel file (for example in /sys) in a child process, because the write
// may block.
func Write(ctx context.Context, file, text string) error {
	if _, busy := stuckTargets.Load(file); busy {
		return fmt.Errorf("writing to %s: %w", file, ErrStuck)
	}
	if err := runRequest(ctx, request{Mount: Mount{Target: file}, Text: text}); err != nil {
		return fmt.Errorf("writing to %s: %w", file, err)
	}
	return nil
}

func writeFile(file, text string) error {
	fd, err := unix.Open(file, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte(text))
	return err
}

// UnmountWhole unmounts a file system that is mounted nowhere else. It returns when the kernel has
// written all data, so that its disk can then be detached. If the file system is in use or has
// unwritten data, it returns an error that names the target. UnmountWhole may be repeated.
func UnmountWhole(ctx context.Context, target string) error {
	if _, busy := stuckTargets.Load(target); busy {
		return fmt.Errorf("unmounting %s: %w", target, ErrStuck)
	}
	err := runBounded(ctx, request{Mount: Mount{Target: target, Flags: unix.UMOUNT_NOFOLLOW}, Unmount: true})
	switch is, merr := Mounted(target); {
	case err == nil, errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
		if is || merr != nil {
			return errors.Join(fmt.Errorf("something is still mounted at %s", target), merr)
		}
		return nil
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("unmounting %s: a process of the node uses it: %w", target, err)
	}
	return fmt.Errorf("unmounting %s: the server has not received all written data yet, and the kernel still waits "+
		"for it: %w", target, err)
}

// kernelTimeout bounds how long an unmount waits for a server, to which the kernel may have data to
// write. startTimeout is the additional time to start the child process on a busy machine. Without
// it, every attempt on such a machine would fail.
const (
	kernelTimeout = 10 * time.Second
	startTimeout  = time.Minute
)

// withPatience returns a context that ends after startTimeout, with the cause
// context.DeadlineExceeded. Once begun is called, it ends after kernelTimeout instead. done
// releases its resources.
func withPatience(ctx context.Context) (bounded context.Context, begun func(), done func()) {
	bounded, giveUp := context.WithCancelCause(ctx)
	end := time.AfterFunc(startTimeout, func() { giveUp(context.DeadlineExceeded) })
	return bounded, func() { end.Reset(kernelTimeout) }, func() {
		end.Stop()
		giveUp(nil)
	}
}

// runBounded runs a request in a child process. It waits for the kernel at most kernelTimeout.
func runBounded(ctx context.Context, c request) error {
	bounded, begun, done := withPatience(ctx)
	defer done()
	return runNotifying(bounded, c, begun)
}

// Unmount unmounts the file system at target, even if its server does not respond. Unwritten data
// is lost only if the server does not accept it in time.
func Unmount(ctx context.Context, target string) error {
	for _, flags := range []int{unix.UMOUNT_NOFOLLOW, unix.UMOUNT_NOFOLLOW | unix.MNT_FORCE | unix.MNT_DETACH} {
		err := runBounded(ctx, request{Mount: Mount{Target: target, Flags: uintptr(flags)}, Unmount: true})
		if errors.Is(err, unix.EBUSY) {
			// A process of the node uses it. The pod is dead, so a lazy unmount loses nothing.
			err = runBounded(ctx, request{Mount: Mount{Target: target, Flags: unix.UMOUNT_NOFOLLOW | unix.MNT_DETACH},
				Unmount: true})
		}
		if err == nil || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if is, merr := Mounted(target); !is && merr == nil {
			return nil // it is unmounted here; the kernel completes the rest
		}
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			return fmt.Errorf("unmounting %s: %w", target, err)
		}
	}
	return fmt.Errorf("unmounting %s: its server does not respond, and the kernel does not release the mount", target)
}

// AbortPending makes the kernel abort the pending requests to the server of a mount. Processes that
// wait for the server get an error; killed processes exit. The mount stays. If several mounts share
// the kernel's connection to a folder, all of them are affected.
func AbortPending(ctx context.Context, target string) error {
	// MNT_FORCE aborts requests and unmounts. The separate mount namespace keeps the mount for
	// everybody else.
	err := runBounded(ctx, request{Mount: Mount{Target: target, Flags: unix.UMOUNT_NOFOLLOW | unix.MNT_FORCE},
		Unmount: true, Apart: true})
	if err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("aborting pending requests at %s: %w", target, err)
	}
	return nil
}

// runRequest runs a request in a child process and returns its error.
func runRequest(ctx context.Context, c request) error { return runNotifying(ctx, c, nil) }

// runNotifying runs a request in a child process, like runRequest. It also calls begun when the
// child process is about to make the system call.
func runNotifying(ctx context.Context, c request, begun func()) error {
	in, err := json.Marshal(c)
	if err != nil {
		return err
	}
	cmd := Program()
	cmd.Stdin = bytes.NewReader(in)
	if c.Apart {
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS} // its mounts are invisible elsewhere
	}
	if c.Disk != nil {
		// no unsupervised process may write to a disk
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	}
	out, err := runProgram(ctx, cmd, c.Target, begun)
	if err != nil {
		return err
	}
	var a response
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

// maxOutput bounds the stored output of a program.
const maxOutput = 64 << 10

// boundedBuffer stores the first maxOutput bytes written.
type boundedBuffer struct {
	onFirstByte func() // called at the first byte; may be nil
	mu          sync.Mutex
	buf         bytes.Buffer
}

func (b *boundedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.onFirstByte != nil && b.buf.Len() == 0 && len(p) > 0 {
		b.onFirstByte()
	}
	b.buf.Write(p[:min(len(p), maxOutput-b.buf.Len())])
	return len(p), nil
}

func (b *boundedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// ExitError is the error of a program that exited with a status other than 0.
type ExitError struct {
	Program string
	Code    int
	Output  string // output on stdout and stderr
}

func (e *ExitError) Error() string {
	if e.Output == "" {
		return fmt.Sprintf("%s: exit status %d", e.Program, e.Code)
	}
	return fmt.Sprintf("%s: %s (exit status %d)", e.Program, e.Output, e.Code)
}

// Run runs a program that may block in the kernel, and returns its standard output. about is the
// target of the operation, for error messages. When ctx ends, the program and its children are
// killed. If the program does not exit then, Run no longer waits for it, and the error is also
// ErrStuck. A program that fails returns an *ExitError.
func Run(ctx context.Context, cmd *exec.Cmd, about string) ([]byte, error) {
	return runProgram(ctx, cmd, about, nil)
}

// runProgram is Run with a callback: it calls begun at the first byte of the program's output.
func runProgram(ctx context.Context, cmd *exec.Cmd, about string, begun func()) ([]byte, error) {
	name := filepath.Base(cmd.Path)
	if len(cmd.Args) > 1 && cmd.Args[1] == Command {
		name = Command
	}
	out, said := boundedBuffer{onFirstByte: begun}, boundedBuffer{}
	cmd.Stdout, cmd.Stderr = &out, &said
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	cmd.WaitDelay = killGrace // for children that hold the pipes open
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	ended := make(chan error, 1)
	go func() {
		ended <- cmd.Wait()
		stuckTargets.CompareAndDelete(about, cmd)
	}()
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
		late := time.NewTimer(killGrace)
		defer late.Stop()
		stuckTargets.Store(about, cmd)
		select {
		case <-ended:
			stuckTargets.CompareAndDelete(about, cmd)
			return nil, context.Cause(ctx)
		case <-late.C:
			return nil, errors.Join(context.Cause(ctx), ErrStuck)
		}
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil, &ExitError{Program: name, Code: exit.ExitCode(),
			Output: string(bytes.TrimSpace([]byte(said.String() + out.String())))}
	}
	if err != nil && !errors.Is(err, exec.ErrWaitDelay) { // a daemon that it started may hold the pipes open
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return []byte(out.String()), nil
}

// Mounted reports whether path is a mount point. It does not access the mounted file system,
// because the access may block.
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
