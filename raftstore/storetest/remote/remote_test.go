package remote_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
	"keelson.dev/keelson/raftstore/storetest/remote"
)

const patience = time.Minute // what takes longer on a busy machine has failed

func withReserve(t testing.TB, d time.Duration) context.Context {
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
	c, err := remote.Dial(withReserve(t, patience), address, insecure.NewCredentials())
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
func TestFollowerFromAfarConforms(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Subject {
		c := storetest.NewCluster(t, 3, nil)
		return storetest.Subject{Store: over(t, c.Replica(c.Followers()[0])), Compact: c.Compact}
	})
}

// A leadership over there is one here, until it ends or the connection does.
func TestLead(t *testing.T) {
	c, m := memory(t)
	fences := make(chan raftstore.Fence)
	over := make(chan raftstore.Fence, 2)
	ended := make(chan error, 1)
	go func() {
		ended <- c.Lead(context.Background(), func(ctx context.Context, f raftstore.Fence) error {
			fences <- f
			<-ctx.Done()
			over <- f
			return nil
		})
	}()
	first := <-fences
	put := raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/a", nil)}, Fence: first}
	if _, err := c.Commit(withReserve(t, patience), put); err != nil {
		t.Errorf("commit of the leader: %v", err)
	}
	m.Depose()
	second := <-fences
	if got := <-over; got != first || second <= first {
		t.Errorf("leadership %d ended before %d began, want %d", got, second, first)
	}
	if _, err := c.Commit(withReserve(t, patience), put); !errors.Is(err, raftstore.ErrFenced) {
		t.Errorf("commit of the deposed leader: %v", err)
	}
	c.Close()
	if err := <-ended; !errors.Is(err, raftstore.ErrClosed) {
		t.Errorf("leading over a closed connection: %v", err)
	}
	if got := <-over; got != second {
		t.Errorf("leadership %d ended with the connection, want %d", got, second)
	}
}

// A connection that is lost is made again. Reads wait for it; a commit under
// way is not sent twice; a watch says why it ended and goes on by revision.
func TestLostConnection(t *testing.T) {
	m := storetest.NewMemory()
	defer m.Close()
	path := filepath.Join(t.TempDir(), "s")
	hanging := make(chan struct{})
	address, stop := serve(t, path, &hangs{Memory: m, hanging: hanging})
	c := dial(t, address)
	ctx := withReserve(t, patience)
	if _, err := c.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/a", []byte("1"))}}); err != nil {
		t.Fatal(err)
	}
	w, err := c.Watch(ctx, "/", 1)
	if err != nil {
		t.Fatal(err)
	}
	fate := make(chan error, 1)
	go func() {
		_, err := c.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/hang", nil)}})
		fate <- err
	}()
	<-hanging
	stop()
	if err := <-fate; !errors.Is(err, raftstore.ErrOutcomeUnknown) {
		t.Errorf("commit under a lost connection: %v", err)
	}
	for range w.C() {
	}
	if err := w.Err(); !errors.Is(err, raftstore.ErrUnavailable) {
		t.Errorf("watch under a lost connection: %v", err)
	}
	_, err = c.Commit(withReserve(t, 100*time.Millisecond),
		raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/b", nil)}})
	if !errors.Is(err, raftstore.ErrUnavailable) || errors.Is(err, raftstore.ErrOutcomeUnknown) {
		t.Errorf("commit that was never sent: %v", err)
	}
	read := make(chan error, 1)
	go func() {
		_, _, err := c.Get(ctx, "/a", raftstore.ReadOptions{})
		read <- err
	}()
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	serve(t, path, m)
	if err := <-read; err != nil {
		t.Errorf("read that had to wait for the replica: %v", err)
	}
	rev, err := c.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/c", nil)}})
	if err != nil {
		t.Fatal(err)
	}
	if w, err = c.Watch(ctx, "/", rev-1); err != nil {
		t.Fatal(err)
	}
	if ev := <-w.C(); ev.Revision != rev {
		t.Errorf("resumed watch begins with %+v", ev)
	}
}

// hangs never answers commits about one key.
type hangs struct {
	*storetest.Memory
	hanging chan struct{}
}

func (h *hangs) Commit(ctx context.Context, c raftstore.Commit) (raftstore.Revision, error) {
	if c.Ops[0].Key == "/hang" {
		close(h.hanging)
		<-ctx.Done()
		return 0, fmt.Errorf("%w: %w", raftstore.ErrOutcomeUnknown, ctx.Err())
	}
	return h.Memory.Commit(ctx, c)
}

// A list larger than any message, and values of the largest size.
func TestLargeList(t *testing.T) {
	c, m := memory(t)
	ctx := withReserve(t, patience)
	const n = 30
	for i := range n {
		if _, err := m.Commit(ctx,
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/l/%02d", i),
				make([]byte, raftstore.MaxValueBytes))}}); err != nil {
			t.Fatal(err)
		}
	}
	l, err := c.List(ctx, "/l/", raftstore.ListOptions{})
	if err != nil || len(l.Items) != n || l.Revision != n || l.More {
		t.Fatalf("%d items at revision %d, error %v", len(l.Items), l.Revision, err)
	}
	for i, it := range l.Items {
		if it.Key != fmt.Sprintf("/l/%02d", i) || len(it.Value) != raftstore.MaxValueBytes {
			t.Fatalf("item %d is %q with %d bytes", i, it.Key, len(it.Value))
		}
	}
}

// A reader that does not read costs no memory on either side, however much happens.
func TestIdleReaderHoldsLittle(t *testing.T) {
	c, m := memory(t)
	ctx := withReserve(t, patience)
	w, err := c.Watch(ctx, "/", 0)
	if err != nil {
		t.Fatal(err)
	}
	const n, size = 2000, 64 << 10
	value := make([]byte, size)
	for i := range n {
		if _, err := m.Commit(ctx,
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/a",
				append([]byte(fmt.Sprint(i, " ")), value...))}}); err != nil {
			t.Fatal(err)
		}
		if i%100 == 99 {
			m.Compact(raftstore.Revision(i - 50)) // nothing is left of the values but what the watch holds
		}
	}
	runtime.GC()
	var mem runtime.MemStats
	runtime.ReadMemStats(&mem)
	if mem.HeapAlloc > 64<<20 {
		t.Errorf("%d MiB are held, of %d MiB that were written", mem.HeapAlloc>>20, n*size>>20)
	}
	// The watch delivers events in order, and then the error that it was too slow.
	last := raftstore.Revision(0)
	for ev := range w.C() {
		if ev.Revision != last+1 {
			t.Fatalf("revision %d after %d", ev.Revision, last)
		}
		last = ev.Revision
	}
	if !errors.Is(w.Err(), raftstore.ErrSlowWatcher) || !errors.Is(w.Err(), raftstore.ErrCompacted) {
		t.Errorf("the watch ended at %d with %v", last, w.Err())
	}
}
