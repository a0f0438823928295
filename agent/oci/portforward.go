package oci

import (
	"context"
	"fmt"
	"io"
	"keelson.dev/keelson/agent/oci/netns"
	"net"
)

// PortForward implements agent.Runtime. It connects conn to 127.0.0.1:port (or ::1) in the sandbox,
// and returns when both directions have ended.
func (r *Runtime) PortForward(ctx context.Context, sandboxID string, port int32, conn io.ReadWriteCloser) error {
	defer conn.Close()
	if err := r.awaitReady(ctx); err != nil {
		return err
	}
	s, err := r.findSandbox(sandboxID)
	if err != nil {
		return err
	}
	path := ""
	if !s.usesHostNetwork() {
		path = r.paths.netnsPath(s.rec.ID)
	}
	inside, err := netns.DialPort(ctx, path, port)
	if err != nil {
		return fmt.Errorf("port %d of sandbox %s: %w", port, sandboxID, err)
	}
	defer inside.Close()
	stop := context.AfterFunc(ctx, func() { inside.Close(); conn.Close() })
	defer stop()
	sent := make(chan error, 1)
	go func() {
		_, err := io.Copy(inside, conn)
		if t, ok := inside.(*net.TCPConn); ok {
			_ = t.CloseWrite()
		}
		sent <- err
	}()
	_, err = io.Copy(conn, inside)
	conn.Close() // there will be no more responses, so stop reading from the client
	<-sent
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}
