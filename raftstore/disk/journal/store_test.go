package journal

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"sync"
	"testing"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore/disk/sector"
)

// smallJournal is the size of a file that has room for a few records.
const smallJournal = 8 * sector.Size

// plainStore is a log in memory that, like bbolt, allows gaps.
type plainStore struct {
	*raft.InmemStore // for keys; the log is in logs
	mu               sync.Mutex
	logs             map[uint64]raft.Log
}

func newPlainStore() *plainStore {
	return &plainStore{InmemStore: raft.NewInmemStore(), logs: make(map[uint64]raft.Log)}
}

func (s *plainStore) clone() *plainStore {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &plainStore{InmemStore: s.InmemStore, logs: maps.Clone(s.logs)}
}

func (s *plainStore) findBound(better func(a, b uint64) bool) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var best uint64
	for i := range s.logs {
		if best == 0 || better(i, best) {
			best = i
		}
	}
	return best, nil
}

func (s *plainStore) FirstIndex() (uint64, error) {
	return s.findBound(func(a, b uint64) bool { return a < b })
}

func (s *plainStore) LastIndex() (uint64, error) {
	return s.findBound(func(a, b uint64) bool { return a > b })
}

func (s *plainStore) GetLog(i uint64, out *raft.Log) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, ok := s.logs[i]
	if !ok {
		return raft.ErrLogNotFound
	}
	*out = l
	return nil
}

func (s *plainStore) StoreLogs(logs []*raft.Log) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range logs {
		s.logs[l.Index] = *l
	}
	return nil
}

func (s *plainStore) DeleteRange(first, last uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.logs, func(i uint64, _ raft.Log) bool { return first <= i && i <= last })
	return nil
}

// storeEnv is a Store and its expected content.
type storeEnv struct {
	path  string
	layer durable.FS
	inner *plainStore
	store *Store
	want  map[uint64]raft.Log
	first uint64
	last  uint64
}

func (b *storeEnv) open() error {
	s, err := Open(b.inner, b.layer, b.path, 7, smallJournal, nil)
	b.store = s
	return err
}

func (b *storeEnv) appendEntries(t fataler, term uint64, n, size int) {
	if err := b.tryAppend(term, n, size); err != nil {
		t.Fatalf("appending up to %d: %v", b.last, err)
	}
}

func (b *storeEnv) tryAppend(term uint64, n, size int) error {
	var logs []*raft.Log
	for range n {
		b.last++
		l := raft.Log{Index: b.last, Term: term, Data: bytes.Repeat([]byte{byte(b.last)}, size),
			Extensions: []byte{1, 2, 3, byte(term)}}
		b.want[l.Index] = l
		logs = append(logs, &l)
	}
	if b.first == 0 {
		b.first = logs[0].Index
	}
	return b.store.StoreLogs(logs)
}

func (b *storeEnv) removeEntries(t fataler, first, last uint64, compaction bool) {
	if err := b.tryRemove(first, last, compaction); err != nil {
		t.Fatalf("deleting %d to %d: %v", first, last, err)
	}
}

func (b *storeEnv) tryRemove(first, last uint64, compaction bool) error {
	err := b.store.DeleteRange(first, last)
	for i := first; i <= last; i++ {
		delete(b.want, i)
	}
	// Compacted entries are not written again. Entries that a new leader replaces are.
	if compaction {
		b.first = last + 1
	} else {
		b.last = first - 1
	}
	if b.first > b.last {
		b.first = 0
	}
	return err
}

type fataler interface {
	Fatalf(format string, args ...any)
}

// differs describes the first difference between the store and its expected content; "" if there is
// none. The store may have earlier entries, without a gap.
func (b *storeEnv) differs(wantLast uint64) string {
	first, err := b.store.FirstIndex()
	if err != nil {
		return err.Error()
	}
	last, err := b.store.LastIndex()
	if err != nil {
		return err.Error()
	}
	if b.first != 0 && b.first <= wantLast && (last != wantLast || first > b.first || first == 0) {
		return fmt.Sprintf("reaches from %d to %d, want %d to %d", first, last, b.first, wantLast)
	}
	for i := first; i != 0 && i <= last; i++ {
		var got raft.Log
		if err := b.store.GetLog(i, &got); err != nil {
			return fmt.Sprintf("entry %d: %v", i, err)
		}
		if w, ok := b.want[i]; ok && (got.Term != w.Term || !bytes.Equal(got.Data, w.Data) ||
			!bytes.Equal(got.Extensions, w.Extensions)) {
			return fmt.Sprintf("entry %d is %d %q, want %d %q", i, got.Term, got.Data, w.Term, w.Data)
		}
	}
	return ""
}

func newStoreEnv(t fataler, dir string) *storeEnv {
	return newStoreEnvOn(t, dir, durable.OS{NoSync: true})
}

func newStoreEnvOn(t fataler, dir string, layer durable.FS) *storeEnv {
	b := &storeEnv{path: filepath.Join(dir, "j"), layer: layer, inner: newPlainStore(), want: make(map[uint64]raft.Log)}
	err := Create(b.layer, b.path, smallJournal)
	if err == nil {
		err = b.open()
	}
	if err != nil {
		t.Fatalf("opening: %v", err)
	}
	return b
}

// lateStore fails when fail is set.
type lateStore struct {
	*plainStore
	fail error
}

func (s *lateStore) StoreLogs(logs []*raft.Log) error {
	if s.fail != nil {
		return s.fail
	}
	return s.plainStore.StoreLogs(logs)
}

func TestFailedMoveStopsAppending(t *testing.T) {
	inner := &lateStore{plainStore: newPlainStore()}
	path := filepath.Join(t.TempDir(), "j")
	if err := Create(durable.OS{}, path, smallJournal); err != nil {
		t.Fatal(err)
	}
	told := make(chan error, 1)
	s, err := Open(inner, durable.OS{}, path, 7, smallJournal, func(err error) { told <- err })
	if err != nil {
		t.Fatal(err)
	}
	inner.fail = errors.New("disk full")
	for i := uint64(1); i < 100 && err == nil; i++ {
		err = s.StoreLog(&raft.Log{Index: i, Term: 1, Data: make([]byte, 100)})
	}
	if !errors.Is(err, inner.fail) {
		t.Errorf("appending: %v", err)
	}
	var l raft.Log
	if err := s.GetLog(1, &l); err != nil || l.Index != 1 {
		t.Errorf("entry 1 is not readable: %v", err)
	}
	// onFailure is called without a further append.
	if err := <-told; !errors.Is(err, inner.fail) {
		t.Errorf("told: %v", err)
	}
	if err := s.Close(); !errors.Is(err, inner.fail) {
		t.Errorf("closing: %v", err)
	}
}
