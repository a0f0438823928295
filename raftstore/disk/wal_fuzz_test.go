package disk

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore/disk/sector"
	"keelson.dev/keelson/raftstore/disk/wal"
)

// segmentPaths returns the files of raft-wal in a data directory that have entries.
func segmentPaths(t testing.TB, dir string) []string {
	all, err := filepath.Glob(filepath.Join(dir, walName, "*.wal"))
	if err != nil || len(all) == 0 {
		t.Fatalf("segments below %s: %v, %v", dir, all, err)
	}
	return all
}

// FuzzWALSegment: a data directory with any bytes in a segment is rejected with an error that names
// the file, or opens and returns its entries.
func FuzzWALSegment(f *testing.F) {
	b := &diskEnv{logs: make(map[uint64]raft.Log), votes: make(map[string]uint64)}
	b.cfg = Config{Name: "r1", Dir: filepath.Join(f.TempDir(), "data"), LogStore: LogWAL, NoSync: true,
		SegmentBytes: 8 << 10}.withDefaults()
	if err := b.open(); err != nil {
		f.Fatal(err)
	}
	id := b.disk.stable.rec.logID
	b.appendEntries(f, 1, 20, 300)
	b.appendEntries(f, 1, 30, 400) // more than a segment
	b.appendEntries(f, 2, 3, 100)
	b.close(f)
	good := make(map[string][]byte)
	for _, dir := range []string{b.cfg.Dir, filepath.Join(b.cfg.Dir, walName)} {
		list, err := os.ReadDir(dir)
		if err != nil {
			f.Fatal(err)
		}
		for _, e := range list {
			if e.IsDir() {
				continue
			}
			content, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				f.Fatal(err)
			}
			good[filepath.Join(dir, e.Name())] = content
		}
	}
	names := segmentPaths(f, b.cfg.Dir)
	lying := []byte{1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff} // an entry of 4 GiB
	f.Add(uint8(0), uint32(sector.Size+sector.HeaderSize), lying, true)
	f.Add(uint8(0), uint32(sector.Size+sector.HeaderSize+32), lying, true)
	f.Add(uint8(9), uint32(sector.Size+sector.HeaderSize+32), lying, true)
	f.Add(uint8(0), uint32(sector.HeaderSize+8), bytes.Repeat([]byte{0xff}, 8), true) // the length of the file
	f.Add(uint8(9), uint32(3000), []byte{1, 2, 3}, false)
	f.Add(uint8(1), uint32(3000), make([]byte, 1000), true)
	f.Add(uint8(0), uint32(0), []byte{}, true)
	f.Fuzz(func(t *testing.T, which uint8, at uint32, piece []byte, sealed bool) {
		name := names[int(which)%len(names)]
		for path, content := range good {
			bad := content
			if path == name {
				bad = bytes.Clone(content)
				from := int(at) % len(bad)
				copy(bad[from:], piece)
				if len(piece) == 0 {
					bad = bad[:from]
				}
				if sealed { // reaches the decoder behind the checksums
					reseal(bad, wal.FileSeed(id, filepath.Base(name)))
				}
			}
			if err := os.WriteFile(path, bad, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		d, err := openDisk(b.cfg, func(error) {})
		if err == nil {
			readLog(t, d)
			if err := d.Close(); err != nil {
				t.Errorf("closing: %v", err)
			}
		} else if !strings.Contains(err.Error(), filepath.Join(b.cfg.Dir, walName)) {
			t.Errorf("%s is damaged, and the error does not name it: %v", name, err)
		}
		runtime.ReadMemStats(&after)
		if took := after.TotalAlloc - before.TotalAlloc; took > 64<<20 {
			t.Errorf("%d bytes of memory for a file of %d", took, len(good[name]))
		}
	})
}

// reseal corrects the checksums of all sectors that are not empty.
func reseal(b []byte, seed uint32) {
	for at := 0; at+sector.Size <= len(b); at += sector.Size {
		s := b[at : at+sector.Size]
		if !bytes.Equal(s, make([]byte, sector.Size)) {
			binary.LittleEndian.PutUint32(s, sector.Checksum(s, seed, int64(at)))
		}
	}
}

// readLog reads an open log. Each entry is returned, or reported as damaged.
func readLog(t *testing.T, d *Data) {
	first, err := d.Log.FirstIndex()
	last, err2 := d.Log.LastIndex()
	if err != nil || err2 != nil {
		t.Fatalf("the log has opened, and its ends are not known: %v, %v", err, err2)
	}
	for i := first; i != 0 && i <= last && i < first+100; i++ {
		var l raft.Log
		if err := d.Log.GetLog(i, &l); err == nil && l.Index != i {
			t.Errorf("entry %d says that it is %d", i, l.Index)
		}
	}
}
