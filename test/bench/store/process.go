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

// program is how a process of the benchmark is started.
type program struct {
	path string
	role string
}

// process is one that takes orders.
type process struct {
	name string
	cmd  *exec.Cmd
	in   io.WriteCloser
	dead chan struct{} // closed when it has ended

	mu      sync.Mutex
	orders  *json.Encoder
	last    int
	waiting map[int]chan drive.Reply
}

// start starts a process and gives it its setup.
func (p program) start(name string, s any) (*process, error) {
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
		name: name, cmd: cmd, in: in, dead: make(chan struct{}),
		orders: json.NewEncoder(in), waiting: make(map[int]chan drive.Reply),
	}
	go proc.read(out)
	if err := proc.orders.Encode(s); err != nil {
		proc.kill()
		return nil, fmt.Errorf("setting %s up: %w", name, err)
	}
	return proc, nil
}

// read gives replies to those who wait for them, until the process ends.
func (p *process) read(out io.Reader) {
	defer close(p.dead)
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
	_ = p.cmd.Wait() // however it ended, whoever waits for a reply is told
}

// pending is an order that is being obeyed.
type pending struct {
	on    *process
	order drive.Order
	reply chan drive.Reply
}

// begin gives an order and does not wait.
func (p *process) begin(o drive.Order) (*pending, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last++
	o.ID = p.last
	reply := make(chan drive.Reply, 1)
	p.waiting[o.ID] = reply
	if err := p.orders.Encode(o); err != nil {
		delete(p.waiting, o.ID)
		return nil, fmt.Errorf("order %s to %s: %w", o.Do, p.name, err)
	}
	return &pending{p, o, reply}, nil
}

// wait returns the reply. An error that the process tells is an error here;
// failed calls of a load are not: who gave the order counts them.
func (w *pending) wait(ctx context.Context) (drive.Reply, error) {
	select {
	case r := <-w.reply:
		return r, w.trouble(r)
	case <-w.on.dead:
		select {
		case r := <-w.reply: // its last word
			return r, w.trouble(r)
		default:
			return drive.Reply{}, fmt.Errorf("%s: %s has ended", w.order.Do, w.on.name)
		}
	case <-ctx.Done():
		return drive.Reply{}, fmt.Errorf("%s at %s: %w", w.order.Do, w.on.name, ctx.Err())
	}
}

func (w *pending) trouble(r drive.Reply) error {
	if r.Error == "" || r.Failed > 0 {
		return nil
	}
	return fmt.Errorf("%s at %s: %s", w.order.Do, w.on.name, r.Error)
}

// end ends a load and returns what it has seen.
func (w *pending) end(ctx context.Context) (drive.Reply, error) {
	if _, err := w.on.do(ctx, drive.Order{Do: drive.DoEnd, Of: w.order.ID}); err != nil {
		return drive.Reply{}, err
	}
	return w.wait(ctx)
}

// do gives an order and waits for the reply.
func (p *process) do(ctx context.Context, o drive.Order) (drive.Reply, error) {
	w, err := p.begin(o)
	if err != nil {
		return drive.Reply{}, err
	}
	return w.wait(ctx)
}

// terminate asks the process to end in an orderly way and waits until it has.
func (p *process) terminate(ctx context.Context) error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("asking %s to end: %w", p.name, err)
	}
	select {
	case <-p.dead:
	case <-ctx.Done():
		return fmt.Errorf("%s was asked to end: %w", p.name, ctx.Err())
	}
	if state := p.cmd.ProcessState; !state.Success() {
		return fmt.Errorf("%s was asked to end and failed: %s", p.name, state)
	}
	return nil
}

// spent is the process's CPU time in seconds, also when it has ended.
func (p *process) spent() float64 {
	select {
	case <-p.dead:
		return (p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()).Seconds()
	default:
	}
	seconds, err := procfs.CPU(p.cmd.Process.Pid)
	if err != nil {
		return 0 // it ends just now
	}
	return seconds
}

// freeze stops the process where it is; thaw lets it go on.
func (p *process) freeze() error { return p.signal("freezing", syscall.SIGSTOP) }
func (p *process) thaw() error   { return p.signal("thawing", syscall.SIGCONT) }

func (p *process) signal(what string, s syscall.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil {
		return fmt.Errorf("%s %s: %w", what, p.name, err)
	}
	return nil
}

// kill is kill -9.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // it may be gone already
	<-p.dead
}
