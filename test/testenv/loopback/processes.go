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

// Processes runs each replica as a child process: its Run is a Shape's Run. Program must accept the
// arguments of keelson-controlplane; it may be the test binary itself. The log of a replica is in
// the file DATADIR.log beside its data folder.
type Processes struct {
	Program string
	Env     []string // in addition to this process's environment
	Args    []string // of the command "run", in addition to the flags that identify the replica

	mu       sync.Mutex
	children map[string]*child
}

type child struct {
	pid  int
	gone chan struct{} // closed when the process has exited
	back chan struct{} // nil unless killed; closed when the replica may run again
}

// Run runs a replica until ctx ends, then stops it with an interrupt signal. It returns an error if
// the process exits by itself.
func (p *Processes) Run(ctx context.Context, cfg server.Config) error {
	if err := p.awaitRestart(ctx, cfg.Name); err != nil {
		return err
	}
	args := []string{"run", "--data-dir", cfg.DataDir, "--name", cfg.Name, "--advertise-address", cfg.Advertise,
		"--shutdown-delay-duration", "0s"}
	if cfg.Leader.SchedulerConfig != "" {
		args = append(args, "--scheduler-config", cfg.Leader.SchedulerConfig)
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
		err = errors.New("the process exited by itself")
	}
	return fmt.Errorf("replica %s: %w; its log is %s", cfg.Name, err, log.Name())
}

// awaitRestart waits until a killed replica may run again.
func (p *Processes) awaitRestart(ctx context.Context, name string) error {
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

// PID returns the PID of a replica's last process, or 0 if it was never started.
func (p *Processes) PID(name string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.children[name]; c != nil {
		return c.pid
	}
	return 0
}

// Kill kills a replica's process with SIGKILL. The replica is not restarted until allowRestart is
// called.
func (p *Processes) Kill(name string) (allowRestart func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.children[name]
	if c == nil {
		return nil, fmt.Errorf("kill replica %s: it is not running", name)
	}
	select {
	case <-c.gone:
		return nil, fmt.Errorf("kill replica %s: it has exited", name)
	default:
	}
	if err := syscall.Kill(c.pid, syscall.SIGKILL); err != nil {
		return nil, fmt.Errorf("killing replica %s: %w", name, err)
	}
	c.back = make(chan struct{})
	return sync.OnceFunc(func() { close(c.back) }), nil
}
