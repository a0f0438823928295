package attack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

const (
	floodConnections = 400
	floodTime        = 5 * time.Second // of each flood, at least
	floodRounds      = 8               // of these connections, at most
	floodWrites      = 20              // through each replica, at least
	floodMemory      = 128 << 20       // resident memory that each flood may add to the leader
)

// floodFrames returns the bytes that a connection without credentials sends: an HTTP/2 preface and
// a number of streams with this number of headers each, which it resets at once.
func floodFrames(t *testing.T, streams, headers int) []byte {
	t.Helper()
	out, frames := newPreface()
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for i := range streams {
		block.Reset()
		fields := []hpack.HeaderField{{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "https"},
			{Name: ":authority", Value: "x"}, {Name: ":path", Value: "/api/v1/namespaces/default/configmaps"}}
		for range headers { // one byte each once the field is in the table
			fields = append(fields, hpack.HeaderField{Name: "x", Value: "y"})
		}
		for _, f := range fields {
			_ = encoder.WriteField(f) // a buffer takes everything
		}
		id := uint32(2*i + 1)
		err := frames.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block.Bytes(),
			EndHeaders: true})
		if err == nil {
			err = frames.WriteRSTStream(id, http2.ErrCodeCancel)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return out.Bytes()
}

// patientClient returns an administrator's client that connects from a replica's host to that replica.
// The client dials again after a timeout, for 30 s at most. A dial of the lab has one second, in which
// a process with 400 attackers may not run the dialing thread.
func patientClient(t *testing.T, replica string) kubernetes.Interface {
	t.Helper()
	h, cfg := testenv.Host(t, replica), testenv.RestConfig(t)
	cfg.Host, cfg.QPS = "https://"+h.Endpoint(lab.APIPort), -1
	cfg.Dial = func(ctx context.Context, _, address string) (net.Conn, error) {
		for limit := time.Now().Add(30 * time.Second); ; {
			conn, err := h.Dial(ctx, address)
			var failed net.Error
			if !errors.As(err, &failed) || !failed.Timeout() || ctx.Err() != nil || time.Now().After(limit) {
				return conn, err
			}
		}
	}
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// leaderTerm returns the leader and its term.
func leaderTerm(t *testing.T) (string, uint64) {
	t.Helper()
	var status api.ClusterStatus
	raw, err := testenv.Client(t).CoreV1().RESTClient().Get().AbsPath(api.PathClusterStatus).DoRaw(context.Background())
	if err == nil {
		err = json.Unmarshal(raw, &status)
	}
	if err != nil {
		t.Fatal(err)
	}
	return status.Leader, status.Term
}

// Cost: 400 connections without credentials, from hosts of the cluster, each of which floods the leader's API by HTTP/2
// and comes again when it was sent away. The leader leads on in its term, and every write through every replica is
// acknowledged. Each flood adds less than 128 MiB to the leader's resident memory, garbage included.
// TestFloodsOfFrames bounds the live memory.
func TestLeaderUnderFloodsOfFrames(t *testing.T) {
	guardCluster(t)
	led, before := leaderTerm(t)
	ns := testenv.Namespace(t)
	clients := map[string]kubernetes.Interface{}
	for i := range replicas {
		name := fmt.Sprintf("cp%d", i+1)
		clients[name] = patientClient(t, name)
	}
	for _, f := range []struct {
		name  string
		frame []byte
	}{
		{"rapid reset", floodFrames(t, 5000, 0)},
		{"rapid reset of many headers", floodFrames(t, 2000, 1400)},
	} {
		t.Run(f.name, func(t *testing.T) {
			for range 20 { // a replica that has been at work: its garbage is no part of the attack
				checkWrites(t, led)
			}
			clearPeak(t, led)
			had, began := residentMemory(t, led), time.Now()
			var attackers sync.WaitGroup
			t.Cleanup(attackers.Wait)
			c := newConnectionFlood(t, led, lab.APIPort, "registry", "w1", "w2", "w3")
			ended := make(chan struct{})
			attackers.Go(func() {
				defer close(ended)
				for n := 0; n < floodRounds &&
					(time.Since(began) < floodTime || c.handshaken.Load() < floodConnections); n++ {
					c.openAll(floodConnections, floodConnections, func(int) []byte { return f.frame })
				}
			})
			writes, slowest := 0, time.Duration(0)
			for flooding := true; flooding || writes < floodWrites*replicas; writes++ {
				select {
				case <-ended:
					flooding = false
				default:
				}
				replica := fmt.Sprintf("cp%d", 1+writes%replicas)
				ctx, cancel := context.WithTimeout(context.Background(), soon)
				asked := time.Now()
				_, err := clients[replica].CoreV1().ConfigMaps(ns).Create(ctx, probeConfigMap(), metav1.CreateOptions{})
				cancel()
				if err != nil {
					t.Fatalf("write %d, through %s: %v", writes, replica, err)
				}
				slowest = max(slowest, time.Since(asked))
			}
			grown := peakMemory(t, led) - had
			t.Logf("%d connections, %d of them flooded, in %v; %d writes, the slowest took %v; %s had %d MiB, and %d "+
				"MiB more at most",
				c.dialed.Load(), c.handshaken.Load(), time.Since(began).Round(time.Millisecond), writes, slowest, led,
				had/megabyte, grown/megabyte)
			if n := c.handshaken.Load(); n < floodConnections {
				t.Errorf("only %d connections flooded: this was no attack", n)
			}
			if grown >= floodMemory {
				t.Errorf("the resident memory of %s grew by %d MiB, want less than %d", led, grown/megabyte,
					floodMemory/megabyte)
			}
			if top := peakMemory(t, led); top > lab.ReplicaMemory {
				t.Errorf("%s took %d MiB", led, top/megabyte)
			}
			if now, at := leaderTerm(t); now != led || at != before {
				t.Errorf("%s leads in term %d, before the flood %s led in term %d", now, at, led, before)
			}
		})
	}
}
