package journal

import (
	"bytes"
	"encoding/binary"
	"testing"

	"keelson.dev/keelson/raftstore/disk/sector"
)

// FuzzJournal: the decoder of a file takes any bytes. It returns an error, or changes that are
// consistent, and never panics.
func FuzzJournal(f *testing.F) {
	dir := f.TempDir()
	b := newStoreEnv(f, dir)
	b.appendEntries(f, 1, 3, 100)
	b.appendEntries(f, 1, 2, 900)
	b.removeEntries(f, 3, 5, false)
	for _, c := range b.readFiles(f) {
		f.Add(c)
	}
	b.store.Close()
	f.Fuzz(func(t *testing.T, content []byte) {
		// Correct checksums let the decoder read the data behind them.
		for at := 0; at+sector.Size <= len(content); at += sector.Size {
			s := content[at : at+sector.Size]
			if !bytes.Equal(s, make([]byte, sector.Size)) {
				binary.LittleEndian.PutUint32(s, sector.Checksum(s, 7, int64(at)))
			}
		}
		c, err := readChain(content, 7)
		if err != nil {
			return
		}
		if c.end > int64(len(content)) || len(c.changes) > 0 && c.changes[len(c.changes)-1].sequence != c.last {
			t.Errorf("chain ends at %d of %d with record %d: %+v", c.end, len(content), c.last, c.changes)
		}
	})
}
