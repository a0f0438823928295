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

// drainTimeout bounds how long a finished tunnel waits until the replica has read its last frame.
const drainTimeout = 10 * time.Second

// openTunnel opens the tunnel that a replica requested in ask, over the replica connection l, and
// serves the request until it ends. If the tunnel is refused, openTunnel sends the refusal on the
// standby stream up.
func (s *Session) openTunnel(ctx context.Context, l *replicaLink, up *standbySender, ask *fleetv1.TunnelAsk) {
	if s.cfg.Server == nil {
		// If the refusal is lost, the replica's request times out.
		_ = up.sendUp(&fleetv1.StandbyUp{Kind: &fleetv1.StandbyUp_Refused{Refused: &fleetv1.TunnelRefused{
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
	go t.receiveFrames() // ends with ctx; finishTunnel waits for it
	t.finishTunnel(s.serveTunnel(ctx, t, ask))
}

// serveTunnel performs the request of a tunnel: exec, attach, logs, port-forward, dial or a CSI
// driver call.
func (s *Session) serveTunnel(ctx context.Context, t *tunnel, ask *fleetv1.TunnelAsk) error {
	switch k := ask.Kind.(type) {
	case *fleetv1.TunnelAsk_Exec:
		st := agent.Streams{Resize: t.sizes}
		if k.Exec.Stdin {
			st.Stdin = t.input
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
		return s.cfg.Server.Exec(ctx, types.UID(k.Exec.PodUid), k.Exec.Container, k.Exec.Command, k.Exec.Attach,
			k.Exec.Tty, st)
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
		return s.cfg.Server.PortForward(ctx, types.UID(k.PortForward.PodUid), k.PortForward.Port, tunnelConn{t})
	}
	switch k := ask.Kind.(type) {
	case *fleetv1.TunnelAsk_Dial:
		return s.serveDial(ctx, t, k.Dial)
	case *fleetv1.TunnelAsk_Driver:
		return s.callDriver(ctx, t, k.Driver)
	}
	return fmt.Errorf("this agent does not support tunnels of kind %T", ask.Kind)
}

// callDriver calls a CSI driver of this node as requested in ask. It sends the driver's response or
// error through the tunnel.
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
	return t.sendFrame(&fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_DriverAnswer{DriverAnswer: answer}})
}

// serveDial connects the tunnel to the address in ask, which belongs to a pod or to this node, and
// copies data in both directions. When the connection is established, it sends an empty frame
// before any data.
func (s *Session) serveDial(ctx context.Context, t *tunnel, ask *fleetv1.DialAsk) error {
	conn, err := s.cfg.Server.Dial(ctx, types.UID(ask.PodUid), ask.Address, ask.Port)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := t.sendFrame(&fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Data{}}); err != nil {
		return fmt.Errorf("tunnel: %w", err)
	}
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	go func() { // ends with the tunnel
		_, _ = io.Copy(conn, t.input) // a write error also appears when the connection is read
		if c, ok := conn.(interface{ CloseWrite() error }); ok {
			_ = c.CloseWrite()
		}
	}()
	_, err = io.Copy(tunnelConn{t}, conn)
	return err
}

// tunnel is a stream to a replica that carries one request to this node. Only receiveFrames
// receives frames. Concurrent sends are serialized.
type tunnel struct {
	stream      fleetv1.Fleet_TunnelClient
	cancel      context.CancelFunc
	input       *io.PipeReader // stdin, or the data from the client of a port-forward
	inputWriter *io.PipeWriter
	sizes       chan agent.TermSize // capacity 1: the latest terminal size
	receiveDone chan struct{}       // closed when receiveFrames has returned

	mu sync.Mutex
}

func newTunnel(stream fleetv1.Fleet_TunnelClient, cancel context.CancelFunc) *tunnel {
	r, w := io.Pipe()
	t := &tunnel{stream: stream, cancel: cancel, input: r, inputWriter: w, sizes: make(chan agent.TermSize, 1),
		receiveDone: make(chan struct{})}
	// Closing the pipe ends a pending write to stdin when the stream ends.
	context.AfterFunc(stream.Context(), func() { r.CloseWithError(io.ErrClosedPipe) })
	return t
}

// receiveFrames receives the frames from the replica and passes them on: data to input, and
// terminal sizes to sizes. When the stream ends, the client has disconnected, and the tunnel is
// canceled.
func (t *tunnel) receiveFrames() {
	defer close(t.receiveDone)
	defer t.cancel()
	for {
		f, err := t.stream.Recv()
		if err != nil {
			t.inputWriter.CloseWithError(io.EOF)
			return
		}
		switch k := f.Kind.(type) {
		case *fleetv1.TunnelFrame_Stdin:
			// fails if the process has exited or closed its stdin; the data is dropped
			_, _ = t.inputWriter.Write(k.Stdin)
		case *fleetv1.TunnelFrame_Data:
			_, _ = t.inputWriter.Write(k.Data) // likewise if the connection is closed
		case *fleetv1.TunnelFrame_CloseStdin:
			t.inputWriter.Close()
		case *fleetv1.TunnelFrame_Resize:
			select {
			case <-t.sizes:
			default:
			}
			t.sizes <- agent.TermSize{Width: uint16(k.Resize.Width), Height: uint16(k.Resize.Height)}
		}
	}
}

func (t *tunnel) sendFrame(f *fleetv1.TunnelFrame) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stream.Send(f)
}

// finishTunnel sends err, the result of the request. It waits until the replica has read the
// result, for at most drainTimeout. Canceling the stream earlier would lose output in transit.
func (t *tunnel) finishTunnel(err error) {
	e := &fleetv1.TunnelExit{}
	if exit := (*agent.ExitError)(nil); errors.As(err, &exit) {
		e.Code = int32(exit.Code)
	} else if err != nil {
		e.Error = err.Error()
	}
	t.input.CloseWithError(io.ErrClosedPipe)
	if t.sendFrame(&fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Exit{Exit: e}}) == nil &&
		t.stream.CloseSend() == nil {
		patience := time.NewTimer(drainTimeout)
		defer patience.Stop()
		select {
		case <-t.receiveDone:
		case <-patience.C:
		}
	}
	t.cancel()
	<-t.receiveDone
}

// frameWriter is an io.Writer that sends data through the tunnel in frames of at most frameBytes.
type frameWriter struct {
	tunnel   *tunnel
	newFrame func([]byte) *fleetv1.TunnelFrame
}

const frameBytes = 32 << 10

func (w frameWriter) Write(p []byte) (int, error) {
	n := 0
	for len(p) > 0 {
		b := p[:min(len(p), frameBytes)]
		if err := w.tunnel.sendFrame(w.newFrame(append([]byte(nil), b...))); err != nil {
			return n, fmt.Errorf("tunnel: %w", err)
		}
		n += len(b)
		p = p[len(b):]
	}
	return n, nil
}

// tunnelConn is an io.ReadWriteCloser that reads and writes the data of a tunnel.
type tunnelConn struct{ tunnel *tunnel }

func (c tunnelConn) Read(p []byte) (int, error) { return c.tunnel.input.Read(p) }

func (c tunnelConn) Write(p []byte) (int, error) {
	return frameWriter{c.tunnel, func(b []byte) *fleetv1.TunnelFrame {
		return &fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Data{Data: b}}
	}}.Write(p)
}

func (c tunnelConn) Close() error { return c.tunnel.input.CloseWithError(io.ErrClosedPipe) }
