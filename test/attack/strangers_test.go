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

// crowd is connections to one port of a replica on which nobody says who he is.
type crowd struct {
	address string
	sources []lab.Host

	// called counts connections, shook those that finished the handshake of TLS, and spoke those that have sent their
	// word.
	called, shook, spoke atomic.Int64
	mu                   sync.Mutex
	open                 map[net.Conn]bool
	most                 int // of open
	readers              sync.WaitGroup
}

func newCrowd(t *testing.T, replica string, port int, sources ...string) *crowd {
	t.Helper()
	c := &crowd{address: net.JoinHostPort(testenv.Host(t, replica).IP.String(), strconv.Itoa(port)), open: map[net.Conn]bool{}}
	for _, name := range sources {
		c.sources = append(c.sources, testenv.Host(t, name))
	}
	t.Cleanup(c.leave)
	return c
}

// come opens n connections, so many at a time, in turn from each source, says on each what word gives for it, and
// keeps those that the replica does not cut off.
func (c *crowd) come(n, atOnce int, word func(i int) []byte) {
	var next atomic.Int64
	var workers sync.WaitGroup
	for range atOnce {
		workers.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				c.call(c.sources[i%len(c.sources)], word(i))
			}
		})
	}
	workers.Wait()
}

// call opens one connection; without a word it stays one of TCP.
func (c *crowd) call(from lab.Host, word []byte) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := from.Dial(ctx, c.address)
	if err != nil {
		return // who is not let in has his answer
	}
	c.called.Add(1)
	if word != nil {
		spoken := tls.Client(conn, &tls.Config{
			InsecureSkipVerify: true, NextProtos: []string{"h2"}, CurvePreferences: []tls.CurveID{tls.X25519},
		})
		if spoken.HandshakeContext(ctx) != nil {
			conn.Close()
			return
		}
		c.shook.Add(1)
		if limit, ok := ctx.Deadline(); ok {
			_ = spoken.SetWriteDeadline(limit) // the replica may read no more
		}
		if _, err := spoken.Write(word); err != nil {
			conn.Close()
			return
		}
		c.spoke.Add(1)
		conn = spoken
	}
	c.mu.Lock()
	c.open[conn] = true
	c.most = max(c.most, len(c.open))
	c.mu.Unlock()
	c.readers.Go(func() {
		_, _ = io.Copy(io.Discard, conn) // until either end has closed it
		c.mu.Lock()
		delete(c.open, conn)
		c.mu.Unlock()
		conn.Close()
	})
}

// held is how many connections are open, and how many were at most.
func (c *crowd) held() (now, most int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.open), c.most
}

func (c *crowd) leave() {
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

// greeting begins a connection of HTTP/2 and asks nothing.
func greeting() (*bytes.Buffer, *http2.Framer) {
	out := bytes.NewBufferString(http2.ClientPreface)
	frames := http2.NewFramer(out, nil)
	_ = frames.WriteSettings() // a buffer takes everything
	return out, frames
}

// halfSent asks to enrol, and stops in the midst of a message of almost the size that is allowed.
func halfSent() []byte {
	out, frames := greeting()
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

// sessions are the agents' by node: the replica and the epoch of each. All nodes must be ready.
func sessions(t *testing.T) map[string][2]string {
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
		out[n.Name] = [2]string{l.Annotations["keelson.dev/session-replica"], l.Annotations["keelson.dev/session-epoch"]}
		if out[n.Name][1] == "" {
			t.Errorf("node %s has no session", n.Name)
		}
	}
	return out
}

// files is how many a host's daemon has open.
func files(t *testing.T, host string) int {
	t.Helper()
	all, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(daemons(t)[host]), "fd"))
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// Cost: a thousand connections that nobody has authenticated, from hosts of the cluster too, each with a stream that
// asks to enrol and is half sent. The replica gives less than 64 MiB for them, and no agent loses its session.
func TestHalfSentStreams(t *testing.T) {
	begin(t)
	before := sessions(t)
	replica := before["w1"][0]
	for range 100 { // one that has been at work: what it keeps in order to collect garbage seldom is no part of the attack
		serves(t, replica)
	}
	c := newCrowd(t, replica, lab.FleetPort, "registry", "w1", "w2", "w3")
	clearPeak(t, replica)
	had, began := resident(t, replica), time.Now()
	word := halfSent()
	c.come(1000, 1000, func(int) []byte { return word })
	took := time.Since(began)
	serves(t, replica)
	// What is not authenticated does not last.
	testenv.Eventually(t, soon, func() error {
		if now, _ := c.held(); now > 0 {
			return fmt.Errorf("%d half-sent streams last", now)
		}
		return nil
	})
	grown, most := peak(t, replica)-had, c.most
	t.Logf("%d of %d who came in %v have half sent a stream, %d at once; %s had %d MiB, and %d KiB more at most",
		c.spoke.Load(), c.called.Load(), took, most, replica, had/megabyte, grown>>10)
	if c.spoke.Load() < 100 {
		t.Errorf("only %d streams were half sent: this was no attack", c.spoke.Load())
	}
	if grown > 64*megabyte {
		t.Errorf("%s has grown by %d MiB", replica, grown/megabyte)
	}
	if now := sessions(t); !maps.Equal(now, before) {
		t.Errorf("the agents' sessions are %v, before the attack %v", now, before)
	}
}

// idleMost is what 25,000 idle connections may cost a replica: a sixteenth of its limit for those that it keeps, and
// as much for the handshakes of the others.
const idleMost = lab.ReplicaMemory / 8

// Cost: 25,000 connections to the API of the replica that leads, from all hosts, on which nobody says who he is; half
// of them shake hands for TLS and begin HTTP/2, the others say nothing at all. The replica keeps a part of them, by
// source and in all. An administrator, who comes from one of these hosts, is served all the while, agents keep their
// sessions, and the leader leads.
func TestIdleStrangers(t *testing.T) {
	begin(t)
	before, replica := sessions(t), leader(t)
	const n = 25000
	c := newCrowd(t, replica, lab.APIPort, "registry", "w1", "w2", "w3", "cp1", "cp2", "cp3")
	clearPeak(t, replica)
	had, hadFiles, began := resident(t, replica), files(t, replica), time.Now()
	word, _ := greeting()
	come := make(chan time.Duration, 1)
	go func() {
		c.come(n, 64, func(i int) []byte {
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
		serves(t, replica)
		slowest = max(slowest, time.Since(asked))
		select {
		case took = <-come:
			served = -1 // once more, now that all are there
		default:
		}
	}
	now, most := c.held()
	top, topFiles := peak(t, replica), files(t, replica)
	t.Logf("%d of %d connected in %v, %d of them with TLS; %d were kept at once, %d still are; an administrator waited %v at most "+
		"for two writes; %s had %d MiB and %d files, and %d MiB and %d files more", c.called.Load(), n, took, c.spoke.Load(), most, now,
		slowest, replica, had/megabyte, hadFiles, (top-had)/megabyte, topFiles-hadFiles)
	if after := sessions(t); !maps.Equal(after, before) {
		t.Errorf("the agents' sessions are %v, before the attack %v", after, before)
	}
	if led := leader(t); led != replica {
		t.Errorf("%s leads, before the attack %s did", led, replica)
	}
	if came := c.called.Load(); came < n/2 || now < 500 {
		t.Errorf("%d came and %d stayed: this was no attack", came, now)
	}
	if top-had > idleMost {
		t.Errorf("%s has grown by %d MiB", replica, (top-had)/megabyte)
	}
	c.leave()
	testenv.Eventually(t, soon, func() error {
		if left := files(t, replica); left > hadFiles+100 {
			return fmt.Errorf("%s has %d files open, before the attack %d", replica, left, hadFiles)
		}
		return nil
	})
}
