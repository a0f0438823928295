package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/oci/bundle"
	"keelson.dev/keelson/agent/oci/wire"
)

// drainTime is how long to wait for output after a command has ended: its children may keep its
// streams open forever.
const drainTime = 2 * time.Second

// maxSyncOutput bounds the output of each stream that ExecSync returns; the rest is dropped. Only
// probes and hooks call it.
const maxSyncOutput = 16 << 10

// capped is a writer that keeps the first bytes and drops the rest. It must not implement
// io.ReaderFrom, which io.Copy would use instead of Write.
type capped struct{ kept []byte }

func (c *capped) Write(p []byte) (int, error) {
	c.kept = append(c.kept, p[:min(maxSyncOutput-len(c.kept), len(p))]...)
	return len(p), nil
}

// ExecSync implements agent.Runtime. A timeout is reported as DeadlineExceeded.
func (r *Runtime) ExecSync(ctx context.Context, q *cri.ExecSyncRequest) (*cri.ExecSyncResponse, error) {
	parent := ctx
	if q.GetTimeout() > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(q.GetTimeout())*time.Second)
		defer cancel()
	}
	var stdout, stderr capped
	err := r.Exec(ctx, q.GetContainerId(), q.GetCmd(), false, agent.Streams{Stdout: &stdout, Stderr: &stderr})
	if parent.Err() == nil && ctx.Err() != nil {
		return nil, status.Errorf(codes.DeadlineExceeded, "command %q timed out after %d s", q.GetCmd(), q.GetTimeout())
	}
	out := &cri.ExecSyncResponse{Stdout: stdout.kept, Stderr: stderr.kept}
	var exit *agent.ExitError
	if errors.As(err, &exit) {
		out.ExitCode = int32(exit.Code)
		return out, nil
	}
	if err != nil {
		return nil, err
	}
	return out, nil
}

// Exec implements agent.Runtime. When ctx ends, the command is killed.
func (r *Runtime) Exec(ctx context.Context, containerID string, command []string, tty bool, st agent.Streams) error {
	if err := r.wait(ctx); err != nil {
		return err
	}
	c, err := r.container(containerID)
	if err != nil {
		return err
	}
	if len(command) == 0 {
		return status.Error(codes.InvalidArgument, "exec needs a command")
	}
	shim := r.shimOf(c)
	if state := r.stateOf(c); state == ContainerRunning && shim == nil {
		return status.Errorf(codes.Unavailable, "container %s: its shim does not answer", containerID)
	} else if state != ContainerRunning {
		return status.Errorf(codes.FailedPrecondition, "container %s is not running: it is %s", containerID, state)
	}
	path, err := r.writeExec(c, command, tty)
	if err != nil {
		return fmt.Errorf("exec in container %s: %w", containerID, err)
	}
	defer os.Remove(path)
	m := wire.Exec{Container: containerID, OCI: r.cfg.OCIPath, Bundle: path, TTY: tty}
	var e *execution
	if tty {
		e, err = newTerminal(st)
	} else {
		e, err = newPipes(st)
	}
	if err != nil {
		return fmt.Errorf("exec in container %s: %w", containerID, err)
	}
	defer e.close()
	code, err := e.run(ctx, r, shim, &m)
	switch {
	case err != nil:
		return fmt.Errorf("exec in container %s: %w", containerID, err)
	case code != 0:
		return &agent.ExitError{Code: code}
	}
	return nil
}

// writeExec writes the request file for keelson-oci: the container's process with another command.
// It returns the file's path.
func (r *Runtime) writeExec(c *ctr, command []string, tty bool) (string, error) {
	p := *c.rec.Process
	p.Args, p.Terminal = command, tty
	if tty {
		p.Env = append([]string{"TERM=xterm"}, p.Env...)
	}
	data, err := json.Marshal(&bundle.Exec{ID: c.rec.ID, StateRoot: r.libcontainerDir(), Process: &p})
	if err != nil {
		return "", err
	}
	// Numbers restart with the agent, so an old file may be overwritten.
	path := filepath.Join(r.containerDir(c.rec.ID), "exec-"+strconv.FormatInt(c.execs.Add(1), 10)+".json")
	return path, os.WriteFile(path, data, 0o600)
}

// execution is one command and its streams. The shim passes the command's ends of the streams to
// keelson-oci; the data does not flow through the shim.
type execution struct {
	st     agent.Streams
	theirs []*os.File
	stdin  *os.File // this side's end, nil if not wanted
	outs   []*os.File
	sinks  []io.Writer

	terminal *os.File      // this side's end of the socket on which the terminal arrives
	typed    chan struct{} // closed when the caller's stdin has ended; nil if nothing waits for that

	copies sync.WaitGroup
}

func newPipes(st agent.Streams) (*execution, error) {
	e := &execution{st: st}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	e.theirs = []*os.File{null, null, null}
	if st.Stdin != nil {
		r, w, err := os.Pipe()
		if err != nil {
			e.close()
			return nil, err
		}
		e.theirs[0], e.stdin = r, w
	}
	for i, sink := range []io.Writer{st.Stdout, st.Stderr} {
		if sink == nil {
			continue
		}
		r, w, err := os.Pipe()
		if err != nil {
			e.close()
			return nil, err
		}
		e.theirs[1+i] = w
		e.outs, e.sinks = append(e.outs, r), append(e.sinks, sink)
	}
	return e, nil
}

func newTerminal(st agent.Streams) (*execution, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return &execution{st: st, terminal: os.NewFile(uintptr(fds[0]), "terminal"), theirs: []*os.File{os.NewFile(uintptr(fds[1]), "terminal")}}, nil
}

// run starts the command, waits for its end and its output, and returns its exit code.
func (e *execution) run(ctx context.Context, r *Runtime, shim *shimClient, m *wire.Exec) (code int, err error) {
	id, answers, end, err := shim.open(wire.KindExec, m, e.theirs...)
	if err != nil {
		return 0, err
	}
	for _, f := range e.theirs {
		f.Close() // /dev/null may be in the list three times: closing it again has no effect
	}
	f, err := shim.await(ctx, answers)
	if err != nil {
		if ctx.Err() != nil {
			// The command may still start: kill it in the background.
			r.background.Go(func() { defer end(); r.abandon(shim, id, answers) })
		} else {
			end()
		}
		return 0, err
	}
	defer end()
	if _, err := shim.begun(f); err != nil {
		return 0, err
	}
	if e.terminal != nil {
		if err := e.receiveTerminal(); err != nil {
			return 0, err
		}
	}
	e.copy(ctx)
	f, err = shim.await(ctx, answers)
	if err != nil {
		if ctx.Err() != nil {
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
			defer cancel()
			shim.killExec(last, id, answers)
		}
		return 0, err
	}
	var x wire.Exited
	if f.Kind != wire.KindExited || shim.unmarshal(f, &x) != nil {
		return 0, wire.ErrMalformed
	}
	e.drain(ctx)
	return int(x.Code), nil
}

// killExec kills the command of the request with this id and waits for its end.
func (s *shimClient) killExec(ctx context.Context, id uint32, answers <-chan wire.Frame) {
	kill := wire.Signal{Exec: id, Signal: int64(unix.SIGKILL)}
	if _, err := s.done(ctx, wire.KindSignal, &kill); err == nil {
		_, _ = s.await(ctx, answers)
	}
}

// abandon kills a command without a caller, as soon as the command has started.
func (r *Runtime) abandon(shim *shimClient, id uint32, answers <-chan wire.Frame) {
	ctx, cancel := context.WithTimeout(context.Background(), teardownTimeout)
	defer cancel()
	go func() {
		select {
		case <-r.stopping: // the shim kills the commands of a closed connection
			cancel()
		case <-ctx.Done():
		}
	}()
	f, err := shim.await(ctx, answers)
	if err != nil {
		return
	}
	if _, err := shim.begun(f); err == nil {
		shim.killExec(ctx, id, answers)
	}
}

func (e *execution) receiveTerminal() error {
	oob := make([]byte, unix.CmsgSpace(4))
	buf := make([]byte, 4096)
	_, n, _, _, err := unix.Recvmsg(int(e.terminal.Fd()), buf, oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
	if err != nil {
		return fmt.Errorf("receive the terminal: %w", err)
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(msgs) != 1 {
		return errors.New("no terminal was sent")
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return errors.New("no terminal was sent")
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return err
	}
	master := os.NewFile(uintptr(fds[0]), "terminal")
	e.outs = []*os.File{master}
	e.sinks = []io.Writer{e.st.Stdout}
	if e.st.Stdout == nil {
		e.sinks[0] = io.Discard
	}
	if e.st.Stdin != nil {
		e.stdin = master
	}
	return nil
}

// copy starts copying between the caller's and the command's streams. The goroutine that reads the
// caller's stdin is not waited for, because it cannot be interrupted.
func (e *execution) copy(ctx context.Context) {
	for i, out := range e.outs {
		e.copies.Go(func() {
			if _, err := io.Copy(e.sinks[i], out); err != nil {
				discard(out) // the reader is gone; the command must not block
			}
		})
	}
	if e.stdin != nil {
		go func() {
			if _, err := io.Copy(e.stdin, e.st.Stdin); err == nil && e.typed != nil {
				close(e.typed)
			}
			if e.terminal == nil {
				e.stdin.Close()
			}
		}()
	}
	if e.st.Resize != nil && e.terminal != nil {
		go resizeLoop(ctx, e.st.Resize, func(s agent.TermSize) {
			if raw, err := e.outs[0].SyscallConn(); err == nil {
				_ = raw.Control(func(fd uintptr) {
					_ = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: s.Height, Col: s.Width})
				})
			}
		})
	}
}

func resizeLoop(ctx context.Context, sizes <-chan agent.TermSize, set func(agent.TermSize)) {
	for {
		select {
		case s, ok := <-sizes:
			if !ok {
				return
			}
			set(s)
		case <-ctx.Done():
			return
		}
	}
}

// drain waits for the rest of the output, at most drainTime.
func (e *execution) drain(ctx context.Context) {
	done := make(chan struct{})
	go func() { e.copies.Wait(); close(done) }()
	t := time.NewTimer(drainTime)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
	case <-ctx.Done():
	}
}

// close closes all streams. Nothing is written to the caller's streams afterwards.
func (e *execution) close() {
	for _, f := range append(append([]*os.File{e.stdin, e.terminal}, e.theirs...), e.outs...) {
		if f != nil {
			f.Close()
		}
	}
	e.copies.Wait()
}

// Attach implements agent.Runtime. It returns when the container's output has ended, ctx is done,
// or the shim is gone. With a terminal or without stdinOnce, it also returns at most drainTime
// after the caller's stdin has ended.
func (r *Runtime) Attach(ctx context.Context, containerID string, tty bool, st agent.Streams) error {
	if err := r.wait(ctx); err != nil {
		return err
	}
	c, err := r.container(containerID)
	if err != nil {
		return err
	}
	shim := r.shimOf(c)
	if state := r.stateOf(c); (state != ContainerRunning && state != ContainerCreated) || shim == nil {
		return status.Errorf(codes.FailedPrecondition, "container %s is not running: it is %s", containerID, state)
	}
	tty = c.config.GetTty() // the container's setting takes precedence
	if tty {
		st.Stderr = nil
	}
	e, err := newPipes(st)
	if err != nil {
		return fmt.Errorf("attach to container %s: %w", containerID, err)
	}
	defer e.close()
	m := wire.Attach{Container: containerID, Stdin: st.Stdin != nil, Stdout: st.Stdout != nil, Stderr: st.Stderr != nil}
	var files []*os.File
	for i, want := range []bool{m.Stdin, m.Stdout, m.Stderr} {
		if want {
			files = append(files, e.theirs[i])
		}
	}
	if _, err := shim.done(ctx, wire.KindAttach, &m, files...); err != nil {
		return fmt.Errorf("attach to container %s: %w", containerID, err)
	}
	for _, f := range e.theirs {
		f.Close()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if st.Resize != nil && tty {
		go resizeLoop(ctx, st.Resize, func(s agent.TermSize) {
			m := wire.Resize{Container: containerID, Width: int64(s.Width), Height: int64(s.Height)}
			_, _ = shim.done(ctx, wire.KindResize, &m)
		})
	}
	// A container's stdin stays open after a client has gone, unless stdinOnce closes it. The end
	// of the client's input therefore ends the attach.
	if c.config.GetStdin() && (tty || !c.config.GetStdinOnce()) && st.Stdin != nil {
		e.typed = make(chan struct{})
	}
	e.copy(ctx)
	over := make(chan struct{})
	go func() { e.copies.Wait(); close(over) }()
	if len(e.outs) == 0 {
		over = nil // only input: until the container ends
	}
	select {
	case <-e.typed:
		e.drain(ctx)
	case <-over:
	case <-c.ended:
		e.drain(ctx)
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}
