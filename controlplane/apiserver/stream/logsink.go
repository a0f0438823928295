package stream

import (
	"encoding/base64"
	"io"
	"net/http"
	"time"

	"github.com/gorilla/websocket"
)

// logSink writes a log to the client, as a response body or over a WebSocket.
type logSink interface {
	begin() error // sends the response headers; further calls do nothing
	write(data []byte) error
	end()
}

// textLog writes a log as the body of a response.
type textLog struct {
	w     http.ResponseWriter
	begun bool
}

func (t *textLog) begin() error {
	if t.begun {
		return nil
	}
	t.begun = true
	t.w.Header().Set("Content-Type", "text/plain")
	t.w.WriteHeader(http.StatusOK)
	return http.NewResponseController(t.w).Flush()
}

func (t *textLog) write(data []byte) error {
	if _, err := t.w.Write(data); err != nil {
		return err
	}
	return http.NewResponseController(t.w).Flush()
}

func (t *textLog) end() {}

// Subprotocols of a log over a WebSocket, for browsers: binary messages, or text messages in
// base64. The default is binary.
const (
	logBinary = "binary.k8s.io"
	logBase64 = "base64.binary.k8s.io"
)

// socketLog writes a log as messages of a WebSocket.
type socketLog struct {
	w    http.ResponseWriter
	r    *http.Request
	left func() // called when the client has disconnected

	conn *websocket.Conn
}

func (s *socketLog) begin() error {
	if s.conn != nil {
		return nil
	}
	conn, err := upgrader(logBinary, logBase64).Upgrade(s.w, s.r, nil)
	if err != nil {
		return err
	}
	s.conn = conn
	conn.SetReadLimit(maxMessage)
	go func() { // discards messages of the client, and detects that it has disconnected
		defer s.left()
		for {
			_, in, err := conn.NextReader()
			if err == nil {
				_, err = io.Copy(io.Discard, in)
			}
			if err != nil {
				return
			}
		}
	}()
	return nil
}

// unreadFor is how long a message may wait for a client that does not read.
const unreadFor = time.Minute

func (s *socketLog) write(data []byte) error {
	if err := s.conn.SetWriteDeadline(time.Now().Add(unreadFor)); err != nil {
		return err
	}
	if s.conn.Subprotocol() == logBase64 {
		return s.conn.WriteMessage(websocket.TextMessage, base64.StdEncoding.AppendEncode(nil, data))
	}
	return s.conn.WriteMessage(websocket.BinaryMessage, data)
}

func (s *socketLog) end() {
	if s.conn == nil {
		return
	}
	_ = s.conn.WriteMessage(websocket.CloseMessage, websocket.FormatCloseMessage(websocket.CloseNormalClosure, ""))
	_ = s.conn.Close()
}
