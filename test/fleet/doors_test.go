package fleet_test

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

// halfSent opens a connection without a certificate from 127.0.0.N, and a stream on it that asks to enrol and
// stops in the midst of its message, upon which it calls sent. It returns when the connection is cut, or ctx ends.
func halfSent(ctx context.Context, address string, n int, sent func()) error {
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
	out := []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	frame := func(kind, flags byte, stream uint32, payload []byte) {
		head := binary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
		out = append(append(append(out, head...), flags), binary.BigEndian.AppendUint32(nil, stream)...)
		out = append(out, payload...)
	}
	frame(4, 0, 0, nil) // SETTINGS
	var headers []byte
	for _, h := range [][2]string{
		{":method", "POST"}, {":scheme", "https"}, {":path", fleetv1.Enrollment_Enroll_FullMethodName},
		{":authority", "x"}, {"content-type", "application/grpc"}, {"te", "trailers"},
	} { // literals that are not indexed
		headers = append(append(append(headers, 0, byte(len(h[0]))), h[0]...), byte(len(h[1])))
		headers = append(headers, h[1]...)
	}
	frame(1, 4, 1, headers) // HEADERS, the end of them
	message := binary.BigEndian.AppendUint32([]byte{0}, 16000)
	message = append(message, make([]byte, 15000)...)
	for len(message) > 0 {
		part := message[:min(len(message), 16<<10)]
		frame(0, 0, 1, part) // DATA
		message = message[len(part):]
	}
	if _, err := conn.Write(out); err != nil {
		return err
	}
	sent()
	_, err = io.Copy(io.Discard, conn)
	return err
}

// attackEnv makes this program the attacker of the address that it holds.
const attackEnv = "KEELSON_TEST_HALF_SENT"

// TestMain lets the attacker be a process of its own, whose memory is not the server's.
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
			_ = halfSent(context.Background(), address, 20+i%10, done) // it may be refused or cut off
			done()
		})
	}
	first.Wait()
	os.Stdout.WriteString("1")
	all.Wait()
	select {} // until it is killed
}

// epoch is that of a node's session, as its Lease tells.
func (b *bed) epoch(node string) string {
	b.t.Helper()
	l, err := client.Get[*coordinationv1.Lease](b.ctx, b.client, v1.NamespaceNodeLease, node)
	if err != nil {
		b.t.Fatal(err)
	}
	return l.Annotations["keelson.dev/session-epoch"]
}

// A thousand streams that nobody has authenticated, each half sent, cost little memory, and no agent loses its session.
func TestHalfSentStreams(t *testing.T) {
	b := newBedWith(t, clocks{}, "cp1") // production's clocks: the handshakes keep this machine busy
	n := b.join("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	epoch := b.epoch("w1")
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc + m.StackInuse)
	}
	before := heap()
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
	b.eventually("each of the streams to have been tried", func() error {
		most = max(most, heap()-before)
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
	// New agents are let in while it lasts.
	b.join("w2", nil)
	b.awaitReady("w2", v1.ConditionTrue)
	stop()
	if now := b.epoch("w1"); now != epoch || b.ready("w1") != v1.ConditionTrue {
		t.Errorf("the session of the agent: %s, before the attack %s; Ready=%s", now, epoch, b.ready("w1"))
	}
	select {
	case <-n.ended:
		t.Error("the agent has ended")
	default:
	}
}

// Nothing of a stranger lasts: its connection ends, whatever it does.
func TestStrangersAreSentAway(t *testing.T) {
	b := newBed(t, "cp1")
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	if err := halfSent(ctx, b.replicas["cp1"].address, 1, func() {}); ctx.Err() != nil {
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
	b := newBed(t, "cp1")
	enroll := func(from int, token string) error {
		dial := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(from))}}
		conn, err := grpc.NewClient("passthrough:///"+b.replicas["cp1"].address,
			grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: b.trust.Pool(), ServerName: "127.0.0.1"})),
			grpc.WithContextDialer(func(ctx context.Context, a string) (net.Conn, error) { return dial.DialContext(ctx, "tcp", a) }))
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
