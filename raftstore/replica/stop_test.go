package replica_test

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// Stop does not wait for a dial to an unreachable peer.
func TestStopEndsDials(t *testing.T) {
	var away atomic.Bool
	type dialed struct {
		by  string
		err error
	}
	dialing, ended := make(chan string, 64), make(chan dialed, 64)
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		slowToMiss(cfg) // raft dials for minutes then: who waits for that is found to
		dial, by := cfg.Network.Dial, cfg.Name
		cfg.Network.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			if !away.Load() {
				return dial(ctx, address)
			}
			dialing <- by
			<-ctx.Done()
			ended <- dialed{by, ctx.Err()}
			return nil, ctx.Err()
		}
	})
	leader := c.Leader()
	away.Store(true)
	c.Kill(c.Followers()[0])
	commit(t, c.Replica(leader), raftstore.Put("/a", nil)) // which it has to send to all
	for <-dialing != leader {
	}
	c.Stop(leader)
	late := time.After(patience)
	for {
		select {
		case d := <-ended: // gRPC's dials hear of it a moment after the replica has stopped
			if d.by == leader && errors.Is(d.err, context.Canceled) {
				return
			}
		case <-late:
			t.Fatal("every dial went on until its own deadline")
		}
	}
}

// A call that waits until the replica has applied an index returns an error when the replica stops.
func TestStopEndsReads(t *testing.T) {
	var silent atomic.Value // the address to which nothing is sent any more
	silent.Store("")
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.Timeouts.HeartbeatTimeout = patience
		dial := cfg.Network.Dial
		cfg.Network.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			conn, err := dial(ctx, address)
			if err != nil {
				return nil, err
			}
			return &mutedConn{Conn: conn, muted: func() bool { return silent.Load() == address }}, nil
		}
	})
	behind := c.Followers()[0]
	r := c.Replica(behind)
	silent.Store(r.Address())
	commit(t, c.Replica(c.Leader()), raftstore.Put("/a", nil))
	read := make(chan error, 1)
	go func() {
		_, _, err := r.Get(context.Background(), "/a", raftstore.ReadOptions{})
		read <- err
	}()
	c.Await("the read to wait for an entry that does not come", func() bool { return r.Waiting() == 1 })
	c.Kill(behind)
	select {
	case err := <-read:
		if !errors.Is(err, raftstore.ErrClosed) {
			t.Errorf("read at a replica that was stopped: %v", err)
		}
	case <-time.After(patience):
		t.Error("the read goes on after the replica has stopped")
	}
}

// mutedConn swallows what is written to it while it is muted.
type mutedConn struct {
	net.Conn
	muted func() bool
}

func (c *mutedConn) Write(b []byte) (int, error) {
	if c.muted() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}
