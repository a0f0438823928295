// Package shimclient is the agent's side of the connection to a pod's shim: requests and responses
// in the protocol of package wire.
package shimclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent/oci/wire"
)

// ErrDisconnected is returned if the connection to the shim has ended.
var ErrDisconnected = errors.New("the connection to the pod's shim has ended")

// Client is a connection to one shim. Its methods may be called concurrently.
type Client struct {
	Conn     *net.UnixConn
	version  int64  // protocol version; set before any request but Hello
	features uint64 // features of the shim

	mu      sync.Mutex
	next    uint32
	calls   map[uint32]chan wire.Frame
	leaving bool
	Gone    chan struct{} // closed when the connection has ended

	writing sync.Mutex
}

// SocketName is the name of a shim's socket in its sandbox's directory.
const SocketName = "sock"

// WithSocketPath calls use with a path of the shim's socket in dir. The path is short enough for a
// socket address, however long dir is.
func WithSocketPath(dir string, use func(path string) error) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return use(fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), SocketName))
}

// Listen creates the listening socket of a new shim in dir. The shim inherits the socket, so
// clients can connect before the shim runs.
func Listen(dir string) (*os.File, error) {
	var out *os.File
	err := WithSocketPath(dir, func(path string) error {
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

// Connect connects to the running shim that has its socket in dir, and returns the shim's snapshot.
// It calls onExit for every process that exits, in order. It calls onGone once if the connection is
// lost, but not after Disconnect.
func Connect(ctx context.Context, dir string, onExit func(wire.Exited),
	onGone func()) (*Client, *wire.Snapshot, error) {
	var c *net.UnixConn
	err := WithSocketPath(dir, func(path string) (err error) {
		c, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	s := &Client{Conn: c, calls: map[uint32]chan wire.Frame{}, Gone: make(chan struct{})}
	// Messages after the snapshot are handled only when the snapshot has been read.
	started := make(chan struct{})
	var refused bool // sendHello failed: the caller gets its error, so onGone is not called
	go s.readFrames(func(f wire.Frame) error {
		<-started
		var e wire.Exited
		if err := s.DecodeMessage(f, &e); err != nil {
			return err
		}
		onExit(e)
		return nil
	}, func() {
		if <-started; !refused {
			onGone()
		}
	})
	snap, err := s.sendHello(ctx)
	if err != nil {
		refused = true
		s.Disconnect()
	}
	close(started)
	if err != nil {
		return nil, nil, err
	}
	return s, snap, nil
}

// sendHello sends Hello, sets the protocol version and returns the shim's snapshot.
func (s *Client) sendHello(ctx context.Context) (*wire.Snapshot, error) {
	s.version = 1 // Hello has the form of version 1 in all versions
	f, err := s.CallShim(ctx, wire.KindHello, &wire.Hello{Version: wire.Version, Features: wire.Features})
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
			return nil, fmt.Errorf("the shim requires protocol version %d, this agent supports versions up to %d",
				w.Version, wire.Version)
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
			return nil, fmt.Errorf("the shim rejects this agent: %s", d.Error)
		}
	}
	return nil, wire.ErrMalformed
}

// readFrames reads frames until the connection ends. onMessage is called for messages that are not
// a response to a request.
func (s *Client) readFrames(onMessage func(wire.Frame) error, onGone func()) {
	var buf []byte
	chunk := make([]byte, 8<<10)
	for {
		n, err := s.Conn.Read(chunk)
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
				err = onMessage(f)
				continue
			}
			s.deliverResponse(f)
		}
		if err != nil {
			break
		}
		if len(buf) == 0 {
			buf = nil
		}
	}
	s.Conn.Close()
	s.mu.Lock()
	leaving := s.leaving
	s.mu.Unlock()
	close(s.Gone)
	if !leaving {
		onGone()
	}
}

func (s *Client) deliverResponse(frame wire.Frame) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ch := s.calls[frame.ID]; ch != nil {
		select {
		case ch <- frame:
		default: // the channel has room for all expected responses; drop more
		}
	}
}

// writeTimeout is how long a shim may take to receive a request. A request is smaller than the
// socket's buffer, so only a stalled shim exceeds it.
const writeTimeout = 10 * time.Second

// SendRequest sends a request and the files that belong to it. It returns the request's ID, and a
// channel with its responses. The caller must call end when it needs no more responses.
func (s *Client) SendRequest(kind wire.Kind, message wire.Message,
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
	frame := wire.AppendFrame(nil, wire.Frame{Kind: kind, ID: id, Body: s.encodeMessage(message)})
	s.writing.Lock()
	n, err := 0, s.Conn.SetWriteDeadline(time.Now().Add(writeTimeout))
	if err == nil {
		n, _, err = s.Conn.WriteMsgUnix(frame, rights, nil)
	}
	if err == nil && n < len(frame) {
		_, err = s.Conn.Write(frame[n:])
	}
	s.writing.Unlock()
	if err != nil {
		s.Conn.Close() // a partial frame may have been sent, so nothing can follow it
		end()
		return 0, nil, nil, fmt.Errorf("%w: %w", ErrDisconnected, err)
	}
	return id, ch, end, nil
}

// AwaitResponse returns the next response on the channel. It returns an error if the connection or
// ctx ends first.
func (s *Client) AwaitResponse(ctx context.Context, answers <-chan wire.Frame) (wire.Frame, error) {
	select {
	case f := <-answers:
		return f, nil
	case <-s.Gone:
		select { // the shim may have responded just before the end
		case f := <-answers:
			return f, nil
		default:
		}
		return wire.Frame{}, ErrDisconnected
	case <-ctx.Done():
		return wire.Frame{}, ctx.Err()
	}
}

// CallShim sends a request and waits for its single response.
func (s *Client) CallShim(ctx context.Context, kind wire.Kind, message wire.Message,
	files ...*os.File) (wire.Frame, error) {
	_, answers, end, err := s.SendRequest(kind, message, files...)
	if err != nil {
		return wire.Frame{}, err
	}
	defer end()
	return s.AwaitResponse(ctx, answers)
}

// CallDone sends a request that has the response Done. It returns the response, or the error that
// Done contains.
func (s *Client) CallDone(ctx context.Context, kind wire.Kind, message wire.Message,
	files ...*os.File) (wire.Done, error) {
	f, err := s.CallShim(ctx, kind, message, files...)
	if err != nil {
		return wire.Done{}, err
	}
	var d wire.Done
	if f.Kind != wire.KindDone || s.DecodeMessage(f, &d) != nil {
		return wire.Done{}, wire.ErrMalformed
	}
	if d.Error != "" {
		return d, errors.New(d.Error)
	}
	return d, nil
}

func (s *Client) encodeMessage(message wire.Message) []byte {
	if message == nil {
		return nil
	}
	return wire.Marshal(s.version, message)
}

// DecodeMessage decodes the body of a frame into message, which must be zero.
func (s *Client) DecodeMessage(frame wire.Frame, message wire.Message) error {
	return wire.Unmarshal(s.version, frame.Body, message)
}

// DecodeStarted decodes a Started response.
func (s *Client) DecodeStarted(frame wire.Frame) (wire.Started, error) {
	var st wire.Started
	if frame.Kind != wire.KindStarted || s.DecodeMessage(frame, &st) != nil {
		return st, wire.ErrMalformed
	}
	if st.Error != "" {
		return st, errors.New(st.Error)
	}
	return st, nil
}

// SignalProcess sends a signal to the first process of a container, or to pause if container is "".
// It returns nil if the process has ended.
func (s *Client) SignalProcess(ctx context.Context, container string, sig int) error {
	m := wire.Signal{Container: container, Signal: int64(sig)}
	_, err := s.CallDone(ctx, wire.KindSignal, &m)
	return err
}

// StopShim makes the shim exit, and waits until the connection ends or ctx is done.
func (s *Client) StopShim(ctx context.Context) {
	s.mu.Lock()
	s.leaving = true
	s.mu.Unlock()
	if _, err := s.CallDone(ctx, wire.KindShutdown, nil); err == nil {
		select {
		case <-s.Gone:
		case <-ctx.Done():
		}
	}
	s.Conn.Close()
}

// Disconnect closes the connection. The shim keeps running.
func (s *Client) Disconnect() {
	s.mu.Lock()
	s.leaving = true
	s.mu.Unlock()
	s.Conn.Close()
}

// KillCommand kills the command of the Exec request with this ID, and waits until it has exited.
// answers are the responses of that request.
func (s *Client) KillCommand(ctx context.Context, id uint32, answers <-chan wire.Frame) {
	kill := wire.Signal{Exec: id, Signal: int64(unix.SIGKILL)}
	if _, err := s.CallDone(ctx, wire.KindSignal, &kill); err == nil {
		_, _ = s.AwaitResponse(ctx, answers)
	}
}

// OpenRequests returns the number of requests that still wait for responses.
func (s *Client) OpenRequests() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.calls)
}
