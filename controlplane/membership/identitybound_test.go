package membership

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/clusterid"
	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/raftstore"
)

// A replica stops serving within 5 seconds after a replica of a later incarnation becomes
// reachable, at any time between two probes: docs/explanation/recovery.md states this limit. F53
func TestReachableLaterIncarnationIsFoundInTime(t *testing.T) {
	const bound = 5 * time.Second
	if probeTimeout+probeInterval+probeTimeout > bound {
		t.Errorf("a failed probe, the pause and a probe take %v, more than docs/explanation/recovery.md states",
			probeTimeout+probeInterval+probeTimeout)
	}
	for offset := 10 * time.Second; offset < 13*time.Second; offset += 130 * time.Millisecond {
		virtual.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ids := newTestIdentities(t)
			ids.setIncarnation(5)
			var reachable atomic.Bool
			members := func() []raftstore.Member { return []raftstore.Member{{ID: "cp1", Address: "192.0.2.1:1"}} }
			r := newPeers("cp2", datadir.Cluster{APIPort: 2}, members, func() *tls.Config {
				return &tls.Config{MinVersion: tls.VersionTLS13}
			},
				slog.New(slog.DiscardHandler))
			r.identities = ids
			recovered := &http.Transport{DisableKeepAlives: true,
				DialTLSContext: func(context.Context, string, string) (net.Conn, error) {
					if !reachable.Load() {
						<-ctx.Done() // packets are lost
						return nil, ctx.Err()
					}
					here, there := net.Pipe()
					go answerWithIdentity(there, clusterid.Identity{Cluster: "c", Incarnation: 6})
					return here, nil
				}}
			r.clients.Store(&peerClients{shortTimeout: &http.Client{Timeout: probeTimeout,
				Transport: identityTransport{recovered, ids}}})
			go func() { _ = r.Run(ctx) }()
			time.Sleep(offset) // virtual
			reachable.Store(true)
			start := time.Now()
			select {
			case <-ids.abandoned:
			case <-time.After(time.Minute):
			}
			if took := time.Since(start); took > bound {
				t.Errorf("the replica found the later incarnation after %v at offset %v, want at most %v",
					took, offset, bound)
			}
		})
	}
}

// answerWithIdentity serves one HTTP request with an identity header in the response.
func answerWithIdentity(c net.Conn, id clusterid.Identity) {
	defer c.Close()
	if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\n%s: %s\r\nContent-Length: 0\r\n\r\n", clusterid.Header, id)
	}
}
