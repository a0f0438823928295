package stream_test

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
	"testing"
	"time"

	"github.com/gorilla/websocket"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/pki"
)

// streaming starts a replica with a running pod "p" on a fake node.
func streaming(t *testing.T) (*apiservertest.Replica, *apiservertest.FakeNode) {
	t.Helper()
	return apiservertest.StreamingWith(t, func(*apiserver.Config) {})
}

type sizes chan remotecommand.TerminalSize

func (s sizes) Next() *remotecommand.TerminalSize {
	v, ok := <-s
	if !ok {
		return nil
	}
	return &v
}

func TestExec(t *testing.T) {
	r, node := streaming(t)
	for _, protocol := range []string{"SPDY", "WebSocket"} {
		t.Run(protocol, func(t *testing.T) {
			var out, errOut bytes.Buffer
			e := apiservertest.Executors(t, r, &corev1.PodExecOptions{Command: []string{"cat"}, Stdin: true,
				Stdout: true, Stderr: true})[protocol]
			big := strings.Repeat("0123456789", 20000)
			if err := e.StreamWithContext(apiservertest.Within(t),
				remotecommand.StreamOptions{Stdin: strings.NewReader(big), Stdout: &out, Stderr: &errOut}); err !=
				nil || out.String() != big {
				t.Errorf("cat: %v, %d bytes back of %d", err, out.Len(), len(big))
			}
			out.Reset()
			e = apiservertest.Executors(t, r, &corev1.PodExecOptions{Command: []string{"fail", "now"}, Stdout: true,
				Stderr: true})[protocol]
			err := e.StreamWithContext(apiservertest.Within(t),
				remotecommand.StreamOptions{Stdout: &out, Stderr: &errOut})
			var code interface{ ExitStatus() int }
			if !errors.As(err, &code) || code.ExitStatus() != 7 || errOut.String() != "it failed" {
				t.Errorf("fail: %v, stderr %q", err, errOut.String())
			}
			e = apiservertest.Executors(t, r, &corev1.PodExecOptions{Command: []string{"size"}, Stdin: true,
				Stdout: true, TTY: true})[protocol]
			q := make(sizes, 1)
			q <- remotecommand.TerminalSize{Width: 80, Height: 24}
			stdin, hold := io.Pipe()
			defer hold.Close()
			if err := e.StreamWithContext(apiservertest.Within(t),
				remotecommand.StreamOptions{Stdin: stdin, Stdout: &out, Tty: true, TerminalSizeQueue: q}); err != nil ||
				out.String() != "80x24" {
				t.Errorf("size: %v, %q", err, out.String())
			}
			close(q)
			e = apiservertest.Executors(t, r, &corev1.PodExecOptions{Command: []string{"nothing"},
				Stdout: true})[protocol]
			if err := e.StreamWithContext(apiservertest.Within(t), remotecommand.StreamOptions{Stdout: &out}); err ==
				nil || !strings.Contains(err.Error(), "executable file not found") {
				t.Errorf("a missing command: %v", err)
			}
			// The command ends with its client.
			node.Left = make(chan struct{})
			ctx, cancel := context.WithCancel(apiservertest.Within(t))
			e = apiservertest.Executors(t, r, &corev1.PodExecOptions{Command: []string{"wait"}, Stdout: true})[protocol]
			if err := e.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: writerFunc(func(b []byte) {
				cancel()
			})}); err == nil {
				t.Error("an exec that was given up had no error")
			}
			select {
			case <-node.Left:
			case <-apiservertest.Within(t).Done():
				t.Error("the command did not hear that its client left")
			}
		})
	}
	c := r.AdminHTTP()
	const exec = "/api/v1/namespaces/default/pods/p/exec?"
	apiservertest.Refused(t, r.Call(c, "GET", exec+"stdout=1", ""), 400, "you must specify at least one command")
	apiservertest.Refused(t, r.Call(c, "GET", exec+"command=x", ""), 400, "at least 1 of stdin, stdout, stderr")
	apiservertest.Refused(t, r.Call(c, "GET", exec+"command=x&stdout=1", ""), 400, "Upgrade request required")
	apiservertest.Refused(t, r.Call(c, "GET", exec+"command=x&stdout=1&container=ghost", ""), 400,
		"container ghost is not valid for pod p")
	apiservertest.Refused(t, r.Call(r.HTTP(nil), "POST", exec+"command=x&stdout=1", "", "Authorization",
		"Bearer alice-token"), 403, `cannot create resource "pods/exec"`)
	r.Must(apiservertest.NewPod("nowhere"))
	apiservertest.Refused(t, r.Call(c, "GET", "/api/v1/namespaces/default/pods/nowhere/exec?command=x&stdout=1", ""),
		400, "pod nowhere does not have a host assigned")
}

type writerFunc func([]byte)

func (f writerFunc) Write(b []byte) (int, error) { f(b); return len(b), nil }

func TestPortForward(t *testing.T) {
	r, _ := streaming(t)
	conf := r.ClientConfig("admin", api.GroupMasters)
	u := r.Admin().CoreV1().RESTClient().Post().Resource("pods").Namespace("default").Name("p").SubResource(
		"portforward").URL()
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
			f, err := portforward.NewOnAddresses(dial, []string{"127.0.0.1"}, []string{":80", ":81"}, stop, ready,
				io.Discard, io.Discard)
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
	pods := r.Admin().CoreV1().Pods("default")
	five, sec := int64(5), int64(60)
	data,
		err := pods.GetLogs("p", &corev1.PodLogOptions{TailLines: &five, Timestamps: true, SinceSeconds: &sec,
		LimitBytes: &five}).DoRaw(apiservertest.Within(t))
	if err != nil || string(data) != "one\ntwo\n" {
		t.Errorf("%v %q", err, data)
	}
	got := node.LogRequests[0]
	if got.Container != "c" || *got.TailLines != 5 || !got.Timestamps || *got.LimitBytes != 5 ||
		time.Since(got.SinceTime.Time) < 50*time.Second {
		t.Errorf("%+v", got)
	}
	ctx, cancel := context.WithCancel(apiservertest.Within(t))
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
	c := r.AdminHTTP()
	apiservertest.Refused(t, r.Call(c, "GET", "/api/v1/namespaces/default/pods/p/log?previous=true", ""), 400,
		`previous terminated container "c" in pod "p" not found`)
	apiservertest.Refused(t, r.Call(c, "GET", "/api/v1/namespaces/default/pods/p/log?tailLines=-1", ""),
		422, "tailLines")
	apiservertest.Refused(t, r.Call(c, "GET", "/api/v1/namespaces/default/pods/p/log?container=ghost", ""), 400,
		"container ghost is not valid for pod p")
}

// A log by WebSocket, as browsers ask for it: bytes, or text in base64.
func TestLogsByWebSocket(t *testing.T) {
	r, _ := streaming(t)
	cert := r.Cert(pki.Client("admin", api.GroupMasters))
	dial := func(query string, protocols ...string) (*websocket.Conn, *http.Response, error) {
		d := websocket.Dialer{TLSClientConfig: &tls.Config{RootCAs: r.Trust.Pool(),
			Certificates: []tls.Certificate{cert}}, Subprotocols: protocols}
		return d.DialContext(apiservertest.Within(t), "wss://"+r.Addr+"/api/v1/namespaces/default/pods/p/log"+query,
			nil)
	}
	for _, c := range []struct {
		name      string
		protocols []string
		chosen    string
		kind      int
		want      string
	}{
		{"bytes", []string{"binary.k8s.io"}, "binary.k8s.io", websocket.BinaryMessage, "one\ntwo\n"},
		{"base64", []string{"base64.binary.k8s.io"}, "base64.binary.k8s.io", websocket.TextMessage,
			base64.StdEncoding.EncodeToString([]byte("one\ntwo\n"))},
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
	all := apiservertest.StockKubectls()
	if len(all) == 0 {
		t.Skip("no stock kubectl on this machine")
	}
	r, _ := streaming(t)
	config := r.Kubeconfig("admin", api.GroupMasters)
	for name, binary := range all {
		t.Run(name, func(t *testing.T) {
			k := &apiservertest.Kubectl{T: t, Binary: binary, Config: config, Home: t.TempDir()}
			if out := k.Ok("some bytes", "exec", "-i", "p", "--", "cat"); out != "some bytes" {
				t.Errorf("exec cat: %q", out)
			}
			if out := k.Fails("", "exec", "p", "--", "fail"); !strings.Contains(out, "it failed") ||
				!strings.Contains(out, "exit code 7") {
				t.Errorf("exec fail: %q", out)
			}
			if out := k.Ok("", "logs", "p", "--tail=2"); out != "one\ntwo\n" {
				t.Errorf("logs: %q", out)
			}
			if out := k.Ok("", "attach", "p"); !strings.Contains(out, "attached to c") {
				t.Errorf("attach: %q", out)
			}
		})
	}
}
