package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
)

// supervisorHost is the cgroup of the supervisor and the forwarder. They are the
// only processes of the lab in the machine's own mount namespace.
var supervisorHost = Host{Name: "forwarder", Role: "forwarder"}

func supervisorLog() string { return filepath.Join(stateRoot, "forwarder.log") }

// startSupervisor starts 'kctl lab supervise' in the background.
func (l *Lab) startSupervisor() error {
	if err := supervisorHost.makeCgroups(); err != nil {
		return err
	}
	logFile, err := os.OpenFile(supervisorLog(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer logFile.Close()
	keepDescriptors()
	cmd := exec.Command("sh", "-c", supervisorHost.joinScript()+`exec "$@"`, "sh", l.bin("kctl"), "lab", "supervise")
	cmd.Stdout, cmd.Stderr, cmd.Dir = logFile, logFile, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting the supervisor: %w", err)
	}
	return cmd.Process.Release()
}

// WayIn says whether the lab's one address leads anywhere: whether its supervisor lives.
func (l *Lab) WayIn() bool { return alive(supervisorHost.CgroupPath()) }

// RestoreWayIn starts the supervisor of a lab that has lost it, and waits until the API answers.
func (l *Lab) RestoreWayIn(ctx context.Context) error {
	if err := l.startSupervisor(); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	return l.Serves(ctx)
}

// Serves waits a moment for the API to answer at the lab's one address.
func (l *Lab) Serves(ctx context.Context) error {
	dial := func(ctx context.Context, _ string) (net.Conn, error) { return dialHere(ctx, l.Config.Listen) }
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	err := wait.For(ctx, 50*time.Millisecond, func() error {
		return readyThrough(ctx, l.hosts(RoleControlPlane)[0], dial)
	})
	if err != nil {
		return fmt.Errorf("lab: no replica answers at %s: %w", l.Config.Listen, err)
	}
	return nil
}

// Supervise listens on the lab's one address and keeps a forwarder running that
// serves it from inside the bridge's namespace. The listener is the supervisor's:
// while a forwarder restarts, connections wait instead of failing.
func (l *Lab) Supervise(ctx context.Context) error {
	ln, err := net.Listen("tcp", l.Config.Listen)
	if err != nil {
		return fmt.Errorf("lab: listening on %s: %w", l.Config.Listen, err)
	}
	defer ln.Close()
	file, err := ln.(*net.TCPListener).File()
	if err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	defer file.Close()
	b := backoff.Backoff{Min: 20 * time.Millisecond, Max: time.Second}
	for ctx.Err() == nil {
		cmd := exec.CommandContext(ctx, "nsenter", "--net="+bridgeHost.NetNS(), "--", l.bin("kctl"), "lab", "forward")
		cmd.ExtraFiles = []*os.File{file} // descriptor 3
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		began := time.Now()
		err := cmd.Run()
		fmt.Fprintf(os.Stderr, "%s forwarder ended: %v\n", time.Now().Format(time.RFC3339), err)
		if time.Since(began) > 10*time.Second {
			b.Reset()
		}
		if wait.Delay(ctx, b.Next()) != nil {
			break
		}
	}
	return nil
}

// Forward serves the inherited listener (descriptor 3): each connection goes to
// a replica that is ready, and ends when that replica ceases to be.
func (l *Lab) Forward(ctx context.Context) error {
	ln, err := net.FileListener(os.NewFile(3, "listener"))
	if err != nil {
		return fmt.Errorf("lab: the forwarder needs the supervisor's listener: %w", err)
	}
	f := &forwarder{replicas: l.hosts(RoleControlPlane), conns: map[net.Conn]int{}}
	go f.watch(ctx)
	for {
		c, err := ln.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return fmt.Errorf("lab: accepting: %w", err)
		}
		go f.serve(ctx, c)
	}
}

type forwarder struct {
	replicas []Host

	mu    sync.Mutex
	up    [10]bool
	best  int
	conns map[net.Conn]int // client connection → replica
}

func dialHere(ctx context.Context, address string) (net.Conn, error) {
	return (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", address)
}

// watch asks every replica for readiness twice a second. A replica that fails
// twice in a row loses its connections.
func (f *forwarder) watch(ctx context.Context) {
	var wg sync.WaitGroup
	for i, h := range f.replicas {
		wg.Add(1)
		go func() {
			defer wg.Done()
			failed := 0
			for {
				err := readyThrough(ctx, h, dialHere)
				if err == nil {
					failed = 0
				} else {
					failed++
				}
				f.set(i, err == nil, failed >= 2)
				if wait.Delay(ctx, 500*time.Millisecond) != nil {
					return
				}
			}
		}()
	}
	wg.Wait()
}

func (f *forwarder) set(i int, up, drop bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.up[i] = up
	if !drop {
		return
	}
	for c, replica := range f.conns {
		if replica == i {
			c.Close()
		}
	}
}

// order lists replicas, ready ones first, the last good one at the head.
func (f *forwarder) order() []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	var good, rest []int
	for k := range f.replicas {
		i := (f.best + k) % len(f.replicas)
		if f.up[i] {
			good = append(good, i)
		} else {
			rest = append(rest, i)
		}
	}
	return append(good, rest...)
}

func (f *forwarder) serve(ctx context.Context, client net.Conn) {
	defer client.Close()
	for _, i := range f.order() {
		server, err := dialHere(ctx, f.replicas[i].apiAddress())
		if err != nil {
			f.set(i, false, false)
			continue
		}
		f.mu.Lock()
		f.best = i
		f.conns[client] = i
		f.mu.Unlock()
		join(client, server)
		f.mu.Lock()
		delete(f.conns, client)
		f.mu.Unlock()
		return
	}
}

// join copies both ways until both ends are done.
func join(a, b net.Conn) {
	defer b.Close()
	done := make(chan struct{})
	go func() {
		_, _ = io.Copy(b, a)
		if t, ok := b.(*net.TCPConn); ok {
			_ = t.CloseWrite()
		}
		close(done)
	}()
	_, _ = io.Copy(a, b)
	a.Close()
	<-done
}
