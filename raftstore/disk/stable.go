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

// ErrCorruptVotes is returned for a damaged stable store, which contains term and vote.
var ErrCorruptVotes = errors.New("raftstore: stable store is corrupt")

// keyRecord is the key of the record with all values of the stable store. The record has a
// checksum, so no single value can vanish or change.
var keyRecord = []byte("keelson.dev/stable")

// maxRecord is the maximum size in bytes of the record of the stable store. bbolt stores a record
// of at most this size in the root page. The meta page, which has a checksum, contains the number
// of the root page. An older version of the record therefore cannot be read instead of the current
// one unnoticed. boltcheck.go verifies that the record is in the root page.
const maxRecord = 900

// stableRecord is the content of the stable store. It is stored as the value of one key.
type stableRecord struct {
	owner  string       // name of the replica that owns the data
	kind   LogStoreKind // kind of the log store
	logID  uint32       // number of the journal or of the segmented log; 0 if the log has not been created yet
	values map[string][]byte
}

const recordVersion = 1

func (r stableRecord) encodeRecord() []byte {
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
		return r, fmt.Errorf("record has version %d, want version %d: %w", b[4], recordVersion, ErrCorruptVotes)
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
		return r, fmt.Errorf("record is truncated: %w", ErrCorruptVotes)
	}
	return r, nil
}

// RecordStore is the key-value store that contains the record of the stable store.
type RecordStore interface {
	Get(key []byte) ([]byte, error)
	Set(key, value []byte) error
}

// stableStore is a raft.StableStore that stores all values in one record.
type stableStore struct {
	records RecordStore
	name    string      // name of the file, for messages
	fail    func(error) // called after a failed write

	mu   sync.Mutex
	rec  stableRecord
	live bool // raft is running
}

// openStableStore returns the stable store with the record that inner contains. name is the path of
// the file, for messages. checkBolt must have verified the file. fail is called after a failed
// write.
func openStableStore(inner RecordStore, name string, fail func(error)) (*stableStore, error) {
	b, err := inner.Get(keyRecord)
	if err != nil && err.Error() == raftboltdb.ErrKeyNotFound.Error() {
		err = fmt.Errorf("it contains no record of a replica: %w", ErrCorruptVotes)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	rec, err := decodeRecord(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return &stableStore{records: inner, name: name, fail: fail, rec: rec}, nil
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
		return 0, fmt.Errorf("%s: %q is not a number: %w", s.name, key, ErrCorruptVotes)
	}
	return binary.BigEndian.Uint64(v), nil
}

// Set implements raft.StableStore.
func (s *stableStore) Set(key, value []byte) error {
	return s.update(func(r *stableRecord) { r.values[string(key)] = slices.Clone(value) })
}

// setPair sets the values of two keys in one write.
func (s *stableStore) setPair(k1 string, v1 []byte, k2 string, v2 []byte) error {
	return s.update(func(r *stableRecord) { r.values[k1], r.values[k2] = v1, slices.Clone(v2) })
}

// SetUint64 implements raft.StableStore.
func (s *stableStore) SetUint64(key []byte, value uint64) error {
	return s.Set(key, binary.BigEndian.AppendUint64(nil, value))
}

// update calls change to modify a copy of the record, and writes the copy durably. After a failed
// write it ends the calling goroutine, before raft can send a message. Otherwise raft would panic,
// because it could not write its term. The process therefore stays alive while the replica stops.
func (s *stableStore) update(change func(*stableRecord)) error {
	s.mu.Lock()
	rec := s.rec
	rec.values = maps.Clone(s.rec.values)
	change(&rec)
	err := s.writeRecord(rec)
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

func (s *stableStore) writeRecord(rec stableRecord) error {
	b := rec.encodeRecord()
	if len(b) > maxRecord {
		return fmt.Errorf("record of %d bytes, at most %d: names or addresses are too long", len(b), maxRecord)
	}
	return s.records.Set(keyRecord, b)
}

// currentRecord returns the current record, which the caller must not change.
func (s *stableStore) currentRecord() stableRecord {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec
}
