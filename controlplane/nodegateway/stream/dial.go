package stream

import (
	"context"
	"fmt"
	"net"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// DialNode implements api.NodeDialer: it opens a TCP connection through the node's agent. address
// must be an address of the pod, or of the node itself if pod is empty. The agent refuses other
// addresses.
func (s *Server) DialNode(ctx context.Context, node string, pod types.UID, address string, port int32) (net.Conn,
	error) {
	// ctx limits only the time to open the tunnel, which outlives it.
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, end)
	conn, err := s.dialNode(life, end, node, &fleetv1.DialAsk{PodUid: string(pod), Address: address, Port: port})
	if err == nil && !stop() {
		conn.Close()
		err = ctx.Err()
	}
	if err != nil {
		end()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("dial tcp %s by way of node %s: %w", net.JoinHostPort(address, fmt.Sprint(port)), node,
			err)
	}
	return conn, nil
}

func (s *Server) dialNode(life context.Context, end func(), node string, ask *fleetv1.DialAsk) (net.Conn, error) {
	t, err := s.openTunnel(life, node, &fleetv1.TunnelAsk{Kind: &fleetv1.TunnelAsk_Dial{Dial: ask}})
	if err != nil {
		return nil, err
	}
	first := make(chan error, 1)
	go func() {
		f, err := t.receiveFrame()
		switch {
		case err != nil:
		case f.GetExit() != nil:
			if err = exitError(f.GetExit()); err == nil {
				err = fmt.Errorf("node %s ended the tunnel", node)
			}
		default:
			if d, ok := f.Kind.(*fleetv1.TunnelFrame_Data); !ok || len(d.Data) > 0 {
				err = fmt.Errorf("node %s did not confirm the connection", node)
			}
		}
		first <- err
	}()
	select {
	case err = <-first:
	case <-life.Done():
		err = life.Err()
	}
	if err != nil {
		t.closeTunnel()
		return nil, err
	}
	near, far := net.Pipe()
	go func() {
		defer end()
		copyBytes(t, far)
	}()
	return &tunnelConn{Conn: near, remote: tunnelAddr(net.JoinHostPort(ask.Address, fmt.Sprint(ask.Port)))}, nil
}

// copyBytes copies bytes between a tunnel and a connection in both directions. It closes both when
// either ends.
func copyBytes(t *tunnel, conn net.Conn) {
	var once sync.Once
	finish := func() { once.Do(func() { t.closeTunnel(); conn.Close() }) }
	defer finish()
	go func() {
		defer finish()
		for {
			buf := make([]byte, frameBytes)
			n, err := conn.Read(buf)
			if n > 0 && t.sendFrame(&fleetv1.TunnelFrame{Kind: &fleetv1.TunnelFrame_Data{Data: buf[:n]}}) != nil {
				return
			}
			if err != nil {
				return
			}
		}
	}()
	for {
		f, err := t.receiveFrame()
		if err != nil || f.GetExit() != nil {
			return
		}
		if _, err := conn.Write(f.GetData()); err != nil {
			return
		}
	}
}

// tunnelConn is a net.Conn over a tunnel. Its remote address is the address to which the agent has
// connected.
type tunnelConn struct {
	net.Conn
	remote tunnelAddr
}

// RemoteAddr implements net.Conn.
func (c *tunnelConn) RemoteAddr() net.Addr { return c.remote }

type tunnelAddr string

func (tunnelAddr) Network() string  { return "tcp" }
func (a tunnelAddr) String() string { return string(a) }
