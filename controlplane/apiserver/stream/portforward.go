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
// Requests with the subprotocols of exec use numbered channels instead.
const (
	portForwardV1     = "portforward.k8s.io"
	portForwardTunnel = "SPDY/3.1+portforward.k8s.io"
)

// forwarder forwards the streams that a client opens to ports of one pod.
type forwarder struct {
	server *Server
	pod    *corev1.Pod
}

func (s *Server) portForward(w http.ResponseWriter, r *http.Request, pod *corev1.Pod, ports []int32) error {
	if pod.Status.Phase != corev1.PodRunning {
		return apierrors.NewBadRequest(fmt.Sprintf(
			"unable to forward port because pod is not running. Current status=%v", pod.Status.Phase))
	}
	if !httpstream.IsUpgradeRequest(r) {
		return apierrors.NewBadRequest("Upgrade request required")
	}
	f := forwarder{s, pod}
	var err error
	switch {
	case wsstream.IsWebSocketRequestWithTunnelingProtocol(r):
		err = f.serveTunneled(w, r)
	case wsstream.IsWebSocketRequest(r):
		if len(ports) == 0 {
			return apierrors.NewBadRequest("query parameter \"ports\" is required: 1 to 100 ports")
		}
		err = f.serveChannels(w, r, ports)
	default:
		err = f.serveSPDY(w, r)
	}
	if err != nil {
		s.Log.Debug("port-forward ended", "pod", pod.Namespace+"/"+pod.Name, "err", err)
	}
	return nil // the client has received an error response
}

func (f forwarder) serveSPDY(w http.ResponseWriter, r *http.Request) error {
	if _, err := httpstream.Handshake(r, w, []string{portForwardV1}); err != nil {
		return err
	}
	stop := make(chan struct{})
	defer close(stop)
	conn, streams, err := upgradeSPDY(w, r, stop)
	if err != nil {
		return err
	}
	return f.forwardPairs(r.Context(), conn, streams)
}

// serveTunneled serves a port-forward request over SPDY inside WebSocket messages.
func (f forwarder) serveTunneled(w http.ResponseWriter, r *http.Request) error {
	ws, err := newUpgrader(portForwardTunnel).Upgrade(w, r, nil)
	if err != nil {
		return err
	}
	stop := make(chan struct{})
	defer close(stop)
	streams := make(chan openedStream)
	conn, err := spdy.NewServerConnection(newFramedConn(portforward.NewTunnelingConnection("server", ws)),
		deliverStreams(streams, stop))
	if err != nil {
		return err
	}
	return f.forwardPairs(r.Context(), conn, streams)
}

// pair contains the two streams of one forwarded connection: the data stream and the error stream.
type pair struct {
	data, err httpstream.Stream
	openedAt  time.Time
}

// forwardPairs matches data and error streams by request ID and forwards each pair, until the
// client disconnects.
func (f forwarder) forwardPairs(ctx context.Context, conn httpstream.Connection, streams <-chan openedStream) error {
	defer conn.Close()
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	half := map[string]*pair{}
	sweep := time.NewTicker(openStreamsTimeout)
	defer sweep.Stop()
	for {
		select {
		case <-conn.CloseChan():
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case now := <-sweep.C:
			for id, p := range half {
				if now.Sub(p.openedAt) > openStreamsTimeout {
					delete(half, id)
				}
			}
		case st := <-streams:
			id := st.Headers().Get("requestID")
			p := half[id]
			if p == nil {
				p = &pair{openedAt: time.Now()}
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
				f.forwardPair(ctx, p, st.replied)
			}()
		}
	}
}

// forwardPair waits until replied is closed, and then forwards one connection. If an error occurs,
// it writes the error to the error stream.
func (f forwarder) forwardPair(ctx context.Context, streamPair *pair, replied <-chan struct{}) {
	select {
	case <-replied:
	case <-ctx.Done():
		return
	}
	defer streamPair.err.Close()
	port, err := strconv.ParseUint(streamPair.data.Headers().Get("port"), 10, 16)
	if err == nil && port == 0 {
		err = errors.New("0 is not a port")
	}
	if err == nil {
		err = f.server.Nodes.PortForward(ctx, f.pod.Spec.NodeName, f.pod.UID, int32(port), streamPair.data)
	}
	_ = streamPair.data.Close()
	if err != nil && ctx.Err() == nil {
		fmt.Fprintf(streamPair.err, "error forwarding port %d to pod %s, uid : %v", port, f.pod.Name, err)
	}
}

// serveChannels serves the older WebSocket protocol: one data channel and one error channel for
// each requested port.
func (f forwarder) serveChannels(w http.ResponseWriter, r *http.Request, ports []int32) error {
	conn, err := newUpgrader(channelV4, channelV4Base64).Upgrade(w, r, nil)
	if err != nil {
		return err
	}
	var inputs []byte
	for i := range ports {
		inputs = append(inputs, byte(2*i))
	}
	m, readers := newMux(conn, conn.Subprotocol() == channelV4Base64, inputs...)
	defer m.closeConn()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	go func() { m.readMessages(); cancel() }()
	var running sync.WaitGroup
	for i, port := range ports {
		data, fail := m.channelWriter(byte(2*i)), m.channelWriter(byte(2*i+1))
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
			err := f.server.Nodes.PortForward(ctx, f.pod.Spec.NodeName, f.pod.UID, port,
				joinedStream{readers[byte(2*i)], data})
			if err != nil && ctx.Err() == nil {
				fmt.Fprintf(fail, "error forwarding port %d to pod %s: %v", port, f.pod.Name, err)
			}
		}()
	}
	running.Wait()
	return nil
}

// joinedStream is an io.ReadWriteCloser that consists of a reader and a writer.
type joinedStream struct {
	io.Reader
	io.Writer
}

// Close closes the reader. The channel itself is closed with the WebSocket.
func (j joinedStream) Close() error {
	if c, ok := j.Reader.(io.Closer); ok {
		return c.Close()
	}
	return nil
}
