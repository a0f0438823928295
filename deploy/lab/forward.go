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

// supervisorHost is a Host for the supervisor and the forwarder of the lab; see Supervise. It only
// determines their cgroup, and has no namespaces. No other processes of the lab run in the mount
// namespace of the machine.
var supervisorHost = Host{Name: "forwarder", Role: "forwarder"}

func supervisorLog() string { return filepath.Join(stateRoot, "forwarder.log") }

// startSupervisor starts 'kctl lab supervise' in the background, which runs Supervise.
func (hb hostBuilder) startSupervisor() error {
	if err := supervisorHost.makeCgroups(); err != nil {
		return err
	}
	logFile, err := os.OpenFile(supervisorLog(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer logFile.Close()
	keepDescriptors()
	cmd := exec.Command("sh", "-c", supervisorHost.joinScript()+`exec "$@"`, "sh", hb.binPath("kctl"),
		"lab", "supervise")
	cmd.Stdout, cmd.Stderr, cmd.Dir = logFile, logFile, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting the supervisor: %w", err)
	}
	return cmd.Process.Release()
}

// ForwarderRuns reports whether the supervisor of the lab is running. The supervisor keeps the
// forwarder running, which accepts connections at the lab's API address.
func (l *Lab) ForwarderRuns() bool { return hasLiveProcess(supervisorHost.CgroupPath()) }

// RestartForwarder starts the supervisor and the forwarder of a lab in which they no longer run,
// and waits until the API responds.
func (l *Lab) RestartForwarder(ctx context.Context) error {
	if err := l.hosts().startSupervisor(); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	return l.AwaitAPI(ctx)
}

// AwaitAPI waits until the API responds at Config.Listen. It fails after 10 seconds.
func (l *Lab) AwaitAPI(ctx context.Context) error {
	dial := func(ctx context.Context, _ string) (net.Conn, error) { return dialHere(ctx, l.Config.Listen) }
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	err := wait.For(ctx, 50*time.Millisecond, func() error {
		return checkReadyWith(ctx, l.hosts().hostsWithRole(RoleControlPlane)[0], dial)
	})
	if err != nil {
		return fmt.Errorf("lab: no replica answers at %s: %w", l.Config.Listen, err)
	}
	return nil
}

// Supervise listens on the lab's API address, and runs a forwarder process until ctx is canceled.
// If the forwarder exits, it is started again. The listener belongs to the supervisor, so that new
// connections wait during a restart. The forwarder runs in the network namespace of the bridge.
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
		cmd := exec.CommandContext(ctx, "nsenter", "--net="+bridgeHost.NetNS(), "--", l.hosts().binPath("kctl"),
			"lab", "forward")
		cmd.ExtraFiles = []*os.File{file} // file descriptor 3
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

// Forward runs in the forwarder process. It accepts connections from the listener that it inherits
// from the supervisor as file descriptor 3. Each connection is forwarded to a ready replica, and
// closed when that replica is no longer ready.
func (l *Lab) Forward(ctx context.Context) error {
	ln, err := net.FileListener(os.NewFile(3, "listener"))
	if err != nil {
		return fmt.Errorf("lab: the forwarder needs the supervisor's listener: %w", err)
	}
	f := &forwarder{replicas: l.hosts().hostsWithRole(RoleControlPlane), conns: map[net.Conn]int{}}
	go f.probeReplicas(ctx)
	for {
		c, err := ln.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return fmt.Errorf("lab: accepting: %w", err)
		}
		go f.forwardConn(ctx, c)
	}
}

type forwarder struct {
	replicas []Host

	mu       sync.Mutex
	up       [10]bool
	lastGood int
	conns    map[net.Conn]int // client connection → index of its replica
}

func dialHere(ctx context.Context, address string) (net.Conn, error) {
	return (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", address)
}

// probeReplicas checks every 500 ms whether each replica is ready, until ctx is canceled. When a
// replica fails two checks in a row, its connections are closed.
func (f *forwarder) probeReplicas(ctx context.Context) {
	var wg sync.WaitGroup
	for i, h := range f.replicas {
		wg.Add(1)
		go func() {
			defer wg.Done()
			failed := 0
			for {
				err := checkReadyWith(ctx, h, dialHere)
				if err == nil {
					failed = 0
				} else {
					failed++
				}
				f.setReplicaState(i, err == nil, failed >= 2)
				if wait.Delay(ctx, 500*time.Millisecond) != nil {
					return
				}
			}
		}()
	}
	wg.Wait()
}

func (f *forwarder) setReplicaState(i int, up, drop bool) {
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

// dialOrder returns the indexes of all replicas in the order in which a connection tries them.
// Ready replicas come first, beginning with the replica that the last connection used.
func (f *forwarder) dialOrder() []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	var good, rest []int
	for k := range f.replicas {
		i := (f.lastGood + k) % len(f.replicas)
		if f.up[i] {
			good = append(good, i)
		} else {
			rest = append(rest, i)
		}
	}
	return append(good, rest...)
}

func (f *forwarder) forwardConn(ctx context.Context, client net.Conn) {
	defer client.Close()
	for _, i := range f.dialOrder() {
		server, err := dialHere(ctx, f.replicas[i].apiAddress())
		if err != nil {
			f.setReplicaState(i, false, false)
			continue
		}
		f.mu.Lock()
		f.lastGood = i
		f.conns[client] = i
		f.mu.Unlock()
		copyBothWays(client, server)
		f.mu.Lock()
		delete(f.conns, client)
		f.mu.Unlock()
		return
	}
}

// copyBothWays copies data between a and b in both directions. It returns when both directions have
// ended, and closes both connections.
func copyBothWays(a, b net.Conn) {
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
