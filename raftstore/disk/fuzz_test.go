package disk

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore/disk/platter"
)

// The decoders of what lies on the disk take any bytes: an error, or what can
// be written again, and never a panic or memory in proportion to a lying length.

func FuzzJournal(f *testing.F) {
	dir := f.TempDir()
	b := newAheadBed(f, dir)
	b.append(f, 1, 3, 100)
	b.append(f, 1, 2, 900)
	b.remove(f, 3, 5, false)
	for _, c := range b.read(f) {
		f.Add(c)
	}
	b.store.Close()
	f.Fuzz(func(t *testing.T, content []byte) {
		// With right checksums, so that what is behind them is reached.
		for at := 0; at+sectorBytes <= len(content); at += sectorBytes {
			s := content[at : at+sectorBytes]
			if !bytes.Equal(s, make([]byte, sectorBytes)) {
				binary.LittleEndian.PutUint32(s, sectorSum(s, 7, int64(at)))
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

func FuzzSnapshotFile(f *testing.F) {
	seals, err := openSealer(filepath.Join(f.TempDir(), sealName), nil)
	if err != nil {
		f.Fatal(err)
	}
	s, err := openSnapshots(Config{Dir: f.TempDir()}.withDefaults(), seals, func(error) {})
	if err != nil {
		f.Fatal(err)
	}
	sink, err := s.Create(1, 7, 2, raft.Configuration{}, 1, nil)
	if err != nil {
		f.Fatal(err)
	}
	sink.Write(bytes.Repeat([]byte("state"), 100))
	if err := sink.Close(); err != nil {
		f.Fatal(err)
	}
	good, err := os.ReadFile(s.path(sink.ID()))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Fuzz(func(t *testing.T, content []byte) {
		name := s.path(sink.ID())
		s := *s
		s.files = platter.Memory{name: fixHeader(content)}
		_, r, err := s.Open(sink.ID())
		if err != nil {
			return
		}
		defer r.Close()
		if n, err := io.Copy(io.Discard, r); err == nil && n > int64(len(content)) {
			t.Errorf("%d bytes out of %d", n, len(content))
		}
	})
}

// FuzzSealedFrames: no change to sealed frames goes unnoticed.
func FuzzSealedFrames(f *testing.F) {
	head := encodeHeader("keelfuzz", []byte("{}"))
	aead := fileKey(make([]byte, keyBytes), nil, head, "fuzz")
	seal := func(content []byte) []byte {
		var out bytes.Buffer
		fw, err := newFrameWriter(&out, nil, aead)
		if err == nil {
			_, err = fw.Write(content)
		}
		if err == nil {
			err = fw.finish()
		}
		if err != nil {
			f.Fatal(err)
		}
		return out.Bytes()
	}
	content := bytes.Repeat([]byte("abc"), frameBytes)
	good := seal(content)
	f.Add(good[:200], 0, 0)
	f.Add([]byte{1}, 3, 1)
	f.Add(good[4+frameBytes+gcmTag:], 0, len(good))
	f.Fuzz(func(t *testing.T, piece []byte, at, drop int) {
		if at < 0 || at > len(good) || drop < 0 || drop > len(good)-at {
			return
		}
		bad := append(append(bytes.Clone(good[:at]), piece...), good[at+drop:]...)
		got, err := io.ReadAll(newFrameReader(bytes.NewReader(bad), nil, aead))
		if err == nil && !bytes.Equal(got, content) {
			t.Errorf("%d bytes are taken for the content", len(got))
		}
	})
}

func FuzzBackup(f *testing.F) {
	keys := testRing("k1")
	f.Add(smallBackup(f, "ours", nil))
	f.Add(smallBackup(f, "ours", keys))
	f.Fuzz(func(t *testing.T, content []byte) {
		_, _ = VerifyBackup(bytes.NewReader(fixHeader(content)), keys)
	})
}

func FuzzKeyFile(f *testing.F) {
	f.Add([]byte("k1 AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n"))
	f.Add([]byte("# keys\nclear\nk2 AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n"))
	f.Fuzz(func(t *testing.T, content []byte) {
		k, err := parseKeyring(content)
		if err != nil {
			return
		}
		var again []byte
		if k.clear {
			again = append(again, clearLine+"\n"...)
		}
		for _, key := range k.keys {
			again = append(again, keyLine(key.id, key.secret[:])...)
		}
		l, err := parseKeyring(again)
		if err != nil || l.Current() != k.Current() || len(l.keys) != len(k.keys) {
			t.Errorf("written again: %v, %v", l, err)
		}
	})
}

func FuzzSmallRecords(f *testing.F) {
	f.Add(stableRecord{owner: "r1", kind: LogBolt, logID: 7, values: map[string][]byte{"CurrentTerm": make([]byte, 8)}}.encode())
	f.Add(encodeWrapped(map[uint32]wrappedKey{3: {kek: "k1", sealed: make([]byte, 60)}}, 4))
	f.Add(append(make([]byte, 4), `{"NextSegmentID":3,"Segments":[{"ID":1}]}`...))
	f.Add(append(make([]byte, 4), `{"NextSegmentID":3,"Segments":[{"ID":1,"BaseIndex":7}],"Places":{"00000000000000000007-0000000000000001.wal":{"File":"001.wal","From":5}},"Spares":["002.wal"],"Next":9}`...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < 4 {
			return
		}
		binary.LittleEndian.PutUint32(b, crc32.Checksum(b[4:], castagnoli))
		if r, err := decodeRecord(bytes.Clone(b)); err == nil {
			if again, err := decodeRecord(r.encode()); err != nil || again.owner != r.owner || len(again.values) != len(r.values) {
				t.Errorf("record written again: %+v, error %v", again, err)
			}
		}
		if keys, next, err := parseWrapped(bytes.Clone(b)); err == nil {
			if again, n, err := parseWrapped(encodeWrapped(keys, next)); err != nil || n != next || len(again) != len(keys) {
				t.Errorf("keys written again: %v, error %v", again, err)
			}
		}
		_, _ = parseWALMeta(b, 0)
	})
}

// FuzzBoltFile: a file of any content is refused or whole enough for bbolt to read all of it.
func FuzzBoltFile(f *testing.F) {
	dir := f.TempDir()
	b := newDiskBed(f, dir, LogBolt, nil)
	b.append(f, 1, 20, 3000)
	b.close(f)
	if err := b.open(); err != nil {
		f.Fatal(err)
	}
	b.close(f)
	good, err := os.ReadFile(filepath.Join(b.cfg.Dir, boltName))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(uint32(0), []byte{1})
	f.Add(uint32(4096+16), []byte("keel"))
	f.Fuzz(func(t *testing.T, at uint32, piece []byte) {
		from := int(at) % len(good)
		bad := bytes.Clone(good)
		copy(bad[from:], piece)
		path := filepath.Join(t.TempDir(), boltName)
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := checkBolt(path); err != nil {
			return
		}
		store, err := openBolt(path, true)
		if err != nil {
			t.Fatalf("found whole, and bbolt does not open it: %v", err)
		}
		defer store.Close()
		first, err := store.FirstIndex()
		last, err2 := store.LastIndex()
		if err != nil || err2 != nil {
			t.Fatalf("found whole, and bbolt says %v, %v", err, err2)
		}
		var l raft.Log
		for i := first; i != 0 && i <= last && i < first+1000; i++ {
			_ = store.GetLog(i, &l) // entries have checksums of their own
		}
		if err := store.StoreLogs([]*raft.Log{{Index: last + 1, Data: make([]byte, 10_000)}}); err != nil {
			t.Fatalf("found whole, and bbolt does not write it: %v", err)
		}
	})
}
