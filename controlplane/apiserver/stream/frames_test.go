package stream

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/moby/spdystream/spdy"
	corev1 "k8s.io/api/core/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

// draining is a node that reads all data.
type draining struct{}

func (draining) Logs(context.Context, string, api.LogRequest) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader("")), nil
}

func (draining) Exec(_ context.Context, _ string, _ api.ExecRequest, s api.Streams) error {
	go func() {
		for range s.Resize {
		}
	}()
	_, err := io.Copy(io.Discard, s.Stdin)
	return err
}

func (draining) PortForward(_ context.Context, _ string, _ types.UID, _ int32, conn io.ReadWriteCloser) error {
	_, err := io.Copy(io.Discard, conn)
	return err
}

// hijacked is a response with a connection that can be hijacked.
type hijacked struct {
	*httptest.ResponseRecorder
	conn net.Conn
}

func (h hijacked) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return h.conn, bufio.NewReadWriter(bufio.NewReader(h.conn), bufio.NewWriter(h.conn)), nil
}

// forms is the ways to open a stream of a pod.
var forms = []struct {
	websocket bool
	protocol  string
	options   k8sruntime.Object
}{
	{true, "v5.channel.k8s.io", &corev1.PodExecOptions{Command: []string{"sh"}, Stdin: true, Stdout: true, TTY: true}},
	{true, channelV4, &corev1.PodAttachOptions{Stdin: true, Stdout: true, Stderr: true}},
	{true, channelV4Base64, &corev1.PodExecOptions{Command: []string{"sh"}, Stdin: true, TTY: true}},
	{false, channelV4, &corev1.PodExecOptions{Command: []string{"sh"}, Stdin: true}},
	{true, portForwardTunnel, &corev1.PodPortForwardOptions{}},
	{true, channelV4, &corev1.PodPortForwardOptions{Ports: []int32{80, 81}}},
	{false, portForwardV1, &corev1.PodPortForwardOptions{}},
}

// talk opens a stream, sends bytes, disconnects, and waits until the server has released the
// stream.
func talk(t testing.TB, form int, sent []byte) {
	t.Helper()
	f := forms[form%len(forms)]
	r := httptest.NewRequest("GET", "/", nil)
	r.Header.Set("Connection", "Upgrade")
	if f.websocket {
		r.Header.Set("Upgrade", "websocket")
		r.Header.Set("Sec-WebSocket-Version", "13")
		r.Header.Set("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")
		r.Header.Set("Sec-WebSocket-Protocol", f.protocol)
	} else {
		r.Header.Set("Upgrade", "SPDY/3.1")
		r.Header.Set("X-Stream-Protocol-Version", f.protocol)
	}
	pod := &corev1.Pod{Spec: corev1.PodSpec{NodeName: "w1", Containers: []corev1.Container{{Name: "a"}}}}
	pod.Status.Phase = corev1.PodRunning
	ours, theirs := net.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	server := &Server{Nodes: draining{}, Log: slog.New(slog.DiscardHandler),
		Error: func(w http.ResponseWriter, _ *http.Request, err error) { t.Errorf("refused: %v", err) }}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer ours.Close()
		req := &api.Request{Subresource: "exec", Object: f.options}
		server.ServeStream(hijacked{httptest.NewRecorder(), ours}, r.WithContext(ctx), req, pod)
	}()
	go func() { _, _ = io.Copy(io.Discard, theirs) }()
	_ = theirs.SetWriteDeadline(time.Now().Add(2 * time.Second)) // who takes no more may do so
	_, _ = theirs.Write(sent)
	_ = theirs.Close()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatalf("%s: the stream goes on without a client after %q", f.protocol, sent)
	}
}

// message returns a WebSocket frame of a client.
func message(opcode byte, payload string) []byte {
	out := []byte{0x80 | opcode, 0x80 | 126, 0, 0, 0, 0, 0, 0}
	binary.BigEndian.PutUint16(out[2:], uint16(len(payload)))
	return append(out, payload...) // the mask is nothing
}

// opening returns the frame with which a client opens a stream over SPDY.
func opening(t testing.TB, id uint32, headers http.Header) []byte {
	t.Helper()
	var out bytes.Buffer
	f, err := spdy.NewFramer(&out, strings.NewReader(""))
	if err != nil {
		t.Fatal(err)
	}
	if err := f.WriteFrame(&spdy.SynStreamFrame{StreamId: spdy.StreamId(id), Headers: headers}); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// allocated returns the number of bytes that do allocates.
func allocated(do func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// Whatever a client sends as frames of exec, attach and port-forward, in every form, the server
// does not panic, needs no memory out of proportion, and lets go when the client leaves.
func FuzzFrames(f *testing.F) {
	data := func(id uint32, flags byte, payload string) []byte {
		out := binary.BigEndian.AppendUint32(nil, id)
		return append(append(out, flags, 0, 0, byte(len(payload))), payload...)
	}
	errors, stdin := opening(f, 1, http.Header{"streamtype": {"error"}}),
		opening(f, 1, http.Header{"streamtype": {"stdin"}})
	pair := opening(f, 1, http.Header{"streamtype": {"error"}, "port": {"80"}, "requestid": {"0"}})
	for form := range byte(len(forms)) {
		for _, seed := range [][]byte{nil, message(2, "\x00input"), message(2, "\x04{\"Width\":80,\"Height\":24}"),
			message(2, "\xff\x00"),
			message(1, "0"+base64.StdEncoding.EncodeToString([]byte("input"))), message(8, "\x03\xe8"),
			message(9, "ping"), message(2, ""),
			errors, append(bytes.Clone(errors), data(1, 1, "abc")...), stdin, pair, message(2, string(pair)),
			data(7, 0, "abc"),
			{0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 1}, {0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff},
			{0, 0, 0, 1, 0, 0xff, 0xff, 0xff}, {0x82, 0xff, 0x7f, 0xff, 0xff, 0xff}} {
			f.Add(form, seed)
		}
	}
	f.Fuzz(func(t *testing.T, form byte, sent []byte) {
		if len(sent) > 64<<10 {
			return
		}
		if n := allocated(func() { talk(t, int(form), sent) }); n > 96<<20 {
			t.Errorf("form %d allocates %d MiB for %d bytes", form, n>>20, len(sent))
		}
	})
}

// The headers of a stream are compressed: what unpacks to much more than any client has to say is
// refused before it is unpacked. Data is not.
func TestHeadersThatUnpack(t *testing.T) {
	bomb := http.Header{"streamtype": {"error"}}
	for i := range 24 {
		bomb[fmt.Sprint("h", i)] = []string{strings.Repeat("x", 1<<20)}
	}
	whole := opening(t, 1, bomb)
	for form, f := range forms {
		frame := whole
		if f.protocol == portForwardTunnel {
			var cut []byte
			for part := range bytesOf(frame, 32<<10) {
				cut = append(cut, message(2, string(part))...)
			}
			frame = cut
		} else if f.websocket {
			continue
		}
		if n := allocated(func() { talk(t, form, frame) }); n > 16<<20 {
			t.Errorf("%s: %d bytes of headers take %d MiB", f.protocol, len(frame), n>>20)
		}
	}
}

// bytesOf returns data in pieces of a size.
func bytesOf(data []byte, size int) func(func([]byte) bool) {
	return func(yield func([]byte) bool) {
		for len(data) > 0 {
			n := min(size, len(data))
			if !yield(data[:n]) {
				return
			}
			data = data[n:]
		}
	}
}
