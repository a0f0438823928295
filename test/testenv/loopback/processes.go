package loopback

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"keelson.dev/keelson/controlplane/server"
)

// Processes runs each replica as a process of its own: a Shape's Run. The program takes the arguments of
// keelson-controlplane; a test that has that command in it may be its own program. What a replica logs is in a file
// beside its data folder.
type Processes struct {
	Program string
	Env     []string // besides this process's
	Args    []string // of run, besides those that say which replica it is

	mu       sync.Mutex
	children map[string]*child
}

type child struct {
	pid  int
	gone chan struct{} // closed when the process has ended
	back chan struct{} // nil, or closed when the replica may run again
}

// Run runs a replica until ctx ends. It is told to end as an operator would.
func (p *Processes) Run(ctx context.Context, cfg server.Config) error {
	if err := p.allowed(ctx, cfg.Name); err != nil {
		return err
	}
	args := []string{"run", "--data-dir", cfg.DataDir, "--name", cfg.Name, "--advertise-address", cfg.Advertise, "--shutdown-delay-duration", "0s"}
	if cfg.SchedulerConfig != "" {
		args = append(args, "--scheduler-config", cfg.SchedulerConfig)
	}
	c := exec.CommandContext(ctx, p.Program, append(args, p.Args...)...)
	c.Env = append(os.Environ(), p.Env...)
	log, err := os.OpenFile(cfg.DataDir+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	c.Stderr, c.Cancel, c.WaitDelay = log, func() error { return c.Process.Signal(os.Interrupt) }, 20*time.Second
	if err := c.Start(); err != nil {
		return fmt.Errorf("starting replica %s: %w", cfg.Name, err)
	}
	own := &child{pid: c.Process.Pid, gone: make(chan struct{})}
	p.mu.Lock()
	if p.children == nil {
		p.children = map[string]*child{}
	}
	p.children[cfg.Name] = own
	p.mu.Unlock()
	err = c.Wait()
	close(own.gone)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err == nil:
		err = errors.New("it ended by itself")
	}
	return fmt.Errorf("replica %s: %w; its log is %s", cfg.Name, err, log.Name())
}

// allowed waits until the replica may run.
func (p *Processes) allowed(ctx context.Context, name string) error {
	p.mu.Lock()
	c := p.children[name]
	p.mu.Unlock()
	if c == nil || c.back == nil {
		return nil
	}
	select {
	case <-c.back:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// PID is the process of a replica; 0 when none has begun.
func (p *Processes) PID(name string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.children[name]; c != nil {
		return c.pid
	}
	return 0
}

// Kill ends a replica at once, as a crash would. It runs again after back was called.
func (p *Processes) Kill(name string) (back func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.children[name]
	if c == nil {
		return nil, fmt.Errorf("killing replica %s: it does not run", name)
	}
	select {
	case <-c.gone:
		return nil, fmt.Errorf("killing replica %s: it has ended", name)
	default:
	}
	if err := syscall.Kill(c.pid, syscall.SIGKILL); err != nil {
		return nil, fmt.Errorf("killing replica %s: %w", name, err)
	}
	c.back = make(chan struct{})
	return sync.OnceFunc(func() { close(c.back) }), nil
}
