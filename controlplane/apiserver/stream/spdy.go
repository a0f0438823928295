package stream

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// Subprotocols of exec over SPDY, newest first: v4 adds exit codes and v3 terminal sizes.
const (
	channelV4 = "v4.channel.k8s.io"
	channelV3 = "v3.channel.k8s.io"
	channelV2 = "v2.channel.k8s.io"
)

const streamTypeHeader = "streamType"

// openedStream is a stream that the client has opened. It must not be used before replied is
// closed.
type openedStream struct {
	httpstream.Stream
	replied <-chan struct{}
}

// upgradeSPDY upgrades the connection to SPDY. The returned channel receives the streams that the
// client opens, until stop is closed.
func upgradeSPDY(w http.ResponseWriter, r *http.Request, stop <-chan struct{}) (
	httpstream.Connection, <-chan openedStream, error,
) {
	streams := make(chan openedStream)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(framedWriter{w}, r, deliverStreams(streams, stop))
	if conn == nil {
		return nil, nil, errors.New("the connection could not be upgraded to SPDY")
	}
	return conn, streams, nil
}

func deliverStreams(streams chan<- openedStream, stop <-chan struct{}) httpstream.NewStreamHandler {
	return func(st httpstream.Stream, replied <-chan struct{}) error {
		select {
		case streams <- openedStream{st, replied}:
			return nil
		case <-stop:
			return errors.New("the session accepts no more streams")
		}
	}
}

// spdySession starts an exec session over SPDY. It waits until the client has opened the error
// stream and all streams in wanted, at most openStreamsTimeout.
func spdySession(w http.ResponseWriter, r *http.Request, wanted wantedStreams) (*session, error) {
	protocol, err := httpstream.Handshake(r, w, []string{channelV4, channelV3, channelV2})
	if err != nil {
		return nil, err
	}
	stop := make(chan struct{})
	defer close(stop)
	conn, streams, err := upgradeSPDY(w, r, stop)
	if err != nil {
		return nil, err
	}
	ses := &session{gone: closeSignal(conn.CloseChan()), close: func() { _ = conn.Close() }}
	need := map[string]bool{"error": true}
	for name, w := range map[string]bool{"stdin": wanted.stdin, "stdout": wanted.stdout, "stderr": wanted.stderr,
		"resize": wanted.tty && protocol != channelV2} {
		if w {
			need[name] = true
		}
	}
	late := time.NewTimer(openStreamsTimeout)
	defer late.Stop()
	for len(need) > 0 {
		select {
		case st := <-streams:
			name := st.Headers().Get(streamTypeHeader)
			if !need[name] {
				_ = conn.Close()
				return nil, fmt.Errorf("the client opened an unexpected stream %q", name)
			}
			delete(need, name)
			if err := ses.attachStream(name, st, protocol, late.C); err != nil {
				_ = conn.Close()
				return nil, err
			}
		case <-late.C:
			_ = conn.Close()
			return nil, errors.New("timed out waiting for client to create streams")
		case <-conn.CloseChan():
			return nil, errors.New("the client disconnected before it opened its streams")
		}
	}
	return ses, nil
}

func closeSignal(c <-chan bool) <-chan struct{} {
	out := make(chan struct{})
	go func() { <-c; close(out) }()
	return out
}

func (ses *session) attachStream(name string, st openedStream, protocol string, deadline <-chan time.Time) error {
	select {
	case <-st.replied:
	case <-deadline:
		return errors.New("timed out accepting a stream of the client")
	}
	switch name {
	case "stdin":
		ses.stdin = st
	case "stdout":
		ses.stdout = st
	case "stderr":
		ses.stderr = st
	case "resize":
		ses.resize = st
	case "error":
		ses.report = func(s metav1.Status) {
			_, _ = st.Write(reportBytes(s, protocol == channelV4)) // fails only if the client has disconnected
		}
	}
	return nil
}

// reportBytes encodes the final status of an exec session: as JSON if structured is true, otherwise
// as the error message. Without structured, the result for a success is empty.
func reportBytes(s metav1.Status, structured bool) []byte {
	if structured {
		data, err := json.Marshal(s)
		if err == nil {
			return data
		}
	}
	if s.Status == metav1.StatusSuccess {
		return nil
	}
	return []byte(s.Message)
}
