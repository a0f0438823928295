package disk

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/hashicorp/raft"
)

func newPacedStore(t *testing.T) raft.SnapshotStore {
	t.Helper()
	dir := t.TempDir()
	seals, err := openSealer(dir+"/"+dataKeysName, nil)
	if err != nil {
		t.Fatal(err)
	}
	files, err := openSnapshotStore(Config{Dir: dir}.withDefaults(), seals, func(err error) { t.Log(err) })
	if err != nil {
		t.Fatal(err)
	}
	return newPacedSnapshots(files, files.dir)
}

// TestPacedSnapshot: a paced snapshot has the written content, whatever the sizes of the writes.
func TestPacedSnapshot(t *testing.T) {
	store := newPacedStore(t)
	_, trans := raft.NewInmemTransport("")
	sink, err := store.Create(1, 7, 2, raft.Configuration{}, 1, trans)
	if err != nil {
		t.Fatal(err)
	}
	if sink.(*pacedSink).file == nil {
		t.Error("the file of the snapshot was not found: it would be written without pacing")
	}
	random := rand.New(rand.NewPCG(1, 2))
	want := make([]byte, 3*chunkBytes+chunkBytes/3)
	for i := range want {
		want[i] = byte(random.Uint32())
	}
	for rest := want; len(rest) > 0; {
		n := min(len(rest), 1+random.IntN(chunkBytes*3/2))
		if wrote, err := sink.Write(rest[:n]); err != nil || wrote != n {
			t.Fatalf("wrote %d of %d: %v", wrote, n, err)
		}
		rest = rest[n:]
	}
	if err := sink.Close(); err != nil {
		t.Fatal(err)
	}
	_, content, err := store.Open(sink.ID())
	if err != nil {
		t.Fatal(err)
	}
	defer content.Close()
	if got, err := io.ReadAll(content); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("read %d bytes, %v; wrote %d", len(got), err, len(want))
	}
}

// TestRestingWriter: a throttled writer writes everything, and fails when the replica stops.
func TestRestingWriter(t *testing.T) {
	life, end := context.WithCancel(context.Background())
	var got bytes.Buffer
	w := &throttledWriter{w: &got, ctx: life}
	want := bytes.Repeat([]byte("keelson"), chunkBytes/3)
	if n, err := w.Write(want); err != nil || n != len(want) || !bytes.Equal(got.Bytes(), want) {
		t.Fatalf("wrote %d of %d bytes, %d arrived: %v", n, len(want), got.Len(), err)
	}
	end()
	if _, err := w.Write(want); !errors.Is(err, context.Canceled) {
		t.Fatalf("writing on after the end: %v", err)
	}
}
