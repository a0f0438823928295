package endpoints

import (
	"context"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/gorilla/websocket"
)

const (
	// bearerProtocol is the prefix of the subprotocol in which a browser sends its bearer token.
	// The server never selects it.
	bearerProtocol = "base64url.bearer.authorization.k8s.io."
	// socketMessage limits the size of a client's messages; the client has nothing to send.
	socketMessage = 4 << 10
	// socketBuffer is the size of a connection's read and write buffers.
	socketBuffer = 4 << 10
	// socketClose is the time limit for writing the close message.
	socketClose = time.Second
)

// socketProtocol returns the subprotocol of a watch: the first that the client offers, or "" if it
// offers none. As in Kubernetes, it does not change the messages: browsers offer
// base64.binary.k8s.io and read JSON.
func socketProtocol(r *http.Request) string {
	for _, p := range websocket.Subprotocols(r) {
		if !strings.HasPrefix(p, bearerProtocol) {
			return p
		}
	}
	return ""
}

// watchSocket sends the events over a WebSocket, one message for each event: text for JSON, binary
// for the other media types. It returns when the client closes the connection or sends a message
// that is too large.
func (s *eventStream) watchSocket(ctx context.Context, w http.ResponseWriter, r *http.Request, events Events) {
	up := websocket.Upgrader{
		ReadBufferSize: socketBuffer, WriteBufferSize: socketBuffer,
		// browsers do not add the credentials of this API on their own
		CheckOrigin: func(*http.Request) bool { return true },
	}
	if p := socketProtocol(r); p != "" {
		up.Subprotocols = []string{p}
	}
	conn, err := up.Upgrade(w, r, nil)
	if err != nil {
		return // the upgrader has written the error response
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := &socketCutter{conn: conn.NetConn()}
	events.WhenExpired(c.setCutDeadline)
	conn.SetReadLimit(socketMessage)
	go func() {
		defer cancel()
		for { // handles pings, and detects that the client has closed the connection
			if _, _, err := conn.NextReader(); err != nil {
				return
			}
		}
	}()
	s.sendMessages(ctx, conn, events)
	bye := websocket.FormatCloseMessage(websocket.CloseNormalClosure, "")
	_ = conn.WriteControl(websocket.CloseMessage, bye, time.Now().Add(socketClose))
}

// sendMessages sends events until the watch or the connection ends.
func (s *eventStream) sendMessages(ctx context.Context, conn *websocket.Conn, events Events) {
	kind := websocket.TextMessage
	if s.format.Media == mediaProto || s.format.Media == mediaCBOR {
		kind = websocket.BinaryMessage
	}
	for {
		ev, open := events.Next(ctx)
		if !open || ctx.Err() != nil {
			return
		}
		message, err := conn.NextWriter(kind)
		if err != nil {
			return
		}
		s.w = message
		failed := s.addEvent(ev)
		if failed != nil {
			s.addError(failed)
		}
		s.writeBuffered()
		if message.Close() != nil || s.failed || failed != nil {
			return
		}
	}
}

// socketCutter limits the time of writes to a client that is too slow for its watch.
type socketCutter struct {
	once sync.Once
	conn net.Conn
}

// setCutDeadline sets a write deadline of lostGrace from now, for the pending message. Only the
// first call has an effect.
func (c *socketCutter) setCutDeadline() {
	c.once.Do(func() { _ = c.conn.SetWriteDeadline(time.Now().Add(lostGrace)) })
}
