package stream

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

const (
	reconnectTimeout = 2 * time.Second  // maximum wait for a node without a standby connection
	tunnelTimeout    = 10 * time.Second // maximum time from the request to the open tunnel
	// maxUnrequestedTunnels is how many more streams may wait for their first message than tunnels
	// are requested, because an agent may open a stream late.
	maxUnrequestedTunnels = 32
)

// tunnelRequests matches requested tunnels with the streams that nodes open in response.
type tunnelRequests struct {
	mu      sync.Mutex
	pending map[string]*tunnelRequest
	unnamed map[string]int // number of streams per node whose first message, which contains the ID, is not received yet
}

type tunnelRequest struct {
	node   string
	opened chan fleetv1.Fleet_TunnelServer // buffered for the one response
	failed chan error                      // buffered for the one response
	done   chan struct{}                   // closed by the requesting function when the tunnel may end
}

func newTunnelRequests() *tunnelRequests {
	return &tunnelRequests{pending: make(map[string]*tunnelRequest), unnamed: make(map[string]int)}
}

// countOpening counts a stream that a node has opened, until received is called. ok is false if too
// many streams of the node wait for their first message.
func (t *tunnelRequests) countOpening(node string) (received func(), ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if excess := t.unnamed[node] + 1; excess > maxUnrequestedTunnels {
		for _, r := range t.pending {
			if r.node == node {
				excess--
			}
		}
		if excess > maxUnrequestedTunnels {
			return nil, false
		}
	}
	t.unnamed[node]++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.unnamed[node]--; t.unnamed[node] == 0 {
			delete(t.unnamed, node)
		}
	}, true
}

func (t *tunnelRequests) addRequest(id string, r *tunnelRequest) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pending[id] = r
}

// claimRequest removes and returns the request with an ID. It returns nil if there is no such
// request, if it is already answered, or if it was sent to another node.
func (t *tunnelRequests) claimRequest(id, node string) *tunnelRequest {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.pending[id]
	if r == nil || r.node != node {
		return nil
	}
	delete(t.pending, id)
	return r
}

func (t *tunnelRequests) refuseRequest(id, node string, err error) {
	if r := t.claimRequest(id, node); r != nil {
		r.failed <- err
	}
}

// failRequests fails all unanswered requests to the node with the error err.
func (t *tunnelRequests) failRequests(node string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, r := range t.pending {
		if r.node == node {
			delete(t.pending, id)
			r.failed <- err
		}
	}
}

// CountOpening counts a tunnel stream that a node opens. The caller calls received when the first
// message of the stream, which contains the ID, has been received. CountOpening returns an error if
// too many streams of the node wait for their first message.
func (s *Server) CountOpening(node string) (received func(), err error) {
	received, ok := s.requests.countOpening(node)
	if !ok {
		return nil, status.Errorf(codes.ResourceExhausted, "fleet: node %s opens more tunnels than were requested",
			node)
	}
	return received, nil
}

// ServeTunnel passes a stream to the function that requested the tunnel with an ID, and keeps the
// stream open until that function is done.
func (s *Server) ServeTunnel(stream fleetv1.Fleet_TunnelServer, node, id string) error {
	r := s.requests.claimRequest(id, node)
	if r == nil {
		return status.Errorf(codes.NotFound, "fleet: no tunnel with this ID was requested from node %s", node)
	}
	r.opened <- stream
	select {
	case <-r.done:
		return nil
	case <-s.cfg.Lifetime.Stopping():
		return s.cfg.Lifetime.StoppingError()
	case <-stream.Context().Done():
		return stream.Context().Err()
	}
}

// tunnel is an open tunnel to a node. sendFrame may be called concurrently; receiveFrame must be
// called from one goroutine.
type tunnel struct {
	node   string
	stream fleetv1.Fleet_TunnelServer
	mu     sync.Mutex
	once   sync.Once
	done   chan struct{}
}

func (t *tunnel) sendFrame(f *fleetv1.TunnelFrame) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stream.Send(f)
}

func (t *tunnel) closeTunnel() { t.once.Do(func() { close(t.done) }) }

// receiveFrame returns the next frame. The error of a broken tunnel contains the node's name.
func (t *tunnel) receiveFrame() (*fleetv1.TunnelFrame, error) {
	f, err := t.stream.Recv()
	if errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("fleet: node %s closed the tunnel", t.node)
	}
	if err != nil {
		return nil, fmt.Errorf("fleet: tunnel to node %s broke: %w", t.node, err)
	}
	return f, nil
}

// openTunnel requests a tunnel from the node. The tunnel ends with ctx. The caller must close it in
// any case.
func (s *Server) openTunnel(ctx context.Context, node string, ask *fleetv1.TunnelAsk) (*tunnel, error) {
	c, err := s.standbyOf(ctx, node)
	if err != nil {
		return nil, err
	}
	return s.openTunnelOver(ctx, c, node, ask)
}

// standbyOf returns the standby connection of a node. It waits up to reconnectTimeout for a node
// that is reconnecting.
func (s *Server) standbyOf(ctx context.Context, node string) (*standbyConn, error) {
	c := s.standbys.awaitNode(ctx, node, reconnectTimeout)
	if c == nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("node %s is not connected to replica %s", node, s.cfg.Lifetime.Replica)
	}
	return c, nil
}

// openTunnelOver requests a tunnel over the standby connection c, and returns it when the node has
// opened it.
func (s *Server) openTunnelOver(ctx context.Context, c *standbyConn, node string, ask *fleetv1.TunnelAsk) (*tunnel,
	error) {
	ask.Id = rand.Text()
	r := &tunnelRequest{
		node: node, opened: make(chan fleetv1.Fleet_TunnelServer, 1),
		failed: make(chan error, 1), done: make(chan struct{}),
	}
	s.requests.addRequest(ask.Id, r)
	m := &fleetv1.StandbyDown{Kind: &fleetv1.StandbyDown_Ask{Ask: ask}}
	c.queueMessage(m)
	defer c.withdrawMessage(m) // the request may still be queued
	timeout := time.NewTimer(tunnelTimeout)
	defer timeout.Stop()
	var err error
	select {
	case stream := <-r.opened:
		t := &tunnel{node: node, stream: stream, done: r.done}
		context.AfterFunc(ctx, t.closeTunnel)
		return t, nil
	case err = <-r.failed:
	case <-timeout.C:
		err = fmt.Errorf("node %s did not open a tunnel to replica %s within %s", node, s.cfg.Lifetime.Replica,
			tunnelTimeout)
	case <-ctx.Done():
		err = ctx.Err()
	}
	if s.requests.claimRequest(ask.Id, node) == nil {
		close(r.done) // the tunnel was opened after the timeout: end it
	}
	return nil, err
}

// exitError returns the result that a tunnel's last frame contains: an error, an exit code other
// than 0, or nil.
func exitError(e *fleetv1.TunnelExit) error {
	switch {
	case e.Error != "":
		return errors.New(e.Error)
	case e.Code != 0:
		return &api.ExitError{Code: int(e.Code)}
	}
	return nil
}

// Logs implements api.NodeStreams: it returns a reader of a container's log on the node.
func (s *Server) Logs(ctx context.Context, node string, r api.LogRequest) (io.ReadCloser, error) {
	ask := &fleetv1.LogAsk{
		PodUid: string(r.PodUID), Namespace: r.Namespace, Pod: r.Pod, Container: r.Container,
		Follow: r.Follow, Previous: r.Previous, Timestamps: r.Timestamps, TailLines: -1,
	}
	if r.SinceTime != nil {
		ask.SinceUnixNano = r.SinceTime.UnixNano()
	}
	if r.TailLines != nil {
		ask.TailLines = *r.TailLines
	}
	if r.LimitBytes != nil {
		ask.LimitBytes = *r.LimitBytes
	}
	t, err := s.openTunnel(ctx, node, &fleetv1.TunnelAsk{Kind: &fleetv1.TunnelAsk_Log{Log: ask}})
	if err != nil {
		return nil, fmt.Errorf("logs of %s/%s: %w", r.Namespace, r.Pod, err)
	}
	return &containerLog{t: t}, nil
}

// containerLog reads the text of a log from a tunnel. TunnelExit marks the end of the text.
type containerLog struct {
	t    *tunnel
	rest []byte
	err  error
}

func (l *containerLog) Read(p []byte) (int, error) {
	for len(l.rest) == 0 {
		if l.err != nil {
			return 0, l.err
		}
		f, err := l.t.receiveFrame()
		switch {
		case err != nil:
			l.err = err
		case f.GetExit() != nil:
			if l.err = exitError(f.GetExit()); l.err == nil {
				l.err = io.EOF
			}
			l.t.closeTunnel()
		default:
			l.rest = f.GetStdout()
		}
	}
	n := copy(p, l.rest)
	l.rest = l.rest[n:]
	return n, nil
}

func (l *containerLog) Close() error { l.t.closeTunnel(); return nil }

// Exec implements api.NodeStreams: it runs a command in a container on the node, or attaches to the
// container, and returns when that ends.
func (s *Server) Exec(ctx context.Context, node string, r api.ExecRequest, st api.Streams) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	t, err := s.openTunnel(ctx, node, &fleetv1.TunnelAsk{Kind: &fleetv1.TunnelAsk_Exec{Exec: &fleetv1.ExecAsk{
		PodUid: string(r.PodUID), Namespace: r.Namespace, Pod: r.Pod, Container: r.Container,
		Command: r.Command, Attach: r.Attach, Tty: r.TTY,
		Stdin: st.Stdin != nil, Stdout: st.Stdout != nil, Stderr: st.Stderr != nil,
	}}})
	if err != nil {
		return fmt.Errorf("exec in %s/%s: %w", r.Namespace, r.Pod, err)
	}
	defer t.closeTunnel()
	// Both goroutines end with the tunnel. A pending Read of stdin ends when the caller closes
	// stdin.
	if st.Stdin != nil {
		go sendStream(t, st.Stdin, func(b []byte) *fleetv1.TunnelFrame {
			return &fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Stdin{Stdin: b}}
		})
	}
	if st.Resize != nil {
		go sendResizes(ctx, t, st.Resize)
	}
	for {
		f, err := t.receiveFrame()
		if err != nil {
			return err
		}
		switch k := f.Kind.(type) {
		case *fleetv1.TunnelFrame_Stdout:
			err = writeBytes(st.Stdout, k.Stdout)
		case *fleetv1.TunnelFrame_Stderr:
			err = writeBytes(st.Stderr, k.Stderr)
		case *fleetv1.TunnelFrame_Exit:
			return exitError(k.Exit)
		}
		if err != nil {
			return fmt.Errorf("exec in %s/%s: the client went away: %w", r.Namespace, r.Pod, err)
		}
	}
}

func writeBytes(w io.Writer, b []byte) error {
	if w == nil {
		return nil
	}
	_, err := w.Write(b)
	return err
}

const frameBytes = 32 << 10

// sendStream sends the data of r in frames, and a final frame at the end of r.
func sendStream(t *tunnel, r io.Reader, frame func([]byte) *fleetv1.TunnelFrame) {
	for {
		buf := make([]byte, frameBytes)
		n, err := r.Read(buf)
		if n > 0 && t.sendFrame(frame(buf[:n])) != nil {
			return
		}
		if err != nil {
			// receiveFrame returns the error of a broken tunnel
			_ = t.sendFrame(&fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_CloseStdin{CloseStdin: true}})
			return
		}
	}
}

func sendResizes(ctx context.Context, t *tunnel, sizes <-chan api.TermSize) {
	for {
		select {
		case s, ok := <-sizes:
			if !ok || t.sendFrame(&fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Resize{
				Resize: &fleetv1.Resize{Width: uint32(s.Width), Height: uint32(s.Height)}}}) != nil {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// PortForward implements api.NodeStreams: it copies bytes between conn and a port of the pod until
// either ends, and closes conn.
func (s *Server) PortForward(ctx context.Context, node string, pod types.UID, port int32,
	conn io.ReadWriteCloser) error {
	defer conn.Close()
	t, err := s.openTunnel(ctx, node, &fleetv1.TunnelAsk{Kind: &fleetv1.TunnelAsk_PortForward{
		PortForward: &fleetv1.PortForwardAsk{PodUid: string(pod), Port: port}}})
	if err != nil {
		return fmt.Errorf("forward port %d of pod %s: %w", port, pod, err)
	}
	defer t.closeTunnel()
	go sendStream(t, conn, func(b []byte) *fleetv1.TunnelFrame {
		return &fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Data{Data: b}}
	})
	for {
		f, err := t.receiveFrame()
		if err != nil {
			return err
		}
		if e := f.GetExit(); e != nil {
			return exitError(e)
		}
		if _, err := conn.Write(f.GetData()); err != nil {
			return fmt.Errorf("forward port %d of pod %s: the client went away: %w", port, pod, err)
		}
	}
}
