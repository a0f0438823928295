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
	"keelson.dev/keelson/agent/oci/shimclient"
	"keelson.dev/keelson/agent/oci/wire"
)

// drainTimeout is how long to wait for remaining output after a command has exited: its child
// processes may keep its streams open forever.
const drainTimeout = 2 * time.Second

// maxSyncOutput bounds the output of each stream that ExecSync returns; the rest is dropped. Only
// probes and hooks call it.
const maxSyncOutput = 16 << 10

// cappedBuffer is a writer that keeps the first maxSyncOutput bytes and drops all later bytes. It
// must not implement io.ReaderFrom, which io.Copy would use instead of Write.
type cappedBuffer struct{ kept []byte }

func (c *cappedBuffer) Write(data []byte) (int, error) {
	c.kept = append(c.kept, data[:min(maxSyncOutput-len(c.kept), len(data))]...)
	return len(data), nil
}

// ExecSync implements agent.Runtime. A timeout is reported as DeadlineExceeded.
func (r *Runtime) ExecSync(ctx context.Context, request *cri.ExecSyncRequest) (*cri.ExecSyncResponse, error) {
	parent := ctx
	if request.GetTimeout() > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(request.GetTimeout())*time.Second)
		defer cancel()
	}
	var stdout, stderr cappedBuffer
	err := r.Exec(ctx, request.GetContainerId(), request.GetCmd(), false,
		agent.Streams{Stdout: &stdout, Stderr: &stderr})
	if parent.Err() == nil && ctx.Err() != nil {
		return nil, status.Errorf(codes.DeadlineExceeded, "command %q timed out after %d s", request.GetCmd(),
			request.GetTimeout())
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
func (r *Runtime) Exec(ctx context.Context, containerID string, command []string, tty bool,
	streams agent.Streams) error {
	if err := r.awaitReady(ctx); err != nil {
		return err
	}
	c, err := r.findContainer(containerID)
	if err != nil {
		return err
	}
	if len(command) == 0 {
		return status.Error(codes.InvalidArgument, "exec needs a command")
	}
	shim := c.containerShim()
	if state := c.containerState(); state == ContainerRunning && shim == nil {
		return status.Errorf(codes.Unavailable, "container %s: its shim does not respond", containerID)
	} else if state != ContainerRunning {
		return status.Errorf(codes.FailedPrecondition, "container %s is not running: it is %s", containerID, state)
	}
	path, err := c.writeExecRequest(command, tty)
	if err != nil {
		return fmt.Errorf("exec in container %s: %w", containerID, err)
	}
	defer os.Remove(path)
	m := wire.Exec{Container: containerID, OCI: r.cfg.OCIPath, Bundle: path, TTY: tty}
	var e *execution
	if tty {
		e, err = newTerminal(streams)
	} else {
		e, err = newPipes(streams)
	}
	if err != nil {
		return fmt.Errorf("exec in container %s: %w", containerID, err)
	}
	defer e.closeStreams()
	code, err := e.runCommand(ctx, r, shim, &m)
	switch {
	case err != nil:
		return fmt.Errorf("exec in container %s: %w", containerID, err)
	case code != 0:
		return &agent.ExitError{Code: code}
	}
	return nil
}

// writeExecRequest writes the request file for keelson-oci: the container's process with another
// command. It returns the file's path.
func (c *container) writeExecRequest(command []string, tty bool) (string, error) {
	r := c.runtime
	p := *c.rec.Process
	p.Args, p.Terminal = command, tty
	if tty {
		p.Env = append([]string{"TERM=xterm"}, p.Env...)
	}
	data, err := json.Marshal(&bundle.Exec{ID: c.rec.ID, StateRoot: r.paths.libcontainerDir(), Process: &p})
	if err != nil {
		return "", err
	}
	// Numbers restart with the agent, so an old file may be overwritten.
	path := filepath.Join(r.paths.containerDir(c.rec.ID), "exec-"+strconv.FormatInt(c.execCount.Add(1), 10)+".json")
	return path, os.WriteFile(path, data, 0o600)
}

// execution is one command and its streams. The shim passes the command's ends of the streams to
// keelson-oci; the shim does not handle the data.
type execution struct {
	streams     agent.Streams
	remoteFiles []*os.File
	stdin       *os.File // the agent's end of the pipe; nil if there is no input
	outputs     []*os.File
	sinks       []io.Writer

	terminal   *os.File      // the agent's end of the socket that receives the terminal
	stdinEnded chan struct{} // closed when the caller's stdin has ended; nil if nothing waits for that

	copies sync.WaitGroup
}

func newPipes(streams agent.Streams) (*execution, error) {
	e := &execution{streams: streams}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	e.remoteFiles = []*os.File{null, null, null}
	if streams.Stdin != nil {
		r, w, err := os.Pipe()
		if err != nil {
			e.closeStreams()
			return nil, err
		}
		e.remoteFiles[0], e.stdin = r, w
	}
	for i, sink := range []io.Writer{streams.Stdout, streams.Stderr} {
		if sink == nil {
			continue
		}
		r, w, err := os.Pipe()
		if err != nil {
			e.closeStreams()
			return nil, err
		}
		e.remoteFiles[1+i] = w
		e.outputs, e.sinks = append(e.outputs, r), append(e.sinks, sink)
	}
	return e, nil
}

func newTerminal(streams agent.Streams) (*execution, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return &execution{streams: streams, terminal: os.NewFile(uintptr(fds[0]), "terminal"),
		remoteFiles: []*os.File{os.NewFile(uintptr(fds[1]), "terminal")}}, nil
}

// runCommand runs the command in its container. It returns the exit code after the command has
// exited and its output was copied. If ctx ends first, it kills the command and returns an error.
func (e *execution) runCommand(ctx context.Context, runtime *Runtime, shim *shimclient.Client,
	request *wire.Exec) (code int, err error) {
	id, answers, end, err := shim.SendRequest(wire.KindExec, request, e.remoteFiles...)
	if err != nil {
		return 0, err
	}
	for _, f := range e.remoteFiles {
		f.Close() // /dev/null may be in the list three times: closing it again has no effect
	}
	f, err := shim.AwaitResponse(ctx, answers)
	if err != nil {
		if ctx.Err() != nil {
			// The command may still start: kill it in the background.
			runtime.life.background.Go(func() { defer end(); runtime.killAbandoned(shim, id, answers) })
		} else {
			end()
		}
		return 0, err
	}
	defer end()
	if _, err := shim.DecodeStarted(f); err != nil {
		return 0, err
	}
	if e.terminal != nil {
		if err := e.receiveTerminal(); err != nil {
			return 0, err
		}
	}
	e.copyStreams(ctx)
	f, err = shim.AwaitResponse(ctx, answers)
	if err != nil {
		if ctx.Err() != nil {
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
			defer cancel()
			shim.KillCommand(last, id, answers)
		}
		return 0, err
	}
	var x wire.Exited
	if f.Kind != wire.KindExited || shim.DecodeMessage(f, &x) != nil {
		return 0, wire.ErrMalformed
	}
	e.drainOutput(ctx)
	return int(x.Code), nil
}

// killAbandoned kills the command of an exec request after the caller has gone, as soon as the
// command has started.
func (r *Runtime) killAbandoned(shim *shimclient.Client, id uint32, answers <-chan wire.Frame) {
	ctx, cancel := context.WithTimeout(context.Background(), teardownTimeout)
	defer cancel()
	go func() {
		select {
		case <-r.life.stopping: // the shim kills the commands of a closed connection
			cancel()
		case <-ctx.Done():
		}
	}()
	f, err := shim.AwaitResponse(ctx, answers)
	if err != nil {
		return
	}
	if _, err := shim.DecodeStarted(f); err == nil {
		shim.KillCommand(ctx, id, answers)
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
		return errors.New("no terminal was received")
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return errors.New("no terminal was received")
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return err
	}
	master := os.NewFile(uintptr(fds[0]), "terminal")
	e.outputs = []*os.File{master}
	e.sinks = []io.Writer{e.streams.Stdout}
	if e.streams.Stdout == nil {
		e.sinks[0] = io.Discard
	}
	if e.streams.Stdin != nil {
		e.stdin = master
	}
	return nil
}

// copyStreams starts goroutines that copy between the caller's streams and the command's streams.
// Nothing waits for the goroutine that reads the caller's stdin, because it cannot be interrupted.
func (e *execution) copyStreams(ctx context.Context) {
	for i, out := range e.outputs {
		e.copies.Go(func() {
			if _, err := io.Copy(e.sinks[i], out); err != nil {
				_, _ = io.Copy(io.Discard, out) // the reader is gone; the command must not block
			}
		})
	}
	if e.stdin != nil {
		go func() {
			if _, err := io.Copy(e.stdin, e.streams.Stdin); err == nil && e.stdinEnded != nil {
				close(e.stdinEnded)
			}
			if e.terminal == nil {
				e.stdin.Close()
			}
		}()
	}
	if e.streams.Resize != nil && e.terminal != nil {
		go forwardResizes(ctx, e.streams.Resize, func(s agent.TermSize) {
			if raw, err := e.outputs[0].SyscallConn(); err == nil {
				_ = raw.Control(func(fd uintptr) {
					_ = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: s.Height, Col: s.Width})
				})
			}
		})
	}
}

func forwardResizes(ctx context.Context, sizes <-chan agent.TermSize, set func(agent.TermSize)) {
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

// drainOutput waits for the rest of the output, at most drainTimeout.
func (e *execution) drainOutput(ctx context.Context) {
	done := make(chan struct{})
	go func() { e.copies.Wait(); close(done) }()
	t := time.NewTimer(drainTimeout)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
	case <-ctx.Done():
	}
}

// closeStreams closes the agent's ends of all streams. Nothing is written to the caller's streams
// afterwards.
func (e *execution) closeStreams() {
	for _, f := range append(append([]*os.File{e.stdin, e.terminal}, e.remoteFiles...), e.outputs...) {
		if f != nil {
			f.Close()
		}
	}
	e.copies.Wait()
}

// Attach implements agent.Runtime. It returns when the container's output has ended, ctx is done,
// or the shim is gone. With a terminal or without stdinOnce, it also returns at most drainTimeout
// after the caller's stdin has ended.
func (r *Runtime) Attach(ctx context.Context, containerID string, tty bool, streams agent.Streams) error {
	if err := r.awaitReady(ctx); err != nil {
		return err
	}
	c, err := r.findContainer(containerID)
	if err != nil {
		return err
	}
	shim := c.containerShim()
	if state := c.containerState(); (state != ContainerRunning && state != ContainerCreated) || shim == nil {
		return status.Errorf(codes.FailedPrecondition, "container %s is not running: it is %s", containerID, state)
	}
	tty = c.config.GetTty() // the container's setting takes precedence
	if tty {
		streams.Stderr = nil
	}
	e, err := newPipes(streams)
	if err != nil {
		return fmt.Errorf("attach to container %s: %w", containerID, err)
	}
	defer e.closeStreams()
	m := wire.Attach{Container: containerID, Stdin: streams.Stdin != nil, Stdout: streams.Stdout != nil,
		Stderr: streams.Stderr != nil}
	var files []*os.File
	for i, wanted := range []bool{m.Stdin, m.Stdout, m.Stderr} {
		if wanted {
			files = append(files, e.remoteFiles[i])
		}
	}
	if _, err := shim.CallDone(ctx, wire.KindAttach, &m, files...); err != nil {
		return fmt.Errorf("attach to container %s: %w", containerID, err)
	}
	for _, f := range e.remoteFiles {
		f.Close()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if streams.Resize != nil && tty {
		go forwardResizes(ctx, streams.Resize, func(s agent.TermSize) {
			m := wire.Resize{Container: containerID, Width: int64(s.Width), Height: int64(s.Height)}
			_, _ = shim.CallDone(ctx, wire.KindResize, &m)
		})
	}
	// A container's stdin stays open after a client has gone, unless stdinOnce closes it. The end
	// of the client's input therefore ends the attach.
	if c.config.GetStdin() && (tty || !c.config.GetStdinOnce()) && streams.Stdin != nil {
		e.stdinEnded = make(chan struct{})
	}
	e.copyStreams(ctx)
	finished := make(chan struct{})
	go func() { e.copies.Wait(); close(finished) }()
	if len(e.outputs) == 0 {
		finished = nil // only input: until the container ends
	}
	select {
	case <-e.stdinEnded:
		e.drainOutput(ctx)
	case <-finished:
	case <-c.ended:
		e.drainOutput(ctx)
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}
