package disk

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"sync"
	"testing"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore/disk/platter"
)

// smallJournal makes files turn every few records.
const smallJournal = 8 * sectorBytes

// plainStore is a log in memory without rules of its own, as bbolt is on disk.
type plainStore struct {
	*raft.InmemStore // of keys; the log is ours
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

func (s *plainStore) bound(better func(a, b uint64) bool) (uint64, error) {
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
	return s.bound(func(a, b uint64) bool { return a < b })
}

func (s *plainStore) LastIndex() (uint64, error) {
	return s.bound(func(a, b uint64) bool { return a > b })
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

// aheadBed is a journalled log beside a plain one that says what must be there.
type aheadBed struct {
	path  string
	layer platter.Layer
	inner *plainStore
	store *aheadStore
	want  map[uint64]raft.Log
	first uint64
	last  uint64
}

func (b *aheadBed) open() error {
	s, err := openAhead(b.inner, b.layer, b.path, 7, smallJournal)
	b.store = s
	return err
}

func (b *aheadBed) append(t fataler, term uint64, n, size int) {
	if err := b.tryAppend(term, n, size); err != nil {
		t.Fatalf("appending up to %d: %v", b.last, err)
	}
}

func (b *aheadBed) tryAppend(term uint64, n, size int) error {
	var logs []*raft.Log
	for range n {
		b.last++
		l := raft.Log{Index: b.last, Term: term, Data: bytes.Repeat([]byte{byte(b.last)}, size), Extensions: []byte{1, 2, 3, byte(term)}}
		b.want[l.Index] = l
		logs = append(logs, &l)
	}
	if b.first == 0 {
		b.first = logs[0].Index
	}
	return b.store.StoreLogs(logs)
}

func (b *aheadBed) remove(t fataler, first, last uint64, compaction bool) {
	if err := b.tryRemove(first, last, compaction); err != nil {
		t.Fatalf("deleting %d to %d: %v", first, last, err)
	}
}

func (b *aheadBed) tryRemove(first, last uint64, compaction bool) error {
	err := b.store.DeleteRange(first, last)
	for i := first; i <= last; i++ {
		delete(b.want, i)
	}
	// What was compacted is not written again; what a new leader took back is.
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

// differs says how the store differs from what is wanted; "" when it does not.
// Entries may be left at the beginning, where they are the old ones, without a gap.
func (b *aheadBed) differs(wantLast uint64) string {
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
		if w, ok := b.want[i]; ok && (got.Term != w.Term || !bytes.Equal(got.Data, w.Data) || !bytes.Equal(got.Extensions, w.Extensions)) {
			return fmt.Sprintf("entry %d is %d %q, want %d %q", i, got.Term, got.Data, w.Term, w.Data)
		}
	}
	return ""
}

func newAheadBed(t fataler, dir string) *aheadBed {
	return newAheadBedOn(t, dir, platter.OS{NoSync: true})
}

func newAheadBedOn(t fataler, dir string, layer platter.Layer) *aheadBed {
	b := &aheadBed{path: filepath.Join(dir, "j"), layer: layer, inner: newPlainStore(), want: make(map[uint64]raft.Log)}
	err := makeJournal(b.layer, b.path, smallJournal)
	if err == nil {
		err = b.open()
	}
	if err != nil {
		t.Fatalf("opening: %v", err)
	}
	return b
}

// lateStore fails from some moment on.
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
	if err := makeJournal(platter.OS{}, path, smallJournal); err != nil {
		t.Fatal(err)
	}
	s, err := openAhead(inner, platter.OS{}, path, 7, smallJournal)
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan error, 1)
	s.halt = func(err error) { told <- err }
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
	// The replica need not append anything to hear of it.
	if err := <-told; !errors.Is(err, inner.fail) {
		t.Errorf("told: %v", err)
	}
	if err := s.Close(); !errors.Is(err, inner.fail) {
		t.Errorf("closing: %v", err)
	}
}
