package replica

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/hashicorp/raft"
)

func pacedStore(t *testing.T, life context.Context) raft.SnapshotStore {
	t.Helper()
	dir := t.TempDir()
	seals, err := openSealer(dir+"/"+sealName, nil)
	if err != nil {
		t.Fatal(err)
	}
	files, err := openSnapshots(Config{DataDir: dir}.withDefaults(), seals, func(err error) { t.Log(err) })
	if err != nil {
		t.Fatal(err)
	}
	return paceSnapshots(life, files, dir)
}

// A paced snapshot holds what was written, however it was cut.
func TestPacedSnapshot(t *testing.T) {
	store := pacedStore(t, context.Background())
	_, trans := raft.NewInmemTransport("")
	sink, err := store.Create(1, 7, 2, raft.Configuration{}, 1, trans)
	if err != nil {
		t.Fatal(err)
	}
	if sink.(*pacedSink).file == nil {
		t.Error("the file of the snapshot was not found: it would be written without pacing")
	}
	random := rand.New(rand.NewPCG(1, 2))
	want := make([]byte, 3*paceBytes+paceBytes/3)
	for i := range want {
		want[i] = byte(random.Uint32())
	}
	for rest := want; len(rest) > 0; {
		n := min(len(rest), 1+random.IntN(paceBytes*3/2))
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

// A replica that stops does not wait for the end of a snapshot.
func TestPacedSnapshotEndsWithTheReplica(t *testing.T) {
	life, end := context.WithCancel(context.Background())
	store := pacedStore(t, life)
	_, trans := raft.NewInmemTransport("")
	sink, err := store.Create(1, 7, 2, raft.Configuration{}, 1, trans)
	if err != nil {
		t.Fatal(err)
	}
	end()
	if _, err := sink.Write(make([]byte, 4*paceBytes)); !errors.Is(err, context.Canceled) {
		t.Fatalf("writing on: %v", err)
	}
	if err := sink.Cancel(); err != nil {
		t.Fatal(err)
	}
	if list, err := store.List(); err != nil || len(list) != 0 {
		t.Fatalf("left behind: %v, %v", list, err)
	}
}
