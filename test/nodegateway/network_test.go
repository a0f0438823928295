package nodegateway_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
)

// testNetwork is the network between agents and replicas. It can drop all data of a connection
// without closing it.
type testNetwork struct {
	mu     sync.Mutex
	cut    map[string]bool // address
	conns  map[*testConn]bool
	dials  int
	writes atomic.Int64 // how often anything was written
}

func newTestNetwork() *testNetwork {
	return &testNetwork{cut: make(map[string]bool), conns: make(map[*testConn]bool)}
}

func (w *testNetwork) dialAddress(ctx context.Context, address string) (net.Conn, error) {
	w.mu.Lock()
	cut := w.cut[address]
	w.dials++
	w.mu.Unlock()
	if cut { // packets are dropped: the caller waits until its timeout
		<-ctx.Done()
		return nil, ctx.Err()
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	wc := &testConn{Conn: c, network: w, address: address, lost: make(chan struct{})}
	w.mu.Lock()
	w.conns[wc] = true
	w.mu.Unlock()
	return wc, nil
}

// cutAddress drops all data from and to an address, on existing and new connections.
func (w *testNetwork) cutAddress(address string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut[address] = true
	for c := range w.conns {
		if c.address == address {
			c.once.Do(func() { close(c.lost) })
		}
	}
}

func (w *testNetwork) healAddress(address string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.cut, address)
}

type testConn struct {
	net.Conn
	network *testNetwork
	address string
	once    sync.Once
	lost    chan struct{}
}

func (c *testConn) isLost() bool {
	select {
	case <-c.lost:
		return true
	default:
		return false
	}
}

func (c *testConn) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.isLost() {
			return n, err
		}
	}
}

func (c *testConn) Write(p []byte) (int, error) {
	if c.isLost() {
		return len(p), nil
	}
	c.network.writes.Add(1)
	return c.Conn.Write(p)
}

// testLog writes to the test's log while it runs.
type testLog struct {
	t   *testing.T
	who string
}

func (l testLog) Write(p []byte) (int, error) {
	if os.Getenv("KEELSON_TEST_LOG") != "" {
		fmt.Fprintf(os.Stderr, "%-4s %s", l.who, p)
	}
	return len(p), nil
}

var _ io.Writer = testLog{}
