package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"runtime"
	"slices"
	"sync"

	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
)

// ErrCorruptVotes reports a stable store, which holds term and vote, that is
// not what was written.
var ErrCorruptVotes = errors.New("raftstore: stable store is corrupt")

// keyRecord holds all that the stable store keeps, in one record with a
// checksum: a value cannot vanish or change without the others.
var keyRecord = []byte("keelson.dev/stable")

// maxRecord keeps the record so small that bbolt puts it into the root page
// itself, which its checksummed meta page names: no damage can put a record of
// yesterday in its place. boltcheck.go sees to it that it is there.
const maxRecord = 900

// stableRecord is what the stable store keeps.
type stableRecord struct {
	owner  string       // name of the replica
	kind   LogStoreKind // of the log store
	logID  uint32       // of the journal or the segments; 0 = not made yet
	values map[string][]byte
}

const recordVersion = 1

func (r stableRecord) encode() []byte {
	text := func(b []byte, s string) []byte {
		return append(binary.AppendUvarint(b, uint64(len(s))), s...)
	}
	b := append(make([]byte, 4, 256), recordVersion)
	b = text(text(b, r.owner), string(r.kind))
	b = binary.LittleEndian.AppendUint32(b, r.logID)
	for _, k := range slices.Sorted(maps.Keys(r.values)) {
		b = text(text(b, k), string(r.values[k]))
	}
	binary.LittleEndian.PutUint32(b, crc32.Checksum(b[4:], castagnoli))
	return b
}

func decodeRecord(b []byte) (stableRecord, error) {
	r := stableRecord{values: make(map[string][]byte)}
	if len(b) < 5 || binary.LittleEndian.Uint32(b) != crc32.Checksum(b[4:], castagnoli) {
		return r, fmt.Errorf("checksum of the record does not match: %w", ErrCorruptVotes)
	}
	if b[4] != recordVersion {
		return r, fmt.Errorf("record of version %d, this is version %d: %w", b[4], recordVersion, ErrCorruptVotes)
	}
	b = b[5:]
	bad := false
	text := func() string {
		n, used := binary.Uvarint(b)
		if used <= 0 || n > uint64(len(b)-used) {
			bad, b = true, nil
			return ""
		}
		s := string(b[used : used+int(n)])
		b = b[used+int(n):]
		return s
	}
	r.owner, r.kind = text(), LogStoreKind(text())
	if len(b) < 4 {
		bad = true
	} else {
		r.logID, b = binary.LittleEndian.Uint32(b), b[4:]
	}
	for !bad && len(b) > 0 {
		k := text()
		r.values[k] = []byte(text())
	}
	if bad || r.owner == "" {
		return r, fmt.Errorf("record ends too soon: %w", ErrCorruptVotes)
	}
	return r, nil
}

// RecordKeeper is where the record lies.
type RecordKeeper interface {
	Get(key []byte) ([]byte, error)
	Set(key, value []byte) error
}

// stableStore is a raft.StableStore.
type stableStore struct {
	inner RecordKeeper
	name  string      // the file, for messages
	fail  func(error) // called when a write failed

	mu   sync.Mutex
	rec  stableRecord
	live bool // raft's own goroutines call
}

// openStable reads the record of a file that checkBolt has found whole.
func openStable(inner RecordKeeper, name string, fail func(error)) (*stableStore, error) {
	b, err := inner.Get(keyRecord)
	if err != nil && err.Error() == raftboltdb.ErrKeyNotFound.Error() {
		err = fmt.Errorf("it holds no record of a replica: %w", ErrCorruptVotes)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	rec, err := decodeRecord(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return &stableStore{inner: inner, name: name, fail: fail, rec: rec}, nil
}

// Get implements raft.StableStore.
func (s *stableStore) Get(key []byte) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok := s.rec.values[string(key)]
	if !ok {
		return nil, raftboltdb.ErrKeyNotFound
	}
	return slices.Clone(v), nil
}

// GetUint64 implements raft.StableStore.
func (s *stableStore) GetUint64(key []byte) (uint64, error) {
	v, err := s.Get(key)
	if err != nil {
		return 0, err
	}
	if len(v) != 8 {
		return 0, fmt.Errorf("%s: %q is no number: %w", s.name, key, ErrCorruptVotes)
	}
	return binary.BigEndian.Uint64(v), nil
}

// Set implements raft.StableStore.
func (s *stableStore) Set(key, value []byte) error {
	return s.change(func(r *stableRecord) { r.values[string(key)] = slices.Clone(value) })
}

// setBoth sets two keys at once.
func (s *stableStore) setBoth(k1 string, v1 []byte, k2 string, v2 []byte) error {
	return s.change(func(r *stableRecord) { r.values[k1], r.values[k2] = v1, slices.Clone(v2) })
}

// SetUint64 implements raft.StableStore.
func (s *stableStore) SetUint64(key []byte, value uint64) error {
	return s.Set(key, binary.BigEndian.AppendUint64(nil, value))
}

// change makes a change durable. raft panics when its term cannot be written;
// so that the process lives on with a replica that has stopped, the goroutine
// ends here instead, before it can say a word to anybody.
func (s *stableStore) change(f func(*stableRecord)) error {
	s.mu.Lock()
	rec := s.rec
	rec.values = maps.Clone(s.rec.values)
	f(&rec)
	err := s.write(rec)
	if err == nil {
		s.rec = rec
	}
	live := s.live
	s.mu.Unlock()
	if err == nil {
		return nil
	}
	err = fmt.Errorf("%s: writing term and vote: %w", s.name, err)
	s.fail(err)
	if live {
		runtime.Goexit()
	}
	return err
}

func (s *stableStore) write(rec stableRecord) error {
	b := rec.encode()
	if len(b) > maxRecord {
		return fmt.Errorf("record of %d bytes, at most %d: names or addresses are too long", len(b), maxRecord)
	}
	return s.inner.Set(keyRecord, b)
}

// record is what the store holds.
func (s *stableStore) record() stableRecord {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec
}
