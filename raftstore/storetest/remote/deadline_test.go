package remote

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/raftstore"
)

// stuck is a store whose calls wait for their deadline, after they told that they have come.
type stuck struct {
	raftstore.Store
	came chan struct{}
}

func (s stuck) Commit(ctx context.Context, _ raftstore.Commit) (raftstore.Revision, error) {
	s.came <- struct{}{}
	<-ctx.Done()
	return 0, fmt.Errorf("%w: %w", raftstore.ErrUnavailable, ctx.Err())
}

func (s stuck) Sync(ctx context.Context) (raftstore.Revision, error) {
	s.came <- struct{}{}
	<-ctx.Done()
	return 0, fmt.Errorf("%w: %w", raftstore.ErrUnavailable, ctx.Err())
}

// A deadline travels, and the replica's own words come back before it: a commit that was certainly not made is not
// reported as perhaps made. The way there and back takes no time here, whatever else the machine does.
func TestDeadlinesTravel(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		l := bufconn.Listen(1 << 16)
		server := grpc.NewServer(ServerOptions()...)
		s := stuck{came: make(chan struct{}, 3)}
		Register(server, s)
		served := make(chan error, 1)
		go func() { served <- server.Serve(l) }()
		c, err := newClient("passthrough:///pipe", insecure.NewCredentials(),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			c.Close()
			server.Stop()
			if err := <-served; err != nil {
				t.Errorf("serving: %v", err)
			}
		}()
		put := raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/a", nil)}}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		began := time.Now()
		_, err = c.Commit(ctx, put)
		if !errors.Is(err, raftstore.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) ||
			errors.Is(err, raftstore.ErrOutcomeUnknown) {
			t.Errorf("commit that cannot be made: %v", err)
		}
		if took := time.Since(began); took != 240*time.Millisecond {
			t.Errorf("it was waited for %v of 300 ms", took)
		}
		<-s.came
		for _, call := range []struct {
			name string
			do   func(context.Context) error
			want []error
		}{
			{"sync", func(ctx context.Context) error { _, err := c.Sync(ctx); return err }, []error{context.Canceled}},
			{"commit", func(ctx context.Context) error { _, err := c.Commit(ctx, put); return err },
				[]error{context.Canceled, raftstore.ErrOutcomeUnknown}},
		} {
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				<-s.came
				cancel()
			}()
			err := call.do(ctx)
			for _, want := range call.want {
				if !errors.Is(err, want) {
					t.Errorf("%s that was given up on its way: %v, want %v", call.name, err, want)
				}
			}
		}
	})
}
