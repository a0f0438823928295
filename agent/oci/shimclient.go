package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent/oci/wire"
)

// errShimGone is returned if the connection to the shim has ended.
var errShimGone = errors.New("the pod's shim is gone")

// shimClient is a connection to one shim. Its methods may be called concurrently.
type shimClient struct {
	conn     *net.UnixConn
	version  int64  // protocol version; set before any request but Hello
	features uint64 // features of the shim

	mu      sync.Mutex
	next    uint32
	calls   map[uint32]chan wire.Frame
	leaving bool
	gone    chan struct{} // closed when the connection has ended

	writing sync.Mutex
}

const shimSocket = "sock"

// viaFolder calls f with a path of the shim's socket in dir. The path fits into a socket address
// however long dir is.
func viaFolder(dir string, f func(path string) error) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return f(fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), shimSocket))
}

// listenShim creates the listening socket that a new shim inherits, so that clients need not wait
// until it exists.
func listenShim(dir string) (*os.File, error) {
	var out *os.File
	err := viaFolder(dir, func(path string) error {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			return err
		}
		l.SetUnlinkOnClose(false)
		defer l.Close()
		out, err = l.File()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen for the shim in %s: %w", dir, err)
	}
	return out, nil
}

// startShim starts the shim of the sandbox with directory dir. The caller connects to it.
func (r *Runtime) startShim(dir string) (pid int, err error) {
	socket, err := listenShim(dir)
	if err != nil {
		return 0, err
	}
	defer socket.Close()
	log, err := os.OpenFile(filepath.Join(dir, "shim.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return 0, err
	}
	defer log.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	pid, err = r.spawner.start(r.cfg.ShimPath, []string{"keelson-shim"}, &syscall.ProcAttr{
		Dir: "/",
		// Saves memory: one thread runs Go code, and garbage is collected early.
		Env:   []string{"GOMAXPROCS=1", "GOGC=20"},
		Files: []uintptr{null.Fd(), null.Fd(), log.Fd(), socket.Fd()},
	})
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", r.cfg.ShimPath, err)
	}
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte("-998"), 0); err != nil {
		r.oomOnce.Do(func() { r.log.Warn("shims cannot be shielded from the OOM killer", "error", err) })
	}
	// The shim is a child of this process until either exits: reap it.
	go func() {
		var ws syscall.WaitStatus
		for {
			if _, err := syscall.Wait4(pid, &ws, 0, nil); err != syscall.EINTR {
				return
			}
		}
	}()
	return pid, nil
}

// connectShim connects to a running shim and returns its snapshot. onExit is called for every
// process that ends, in order. onGone is called once if the connection is lost, but not after
// leave.
func connectShim(ctx context.Context, dir string, onExit func(wire.Exited), onGone func()) (*shimClient, *wire.Snapshot, error) {
	var c *net.UnixConn
	err := viaFolder(dir, func(path string) (err error) {
		c, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	s := &shimClient{conn: c, calls: map[uint32]chan wire.Frame{}, gone: make(chan struct{})}
	// Messages after the snapshot are handled only when the snapshot has been read.
	started := make(chan struct{})
	var refused bool // greet failed: the caller gets its error, so onGone is not called
	go s.read(func(f wire.Frame) error {
		<-started
		var e wire.Exited
		if err := s.unmarshal(f, &e); err != nil {
			return err
		}
		onExit(e)
		return nil
	}, func() {
		if <-started; !refused {
			onGone()
		}
	})
	snap, err := s.greet(ctx)
	if err != nil {
		refused = true
		s.leave()
	}
	close(started)
	if err != nil {
		return nil, nil, err
	}
	return s, snap, nil
}

// greet sends Hello, sets the protocol version and returns the shim's snapshot.
func (s *shimClient) greet(ctx context.Context) (*wire.Snapshot, error) {
	s.version = 1 // Hello has the form of version 1 in all versions
	f, err := s.call(ctx, wire.KindHello, &wire.Hello{Version: wire.Version, Features: wire.Features})
	if err != nil {
		return nil, err
	}
	switch f.Kind {
	case wire.KindWelcome:
		var w wire.Welcome
		if err := wire.Unmarshal(1, f.Body, &w); err != nil {
			return nil, err
		}
		if w.Version < 1 || w.Version > wire.Version {
			return nil, fmt.Errorf("the shim wants to speak version %d, this agent up to %d", w.Version, wire.Version)
		}
		s.version, s.features = w.Version, w.Features
		return &w.Snapshot, nil
	case wire.KindSnapshot: // the shim is older than protocol versions
		var snap wire.Snapshot
		s.version = 0
		if err := wire.Unmarshal(0, f.Body, &snap); err != nil {
			return nil, err
		}
		return &snap, nil
	case wire.KindDone:
		var d wire.Done
		if wire.Unmarshal(1, f.Body, &d) == nil && d.Error != "" {
			return nil, fmt.Errorf("the shim refuses this agent: %s", d.Error)
		}
	}
	return nil, wire.ErrMalformed
}

// read reads frames until the connection ends. note is called for messages that are not a response
// to a request.
func (s *shimClient) read(note func(wire.Frame) error, onGone func()) {
	var buf []byte
	chunk := make([]byte, 8<<10)
	for {
		n, err := s.conn.Read(chunk)
		if err != nil {
			break
		}
		buf = append(buf, chunk[:n]...)
		for err == nil {
			var f wire.Frame
			var used int
			if f, used, err = wire.NextFrame(buf); used == 0 {
				break
			}
			f.Body = append([]byte(nil), f.Body...)
			buf = buf[used:]
			if f.Kind == wire.KindExited && f.ID == 0 {
				err = note(f)
				continue
			}
			s.deliver(f)
		}
		if err != nil {
			break
		}
		if len(buf) == 0 {
			buf = nil
		}
	}
	s.conn.Close()
	s.mu.Lock()
	leaving := s.leaving
	s.mu.Unlock()
	close(s.gone)
	if !leaving {
		onGone()
	}
}

func (s *shimClient) deliver(f wire.Frame) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ch := s.calls[f.ID]; ch != nil {
		select {
		case ch <- f:
		default: // the channel has room for all expected responses; drop more
		}
	}
}

// writeTime is how long a shim may leave a request unread. A request is smaller than the socket's
// buffer.
const writeTime = 10 * time.Second

// open sends a request. Its responses arrive on the returned channel. The caller must call end when
// it needs no more of them.
func (s *shimClient) open(kind wire.Kind, m wire.Message,
	files ...*os.File) (id uint32, answers <-chan wire.Frame, end func(), err error) {
	ch := make(chan wire.Frame, 2)
	s.mu.Lock()
	s.next++
	id = s.next
	s.calls[id] = ch
	s.mu.Unlock()
	end = func() {
		s.mu.Lock()
		delete(s.calls, id)
		s.mu.Unlock()
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	frame := wire.AppendFrame(nil, wire.Frame{Kind: kind, ID: id, Body: s.marshal(m)})
	s.writing.Lock()
	n, err := 0, s.conn.SetWriteDeadline(time.Now().Add(writeTime))
	if err == nil {
		n, _, err = s.conn.WriteMsgUnix(frame, rights, nil)
	}
	if err == nil && n < len(frame) {
		_, err = s.conn.Write(frame[n:])
	}
	s.writing.Unlock()
	if err != nil {
		s.conn.Close() // a partial frame may have been sent, so nothing can follow it
		end()
		return 0, nil, nil, fmt.Errorf("%w: %w", errShimGone, err)
	}
	return id, ch, end, nil
}

// await waits for a response, the end of the connection, or ctx.
func (s *shimClient) await(ctx context.Context, answers <-chan wire.Frame) (wire.Frame, error) {
	select {
	case f := <-answers:
		return f, nil
	case <-s.gone:
		select { // the shim may have responded just before the end
		case f := <-answers:
			return f, nil
		default:
		}
		return wire.Frame{}, errShimGone
	case <-ctx.Done():
		return wire.Frame{}, ctx.Err()
	}
}

// call sends a request and waits for its single response.
func (s *shimClient) call(ctx context.Context, kind wire.Kind, m wire.Message, files ...*os.File) (wire.Frame, error) {
	_, answers, end, err := s.open(kind, m, files...)
	if err != nil {
		return wire.Frame{}, err
	}
	defer end()
	return s.await(ctx, answers)
}

// done sends a request that is answered with Done, and returns Done or its error.
func (s *shimClient) done(ctx context.Context, kind wire.Kind, m wire.Message, files ...*os.File) (wire.Done, error) {
	f, err := s.call(ctx, kind, m, files...)
	if err != nil {
		return wire.Done{}, err
	}
	var d wire.Done
	if f.Kind != wire.KindDone || s.unmarshal(f, &d) != nil {
		return wire.Done{}, wire.ErrMalformed
	}
	if d.Error != "" {
		return d, errors.New(d.Error)
	}
	return d, nil
}

func (s *shimClient) marshal(m wire.Message) []byte {
	if m == nil {
		return nil
	}
	return wire.Marshal(s.version, m)
}

func (s *shimClient) unmarshal(f wire.Frame, m wire.Message) error {
	return wire.Unmarshal(s.version, f.Body, m)
}

// begun decodes a Started response.
func (s *shimClient) begun(f wire.Frame) (wire.Started, error) {
	var st wire.Started
	if f.Kind != wire.KindStarted || s.unmarshal(f, &st) != nil {
		return st, wire.ErrMalformed
	}
	if st.Error != "" {
		return st, errors.New(st.Error)
	}
	return st, nil
}

func (s *shimClient) signal(ctx context.Context, container string, sig int) error {
	m := wire.Signal{Container: container, Signal: int64(sig)}
	_, err := s.done(ctx, wire.KindSignal, &m)
	return err
}

// shutdown makes the shim exit and waits until it has.
func (s *shimClient) shutdown(ctx context.Context) {
	s.mu.Lock()
	s.leaving = true
	s.mu.Unlock()
	if _, err := s.done(ctx, wire.KindShutdown, nil); err == nil {
		select {
		case <-s.gone:
		case <-ctx.Done():
		}
	}
	s.conn.Close()
}

// leave closes the connection. The shim keeps running.
func (s *shimClient) leave() {
	s.mu.Lock()
	s.leaving = true
	s.mu.Unlock()
	s.conn.Close()
}

// discard reads and drops all data of a reader.
func discard(r io.Reader) { _, _ = io.Copy(io.Discard, r) }
