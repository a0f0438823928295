package nodegateway

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
	reconnectPatience = 2 * time.Second  // wait for a node without a standby connection
	tunnelPatience    = 10 * time.Second // from the request to the open tunnel
)

// tunnels matches requested tunnels with the streams that nodes open in response.
type tunnels struct {
	mu      sync.Mutex
	asked   map[string]*askedTunnel
	unnamed map[string]int // number of streams per node without their first message, which holds the ID
}

type askedTunnel struct {
	node   string
	opened chan fleetv1.Fleet_TunnelServer // buffered for the one response
	failed chan error                      // buffered for the one response
	done   chan struct{}                   // closed by the requester when the tunnel may end
}

func newTunnels() *tunnels {
	return &tunnels{asked: make(map[string]*askedTunnel), unnamed: make(map[string]int)}
}

// opening counts a stream that a node has opened, until named is called. ok is false if the node
// has opened too many streams without a request.
func (t *tunnels) opening(node string) (named func(), ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if many := t.unnamed[node] + 1; many > maxUnasked {
		for _, a := range t.asked {
			if a.node == node {
				many--
			}
		}
		if many > maxUnasked {
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

func (t *tunnels) add(id string, a *askedTunnel) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.asked[id] = a
}

// claim removes and returns the request with the given ID. It returns nil if none exists, if it
// is answered, or if it was for another node.
func (t *tunnels) claim(id, node string) *askedTunnel {
	t.mu.Lock()
	defer t.mu.Unlock()
	a := t.asked[id]
	if a == nil || a.node != node {
		return nil
	}
	delete(t.asked, id)
	return a
}

func (t *tunnels) refuse(id, node string, err error) {
	if a := t.claim(id, node); a != nil {
		a.failed <- err
	}
}

// abandon fails all unanswered requests to the node with err.
func (t *tunnels) abandon(node string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, a := range t.asked {
		if a.node == node {
			delete(t.asked, id)
			a.failed <- err
		}
	}
}

// Tunnel implements fleetv1.FleetServer: it passes a stream to the requester of the tunnel and
// keeps it open until the requester is done.
func (s *Server) Tunnel(stream fleetv1.Fleet_TunnelServer) error {
	node, err := nodeOf(stream.Context())
	if err != nil {
		return err
	}
	named, ok := s.tunnels.opening(node)
	if !ok {
		return status.Errorf(codes.ResourceExhausted, "fleet: node %s opens more tunnels than it was asked for", node)
	}
	first, err := first(s, stream)
	named()
	if err != nil {
		return err
	}
	a := s.tunnels.claim(first.GetOpen().GetId(), node)
	if a == nil {
		return status.Errorf(codes.NotFound, "fleet: no tunnel of this id was asked of node %s", node)
	}
	a.opened <- stream
	select {
	case <-a.done:
		return nil
	case <-s.stopping:
		return status.Errorf(codes.Unavailable, "fleet: replica %s is stopping", s.cfg.Replica)
	case <-stream.Context().Done():
		return stream.Context().Err()
	}
}

// tunnel is an open tunnel to a node. send may be called concurrently; recv must be called from one
// goroutine.
type tunnel struct {
	node   string
	stream fleetv1.Fleet_TunnelServer
	mu     sync.Mutex
	once   sync.Once
	done   chan struct{}
}

func (t *tunnel) send(f *fleetv1.TunnelFrame) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stream.Send(f)
}

func (t *tunnel) close() { t.once.Do(func() { close(t.done) }) }

// recv returns the next frame. The error of a broken tunnel contains the node's name.
func (t *tunnel) recv() (*fleetv1.TunnelFrame, error) {
	f, err := t.stream.Recv()
	if errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("fleet: node %s closed the tunnel", t.node)
	}
	if err != nil {
		return nil, fmt.Errorf("fleet: tunnel to node %s broke: %w", t.node, err)
	}
	return f, nil
}

// open requests a tunnel from the node. The tunnel ends with ctx, and must be closed in any case.
func (s *Server) open(ctx context.Context, node string, ask *fleetv1.TunnelAsk) (*tunnel, error) {
	b, err := s.standby(ctx, node)
	if err != nil {
		return nil, err
	}
	return s.openBy(ctx, b, node, ask)
}

// standby returns the standby connection of a node. It waits up to reconnectPatience for a node
// that is reconnecting.
func (s *Server) standby(ctx context.Context, node string) (*standby, error) {
	b := s.standbys.wait(ctx, node, reconnectPatience)
	if b == nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("node %s is not connected to replica %s", node, s.cfg.Replica)
	}
	return b, nil
}

// openBy requests a tunnel over the standby b and returns it when the node has opened it.
func (s *Server) openBy(ctx context.Context, b *standby, node string, ask *fleetv1.TunnelAsk) (*tunnel, error) {
	ask.Id = rand.Text()
	a := &askedTunnel{
		node: node, opened: make(chan fleetv1.Fleet_TunnelServer, 1),
		failed: make(chan error, 1), done: make(chan struct{}),
	}
	s.tunnels.add(ask.Id, a)
	m := &fleetv1.StandbyDown{Kind: &fleetv1.StandbyDown_Ask{Ask: ask}}
	b.post(m)
	defer b.withdraw(m) // it may still be queued
	patience := time.NewTimer(tunnelPatience)
	defer patience.Stop()
	var err error
	select {
	case stream := <-a.opened:
		t := &tunnel{node: node, stream: stream, done: a.done}
		context.AfterFunc(ctx, t.close)
		return t, nil
	case err = <-a.failed:
	case <-patience.C:
		err = fmt.Errorf("node %s did not open a tunnel to replica %s within %s", node, s.cfg.Replica, tunnelPatience)
	case <-ctx.Done():
		err = ctx.Err()
	}
	if s.tunnels.claim(ask.Id, node) == nil {
		close(a.done) // opened at the last moment: end it
	}
	return nil, err
}

// exit returns the result in a tunnel's last frame: an error, an exit code other than 0, or nil.
func exit(e *fleetv1.TunnelExit) error {
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
	t, err := s.open(ctx, node, &fleetv1.TunnelAsk{Kind: &fleetv1.TunnelAsk_Log{Log: ask}})
	if err != nil {
		return nil, fmt.Errorf("logs of %s/%s: %w", r.Namespace, r.Pod, err)
	}
	return &logReader{t: t}, nil
}

// logReader reads the log text from a tunnel. The agent ends the text with TunnelExit.
type logReader struct {
	t    *tunnel
	rest []byte
	err  error
}

func (l *logReader) Read(p []byte) (int, error) {
	for len(l.rest) == 0 {
		if l.err != nil {
			return 0, l.err
		}
		f, err := l.t.recv()
		switch {
		case err != nil:
			l.err = err
		case f.GetExit() != nil:
			if l.err = exit(f.GetExit()); l.err == nil {
				l.err = io.EOF
			}
			l.t.close()
		default:
			l.rest = f.GetStdout()
		}
	}
	n := copy(p, l.rest)
	l.rest = l.rest[n:]
	return n, nil
}

func (l *logReader) Close() error { l.t.close(); return nil }

// Exec implements api.NodeStreams: it runs a command in a container on the node, or attaches to it,
// and returns when it ends.
func (s *Server) Exec(ctx context.Context, node string, r api.ExecRequest, st api.Streams) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	t, err := s.open(ctx, node, &fleetv1.TunnelAsk{Kind: &fleetv1.TunnelAsk_Exec{Exec: &fleetv1.ExecAsk{
		PodUid: string(r.PodUID), Namespace: r.Namespace, Pod: r.Pod, Container: r.Container,
		Command: r.Command, Attach: r.Attach, Tty: r.TTY,
		Stdin: st.Stdin != nil, Stdout: st.Stdout != nil, Stderr: st.Stderr != nil,
	}}})
	if err != nil {
		return fmt.Errorf("exec in %s/%s: %w", r.Namespace, r.Pod, err)
	}
	defer t.close()
	// Both goroutines end with the tunnel. A pending Read of stdin ends when the caller closes
	// stdin.
	if st.Stdin != nil {
		go pump(t, st.Stdin, func(b []byte) *fleetv1.TunnelFrame {
			return &fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Stdin{Stdin: b}}
		})
	}
	if st.Resize != nil {
		go pumpResize(ctx, t, st.Resize)
	}
	for {
		f, err := t.recv()
		if err != nil {
			return err
		}
		switch k := f.Kind.(type) {
		case *fleetv1.TunnelFrame_Stdout:
			err = writeTo(st.Stdout, k.Stdout)
		case *fleetv1.TunnelFrame_Stderr:
			err = writeTo(st.Stderr, k.Stderr)
		case *fleetv1.TunnelFrame_Exit:
			return exit(k.Exit)
		}
		if err != nil {
			return fmt.Errorf("exec in %s/%s: the client went away: %w", r.Namespace, r.Pod, err)
		}
	}
}

func writeTo(w io.Writer, b []byte) error {
	if w == nil {
		return nil
	}
	_, err := w.Write(b)
	return err
}

const frameBytes = 32 << 10

// pump sends the data of r in frames, and a final frame when r ends.
func pump(t *tunnel, r io.Reader, frame func([]byte) *fleetv1.TunnelFrame) {
	for {
		buf := make([]byte, frameBytes)
		n, err := r.Read(buf)
		if n > 0 && t.send(frame(buf[:n])) != nil {
			return
		}
		if err != nil {
			_ = t.send(&fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_CloseStdin{CloseStdin: true}}) // recv returns the error of a broken tunnel
			return
		}
	}
}

func pumpResize(ctx context.Context, t *tunnel, sizes <-chan api.TermSize) {
	for {
		select {
		case s, ok := <-sizes:
			if !ok || t.send(&fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Resize{
				Resize: &fleetv1.Resize{Width: uint32(s.Width), Height: uint32(s.Height)}}}) != nil {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// PortForward implements api.NodeStreams: it forwards bytes between conn and a pod's port until
// either ends, and closes conn.
func (s *Server) PortForward(ctx context.Context, node string, pod types.UID, port int32, conn io.ReadWriteCloser) error {
	defer conn.Close()
	t, err := s.open(ctx, node, &fleetv1.TunnelAsk{Kind: &fleetv1.TunnelAsk_PortForward{
		PortForward: &fleetv1.PortForwardAsk{PodUid: string(pod), Port: port}}})
	if err != nil {
		return fmt.Errorf("forward port %d of pod %s: %w", port, pod, err)
	}
	defer t.close()
	go pump(t, conn, func(b []byte) *fleetv1.TunnelFrame {
		return &fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Data{Data: b}}
	})
	for {
		f, err := t.recv()
		if err != nil {
			return err
		}
		if e := f.GetExit(); e != nil {
			return exit(e)
		}
		if _, err := conn.Write(f.GetData()); err != nil {
			return fmt.Errorf("forward port %d of pod %s: the client went away: %w", port, pod, err)
		}
	}
}
