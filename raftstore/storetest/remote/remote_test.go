package remote_test

import (
	"context"
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
	"keelson.dev/keelson/raftstore/storetest/remote"
)

const patience = 30 * time.Second

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// serve serves a store on a socket and returns its address and how to stop it.
func serve(t testing.TB, path string, s raftstore.Store) (address string, stop func()) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(remote.ServerOptions()...)
	remote.Register(server, s)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			server.Stop()
			if err := <-served; err != nil {
				t.Errorf("serving: %v", err)
			}
		}
	}
	t.Cleanup(stop)
	return "unix:" + path, stop
}

// over returns a client of a store that is served on a socket.
func over(t testing.TB, s raftstore.Store) *remote.Client {
	t.Helper()
	address, _ := serve(t, filepath.Join(t.TempDir(), "s"), s)
	return dial(t, address)
}

func dial(t testing.TB, address string) *remote.Client {
	t.Helper()
	c, err := remote.Dial(within(t, patience), address, insecure.NewCredentials())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// memory returns a client of a store in memory, and that store.
func memory(t testing.TB) (*remote.Client, *storetest.Memory) {
	m := storetest.NewMemory()
	t.Cleanup(m.Close)
	return over(t, m), m
}

func TestMemoryConforms(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Subject {
		c, m := memory(t)
		return storetest.Subject{Store: c, Compact: m.Compact}
	})
}

// Two networks lie between the caller and the leader. F53
func TestFollowerConforms(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Subject {
		c := storetest.NewCluster(t, 3, nil)
		return storetest.Subject{Store: over(t, c.Replica(c.Followers()[0])), Compact: func(upTo raftstore.Revision) {
			if err := c.Replica(c.Leader()).Compact(within(t, patience), upTo); err != nil {
				t.Errorf("compact: %v", err)
			}
			c.Await("compaction everywhere", func() bool {
				for _, r := range c.Replicas() {
					if r.Status().Compacted < upTo {
						return false
					}
				}
				return true
			})
		}}
	})
}
