package stream

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
	"k8s.io/streaming/pkg/httpstream/wsstream"
)

// Subprotocols of port-forward: SPDY on the connection, and SPDY inside WebSocket messages.
// Requests with the exec subprotocols use numbered channels.
const (
	portForwardV1     = "portforward.k8s.io"
	portForwardTunnel = "SPDY/3.1+portforward.k8s.io"
)

// forwarder forwards streams of a client to ports of one pod.
type forwarder struct {
	s   *Server
	pod *corev1.Pod
}

func (s *Server) portForward(w http.ResponseWriter, r *http.Request, pod *corev1.Pod, ports []int32) error {
	if pod.Status.Phase != corev1.PodRunning {
		return apierrors.NewBadRequest(fmt.Sprintf("unable to forward port because pod is not running. Current status=%v", pod.Status.Phase))
	}
	if !httpstream.IsUpgradeRequest(r) {
		return apierrors.NewBadRequest("Upgrade request required")
	}
	f := forwarder{s, pod}
	var err error
	switch {
	case wsstream.IsWebSocketRequestWithTunnelingProtocol(r):
		err = f.tunnelled(w, r)
	case wsstream.IsWebSocketRequest(r):
		if len(ports) == 0 {
			return apierrors.NewBadRequest("query parameter \"ports\" is required: one to a hundred ports")
		}
		err = f.channels(w, r, ports)
	default:
		err = f.spdy(w, r)
	}
	if err != nil {
		s.Log.Debug("port-forward ended", "pod", pod.Namespace+"/"+pod.Name, "err", err)
	}
	return nil // the client has received an error response
}

func (f forwarder) spdy(w http.ResponseWriter, r *http.Request) error {
	if _, err := httpstream.Handshake(r, w, []string{portForwardV1}); err != nil {
		return err
	}
	stop := make(chan struct{})
	defer close(stop)
	conn, streams, err := upgradeSPDY(w, r, stop)
	if err != nil {
		return err
	}
	return f.pairs(r.Context(), conn, streams)
}

// tunnelled serves port-forward over SPDY inside WebSocket messages.
func (f forwarder) tunnelled(w http.ResponseWriter, r *http.Request) error {
	ws, err := upgrader(portForwardTunnel).Upgrade(w, r, nil)
	if err != nil {
		return err
	}
	stop := make(chan struct{})
	defer close(stop)
	streams := make(chan opened)
	conn, err := spdy.NewServerConnection(newFramedConn(portforward.NewTunnelingConnection("server", ws)), deliver(streams, stop))
	if err != nil {
		return err
	}
	return f.pairs(r.Context(), conn, streams)
}

// pair is the data stream and the error stream of one forwarded connection.
type pair struct {
	data, err httpstream.Stream
	since     time.Time
}

// pairs matches data and error streams by request ID and forwards each pair, until the client
// disconnects.
func (f forwarder) pairs(ctx context.Context, conn httpstream.Connection, streams <-chan opened) error {
	defer conn.Close()
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	half := map[string]*pair{}
	sweep := time.NewTicker(openStreams)
	defer sweep.Stop()
	for {
		select {
		case <-conn.CloseChan():
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case now := <-sweep.C:
			for id, p := range half {
				if now.Sub(p.since) > openStreams {
					delete(half, id)
				}
			}
		case st := <-streams:
			id := st.Headers().Get("requestID")
			p := half[id]
			if p == nil {
				p = &pair{since: time.Now()}
				half[id] = p
			}
			switch st.Headers().Get(streamTypeHeader) {
			case "error":
				p.err = st
			case "data":
				p.data = st
			default:
				_ = st.Reset()
				continue
			}
			if p.data == nil || p.err == nil {
				continue
			}
			delete(half, id)
			running.Add(1)
			go func() {
				defer running.Done()
				defer conn.RemoveStreams(p.data, p.err)
				f.one(ctx, p, st.replied)
			}()
		}
	}
}

// one forwards one connection after replied is closed. It writes an error to the error stream.
func (f forwarder) one(ctx context.Context, p *pair, replied <-chan struct{}) {
	select {
	case <-replied:
	case <-ctx.Done():
		return
	}
	defer p.err.Close()
	port, err := strconv.ParseUint(p.data.Headers().Get("port"), 10, 16)
	if err == nil && port == 0 {
		err = errors.New("0 is no port")
	}
	if err == nil {
		err = f.s.Nodes.PortForward(ctx, f.pod.Spec.NodeName, f.pod.UID, int32(port), p.data)
	}
	_ = p.data.Close()
	if err != nil && ctx.Err() == nil {
		fmt.Fprintf(p.err, "error forwarding port %d to pod %s, uid : %v", port, f.pod.Name, err)
	}
}

// channels serves the older WebSocket protocol: one data channel and one error channel for each
// requested port.
func (f forwarder) channels(w http.ResponseWriter, r *http.Request, ports []int32) error {
	conn, err := upgrader(channelV4, channelV4Base64).Upgrade(w, r, nil)
	if err != nil {
		return err
	}
	var inputs []byte
	for i := range ports {
		inputs = append(inputs, byte(2*i))
	}
	m, readers := newMux(conn, conn.Subprotocol() == channelV4Base64, inputs...)
	defer m.close()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	go func() { m.run(); cancel() }()
	var running sync.WaitGroup
	for i, port := range ports {
		data, fail := m.channel(byte(2*i)), m.channel(byte(2*i+1))
		// Each channel starts with its port number.
		var hello [2]byte
		binary.LittleEndian.PutUint16(hello[:], uint16(port))
		for _, c := range []io.Writer{data, fail} {
			if _, err := c.Write(hello[:]); err != nil {
				return err
			}
		}
		running.Add(1)
		go func() {
			defer running.Done()
			err := f.s.Nodes.PortForward(ctx, f.pod.Spec.NodeName, f.pod.UID, port, joined{readers[byte(2*i)], data})
			if err != nil && ctx.Err() == nil {
				fmt.Fprintf(fail, "error forwarding port %d to pod %s: %v", port, f.pod.Name, err)
			}
		}()
	}
	running.Wait()
	return nil
}

// joined is an io.ReadWriteCloser that consists of a reader and a writer.
type joined struct {
	io.Reader
	io.Writer
}

// Close closes the reader. The channel itself is closed with the WebSocket.
func (j joined) Close() error {
	if c, ok := j.Reader.(io.Closer); ok {
		return c.Close()
	}
	return nil
}
