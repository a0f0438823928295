package apiservertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/pki"
)

// FakeNode is an api.NodeStreams with fake containers. It records the requests that it receives.
type FakeNode struct {
	Mu          sync.Mutex
	Execs       []api.ExecRequest
	LogRequests []api.LogRequest
	Left        chan struct{} // closed when the context of the exec command "wait" has ended
}

// Logs returns fixed log lines; with r.Follow, it returns one line and ends with ctx. Previous logs
// do not exist. It implements api.NodeStreams.
func (n *FakeNode) Logs(ctx context.Context, node string, r api.LogRequest) (io.ReadCloser, error) {
	n.Mu.Lock()
	n.LogRequests = append(n.LogRequests, r)
	n.Mu.Unlock()
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

// Exec simulates the commands cat, fail (exit code 7), size (of the terminal) and wait (until ctx
// ends); other commands do not exist. It implements api.NodeStreams.
func (n *FakeNode) Exec(ctx context.Context, node string, r api.ExecRequest, s api.Streams) error {
	n.Mu.Lock()
	n.Execs = append(n.Execs, r)
	n.Mu.Unlock()
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
		close(n.Left)
		return ctx.Err()
	}
	return fmt.Errorf("exec: %q: executable file not found in $PATH", r.Command[0])
}

// PortForward responds once, to the first bytes that it receives; port 81 refuses connections. It
// implements api.NodeStreams.
func (n *FakeNode) PortForward(
	ctx context.Context, node string, pod types.UID, port int32, conn io.ReadWriteCloser,
) error {
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

// StreamingWith starts a replica with a running pod default/p on a FakeNode. change may modify the
// configuration.
func StreamingWith(t *testing.T, change func(*apiserver.Config)) (*Replica, *FakeNode) {
	t.Helper()
	node := &FakeNode{Left: make(chan struct{})}
	r := StartReplica(t, func(c *apiserver.Config) { c.Outbound.Streams = node; change(c) })
	r.Must(NewPod("p"))
	pods := r.Admin().CoreV1().Pods("default")
	if err := pods.Bind(Within(t), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Target: corev1.ObjectReference{Name: "n1"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err := pods.Patch(Within(t), "p", types.MergePatchType,
		[]byte(`{"status":{"phase":"Running","containerStatuses":[{"name":"c","ready":true,"image":"nginx",`+
			`"imageID":"x","restartCount":0,"state":{"running":{}}}]}}`), metav1.PatchOptions{}, "status")
	if err != nil {
		t.Fatal(err)
	}
	return r, node
}

// Executors returns exec clients for pod default/p: one for each protocol, SPDY and WebSocket.
func Executors(t *testing.T, r *Replica, o *corev1.PodExecOptions) map[string]remotecommand.Executor {
	t.Helper()
	conf := r.ClientConfig("admin", api.GroupMasters)
	u := r.Admin().CoreV1().RESTClient().Post().Resource("pods").Namespace("default").Name("p").
		SubResource("exec").VersionedParams(o, scheme.ParameterCodec).URL()
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

// Browser opens a WebSocket like a browser. Subprotocols take the place of headers, for the bearer
// token and the media type.
func (r *Replica) Browser(path string, protocols ...string) (*websocket.Conn, *http.Response, error) {
	d := websocket.Dialer{TLSClientConfig: pki.ClientTLS(r.Trust.Pool(), nil, "", time.Now), Subprotocols: protocols,
		HandshakeTimeout: 20 * time.Second}
	return d.Dial("wss://"+r.Addr+path, http.Header{"Origin": {"https://dashboard.example"}})
}
