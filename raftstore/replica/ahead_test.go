package replica

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/hashicorp/raft"
	"pgregory.net/rapid"
)

// smallJournal makes files turn every few records.
const smallJournal = 640

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
	inner *plainStore
	store *aheadStore
	want  map[uint64]raft.Log
	first uint64
	last  uint64
}

func (b *aheadBed) open() error {
	s, err := openAhead(b.inner, b.inner, b.path, smallJournal, false)
	b.store = s
	return err
}

func (b *aheadBed) append(t fataler, term uint64, n, size int) {
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
	if err := b.store.StoreLogs(logs); err != nil {
		t.Fatalf("appending up to %d: %v", b.last, err)
	}
}

func (b *aheadBed) remove(t fataler, first, last uint64, compaction bool) {
	if err := b.store.DeleteRange(first, last); err != nil {
		t.Fatalf("deleting %d to %d: %v", first, last, err)
	}
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
	b := &aheadBed{path: filepath.Join(dir, "j"), inner: newPlainStore(), want: make(map[uint64]raft.Log)}
	if err := b.open(); err != nil {
		t.Fatalf("opening: %v", err)
	}
	return b
}

// Whatever is appended and deleted, a store opened again after a crash has it
// all; an append that the crash cut short is there or not.
func TestJournalOutlivesCrashes(t *testing.T) { // F17
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp("", "journal")
		if err != nil {
			t.Fatalf("%v", err)
		}
		defer os.RemoveAll(dir)
		b := newAheadBed(t, dir)
		defer func() { b.store.Close() }()
		term := uint64(1)
		for range rapid.IntRange(5, 60).Draw(t, "steps") {
			if err := b.store.await(); err != nil {
				t.Fatalf("%v", err)
			}
			before, files := b.last, b.read(t)
			appended := false
			switch step := rapid.IntRange(0, 9).Draw(t, "step"); {
			case step < 7:
				b.append(t, term, rapid.IntRange(1, 4).Draw(t, "n"), rapid.IntRange(0, 300).Draw(t, "size"))
				appended = true
			case b.first == 0:
			case step == 7: // a compaction
				first, err := b.store.FirstIndex() // raft begins where the store does
				if err != nil {
					t.Fatalf("%v", err)
				}
				b.remove(t, first, rapid.Uint64Range(b.first, b.last).Draw(t, "to"), true)
			case step == 8: // a new leader knows better
				b.remove(t, rapid.Uint64Range(b.first, b.last).Draw(t, "from"), b.last, false)
				term++
			}
			if rapid.IntRange(0, 3).Draw(t, "crash") != 0 {
				continue
			}
			b.store.Close()
			torn := appended && rapid.Bool().Draw(t, "torn") && b.tear(t, files)
			if err := b.open(); err != nil {
				t.Fatalf("opening after a crash (torn: %v): %v", torn, err)
			}
			if torn {
				for i := before + 1; i <= b.last; i++ {
					delete(b.want, i)
				}
				if b.last = before; b.first > b.last {
					b.first = 0
				}
			}
			if d := b.differs(b.last); d != "" {
				t.Fatalf("after a crash (torn: %v): %s", torn, d)
			}
		}
		if d := b.differs(b.last); d != "" {
			t.Fatalf("at the end: %s", d)
		}
	})
}

// tear undoes the writing of some sectors, as a power cut may. It reports
// whether anything was lost by that.
func (b *aheadBed) tear(t *rapid.T, before [2][]byte) bool {
	const sector = 512
	active := b.store.journal.active
	content := b.read(t)[active]
	old := append(before[active], make([]byte, max(0, len(content)-len(before[active])))...)
	lost := false
	for from := 0; from < len(content); from += sector {
		to := min(from+sector, len(content))
		if !bytes.Equal(content[from:to], old[from:to]) && rapid.Bool().Draw(t, "lost") {
			copy(content[from:to], old[from:to])
			lost = true
		}
	}
	if err := os.WriteFile(fmt.Sprintf("%s.%d", b.path, active), content, 0o600); err != nil {
		t.Fatalf("%v", err)
	}
	return lost
}

// read is what both files hold.
func (b *aheadBed) read(t fataler) (out [2][]byte) {
	for i := range out {
		var err error
		if out[i], err = os.ReadFile(fmt.Sprintf("%s.%d", b.path, i)); err != nil {
			t.Fatalf("%v", err)
		}
	}
	return out
}

// A flipped bit never changes what is read: it is reported, or it hit nothing
// that counts, or the very last record, which looks as if a crash had cut it short.
func TestJournalFindsFlippedBits(t *testing.T) {
	b := newAheadBed(t, t.TempDir())
	for i := range 14 {
		b.append(t, 1, 2, 20+7*i)
	}
	b.remove(t, b.last-1, b.last, false)
	b.append(t, 2, 1, 30)
	b.store.Close()
	reported := 0
	for file := range 2 {
		name := fmt.Sprintf("%s.%d", b.path, file)
		good, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for at := range good {
			bad := bytes.Clone(good)
			bad[at] ^= 1 << (at % 8)
			if err := os.WriteFile(name, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			copied := *b
			copied.inner = b.inner.clone()
			switch err := copied.open(); {
			case errors.Is(err, ErrCorruptLog):
				reported++
			case err != nil:
				t.Fatalf("byte %d of file %d: %v", at, file, err)
			default:
				if d := copied.differs(b.last); d != "" {
					if d = copied.differs(b.last - 1); d != "" {
						t.Fatalf("byte %d of file %d flipped: %s", at, file, d)
					}
				}
				copied.store.Close()
			}
		}
		if err := os.WriteFile(name, good, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if reported < 300 {
		t.Errorf("only %d flipped bits reported", reported)
	}
}

// A journal beside a store that it does not belong to is not read.
func TestJournalOfAnotherStore(t *testing.T) {
	b := newAheadBed(t, t.TempDir())
	b.append(t, 1, 3, 10)
	b.store.Close()
	b.inner = newPlainStore()
	if err := b.open(); err != nil {
		t.Fatal(err)
	}
	defer b.store.Close()
	if last, err := b.store.LastIndex(); last != 0 || err != nil {
		t.Errorf("holds entries up to %d, error %v", last, err)
	}
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
	s, err := openAhead(inner, inner, filepath.Join(t.TempDir(), "j"), smallJournal, true)
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
	if err := s.Close(); !errors.Is(err, inner.fail) {
		t.Errorf("closing: %v", err)
	}
}
