package nodegateway_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// fakeContainers responds to tunnels like a node.
type fakeContainers struct{}

func (fakeContainers) Exec(
	ctx context.Context, pod types.UID, container string, command []string, attach, tty bool, s agent.Streams,
) error {
	switch command[0] {
	case "cat":
		_, err := io.Copy(s.Stdout, s.Stdin)
		return err
	case "exit":
		fmt.Fprint(s.Stderr, "failing")
		return &agent.ExitError{Code: 7}
	case "size":
		select {
		case sz := <-s.Resize:
			fmt.Fprintf(s.Stdout, "%dx%d", sz.Width, sz.Height)
		case <-ctx.Done():
		}
		return nil
	case "hang":
		<-ctx.Done()
		return ctx.Err()
	}
	return fmt.Errorf("pod %s container %s: %s: no such command", pod, container, command[0])
}

func (fakeContainers) Logs(ctx context.Context, r agent.LogRequest, w io.Writer) error {
	if r.Container == "missing" {
		return fmt.Errorf("container %q in pod %q is not available", r.Container, r.Pod)
	}
	for i := range 1000 {
		if _, err := fmt.Fprintf(w, "line %d %s\n", i, strings.Repeat("x", 200)); err != nil {
			return err
		}
	}
	if r.Follow {
		<-ctx.Done()
	}
	return nil
}

func (fakeContainers) PortForward(ctx context.Context, pod types.UID, port int32, conn io.ReadWriteCloser) error {
	if port == 1 {
		return errors.New("connection refused")
	}
	buf := make([]byte, 4)
	if _, err := io.ReadFull(conn, buf); err != nil {
		return err
	}
	_, err := conn.Write(bytes.ToUpper(buf))
	return err
}

func (fakeContainers) Dial(_ context.Context, pod types.UID, address string, port int32) (net.Conn, error) {
	if port == 1 {
		return nil, fmt.Errorf("pod %s: %s: connection refused", pod, address)
	}
	near, far := net.Pipe()
	go func() {
		defer far.Close()
		_, _ = io.Copy(far, far)
	}()
	return near, nil
}

// P17: exec, logs and port-forward work through every replica, whichever has the session, and fail with clear errors.
func TestTunnels(t *testing.T) {
	b := newTestEnv(t, "cp1", "cp2")
	n := b.startAgent("w1", fakeContainers{})
	b.awaitReady("w1", v1.ConditionTrue)
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	for name, r := range b.replicas {
		t.Run(name, func(t *testing.T) { checkTunnels(ctx, t, r.fleet.Streams()) })
	}
	if err := b.replicas["cp1"].fleet.Streams().Exec(ctx, "w9",
		api.ExecRequest{Namespace: "default", Pod: "p", Command: []string{"cat"}}, api.Streams{}); err == nil ||
		!strings.Contains(err.Error(), "node w9 is not connected to replica cp1") {
		t.Errorf("exec on an unknown node: %v", err)
	}
	// The exit of an agent ends the streams through it.
	ended := make(chan error, 1)
	started := make(chan struct{})
	go func() {
		close(started)
		ended <- b.replicas["cp2"].fleet.Streams().Exec(ctx, "w1",
			api.ExecRequest{Command: []string{"hang"}}, api.Streams{})
	}()
	<-started
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil {
		t.Error("exec succeeded though its node went away")
	}
}

// Call implements agent.DriverCalls.
func (fakeContainers) Call(ctx context.Context, driver, method string, request []byte, timeout time.Duration) (
	[]byte, error,
) {
	switch {
	case driver == "none.example":
		return nil, errors.New("none.example was looked for")
	case timeout <= 0 || timeout > 2*time.Minute:
		return nil, fmt.Errorf("a timeout of %s", timeout)
	case string(request) == "fail":
		return nil, status.Error(codes.ResourceExhausted, "full"+strings.Repeat("!", 10_000))
	case string(request) == "large":
		return make([]byte, 1<<20+1), nil
	case string(request) == "hang":
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return append([]byte(driver+" "+method+" "), request...), nil
}

func alwaysConfirmed(context.Context) error { return nil }

// F110: a CSI driver on a node is called through every replica. Its errors keep their codes;
// missing drivers, too large messages and timeouts are distinguished.
func TestDriverCalls(t *testing.T) {
	b := newTestEnv(t, "cp1", "cp2")
	n := b.startAgent("w1", fakeContainers{})
	b.awaitReady("w1", v1.ConditionTrue)
	for name, r := range b.replicas {
		t.Run(name, func(t *testing.T) {
			call := func(node, driver, request string) (string, error) {
				ctx, cancel := context.WithTimeout(b.ctx, patience)
				defer cancel()
				out, err := r.fleet.Streams().CallDriver(ctx, node, driver, "/m", []byte(request), alwaysConfirmed)
				return string(out), err
			}
			if out, err := call("w1", "a.example", "ok"); err != nil || out != "a.example /m ok" {
				t.Errorf("a call: %q, %v", out, err)
			}
			if _, err := call("w1", "a.example", "fail"); status.Code(err) != codes.ResourceExhausted ||
				len(err.Error()) > 5000 {
				t.Errorf("a refusal: %.200v", err)
			}
			var missing *api.DriverMissing
			if _, err := call("w1", "none.example", ""); !errors.As(err, &missing) ||
				err.Error() != "node w1: none.example was looked for" {
				t.Errorf("a driver that is not there: %v", err)
			}
			if _, err := call("w1", "a.example", "large"); err == nil ||
				!strings.Contains(err.Error(), "1048577 bytes") {
				t.Errorf("a large answer: %v", err)
			}
			if _, err := call("w1", "a.example", strings.Repeat("x", 1<<20+1)); status.Code(err) !=
				codes.InvalidArgument {
				t.Errorf("a large request: %v", err)
			}
			if _, err := call("w9", "a.example", ""); err == nil ||
				!strings.Contains(err.Error(), "node w9 is not connected to replica "+name) {
				t.Errorf("a node that is not there: %v", err)
			}
			replaced := errors.New("another replica leads")
			if out, err := r.fleet.Streams().CallDriver(b.ctx, "w1", "a.example", "/m", []byte("ok"),
				func(context.Context) error { return replaced }); !errors.Is(err, replaced) {
				t.Errorf("a call of a leader that was replaced: %q, %v", out, err)
			}
			ctx, cancel := context.WithTimeout(b.ctx, 50*time.Millisecond)
			defer cancel()
			if _, err := r.fleet.Streams().CallDriver(ctx, "w1", "a.example", "/m", []byte("hang"),
				alwaysConfirmed); err ==
				nil {
				t.Error("a driver that hangs has answered")
			}
		})
	}
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
}

// A dialled connection carries bytes both ways, obeys deadlines, outlives the context that it was dialled with, and
// ends at the other end when it is closed.
func TestDialThroughTunnel(t *testing.T) {
	b := newTestEnv(t, "cp1", "cp2")
	b.startAgent("w1", fakeContainers{})
	b.awaitReady("w1", v1.ConditionTrue)
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	for name, r := range b.replicas {
		t.Run(name, func(t *testing.T) { checkDial(ctx, t, r.fleet.Streams()) })
	}
}

func checkDial(ctx context.Context, t *testing.T, f api.NodeDialer) {
	dialling, dialled := context.WithCancel(ctx)
	conn, err := f.DialNode(dialling, "w1", "u", "10.64.0.9", 443)
	dialled()
	if err != nil {
		t.Fatal(err)
	}
	if got := conn.RemoteAddr().String(); got != "10.64.0.9:443" {
		t.Errorf("remote address %s", got)
	}
	big := strings.Repeat("0123456789", 30_000)
	go func() { _, _ = io.WriteString(conn, big) }()
	back := make([]byte, len(big))
	if _, err := io.ReadFull(conn, back); err != nil || string(back) != big {
		t.Errorf("echo of %d bytes: %v", len(big), err)
	}
	if err := conn.SetReadDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(back); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a read beyond its deadline: %v", err)
	}
	conn.Close()
	_, err = f.DialNode(ctx, "w1", "u", "10.64.0.9", 1)
	if err == nil || !strings.Contains(err.Error(), "by way of node w1: pod u: 10.64.0.9: connection refused") {
		t.Errorf("a refused connection: %v", err)
	}
	if _, err = f.DialNode(ctx, "w9", "u", "10.64.0.9", 1); err == nil ||
		!strings.Contains(err.Error(), "node w9 is not connected") {
		t.Errorf("an unknown node: %v", err)
	}
}

func checkTunnels(ctx context.Context, t *testing.T, f api.NodeStreams) {
	var out, errOut bytes.Buffer
	big := strings.Repeat("0123456789", 50_000)
	st := api.Streams{Stdin: strings.NewReader(big), Stdout: &out, Stderr: &errOut}
	if err := f.Exec(ctx, "w1", api.ExecRequest{PodUID: "u", Command: []string{"cat"}}, st); err != nil {
		t.Fatal(err)
	}
	if out.String() != big {
		t.Errorf("cat returned %d bytes of %d", out.Len(), len(big))
	}
	err := f.Exec(ctx, "w1", api.ExecRequest{Command: []string{"exit"}}, api.Streams{Stdout: &out, Stderr: &errOut})
	if exit := (*api.ExitError)(nil); !errors.As(err, &exit) || exit.Code != 7 || errOut.String() != "failing" {
		t.Errorf("exit code: %v, stderr %q", err, errOut.String())
	}
	sizes := make(chan api.TermSize, 1)
	sizes <- api.TermSize{Width: 80, Height: 24}
	out.Reset()
	if err := f.Exec(ctx, "w1", api.ExecRequest{Command: []string{"size"}, TTY: true},
		api.Streams{Stdout: &out, Resize: sizes}); err != nil || out.String() != "80x24" {
		t.Errorf("terminal size %q, %v", out.String(), err)
	}
	if err := f.Exec(ctx, "w1", api.ExecRequest{PodUID: "u", Container: "c", Command: []string{"nope"}},
		api.Streams{}); err == nil ||
		!strings.Contains(err.Error(), "pod u container c: nope: no such command") {
		t.Errorf("error from the node: %v", err)
	}
	logs, err := f.Logs(ctx, "w1", api.LogRequest{Container: "c"})
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(logs)
	if err != nil || bytes.Count(text, []byte("\n")) != 1000 {
		t.Errorf("%d lines of log, %v", bytes.Count(text, []byte("\n")), err)
	}
	if err := logs.Close(); err != nil {
		t.Error(err)
	}
	follow, err := f.Logs(ctx, "w1", api.LogRequest{Container: "c", Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(follow, make([]byte, 1000)); err != nil {
		t.Error(err)
	}
	if err := follow.Close(); err != nil {
		t.Error(err)
	}
	missing, err := f.Logs(ctx, "w1", api.LogRequest{Pod: "p", Container: "missing"})
	if err == nil {
		_, err = io.ReadAll(missing)
	}
	if err == nil || !strings.Contains(err.Error(), `container "missing" in pod "p" is not available`) {
		t.Errorf("logs of a missing container: %v", err)
	}
	here, there := net.Pipe()
	done := make(chan error, 1)
	go func() { done <- f.PortForward(ctx, "w1", "u", 80, there) }()
	if _, err := here.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 4)
	if _, err := io.ReadFull(here, got); err != nil || string(got) != "PING" {
		t.Errorf("port-forward answered %q, %v", got, err)
	}
	if err := <-done; err != nil {
		t.Errorf("port-forward: %v", err)
	}
	_, there = net.Pipe()
	if err := f.PortForward(ctx, "w1", "u", 1, there); err == nil ||
		!strings.Contains(err.Error(), "connection refused") {
		t.Errorf("port-forward to a closed port: %v", err)
	}
}

// rawClient returns a gRPC client with the certificate of the node.
func (b *testEnv) rawClient(node string, address string) fleetv1.FleetClient {
	b.t.Helper()
	return b.grpcClient(b.nodeTLS(node), address)
}

// nodeTLS returns the TLS configuration of a client with a certificate of the node.
func (b *testEnv) nodeTLS(node string) *tls.Config {
	b.t.Helper()
	key := newKey(b.t)
	cert, err := b.trust.SignAgent(certificateRequest(b.t, node, key), node, time.Hour, time.Now())
	if err != nil {
		b.t.Fatal(err)
	}
	return b.clientTLS(cert, key)
}

func (b *testEnv) clientTLS(cert []byte, key *ecdsa.PrivateKey) *tls.Config {
	block, _ := pem.Decode(cert)
	return &tls.Config{
		RootCAs: b.trust.Pool(), Certificates: []tls.Certificate{{Certificate: [][]byte{block.Bytes}, PrivateKey: key}},
	}
}

// certificateClient returns a gRPC client with this certificate.
func (b *testEnv) certificateClient(cert []byte, key *ecdsa.PrivateKey, address string) fleetv1.FleetClient {
	b.t.Helper()
	return b.grpcClient(b.clientTLS(cert, key), address)
}

func (b *testEnv) grpcClient(conf *tls.Config, address string) fleetv1.FleetClient {
	b.t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(credentials.NewTLS(conf)))
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { conn.Close() })
	return fleetv1.NewFleetClient(conn)
}

func startSession(b *testEnv, c fleetv1.FleetClient, node string) (fleetv1.Fleet_SessionClient, *fleetv1.Welcome) {
	b.t.Helper()
	s, w, err := tryStartSession(b, c, node)
	if err != nil {
		b.t.Fatal(err)
	}
	return s, w
}

func tryStartSession(b *testEnv, c fleetv1.FleetClient, node string) (
	fleetv1.Fleet_SessionClient, *fleetv1.Welcome, error,
) {
	s, err := c.Session(b.ctx)
	if err != nil {
		return nil, nil, err
	}
	// Recv also returns the error of Send, with its reason.
	_ = s.Send(&fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_Hello{Hello: &fleetv1.Hello{NodeName: node}}})
	m, err := s.Recv()
	if err == nil && m.GetWelcome() == nil {
		err = fmt.Errorf("no welcome: %v", m)
	}
	return s, m.GetWelcome(), err
}

// A newer epoch closes the older stream, on the same replica and on another; messages of an older
// epoch are ignored.
func TestEpochFencing(t *testing.T) {
	b := newTestEnvWith(t, steady, "cp1", "cp2")
	for _, second := range []string{"cp1", "cp2"} {
		t.Run("then "+second, func(t *testing.T) {
			node := "w-" + second
			old, w1 := startSession(b, b.rawClient(node, b.replicas["cp1"].address), node)
			newer, w2 := startSession(b, b.rawClient(node, b.replicas[second].address), node)
			if w2.Epoch <= w1.Epoch {
				t.Fatalf("epochs %d, then %d", w1.Epoch, w2.Epoch)
			}
			for {
				if _, err := old.Recv(); err != nil {
					if status.Code(err) != codes.Aborted {
						t.Errorf("the older stream ended with %v, want ABORTED", err)
					}
					break
				}
			}
			p := b.createPod("p-"+second, node, nil)
			say := func(epoch uint64, m *fleetv1.AgentMessage) {
				m.Epoch = epoch
				if err := newer.Send(m); err != nil {
					t.Fatal(err)
				}
			}
			gone := func() *fleetv1.AgentMessage {
				return &fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_PodGone{
					PodGone: &fleetv1.PodGone{Namespace: "default", Name: p.Name, Uid: string(p.UID)}}}
			}
			say(w1.Epoch, gone())
			say(w2.Epoch,
				&fleetv1.AgentMessage{
					Kind: &fleetv1.AgentMessage_Heartbeat{Heartbeat: &fleetv1.Heartbeat{SentUnixNano: 1}}})
			awaitMessage(t, newer, func(m *fleetv1.ControlMessage) bool { return m.GetHeartbeatAck() != nil })
			if _, err := client.Get[*v1.Pod](b.ctx, b.client, "default", p.Name); err != nil {
				t.Errorf("a message of an older epoch was accepted: %v", err)
			}
			say(w2.Epoch, gone())
			awaitMessage(t, newer, func(m *fleetv1.ControlMessage) bool {
				return m.GetStatusAck().GetUid() == string(p.UID)
			})
		})
	}
}

func awaitMessage(t *testing.T, s fleetv1.Fleet_SessionClient, is func(*fleetv1.ControlMessage) bool) {
	t.Helper()
	for {
		m, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if is(m) {
			return
		}
	}
}

// F55: without a node's certificate nothing but enrolment is served, and a node speaks for itself only.
func TestIdentity(t *testing.T) {
	b := newTestEnv(t, "cp1")
	address := b.replicas["cp1"].address
	conn, err := grpc.NewClient(address,
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: b.trust.Pool()})))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := fleetv1.NewFleetClient(conn).RenewCertificate(b.ctx, &fleetv1.RenewRequest{}); status.Code(err) !=
		codes.Unauthenticated {
		t.Errorf("without a certificate: %v", err)
	}
	s, err := b.rawClient("w1", address).Session(b.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err :=
		s.Send(&fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_Hello{Hello: &fleetv1.Hello{NodeName: "w2"}}}); err !=
		nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a node in another's name: %v", err)
	}
	_, err = fleetv1.NewEnrollmentClient(conn).Enroll(b.ctx,
		&fleetv1.EnrollRequest{Token: b.token, NodeName: "Bad_Name"})
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "Bad_Name") {
		t.Errorf("a bad node name: %v", err)
	}
}
