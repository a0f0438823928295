package stream

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"

	"github.com/gorilla/websocket"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The subprotocols over WebSockets. Every message begins with the number of its
// channel; 5 adds a message that closes one channel. The base64 forms are for
// clients that cannot send binary.
const (
	channelV5       = "v5.channel.k8s.io"
	channelV1       = "channel.k8s.io"
	channelV4Base64 = "v4.base64.channel.k8s.io"
	channelV1Base64 = "base64.channel.k8s.io"
)

// The channels of an exec.
const (
	wsStdin = iota
	wsStdout
	wsStderr
	wsError
	wsResize
	wsClose = 255
)

// maxMessage bounds what a client may send in one message.
const maxMessage = 1 << 20

func upgrader(protocols ...string) *websocket.Upgrader {
	return &websocket.Upgrader{
		Subprotocols: protocols,
		// Who may talk to the API is settled by credentials that no browser adds by itself.
		CheckOrigin:     func(*http.Request) bool { return true },
		ReadBufferSize:  32 << 10,
		WriteBufferSize: 32 << 10,
	}
}

// mux carries numbered channels over one WebSocket.
type mux struct {
	conn   *websocket.Conn
	base64 bool

	mu     sync.Mutex // serialises writes
	inputs map[byte]*io.PipeWriter
	done   chan struct{}
}

// newMux reads channels inputs; call run to serve them.
func newMux(conn *websocket.Conn, base64 bool, inputs ...byte) (*mux, map[byte]io.Reader) {
	m := &mux{conn: conn, base64: base64, inputs: map[byte]*io.PipeWriter{}, done: make(chan struct{})}
	readers := map[byte]io.Reader{}
	for _, c := range inputs {
		r, w := io.Pipe()
		m.inputs[c], readers[c] = w, r
	}
	conn.SetReadLimit(maxMessage)
	return m, readers
}

// run reads messages until the connection ends, then ends all inputs.
func (m *mux) run() {
	defer close(m.done)
	defer func() {
		for _, w := range m.inputs {
			_ = w.CloseWithError(io.EOF)
		}
	}()
	for {
		_, data, err := m.conn.ReadMessage()
		if err != nil {
			return
		}
		channel, data, err := m.open(data)
		if err != nil {
			return
		}
		if channel == wsClose && len(data) == 1 {
			if w := m.inputs[data[0]]; w != nil {
				_ = w.Close()
			}
			continue
		}
		if w := m.inputs[channel]; w != nil && len(data) > 0 {
			_, _ = w.Write(data) // nobody reads this input any more
		}
	}
}

func (m *mux) open(msg []byte) (byte, []byte, error) {
	if len(msg) == 0 {
		return 0, nil, errors.New("a message without a channel")
	}
	if !m.base64 {
		return msg[0], msg[1:], nil
	}
	data, err := base64.StdEncoding.DecodeString(string(msg[1:]))
	return msg[0] - '0', data, err
}

// channel is an output as a Writer.
func (m *mux) channel(c byte) io.Writer { return muxWriter{m, c} }

type muxWriter struct {
	m *mux
	c byte
}

// Write sends data as one message.
func (w muxWriter) Write(data []byte) (int, error) {
	kind := websocket.BinaryMessage
	msg := make([]byte, 0, len(data)+1)
	if w.m.base64 {
		kind = websocket.TextMessage
		msg = append(msg, '0'+w.c)
		msg = append(msg, base64.StdEncoding.EncodeToString(data)...)
	} else {
		msg = append(msg, w.c)
		msg = append(msg, data...)
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if err := w.m.conn.WriteMessage(kind, msg); err != nil {
		return 0, fmt.Errorf("writing to the client: %w", err)
	}
	return len(data), nil
}

func (m *mux) close() {
	m.mu.Lock()
	_ = m.conn.WriteMessage(websocket.CloseMessage, websocket.FormatCloseMessage(websocket.CloseNormalClosure, ""))
	m.mu.Unlock()
	_ = m.conn.Close()
	for _, w := range m.inputs {
		_ = w.CloseWithError(io.EOF)
	}
}

// webSocketSession opens an exec by WebSocket.
func webSocketSession(w http.ResponseWriter, r *http.Request, want wanted) (*session, error) {
	conn, err := upgrader(channelV5, channelV4, channelV4Base64, channelV1, channelV1Base64).Upgrade(w, r, nil)
	if err != nil {
		return nil, err
	}
	protocol := conn.Subprotocol()
	inputs := []byte{wsResize}
	if want.stdin {
		inputs = append(inputs, wsStdin)
	}
	m, readers := newMux(conn, slices.Contains([]string{channelV4Base64, channelV1Base64}, protocol), inputs...)
	ses := &session{gone: m.done, close: m.close}
	if want.stdin {
		ses.stdin = readers[wsStdin]
	}
	if want.stdout {
		ses.stdout = m.channel(wsStdout)
	}
	if want.stderr {
		ses.stderr = m.channel(wsStderr)
	}
	if want.tty {
		ses.resize = readers[wsResize]
	} else {
		go func() { _, _ = io.Copy(io.Discard, readers[wsResize]) }()
	}
	structured := protocol == channelV5 || protocol == channelV4 || protocol == channelV4Base64
	ses.report = func(s metav1.Status) {
		_, _ = m.channel(wsError).Write(reportBytes(s, structured)) // the client has left when this fails
	}
	go m.run()
	return ses, nil
}
