package stream

import (
	"encoding/base64"
	"io"
	"net/http"
	"time"

	"github.com/gorilla/websocket"
)

// logSink writes a log to the client: as a response body (textLog) or over a WebSocket (socketLog).
type logSink interface {
	startLog() error // sends the response headers; further calls do nothing
	writeLog(data []byte) error
	endLog()
}

// textLog writes a log as the body of an HTTP response.
type textLog struct {
	w       http.ResponseWriter
	started bool
}

func (t *textLog) startLog() error {
	if t.started {
		return nil
	}
	t.started = true
	t.w.Header().Set("Content-Type", "text/plain")
	t.w.WriteHeader(http.StatusOK)
	return http.NewResponseController(t.w).Flush()
}

func (t *textLog) writeLog(data []byte) error {
	if _, err := t.w.Write(data); err != nil {
		return err
	}
	return http.NewResponseController(t.w).Flush()
}

func (t *textLog) endLog() {}

// Subprotocols of a log over a WebSocket, for browsers: binary messages, or text messages in
// base64. The default is binary.
const (
	logBinary = "binary.k8s.io"
	logBase64 = "base64.binary.k8s.io"
)

// socketLog writes a log as messages of a WebSocket.
type socketLog struct {
	w            http.ResponseWriter
	r            *http.Request
	onDisconnect func() // called when the client has disconnected

	conn *websocket.Conn
}

func (s *socketLog) startLog() error {
	if s.conn != nil {
		return nil
	}
	conn, err := newUpgrader(logBinary, logBase64).Upgrade(s.w, s.r, nil)
	if err != nil {
		return err
	}
	s.conn = conn
	conn.SetReadLimit(maxMessage)
	go func() { // discards messages of the client, and detects that it has disconnected
		defer s.onDisconnect()
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

// unreadFor is how long the write of a message may wait for a client that does not read.
const unreadFor = time.Minute

func (s *socketLog) writeLog(data []byte) error {
	if err := s.conn.SetWriteDeadline(time.Now().Add(unreadFor)); err != nil {
		return err
	}
	if s.conn.Subprotocol() == logBase64 {
		return s.conn.WriteMessage(websocket.TextMessage, base64.StdEncoding.AppendEncode(nil, data))
	}
	return s.conn.WriteMessage(websocket.BinaryMessage, data)
}

func (s *socketLog) endLog() {
	if s.conn == nil {
		return
	}
	_ = s.conn.WriteMessage(websocket.CloseMessage, websocket.FormatCloseMessage(websocket.CloseNormalClosure, ""))
	_ = s.conn.Close()
}
