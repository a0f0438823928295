package attack

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/deploy/lab"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
	"keelson.dev/keelson/test/testenv"
)

// connectionFlood is a set of connections to one port of a replica without client credentials.
type connectionFlood struct {
	address string
	sources []lab.Host

	// dialed counts connections, handshaken counts completed TLS handshakes, and written counts
	// connections that have sent their message.
	dialed, handshaken, written atomic.Int64
	mu                          sync.Mutex
	open                        map[net.Conn]bool
	maxOpen                     int // of open
	readers                     sync.WaitGroup
}

func newConnectionFlood(t *testing.T, replica string, port int, sources ...string) *connectionFlood {
	t.Helper()
	c := &connectionFlood{address: net.JoinHostPort(testenv.Host(t, replica).IP.String(), strconv.Itoa(port)),
		open: map[net.Conn]bool{}}
	for _, name := range sources {
		c.sources = append(c.sources, testenv.Host(t, name))
	}
	t.Cleanup(c.closeAll)
	return c
}

// openAll opens n connections, atOnce at a time, from each source in turn. It sends the bytes of
// message on each, and keeps the connections that the replica does not close.
func (c *connectionFlood) openAll(n, atOnce int, word func(i int) []byte) {
	var next atomic.Int64
	var workers sync.WaitGroup
	for range atOnce {
		workers.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				c.openOne(c.sources[i%len(c.sources)], word(i))
			}
		})
	}
	workers.Wait()
}

// openOne opens one connection. Without a message it stays a bare TCP connection.
func (c *connectionFlood) openOne(from lab.Host, word []byte) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := from.Dial(ctx, c.address)
	if err != nil {
		return // a refused connection has been closed
	}
	c.dialed.Add(1)
	if word != nil {
		spoken := tls.Client(conn, &tls.Config{
			InsecureSkipVerify: true, NextProtos: []string{"h2"}, CurvePreferences: []tls.CurveID{tls.X25519},
		})
		if spoken.HandshakeContext(ctx) != nil {
			conn.Close()
			return
		}
		c.handshaken.Add(1)
		if limit, ok := ctx.Deadline(); ok {
			_ = spoken.SetWriteDeadline(limit) // the replica may read no more
		}
		if _, err := spoken.Write(word); err != nil {
			conn.Close()
			return
		}
		c.written.Add(1)
		conn = spoken
	}
	c.mu.Lock()
	c.open[conn] = true
	c.maxOpen = max(c.maxOpen, len(c.open))
	c.mu.Unlock()
	c.readers.Go(func() {
		_, _ = io.Copy(io.Discard, conn) // until either end has closed it
		c.mu.Lock()
		delete(c.open, conn)
		c.mu.Unlock()
		conn.Close()
	})
}

// openCounts returns the current and the largest number of open connections.
func (c *connectionFlood) openCounts() (now, most int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.open), c.maxOpen
}

func (c *connectionFlood) closeAll() {
	c.mu.Lock()
	for conn := range c.open {
		if t, ok := conn.(*tls.Conn); ok {
			conn = t.NetConn() // without a farewell, for which it might have to wait
		}
		conn.Close()
	}
	c.mu.Unlock()
	c.readers.Wait()
}

// newPreface returns an HTTP/2 connection preface without a request, and a framer that appends to
// it.
func newPreface() (*bytes.Buffer, *http2.Framer) {
	out := bytes.NewBufferString(http2.ClientPreface)
	frames := http2.NewFramer(out, nil)
	_ = frames.WriteSettings() // a buffer takes everything
	return out, frames
}

// partialEnrollment returns an enrollment request that stops in the middle of a message of almost
// the maximum size.
func partialEnrollment() []byte {
	out, frames := newPreface()
	var head bytes.Buffer
	encoder := hpack.NewEncoder(&head)
	for _, f := range []hpack.HeaderField{
		{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "https"}, {Name: ":authority", Value: "x"},
		{Name: ":path", Value: fleetv1.Enrollment_Enroll_FullMethodName},
		{Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"},
	} {
		_ = encoder.WriteField(f)
	}
	_ = frames.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: head.Bytes(), EndHeaders: true})
	message := append(binary.BigEndian.AppendUint32([]byte{0}, 16000), make([]byte, 15000)...)
	for part := range slices.Chunk(message, 16<<10) {
		_ = frames.WriteData(1, false, part)
	}
	return out.Bytes()
}

// agentSessions returns the replica and the epoch of each agent's session by node. All nodes must
// be Ready.
func agentSessions(t *testing.T) map[string][2]string {
	t.Helper()
	cs, ctx := testenv.Client(t), context.Background()
	nodes, err := cs.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][2]string{}
	for _, n := range nodes.Items {
		for _, c := range n.Status.Conditions {
			if c.Type == v1.NodeReady && c.Status != v1.ConditionTrue {
				t.Errorf("node %s: %s %s", n.Name, c.Reason, c.Message)
			}
		}
		l, err := cs.CoordinationV1().Leases(v1.NamespaceNodeLease).Get(ctx, n.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		out[n.Name] = [2]string{l.Annotations["keelson.dev/session-replica"],
			l.Annotations["keelson.dev/session-epoch"]}
		if out[n.Name][1] == "" {
			t.Errorf("node %s has no session", n.Name)
		}
	}
	return out
}

// countOpenFiles returns the number of files that a host's daemon has open.
func countOpenFiles(t *testing.T, host string) int {
	t.Helper()
	all, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(daemonPIDs(t)[host]), "fd"))
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// Cost: a thousand unauthenticated connections, also from hosts of the cluster, each with a
// half-sent enrollment request. The replica uses less than 64 MiB for them, and no agent loses its
// session.
func TestHalfSentStreams(t *testing.T) {
	guardCluster(t)
	before := agentSessions(t)
	replica := before["w1"][0]
	for range 100 {
		// warms up the daemon: memory that it keeps to collect garbage rarely is not part of the
		// attack
		checkWrites(t, replica)
	}
	c := newConnectionFlood(t, replica, lab.FleetPort, "registry", "w1", "w2", "w3")
	clearPeak(t, replica)
	had, began := residentMemory(t, replica), time.Now()
	word := partialEnrollment()
	c.openAll(1000, 1000, func(int) []byte { return word })
	took := time.Since(began)
	checkWrites(t, replica)
	// Unauthenticated connections are closed.
	testenv.Eventually(t, soon, func() error {
		if now, _ := c.openCounts(); now > 0 {
			return fmt.Errorf("%d half-sent streams last", now)
		}
		return nil
	})
	grown, most := peakMemory(t, replica)-had, c.maxOpen
	t.Logf("%d of %d connections in %v have half sent a stream, %d at once; %s had %d MiB, and %d KiB more at most",
		c.written.Load(), c.dialed.Load(), took, most, replica, had/megabyte, grown>>10)
	if c.written.Load() < 100 {
		t.Errorf("only %d streams were half sent: this was no attack", c.written.Load())
	}
	if grown > 64*megabyte {
		t.Errorf("%s has grown by %d MiB", replica, grown/megabyte)
	}
	if now := agentSessions(t); !maps.Equal(now, before) {
		t.Errorf("the agents' sessions are %v, before the attack %v", now, before)
	}
}

// idleMost is the memory that 25,000 idle connections may use in a replica: a sixteenth of its
// limit for the open connections, and the same for the handshakes of the others.
const idleMost = lab.ReplicaMemory / 8

// Cost: 25,000 unauthenticated connections to the API of the leader from all hosts. Half of them
// complete a TLS handshake and start HTTP/2; the others send nothing. The replica keeps some of
// them, limited by source and in total. An administrator who connects from one of these hosts is
// served meanwhile, agents keep their sessions, and the leader stays.
func TestIdleStrangers(t *testing.T) {
	guardCluster(t)
	before, replica := agentSessions(t), leaderName(t)
	const n = 25000
	c := newConnectionFlood(t, replica, lab.APIPort, "registry", "w1", "w2", "w3", "cp1", "cp2", "cp3")
	clearPeak(t, replica)
	had, hadFiles, began := residentMemory(t, replica), countOpenFiles(t, replica), time.Now()
	word, _ := newPreface()
	come := make(chan time.Duration, 1)
	go func() {
		c.openAll(n, 64, func(i int) []byte {
			if i%2 == 0 && time.Since(began) < 25*time.Second { // hands are shaken as long as the machine has the time
				return word.Bytes()
			}
			return nil
		})
		come <- time.Since(began)
	}()
	var slowest, took time.Duration
	for served := 0; took == 0 || served == 0; served++ {
		asked := time.Now()
		checkWrites(t, replica)
		slowest = max(slowest, time.Since(asked))
		select {
		case took = <-come:
			served = -1 // once more, now that all are there
		default:
		}
	}
	now, most := c.openCounts()
	top, topFiles := peakMemory(t, replica), countOpenFiles(t, replica)
	t.Logf("%d of %d connected in %v, %d of them with TLS; %d were kept at once, %d still are; an administrator "+
		"waited %v at most "+
		"for two writes; %s had %d MiB and %d files, and %d MiB and %d files more", c.dialed.Load(), n, took,
		c.written.Load(), most, now,
		slowest, replica, had/megabyte, hadFiles, (top-had)/megabyte, topFiles-hadFiles)
	if after := agentSessions(t); !maps.Equal(after, before) {
		t.Errorf("the agents' sessions are %v, before the attack %v", after, before)
	}
	if led := leaderName(t); led != replica {
		t.Errorf("%s leads, before the attack %s did", led, replica)
	}
	if came := c.dialed.Load(); came < n/2 || now < 500 {
		t.Errorf("%d connected and %d stayed: this was no attack", came, now)
	}
	if top-had > idleMost {
		t.Errorf("%s has grown by %d MiB", replica, (top-had)/megabyte)
	}
	c.closeAll()
	testenv.Eventually(t, soon, func() error {
		if left := countOpenFiles(t, replica); left > hadFiles+100 {
			return fmt.Errorf("%s has %d files open, before the attack %d", replica, left, hadFiles)
		}
		return nil
	})
}
