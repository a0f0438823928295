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

// Subprotocols of exec over WebSockets. Each message starts with a channel number. v5 adds a
// message that closes one channel. The base64 variants are for clients that cannot send binary
// messages.
const (
	channelV5       = "v5.channel.k8s.io"
	channelV1       = "channel.k8s.io"
	channelV4Base64 = "v4.base64.channel.k8s.io"
	channelV1Base64 = "base64.channel.k8s.io"
)

// Channel numbers of an exec session.
const (
	wsStdin = iota
	wsStdout
	wsStderr
	wsError
	wsResize
	wsClose = 255
)

// maxMessage limits the size of a client's message.
const maxMessage = 1 << 20

func newUpgrader(protocols ...string) *websocket.Upgrader {
	return &websocket.Upgrader{
		Subprotocols: protocols,
		// Access is controlled by credentials that browsers do not add on their own.
		CheckOrigin:     func(*http.Request) bool { return true },
		ReadBufferSize:  32 << 10,
		WriteBufferSize: 32 << 10,
	}
}

// mux multiplexes numbered channels over one WebSocket, as the subprotocols of exec require.
type mux struct {
	conn   *websocket.Conn
	base64 bool

	mu     sync.Mutex // serializes writes
	inputs map[byte]*io.PipeWriter
	done   chan struct{}
}

// newMux returns a mux, and a reader for each channel in inputs. If encoded is true, messages are
// text in base64. The caller must call readMessages to receive messages.
func newMux(conn *websocket.Conn, encoded bool, inputs ...byte) (*mux, map[byte]io.Reader) {
	m := &mux{conn: conn, base64: encoded, inputs: map[byte]*io.PipeWriter{}, done: make(chan struct{})}
	readers := map[byte]io.Reader{}
	for _, c := range inputs {
		r, w := io.Pipe()
		m.inputs[c], readers[c] = w, r
	}
	conn.SetReadLimit(maxMessage)
	return m, readers
}

// readMessages reads messages until the connection ends, then closes all inputs.
func (m *mux) readMessages() {
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
		channel, data, err := m.openMessage(data)
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
			_, _ = w.Write(data) // fails only if the input is no longer read
		}
	}
}

func (m *mux) openMessage(msg []byte) (byte, []byte, error) {
	if len(msg) == 0 {
		return 0, nil, errors.New("a message without a channel")
	}
	if !m.base64 {
		return msg[0], msg[1:], nil
	}
	data, err := base64.StdEncoding.DecodeString(string(msg[1:]))
	return msg[0] - '0', data, err
}

// channelWriter returns an io.Writer that sends messages on channel c.
func (m *mux) channelWriter(c byte) io.Writer { return muxWriter{m, c} }

type muxWriter struct {
	mux     *mux
	channel byte
}

// Write sends data as one message. It implements io.Writer.
func (w muxWriter) Write(data []byte) (int, error) {
	kind := websocket.BinaryMessage
	msg := make([]byte, 0, len(data)+1)
	if w.mux.base64 {
		kind = websocket.TextMessage
		msg = append(msg, '0'+w.channel)
		msg = append(msg, base64.StdEncoding.EncodeToString(data)...)
	} else {
		msg = append(msg, w.channel)
		msg = append(msg, data...)
	}
	w.mux.mu.Lock()
	defer w.mux.mu.Unlock()
	if err := w.mux.conn.WriteMessage(kind, msg); err != nil {
		return 0, fmt.Errorf("writing to the client: %w", err)
	}
	return len(data), nil
}

func (m *mux) closeConn() {
	m.mu.Lock()
	_ = m.conn.WriteMessage(websocket.CloseMessage, websocket.FormatCloseMessage(websocket.CloseNormalClosure, ""))
	m.mu.Unlock()
	_ = m.conn.Close()
	for _, w := range m.inputs {
		_ = w.CloseWithError(io.EOF)
	}
}

// webSocketSession upgrades the connection and starts an exec session over a WebSocket.
func webSocketSession(w http.ResponseWriter, r *http.Request, wanted wantedStreams) (*session, error) {
	conn, err := newUpgrader(channelV5, channelV4, channelV4Base64, channelV1, channelV1Base64).Upgrade(w, r, nil)
	if err != nil {
		return nil, err
	}
	protocol := conn.Subprotocol()
	inputs := []byte{wsResize}
	if wanted.stdin {
		inputs = append(inputs, wsStdin)
	}
	m, readers := newMux(conn, slices.Contains([]string{channelV4Base64, channelV1Base64}, protocol), inputs...)
	ses := &session{gone: m.done, close: m.closeConn}
	if wanted.stdin {
		ses.stdin = readers[wsStdin]
	}
	if wanted.stdout {
		ses.stdout = m.channelWriter(wsStdout)
	}
	if wanted.stderr {
		ses.stderr = m.channelWriter(wsStderr)
	}
	if wanted.tty {
		ses.resize = readers[wsResize]
	} else {
		go func() { _, _ = io.Copy(io.Discard, readers[wsResize]) }()
	}
	structured := protocol == channelV5 || protocol == channelV4 || protocol == channelV4Base64
	ses.report = func(s metav1.Status) {
		_, _ = m.channelWriter(wsError).Write(reportBytes(s, structured)) // fails only if the client has disconnected
	}
	go m.readMessages()
	return ses, nil
}
