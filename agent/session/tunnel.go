package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// drainPatience bounds how long a finished tunnel waits for the replica to have read its end.
const drainPatience = 10 * time.Second

// answer opens the tunnel that a replica asked for and serves it until it ends.
func (s *Session) answer(ctx context.Context, l *link, up *standbyUp, ask *fleetv1.TunnelAsk) {
	if s.cfg.Server == nil {
		// When the refusal does not arrive, the replica stops waiting by itself.
		_ = up.send(&fleetv1.StandbyUp{Kind: &fleetv1.StandbyUp_Refused{Refused: &fleetv1.TunnelRefused{
			Id: ask.Id, Reason: "the agent does not serve tunnels"}}})
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := fleetv1.NewFleetClient(l.conn).Tunnel(ctx)
	if err == nil {
		err = stream.Send(&fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Open{Open: &fleetv1.TunnelOpen{Id: ask.Id}}})
	}
	if err != nil {
		s.log.Warn("tunnel could not be opened", "replica", l.address, "err", err)
		return
	}
	t := newTunnel(stream, cancel)
	go t.receive() // ends with ctx; finish waits for it
	t.finish(s.serve(ctx, t, ask))
}

// serve does what was asked.
func (s *Session) serve(ctx context.Context, t *tunnel, ask *fleetv1.TunnelAsk) error {
	switch k := ask.Kind.(type) {
	case *fleetv1.TunnelAsk_Exec:
		st := agent.Streams{Resize: t.sizes}
		if k.Exec.Stdin {
			st.Stdin = t.in
		}
		if k.Exec.Stdout {
			st.Stdout = frameWriter{t, func(b []byte) *fleetv1.TunnelFrame {
				return &fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Stdout{Stdout: b}}
			}}
		}
		if k.Exec.Stderr {
			st.Stderr = frameWriter{t, func(b []byte) *fleetv1.TunnelFrame {
				return &fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Stderr{Stderr: b}}
			}}
		}
		return s.cfg.Server.Exec(ctx, types.UID(k.Exec.PodUid), k.Exec.Container, k.Exec.Command, k.Exec.Attach, k.Exec.Tty, st)
	case *fleetv1.TunnelAsk_Log:
		r := agent.LogRequest{
			PodUID: types.UID(k.Log.PodUid), Namespace: k.Log.Namespace, Pod: k.Log.Pod, Container: k.Log.Container,
			Follow: k.Log.Follow, Previous: k.Log.Previous, Timestamps: k.Log.Timestamps,
			TailLines: k.Log.TailLines, LimitBytes: k.Log.LimitBytes,
		}
		if k.Log.SinceUnixNano != 0 {
			r.Since = time.Unix(0, k.Log.SinceUnixNano)
		}
		return s.cfg.Server.Logs(ctx, r, frameWriter{t, func(b []byte) *fleetv1.TunnelFrame {
			return &fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Stdout{Stdout: b}}
		}})
	case *fleetv1.TunnelAsk_PortForward:
		return s.cfg.Server.PortForward(ctx, types.UID(k.PortForward.PodUid), k.PortForward.Port, portConn{t})
	}
	switch k := ask.Kind.(type) {
	case *fleetv1.TunnelAsk_Dial:
		return s.connect(ctx, t, k.Dial)
	case *fleetv1.TunnelAsk_Driver:
		return s.callDriver(ctx, t, k.Driver)
	}
	return fmt.Errorf("this agent does not know tunnels of kind %T", ask.Kind)
}

// callDriver passes a call on to a CSI driver and sends what it says.
func (s *Session) callDriver(ctx context.Context, t *tunnel, ask *fleetv1.DriverAsk) error {
	if s.cfg.Drivers == nil {
		return errors.New("this agent has no CSI drivers")
	}
	response, err := s.cfg.Drivers.Call(ctx, ask.Driver, ask.Method, ask.Request, time.Duration(ask.TimeoutNano))
	answer := &fleetv1.DriverAnswer{Response: response}
	if err != nil {
		answer.Code, answer.Message = int32(codes.NotFound), err.Error()
		if said, ok := status.FromError(err); ok {
			answer.Code, answer.Message = int32(said.Code()), said.Message()
		} else {
			answer.Missing = true
		}
	}
	return t.send(&fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_DriverAnswer{DriverAnswer: answer}})
}

// connect joins the tunnel to a connection, and says that there is one before any of its bytes.
func (s *Session) connect(ctx context.Context, t *tunnel, ask *fleetv1.DialAsk) error {
	conn, err := s.cfg.Server.Dial(ctx, types.UID(ask.PodUid), ask.Address, ask.Port)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := t.send(&fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Data{}}); err != nil {
		return fmt.Errorf("tunnel: %w", err)
	}
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	go func() { // ends with the tunnel
		_, _ = io.Copy(conn, t.in) // what the connection does not take is seen when it is read
		if c, ok := conn.(interface{ CloseWrite() error }); ok {
			_ = c.CloseWrite()
		}
	}()
	_, err = io.Copy(portConn{t}, conn)
	return err
}

// tunnel is one open tunnel. receive owns the receiving half, sends are serialised.
type tunnel struct {
	stream fleetv1.Fleet_TunnelClient
	cancel context.CancelFunc
	in     *io.PipeReader // stdin, or what the client of a port-forward sends
	inw    *io.PipeWriter
	sizes  chan agent.TermSize // the newest only
	over   chan struct{}       // closed when receive has ended

	mu sync.Mutex
}

func newTunnel(stream fleetv1.Fleet_TunnelClient, cancel context.CancelFunc) *tunnel {
	r, w := io.Pipe()
	t := &tunnel{stream: stream, cancel: cancel, in: r, inw: w, sizes: make(chan agent.TermSize, 1), over: make(chan struct{})}
	// A Write to stdin that nobody reads must not outlive the tunnel.
	context.AfterFunc(stream.Context(), func() { r.CloseWithError(io.ErrClosedPipe) })
	return t
}

// receive hands over what the replica sends. Its end means that the client is gone: everything stops.
func (t *tunnel) receive() {
	defer close(t.over)
	defer t.cancel()
	for {
		f, err := t.stream.Recv()
		if err != nil {
			t.inw.CloseWithError(io.EOF)
			return
		}
		switch k := f.Kind.(type) {
		case *fleetv1.TunnelFrame_Stdin:
			_, _ = t.inw.Write(k.Stdin) // fails when the process has ended or closed its stdin: the rest is not wanted
		case *fleetv1.TunnelFrame_Data:
			_, _ = t.inw.Write(k.Data) // likewise for a closed connection
		case *fleetv1.TunnelFrame_CloseStdin:
			t.inw.Close()
		case *fleetv1.TunnelFrame_Resize:
			select {
			case <-t.sizes:
			default:
			}
			t.sizes <- agent.TermSize{Width: uint16(k.Resize.Width), Height: uint16(k.Resize.Height)}
		}
	}
}

func (t *tunnel) send(f *fleetv1.TunnelFrame) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stream.Send(f)
}

// finish sends the result and waits until the replica has taken it: cancelling earlier would drop output that is
// still on its way.
func (t *tunnel) finish(err error) {
	e := &fleetv1.TunnelExit{}
	if exit := (*agent.ExitError)(nil); errors.As(err, &exit) {
		e.Code = int32(exit.Code)
	} else if err != nil {
		e.Error = err.Error()
	}
	t.in.CloseWithError(io.ErrClosedPipe)
	if t.send(&fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Exit{Exit: e}}) == nil && t.stream.CloseSend() == nil {
		patience := time.NewTimer(drainPatience)
		defer patience.Stop()
		select {
		case <-t.over:
		case <-patience.C:
		}
	}
	t.cancel()
	<-t.over
}

// frameWriter sends what is written in frames of a bounded size.
type frameWriter struct {
	t     *tunnel
	frame func([]byte) *fleetv1.TunnelFrame
}

const frameBytes = 32 << 10

func (w frameWriter) Write(p []byte) (int, error) {
	n := 0
	for len(p) > 0 {
		b := p[:min(len(p), frameBytes)]
		if err := w.t.send(w.frame(append([]byte(nil), b...))); err != nil {
			return n, fmt.Errorf("tunnel: %w", err)
		}
		n += len(b)
		p = p[len(b):]
	}
	return n, nil
}

// portConn is a port-forward's tunnel as a connection.
type portConn struct{ t *tunnel }

func (c portConn) Read(p []byte) (int, error) { return c.t.in.Read(p) }

func (c portConn) Write(p []byte) (int, error) {
	return frameWriter{c.t, func(b []byte) *fleetv1.TunnelFrame {
		return &fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Data{Data: b}}
	}}.Write(p)
}

func (c portConn) Close() error { return c.t.in.CloseWithError(io.ErrClosedPipe) }
