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

	"keelson.dev/keelson/internal/durable/durabletest"
	"keelson.dev/keelson/raftstore/disk/wal"
)

// The decoders of files accept any bytes. They return an error or a value that can be encoded
// again. They never panic, and do not allocate memory in proportion to a wrong length.

func FuzzSnapshotFile(f *testing.F) {
	seals, err := openSealer(filepath.Join(f.TempDir(), dataKeysName), nil)
	if err != nil {
		f.Fatal(err)
	}
	s, err := openSnapshotStore(Config{Dir: f.TempDir()}.withDefaults(), seals, func(error) {})
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
	good, err := os.ReadFile(s.filePath(sink.ID()))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Fuzz(func(t *testing.T, content []byte) {
		name := s.filePath(sink.ID())
		s := *s
		s.files = durabletest.Memory{name: fixHeader(content)}
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

// FuzzSealedFrames: every change of encrypted frames is detected.
func FuzzSealedFrames(f *testing.F) {
	head := encodeHeader("keelfuzz", []byte("{}"))
	aead := deriveFileKey(make([]byte, keyBytes), nil, head, "fuzz")
	seal := func(content []byte) []byte {
		var out bytes.Buffer
		fw, err := newFrameWriter(&out, nil, aead)
		if err == nil {
			_, err = fw.Write(content)
		}
		if err == nil {
			err = fw.writeEnd()
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
	keys := newTestKeyring("k1")
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
			again = append(again, formatKeyLine(key.id, key.secret[:])...)
		}
		l, err := parseKeyring(again)
		if err != nil || l.Current() != k.Current() || len(l.keys) != len(k.keys) {
			t.Errorf("written again: %v, %v", l, err)
		}
	})
}

func FuzzSmallRecords(f *testing.F) {
	f.Add(stableRecord{owner: "r1", kind: LogBolt, logID: 7,
		values: map[string][]byte{"CurrentTerm": make([]byte, 8)}}.encodeRecord())
	f.Add(encodeDataKeys(map[uint32]wrappedKey{3: {kek: "k1", sealed: make([]byte, 60)}}, 4))
	f.Add(append(make([]byte, 4), `{"NextSegmentID":3,"Segments":[{"ID":1}]}`...))
	f.Add(append(make([]byte, 4),
		`{"NextSegmentID":3,"Segments":[{"ID":1,"BaseIndex":7}],`+
			`"Places":{"00000000000000000007-0000000000000001.wal":{"File":"001.wal","From":5}},`+
			`"Spares":["002.wal"],"Next":9}`...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < 4 {
			return
		}
		binary.LittleEndian.PutUint32(b, crc32.Checksum(b[4:], castagnoli))
		if r, err := decodeRecord(bytes.Clone(b)); err == nil {
			if again, err := decodeRecord(r.encodeRecord()); err != nil || again.owner != r.owner ||
				len(again.values) != len(r.values) {
				t.Errorf("record written again: %+v, error %v", again, err)
			}
		}
		if keys, next, err := parseDataKeys(bytes.Clone(b)); err == nil {
			if again, n, err := parseDataKeys(encodeDataKeys(keys, next)); err != nil || n != next ||
				len(again) != len(keys) {
				t.Errorf("keys written again: %v, error %v", again, err)
			}
		}
		_, _ = wal.ParseList(b, 0)
	})
}

// FuzzBoltFile: bbolt can read and extend every file that checkBolt accepts.
func FuzzBoltFile(f *testing.F) {
	dir := f.TempDir()
	b := newDiskEnv(f, dir, LogBolt, nil)
	b.appendEntries(f, 1, 20, 3000)
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
			_ = store.GetLog(i, &l) // entries have their own checksums
		}
		if err := store.StoreLogs([]*raft.Log{{Index: last + 1, Data: make([]byte, 10_000)}}); err != nil {
			t.Fatalf("found whole, and bbolt does not write it: %v", err)
		}
	})
}
