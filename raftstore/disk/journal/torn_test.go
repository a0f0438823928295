package journal

import (
	"bytes"
	"path/filepath"
	"testing"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore/disk/sector"
)

// TestTornRecordIsDropped: a record that a crash left incomplete is dropped, and earlier
// acknowledged records stay. F52
func TestTornRecordIsDropped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	if err := Create(durable.OS{}, path, 1<<16); err != nil {
		t.Fatal(err)
	}
	open := func() (*journal, []change) {
		j, changes, err := openJournal(durable.OS{}, path, 7, 1<<16)
		if err != nil {
			t.Fatal(err)
		}
		return j, changes
	}
	j, _ := open()
	for index := uint64(1); index <= 2; index++ {
		if err := j.appendEntries([]*raft.Log{{Index: index, Term: 1,
			Data: bytes.Repeat([]byte{9}, 3*sector.Size)}}); err != nil {
			t.Fatal(err)
		}
	}
	// The last sector of the second record is not on the disk.
	if _, err := j.files[j.active].WriteAt(make([]byte, sector.Size), j.end-sector.Size); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j, changes := open()
	defer j.Close()
	if len(changes) != 1 || len(changes[0].entries) != 1 || changes[0].entries[0].Index != 1 ||
		j.last != 1 || j.top != 1 {
		t.Errorf("the journal holds %d records up to %d, the log ends with %d; want the first of two",
			len(changes), j.last, j.top)
	}
}
