package nodegateway_test

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/client"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// sendPartial opens a connection without a certificate from 127.0.0.N, and a stream on it that asks to enrol and
// stops in the midst of its message, upon which it calls sent. It returns when the connection is cut, or ctx ends.
func sendPartial(ctx context.Context, address string, n int, sent func()) error {
	dial := tls.Dialer{
		NetDialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(n))}},
		Config:    &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}},
	}
	conn, err := dial.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if _, err := conn.Write(appendPartial(prefaceBytes(), 1, fleetv1.Enrollment_Enroll_FullMethodName, 16000,
		15000)); err != nil {
		return err
	}
	sent()
	_, err = io.Copy(io.Discard, conn)
	return err
}

// prefaceBytes returns the first bytes of an HTTP/2 connection.
func prefaceBytes() []byte {
	return appendFrame([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 4, 0, 0, nil)
} // SETTINGS

// appendFrame appends an HTTP/2 frame.
func appendFrame(out []byte, kind, flags byte, stream uint32, payload []byte) []byte {
	out = binary.BigEndian.AppendUint32(out, uint32(len(payload))<<8|uint32(kind))
	return append(binary.BigEndian.AppendUint32(append(out, flags), stream), payload...)
}

// appendPartial appends a stream that announces a message of a length and sends fewer bytes.
func appendPartial(out []byte, stream uint32, method string, announced uint32, sent int) []byte {
	var headers []byte
	for _, h := range [][2]string{
		{":method", "POST"}, {":scheme", "https"}, {":path", method},
		{":authority", "x"}, {"content-type", "application/grpc"}, {"te", "trailers"},
	} { // literals that are not indexed
		headers = append(append(append(headers, 0, byte(len(h[0]))), h[0]...), byte(len(h[1])))
		headers = append(headers, h[1]...)
	}
	out = appendFrame(out, 1, 4, stream, headers) // HEADERS, the end of them
	message := append(binary.BigEndian.AppendUint32([]byte{0}, announced), make([]byte, sent)...)
	for len(message) > 0 {
		part := message[:min(len(message), 16<<10)]
		out = appendFrame(out, 0, 0, stream, part) // DATA
		message = message[len(part):]
	}
	return out
}

// awaitPing waits until the server has read the sent data: it responds to a PING.
func awaitPing(conn net.Conn) error {
	if _, err := conn.Write(appendFrame(nil, 6, 0, 0, make([]byte, 8))); err != nil {
		return err
	}
	head := make([]byte, 9)
	for {
		if _, err := io.ReadFull(conn, head); err != nil {
			return err
		}
		size := binary.BigEndian.Uint32(head) >> 8
		if _, err := io.CopyN(io.Discard, conn, int64(size)); err != nil {
			return err
		}
		if head[3] == 6 && head[4] == 1 {
			return nil
		}
	}
}

// attackEnv makes this program the attacker of the address that it holds.
const attackEnv = "KEELSON_TEST_HALF_SENT"

// TestMain runs the attacker as a separate process, so that its memory is not the server's.
func TestMain(m *testing.M) {
	address := os.Getenv(attackEnv)
	if address == "" {
		os.Exit(m.Run())
	}
	var first, all sync.WaitGroup
	for i := range 1000 {
		first.Add(1)
		all.Go(func() {
			done := sync.OnceFunc(first.Done)
			_ = sendPartial(context.Background(), address, 20+i%10, done) // it may be refused or cut off
			done()
		})
	}
	first.Wait()
	os.Stdout.WriteString("1")
	all.Wait()
	select {} // until it is killed
}

// sessionEpoch returns the epoch of a node's session from its Lease.
func (b *testEnv) sessionEpoch(node string) string {
	b.t.Helper()
	l, err := client.Get[*coordinationv1.Lease](b.ctx, b.client, v1.NamespaceNodeLease, node)
	if err != nil {
		b.t.Fatal(err)
	}
	return l.Annotations["keelson.dev/session-epoch"]
}

// unhurried are timeouts with which a session survives half a minute on a busy machine: only the
// attack can end it.
var unhurried = timeouts{heartbeat: 10 * time.Second, suspect: time.Hour, grace: time.Hour}

// A thousand unauthenticated, half-sent streams cost little memory, and no agent loses its session.
func TestHalfSentStreams(t *testing.T) {
	b := newTestEnvWith(t, unhurried, "cp1") // the handshakes keep this machine busy
	n := b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	epoch := b.sessionEpoch("w1")
	before := heapBytes()
	attack := exec.Command(os.Args[0])
	attack.Env = append(os.Environ(), attackEnv+"="+b.replicas["cp1"].address)
	attack.Stderr = os.Stderr
	word, err := attack.StdoutPipe()
	if err == nil {
		err = attack.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	stop := sync.OnceFunc(func() {
		_ = attack.Process.Kill()
		_ = attack.Wait() // killed
	})
	defer stop()
	done := make(chan error, 1)
	go func() { _, err := io.ReadFull(word, make([]byte, 1)); done <- err }()
	most := int64(0)
	b.awaitCondition("each of the streams to have been tried", func() error {
		most = max(most, heapBytes()-before)
		select {
		case err := <-done:
			done <- err
			return err
		default:
			return fmt.Errorf("%d MiB so far", most>>20)
		}
	})
	t.Logf("%d MiB more", most>>20)
	if most > 64<<20 {
		t.Errorf("a thousand half-sent streams took %d MiB", most>>20)
	}
	// New agents are admitted meanwhile.
	b.startAgent("w2", nil)
	b.awaitReady("w2", v1.ConditionTrue)
	stop()
	if now := b.sessionEpoch("w1"); now != epoch || b.readyStatus("w1") != v1.ConditionTrue {
		t.Errorf("the session of the agent: %s, before the attack %s; Ready=%s", now, epoch, b.readyStatus("w1"))
	}
	select {
	case <-n.ended:
		t.Error("the agent has ended")
	default:
	}
}

func heapBytes() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// A thief of a node's key half sends as many streams as the node may have, which are few, on few
// connections; the node itself and others are served nevertheless.
func TestHalfSentStreamsOfANode(t *testing.T) {
	b := newTestEnvWith(t, unhurried, "cp1")
	b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	epoch, address := b.sessionEpoch("w1"), b.replicas["cp1"].address
	conf := b.nodeTLS("w1")
	conf.ServerName, conf.NextProtos = "127.0.0.1", []string{"h2"}
	connect := func() (net.Conn, error) {
		conn, err := (&tls.Dialer{Config: conf}).DialContext(b.ctx, "tcp", address)
		if err != nil {
			return nil, err
		}
		t.Cleanup(func() { conn.Close() })
		_, err = conn.Write(prefaceBytes())
		return conn, err
	}
	before := heapBytes()
	for range 4 {
		conn, err := connect()
		if err != nil {
			t.Fatal(err)
		}
		stream := uint32(1)
		for range 8 {
			for _, method := range []string{
				fleetv1.Fleet_Session_FullMethodName, fleetv1.Fleet_Standby_FullMethodName,
				fleetv1.Fleet_Tunnel_FullMethodName,
				fleetv1.Fleet_Review_FullMethodName, fleetv1.Fleet_RenewCertificate_FullMethodName,
			} {
				if _, err := conn.Write(appendPartial(nil, stream, method, 3<<19, 1000_000)); err != nil {
					t.Fatal(err)
				}
				stream += 2
			}
		}
		if err := awaitPing(conn); err != nil {
			t.Fatal(err)
		}
	}
	more := heapBytes() - before
	t.Logf("%d MiB more", more>>20)
	if more > 64<<20 {
		t.Errorf("the half-sent streams of a node took %d MiB", more>>20)
	}
	served := 0
	for range 40 {
		if conn, err := connect(); err == nil && awaitPing(conn) == nil {
			served++
		}
	}
	if served == 0 || served == 40 {
		t.Errorf("of 40 connections more %d are served", served)
	}
	b.startAgent("w2", nil)
	b.awaitReady("w2", v1.ConditionTrue)
	if now := b.sessionEpoch("w1"); now != epoch || b.readyStatus("w1") != v1.ConditionTrue {
		t.Errorf("the session of the agent: %s, before the attack %s; Ready=%s", now, epoch, b.readyStatus("w1"))
	}
}

// A stream on which nothing comes ends, and makes room for another; a message that no agent sends ends its stream.
func TestStreamsOfANode(t *testing.T) {
	b := newTestEnvWith(t, steady, "cp1")
	raw := b.rawClient("w1", b.replicas["cp1"].address)
	var silent []fleetv1.Fleet_SessionClient
	for range 5 {
		s, err := raw.Session(b.ctx)
		if err != nil {
			t.Fatal(err)
		}
		silent = append(silent, s)
	}
	if _, err := silent[4].Recv(); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("the fifth session at once: %v", err)
	}
	for _, s := range silent[:4] {
		if _, err := s.Recv(); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("a session on which nothing comes: %v", err)
		}
	}
	var s fleetv1.Fleet_SessionClient
	var welcome *fleetv1.Welcome
	b.awaitCondition("room for another", func() (err error) {
		// a client may learn of the end of a stream before its slot is free
		if s, welcome, err = tryStartSession(b, raw, "w1"); err != nil && status.Code(err) != codes.ResourceExhausted {
			t.Fatal(err)
		}
		return err
	})
	for _, c := range []struct {
		bytes int
		want  codes.Code
	}{{3 << 19, codes.OK}, {5 << 19, codes.ResourceExhausted}} { // the first size may be stored
		_ = s.Send(&fleetv1.AgentMessage{Epoch: welcome.Epoch,
			Kind: &fleetv1.AgentMessage_Event{Event: make([]byte, c.bytes)}})
		_ = s.Send(&fleetv1.AgentMessage{Epoch: welcome.Epoch,
			Kind: &fleetv1.AgentMessage_Heartbeat{Heartbeat: &fleetv1.Heartbeat{SentUnixNano: int64(c.bytes)}}})
		for {
			m, err := s.Recv()
			if err == nil && m.GetHeartbeatAck().GetSentUnixNano() != int64(c.bytes) {
				continue
			}
			if status.Code(err) != c.want {
				t.Errorf("a message of %d bytes: %v", c.bytes, err)
			}
			break
		}
	}
}

// The connection of an unauthenticated client is closed, whatever it sends.
func TestStrangersAreSentAway(t *testing.T) {
	b := newTestEnv(t, "cp1")
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	if err := sendPartial(ctx, b.replicas["cp1"].address, 1, func() {}); ctx.Err() != nil {
		t.Errorf("a half-sent stream lasts: %v", err)
	}
	silent, err := net.Dial("tcp", b.replicas["cp1"].address)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	if err := silent.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := silent.Read(make([]byte, 1)); err != io.EOF && !strings.Contains(fmt.Sprint(err), "reset") {
		t.Errorf("a connection without a handshake: %v", err)
	}
}

// Without a certificate a message has a size for enrolment, and joins that fail become few.
func TestFailedJoins(t *testing.T) {
	b := newTestEnv(t, "cp1")
	enroll := func(from int, token string) error {
		dial := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(from))}}
		conn, err := grpc.NewClient("passthrough:///"+b.replicas["cp1"].address,
			grpc.WithTransportCredentials(credentials.NewTLS(
				&tls.Config{RootCAs: b.trust.Pool(), ServerName: "127.0.0.1"})),
			grpc.WithContextDialer(func(ctx context.Context, a string) (net.Conn, error) {
				return dial.DialContext(ctx, "tcp", a)
			}))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, err = fleetv1.NewEnrollmentClient(conn).Enroll(b.ctx, &fleetv1.EnrollRequest{NodeName: "w9", Token: token})
		return err
	}
	if err := enroll(30, strings.Repeat("x", 100<<10)); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a message of 100 KiB: %v", err)
	}
	refused, limited := 0, 0
	for range 30 {
		switch err := enroll(31, "keelson1.node.abcdef.x.y"); status.Code(err) {
		case codes.Unauthenticated:
			refused++
		case codes.ResourceExhausted:
			limited++
		default:
			t.Fatal(err)
		}
	}
	if refused < 10 || limited < 10 {
		t.Errorf("%d joins were looked at and %d were not", refused, limited)
	}
	if err := enroll(32, "keelson1.node.abcdef.x.y"); status.Code(err) != codes.Unauthenticated {
		t.Errorf("from another source: %v", err)
	}
}
