package journal

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
)

// TestFailedFlushIsNoAppend: an append whose sync failed is not acknowledged. F52
func TestFailedFlushIsNoAppend(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	if err := Create(durable.OS{}, path, 1<<16); err != nil {
		t.Fatal(err)
	}
	j, _, err := openJournal(durable.OS{}, path, 7, 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	entries := []*raft.Log{{Index: 1, Term: 1, Data: []byte("x")}}
	if err := j.appendEntries(entries); err != nil {
		t.Fatal(err)
	}
	before := j.last
	// /dev/null accepts every write, and cannot be synced.
	null, err := durable.OS{}.Open(os.DevNull, os.O_RDWR)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.files[j.active].Close(); err != nil {
		t.Fatal(err)
	}
	j.files[j.active] = null
	if err := j.appendEntries(entries); err == nil {
		t.Error("an append whose flush failed is reported as done")
	}
	if err := j.appendDelete(1, 1, 0); err == nil {
		t.Error("a deletion whose flush failed is reported as done")
	}
	if j.last != before {
		t.Errorf("the journal counts %d records, want %d", j.last, before)
	}
}
