package apiserver

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
)

// fakeNode is a node with containers that echo, fail and log as the test requires.
type fakeNode struct {
	mu    sync.Mutex
	execs []api.ExecRequest
	logs  []api.LogRequest
	left  chan struct{} // an exec that waited for the client to leave saw it leave
}

func (n *fakeNode) Logs(ctx context.Context, node string, r api.LogRequest) (io.ReadCloser, error) {
	n.mu.Lock()
	n.logs = append(n.logs, r)
	n.mu.Unlock()
	if r.Previous {
		return nil, errors.New("no such file")
	}
	if !r.Follow {
		return io.NopCloser(strings.NewReader("one\ntwo\n")), nil
	}
	pr, pw := io.Pipe()
	go func() {
		fmt.Fprintln(pw, "begun")
		<-ctx.Done()
		_ = pw.CloseWithError(ctx.Err())
	}()
	return pr, nil
}

func (n *fakeNode) Exec(ctx context.Context, node string, r api.ExecRequest, s api.Streams) error {
	n.mu.Lock()
	n.execs = append(n.execs, r)
	n.mu.Unlock()
	if r.Attach {
		fmt.Fprintf(s.Stdout, "attached to %s", r.Container)
		return nil
	}
	switch r.Command[0] {
	case "cat":
		_, err := io.Copy(s.Stdout, s.Stdin)
		return err
	case "fail":
		fmt.Fprint(s.Stderr, "it failed")
		return &api.ExitError{Code: 7}
	case "size":
		size := <-s.Resize
		fmt.Fprintf(s.Stdout, "%dx%d", size.Width, size.Height)
		return nil
	case "wait":
		fmt.Fprint(s.Stdout, "waiting")
		<-ctx.Done()
		close(n.left)
		return ctx.Err()
	}
	return fmt.Errorf("exec: %q: executable file not found in $PATH", r.Command[0])
}

func (n *fakeNode) PortForward(ctx context.Context, node string, pod types.UID, port int32, conn io.ReadWriteCloser) error {
	defer conn.Close()
	if port == 81 {
		return errors.New("connection refused")
	}
	buf := make([]byte, 100)
	k, err := conn.Read(buf)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(conn, "port %d heard %s", port, buf[:k])
	return err
}

// streaming starts a replica with a running pod "p" on a fake node.
func streaming(t *testing.T) (*replica, *fakeNode) {
	t.Helper()
	return streamingWith(t, func(*Config) {})
}

func streamingWith(t *testing.T, change func(*Config)) (*replica, *fakeNode) {
	t.Helper()
	node := &fakeNode{left: make(chan struct{})}
	r := start(t, func(c *Config) { c.Streams = node; change(c) })
	r.must(newPod("p"))
	pods := r.admin().CoreV1().Pods("default")
	if err := pods.Bind(within(t), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Target: corev1.ObjectReference{Name: "n1"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err := pods.Patch(within(t), "p", types.MergePatchType, []byte(`{"status":{"phase":"Running","containerStatuses":[{"name":"c","ready":true,"image":"nginx","imageID":"x","restartCount":0,"state":{"running":{}}}]}}`), metav1.PatchOptions{}, "status")
	if err != nil {
		t.Fatal(err)
	}
	return r, node
}

type sizes chan remotecommand.TerminalSize

func (s sizes) Next() *remotecommand.TerminalSize {
	v, ok := <-s
	if !ok {
		return nil
	}
	return &v
}

// executors returns the exec clients of both protocols by name.
func executors(t *testing.T, r *replica, o *corev1.PodExecOptions) map[string]remotecommand.Executor {
	t.Helper()
	conf := r.config("admin", api.GroupMasters)
	u := r.admin().CoreV1().RESTClient().Post().Resource("pods").Namespace("default").Name("p").SubResource("exec").VersionedParams(o, scheme.ParameterCodec).URL()
	spdyExec, err := remotecommand.NewSPDYExecutor(conf, "POST", u)
	if err != nil {
		t.Fatal(err)
	}
	ws, err := remotecommand.NewWebSocketExecutor(conf, "GET", u.String())
	if err != nil {
		t.Fatal(err)
	}
	return map[string]remotecommand.Executor{"SPDY": spdyExec, "WebSocket": ws}
}

func TestExec(t *testing.T) {
	r, node := streaming(t)
	for _, protocol := range []string{"SPDY", "WebSocket"} {
		t.Run(protocol, func(t *testing.T) {
			var out, errOut bytes.Buffer
			e := executors(t, r, &corev1.PodExecOptions{Command: []string{"cat"}, Stdin: true, Stdout: true, Stderr: true})[protocol]
			big := strings.Repeat("0123456789", 20000)
			if err := e.StreamWithContext(within(t), remotecommand.StreamOptions{Stdin: strings.NewReader(big), Stdout: &out, Stderr: &errOut}); err != nil || out.String() != big {
				t.Errorf("cat: %v, %d bytes back of %d", err, out.Len(), len(big))
			}
			out.Reset()
			e = executors(t, r, &corev1.PodExecOptions{Command: []string{"fail", "now"}, Stdout: true, Stderr: true})[protocol]
			err := e.StreamWithContext(within(t), remotecommand.StreamOptions{Stdout: &out, Stderr: &errOut})
			var code interface{ ExitStatus() int }
			if !errors.As(err, &code) || code.ExitStatus() != 7 || errOut.String() != "it failed" {
				t.Errorf("fail: %v, stderr %q", err, errOut.String())
			}
			e = executors(t, r, &corev1.PodExecOptions{Command: []string{"size"}, Stdin: true, Stdout: true, TTY: true})[protocol]
			q := make(sizes, 1)
			q <- remotecommand.TerminalSize{Width: 80, Height: 24}
			stdin, hold := io.Pipe()
			defer hold.Close()
			if err := e.StreamWithContext(within(t), remotecommand.StreamOptions{Stdin: stdin, Stdout: &out, Tty: true, TerminalSizeQueue: q}); err != nil || out.String() != "80x24" {
				t.Errorf("size: %v, %q", err, out.String())
			}
			close(q)
			e = executors(t, r, &corev1.PodExecOptions{Command: []string{"nothing"}, Stdout: true})[protocol]
			if err := e.StreamWithContext(within(t), remotecommand.StreamOptions{Stdout: &out}); err == nil || !strings.Contains(err.Error(), "executable file not found") {
				t.Errorf("a missing command: %v", err)
			}
			// The command ends with its client.
			node.left = make(chan struct{})
			ctx, cancel := context.WithCancel(within(t))
			e = executors(t, r, &corev1.PodExecOptions{Command: []string{"wait"}, Stdout: true})[protocol]
			if err := e.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: writerFunc(func(b []byte) { cancel() })}); err == nil {
				t.Error("an exec that was given up had no error")
			}
			select {
			case <-node.left:
			case <-within(t).Done():
				t.Error("the command did not hear that its client left")
			}
		})
	}
	c := r.adminHTTP()
	const exec = "/api/v1/namespaces/default/pods/p/exec?"
	refused(t, r.call(c, "GET", exec+"stdout=1", ""), 400, "you must specify at least one command")
	refused(t, r.call(c, "GET", exec+"command=x", ""), 400, "at least 1 of stdin, stdout, stderr")
	refused(t, r.call(c, "GET", exec+"command=x&stdout=1", ""), 400, "Upgrade request required")
	refused(t, r.call(c, "GET", exec+"command=x&stdout=1&container=ghost", ""), 400, "container ghost is not valid for pod p")
	refused(t, r.call(r.http(nil), "POST", exec+"command=x&stdout=1", "", "Authorization", "Bearer alice-token"), 403, `cannot create resource "pods/exec"`)
	r.must(newPod("nowhere"))
	refused(t, r.call(c, "GET", "/api/v1/namespaces/default/pods/nowhere/exec?command=x&stdout=1", ""), 400, "pod nowhere does not have a host assigned")
}

type writerFunc func([]byte)

func (f writerFunc) Write(b []byte) (int, error) { f(b); return len(b), nil }

func TestPortForward(t *testing.T) {
	r, _ := streaming(t)
	conf := r.config("admin", api.GroupMasters)
	u := r.admin().CoreV1().RESTClient().Post().Resource("pods").Namespace("default").Name("p").SubResource("portforward").URL()
	transport, upgrader, err := spdy.RoundTripperFor(conf)
	if err != nil {
		t.Fatal(err)
	}
	tunnel, err := portforward.NewSPDYOverWebsocketDialer(u, conf)
	if err != nil {
		t.Fatal(err)
	}
	dialers := map[string]httpstream.Dialer{
		"SPDY":      spdy.NewDialer(upgrader, &http.Client{Transport: transport}, "POST", u),
		"WebSocket": tunnel,
	}
	for name, dial := range dialers {
		t.Run(name, func(t *testing.T) {
			stop, ready := make(chan struct{}), make(chan struct{})
			f, err := portforward.NewOnAddresses(dial, []string{"127.0.0.1"}, []string{":80", ":81"}, stop, ready, io.Discard, io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() { done <- f.ForwardPorts() }()
			select {
			case <-ready:
			case err := <-done:
				t.Fatal(err)
			}
			ports, err := f.GetPorts()
			if err != nil {
				t.Fatal(err)
			}
			for i := range 3 {
				conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", ports[0].Local))
				if err != nil {
					t.Fatal(err)
				}
				fmt.Fprintf(conn, "hello %d", i)
				_ = conn.(*net.TCPConn).CloseWrite()
				got, err := io.ReadAll(conn)
				if want := fmt.Sprintf("port 80 heard hello %d", i); err != nil || string(got) != want {
					t.Errorf("%v %q, want %q", err, got, want)
				}
				_ = conn.Close()
			}
			close(stop)
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

func TestLogs(t *testing.T) {
	r, node := streaming(t)
	pods := r.admin().CoreV1().Pods("default")
	five, sec := int64(5), int64(60)
	data, err := pods.GetLogs("p", &corev1.PodLogOptions{TailLines: &five, Timestamps: true, SinceSeconds: &sec, LimitBytes: &five}).DoRaw(within(t))
	if err != nil || string(data) != "one\ntwo\n" {
		t.Errorf("%v %q", err, data)
	}
	got := node.logs[0]
	if got.Container != "c" || *got.TailLines != 5 || !got.Timestamps || *got.LimitBytes != 5 || time.Since(got.SinceTime.Time) < 50*time.Second {
		t.Errorf("%+v", got)
	}
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	body, err := pods.GetLogs("p", &corev1.PodLogOptions{Follow: true}).Stream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 6)
	if _, err := io.ReadFull(body, line); err != nil || string(line) != "begun\n" {
		t.Errorf("%v %q", err, line)
	}
	cancel()
	_ = body.Close()
	c := r.adminHTTP()
	refused(t, r.call(c, "GET", "/api/v1/namespaces/default/pods/p/log?previous=true", ""), 400, `previous terminated container "c" in pod "p" not found`)
	refused(t, r.call(c, "GET", "/api/v1/namespaces/default/pods/p/log?tailLines=-1", ""), 422, "tailLines")
	refused(t, r.call(c, "GET", "/api/v1/namespaces/default/pods/p/log?container=ghost", ""), 400, "container ghost is not valid for pod p")
}

// A log by WebSocket, as browsers ask for it: bytes, or text in base64.
func TestLogsByWebSocket(t *testing.T) {
	r, _ := streaming(t)
	cert := r.cert(pki.Client("admin", api.GroupMasters))
	dial := func(query string, protocols ...string) (*websocket.Conn, *http.Response, error) {
		d := websocket.Dialer{TLSClientConfig: &tls.Config{RootCAs: r.trust.Pool(), Certificates: []tls.Certificate{cert}}, Subprotocols: protocols}
		return d.DialContext(within(t), "wss://"+r.addr+"/api/v1/namespaces/default/pods/p/log"+query, nil)
	}
	for _, c := range []struct {
		name      string
		protocols []string
		chosen    string
		kind      int
		want      string
	}{
		{"bytes", []string{"binary.k8s.io"}, "binary.k8s.io", websocket.BinaryMessage, "one\ntwo\n"},
		{"base64", []string{"base64.binary.k8s.io"}, "base64.binary.k8s.io", websocket.TextMessage, base64.StdEncoding.EncodeToString([]byte("one\ntwo\n"))},
		{"unnamed", nil, "", websocket.BinaryMessage, "one\ntwo\n"},
	} {
		conn, _, err := dial("", c.protocols...)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		kind, data, err := conn.ReadMessage()
		if err != nil || kind != c.kind || string(data) != c.want || conn.Subprotocol() != c.chosen {
			t.Errorf("%s: %q message of kind %d by %q, %v", c.name, data, kind, conn.Subprotocol(), err)
		}
		if _, _, err := conn.ReadMessage(); !websocket.IsCloseError(err, websocket.CloseNormalClosure) {
			t.Errorf("%s: it ends with %v", c.name, err)
		}
		_ = conn.Close()
	}
	conn, _, err := dial("?follow=true")
	if err != nil {
		t.Fatal(err)
	}
	if _, data, err := conn.ReadMessage(); err != nil || string(data) != "begun\n" {
		t.Errorf("%v %q", err, data)
	}
	_ = conn.Close()
	// What cannot be had is refused before the connection is taken over.
	if _, resp, err := dial("?previous=true"); err == nil || resp == nil || resp.StatusCode != http.StatusBadRequest {
		t.Errorf("a log that is not there: %v %v", resp, err)
	}
}

// Stock kubectl's exec, logs, attach and port-forward.
func TestKubectlStreams(t *testing.T) {
	all := stockKubectls()
	if len(all) == 0 {
		t.Skip("no stock kubectl on this machine")
	}
	r, _ := streaming(t)
	config := r.kubeconfig("admin", api.GroupMasters)
	for name, binary := range all {
		t.Run(name, func(t *testing.T) {
			k := &kubectl{t: t, binary: binary, config: config, home: t.TempDir()}
			if out := k.ok("some bytes", "exec", "-i", "p", "--", "cat"); out != "some bytes" {
				t.Errorf("exec cat: %q", out)
			}
			if out := k.fails("", "exec", "p", "--", "fail"); !strings.Contains(out, "it failed") || !strings.Contains(out, "exit code 7") {
				t.Errorf("exec fail: %q", out)
			}
			if out := k.ok("", "logs", "p", "--tail=2"); out != "one\ntwo\n" {
				t.Errorf("logs: %q", out)
			}
			if out := k.ok("", "attach", "p"); !strings.Contains(out, "attached to c") {
				t.Errorf("attach: %q", out)
			}
		})
	}
}
