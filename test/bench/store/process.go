package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"

	"keelson.dev/keelson/test/bench/procfs"
	"keelson.dev/keelson/test/bench/store/drive"
)

// program is the executable and role of a process of the benchmark.
type program struct {
	path string
	role string
}

// process is a child process that serves requests.
type process struct {
	name   string
	cmd    *exec.Cmd
	in     io.WriteCloser
	exited chan struct{} // closed when the process has exited

	mu          sync.Mutex
	orders      *json.Encoder
	lastRequest int
	waiting     map[int]chan drive.Reply
}

// startProcess starts the program as a child process with this name, and sends its Setup.
func (p program) startProcess(name string, s any) (*process, error) {
	cmd := exec.Command(p.path)
	cmd.Env = append(os.Environ(), drive.RoleEnv+"="+p.role)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	proc := &process{
		name: name, cmd: cmd, in: in, exited: make(chan struct{}),
		orders: json.NewEncoder(in), waiting: make(map[int]chan drive.Reply),
	}
	go proc.readReplies(out)
	if err := proc.orders.Encode(s); err != nil {
		proc.killProcess()
		return nil, fmt.Errorf("sending the setup to %s: %w", name, err)
	}
	return proc, nil
}

// readReplies delivers replies to their waiting callers until the process exits.
func (p *process) readReplies(out io.Reader) {
	defer close(p.exited)
	for replies := json.NewDecoder(out); ; {
		var r drive.Reply
		if replies.Decode(&r) != nil {
			break
		}
		p.mu.Lock()
		waiting := p.waiting[r.ID]
		delete(p.waiting, r.ID)
		p.mu.Unlock()
		if waiting != nil {
			waiting <- r
		}
	}
	_ = p.cmd.Wait() // its exit status does not matter: waiting callers get an error
}

// pendingRequest is a request in progress.
type pendingRequest struct {
	on    *process
	order drive.Request
	reply chan drive.Reply
}

// sendRequest sends a request without waiting for its reply.
func (p *process) sendRequest(o drive.Request) (*pendingRequest, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lastRequest++
	o.ID = p.lastRequest
	reply := make(chan drive.Reply, 1)
	p.waiting[o.ID] = reply
	if err := p.orders.Encode(o); err != nil {
		delete(p.waiting, o.ID)
		return nil, fmt.Errorf("sending order %s to %s: %w", o.Do, p.name, err)
	}
	return &pendingRequest{p, o, reply}, nil
}

// awaitReply waits for the reply and returns it. It returns an error that the process reports, but
// not for failed calls of a load, which the caller counts.
func (w *pendingRequest) awaitReply(ctx context.Context) (drive.Reply, error) {
	select {
	case r := <-w.reply:
		return r, w.replyError(r)
	case <-w.on.exited:
		select {
		case r := <-w.reply: // sent just before the exit
			return r, w.replyError(r)
		default:
			return drive.Reply{}, fmt.Errorf("%s: %s has exited", w.order.Do, w.on.name)
		}
	case <-ctx.Done():
		return drive.Reply{}, fmt.Errorf("%s at %s: %w", w.order.Do, w.on.name, ctx.Err())
	}
}

func (w *pendingRequest) replyError(r drive.Reply) error {
	if r.Error == "" || r.Failed > 0 {
		return nil
	}
	return fmt.Errorf("%s at %s: %s", w.order.Do, w.on.name, r.Error)
}

// stopLoad stops the load of the request and returns its reply.
func (w *pendingRequest) stopLoad(ctx context.Context) (drive.Reply, error) {
	if _, err := w.on.callProcess(ctx, drive.Request{Do: drive.DoEnd, Of: w.order.ID}); err != nil {
		return drive.Reply{}, err
	}
	return w.awaitReply(ctx)
}

// callProcess sends a request and waits for its reply.
func (p *process) callProcess(ctx context.Context, o drive.Request) (drive.Reply, error) {
	w, err := p.sendRequest(o)
	if err != nil {
		return drive.Reply{}, err
	}
	return w.awaitReply(ctx)
}

// terminateProcess sends SIGTERM and waits until the process has exited. It returns an error if the
// exit status is not 0.
func (p *process) terminateProcess(ctx context.Context) error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("sending SIGTERM to %s: %w", p.name, err)
	}
	select {
	case <-p.exited:
	case <-ctx.Done():
		return fmt.Errorf("waiting for %s to exit: %w", p.name, ctx.Err())
	}
	if state := p.cmd.ProcessState; !state.Success() {
		return fmt.Errorf("%s has failed after SIGTERM: %s", p.name, state)
	}
	return nil
}

// cpuSeconds returns the process's CPU seconds, even after it has exited.
func (p *process) cpuSeconds() float64 {
	select {
	case <-p.exited:
		return (p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()).Seconds()
	default:
	}
	seconds, err := procfs.CPU(p.cmd.Process.Pid)
	if err != nil {
		return 0 // it is exiting
	}
	return seconds
}

// freezeProcess stops the process with SIGSTOP; resumeProcess continues it.
func (p *process) freezeProcess() error { return p.signal("suspending", syscall.SIGSTOP) }
func (p *process) resumeProcess() error { return p.signal("resuming", syscall.SIGCONT) }

func (p *process) signal(what string, s syscall.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil {
		return fmt.Errorf("%s %s: %w", what, p.name, err)
	}
	return nil
}

// killProcess kills the process with SIGKILL and waits until it has exited.
func (p *process) killProcess() {
	_ = p.cmd.Process.Kill() // it may have exited already
	<-p.exited
}
