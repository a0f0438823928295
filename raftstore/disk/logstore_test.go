package disk

import (
	"errors"
	"fmt"
	"testing"

	"github.com/hashicorp/raft"
)

// faultyStore is a log in memory that records its deletions and can be made to fail.
type faultyStore struct {
	*raft.InmemStore
	deleted [][2]uint64
	fail    error
}

func (s *faultyStore) StoreLogs(logs []*raft.Log) error {
	if s.fail != nil {
		return s.fail
	}
	return s.InmemStore.StoreLogs(logs)
}

func (s *faultyStore) DeleteRange(first, last uint64) error {
	s.deleted = append(s.deleted, [2]uint64{first, last})
	return s.InmemStore.DeleteRange(first, last)
}

func newFaultyStore(t *testing.T, n uint64) (*faultyStore, *logStore, *error) {
	inner := &faultyStore{InmemStore: raft.NewInmemStore()}
	failed := new(error)
	s := newLogStore(inner, "file", func(err error) { *failed = err })
	for i := uint64(1); i <= n; i++ {
		if err := s.StoreLog(&raft.Log{Index: i, Term: 1, Data: []byte(fmt.Sprint(i))}); err != nil {
			t.Fatal(err)
		}
	}
	return inner, s, failed
}

func TestLogIsShortenedInwards(t *testing.T) {
	inner, s, _ := newFaultyStore(t, 1000)
	if err := s.DeleteRange(401, 1000); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(inner.deleted); got != "[[745 1000] [489 744] [401 488]]" {
		t.Errorf("suffix deleted as %s", got)
	}
	inner.deleted = nil
	if err := s.DeleteRange(1, 300); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(inner.deleted); got != "[[1 256] [257 300]]" {
		t.Errorf("prefix deleted as %s", got)
	}
	var l raft.Log
	for i, want := range map[uint64]bool{300: false, 301: true, 400: true, 401: false} {
		if err := s.GetLog(i, &l); (err == nil) != want {
			t.Errorf("entry %d: %v", i, err)
		}
	}
	// An entry that replaces a deleted one is returned.
	if err := s.StoreLog(&raft.Log{Index: 401, Term: 2, Data: []byte("new")}); err != nil {
		t.Fatal(err)
	}
	if err := s.GetLog(401, &l); err != nil || l.Term != 2 || string(l.Data) != "new" || l.Extensions != nil {
		t.Errorf("entry 401: %+v, error %v", l, err)
	}
}

func TestFirstFailedWriteIsTheLast(t *testing.T) {
	inner, s, failed := newFaultyStore(t, 3)
	inner.fail = errors.New("disk full")
	if err := s.StoreLog(&raft.Log{Index: 4}); !errors.Is(err, inner.fail) {
		t.Errorf("failed write: %v", err)
	}
	inner.fail = nil
	if err := s.StoreLog(&raft.Log{Index: 4}); err == nil {
		t.Error("write after a failed one is accepted")
	}
	if *failed == nil {
		t.Error("replica is not told")
	}
}

func TestFlippedBitsAreFound(t *testing.T) {
	inner, s, failed := newFaultyStore(t, 5)
	for name, spoil := range map[string]func(*raft.Log){
		"data":     func(l *raft.Log) { l.Data = []byte("x") },
		"term":     func(l *raft.Log) { l.Term++ },
		"type":     func(l *raft.Log) { l.Type = raft.LogNoop },
		"checksum": func(l *raft.Log) { l.Extensions = nil },
	} {
		var good raft.Log
		if err := inner.GetLog(3, &good); err != nil {
			t.Fatal(err)
		}
		bad := good
		spoil(&bad)
		if err := inner.StoreLog(&bad); err != nil {
			t.Fatal(err)
		}
		fresh := newLogStore(inner, "file", func(err error) { *failed = err })
		if _, err := fresh.verifyEntries(0); !errors.Is(err, ErrCorruptLog) || !errors.Is(*failed, ErrCorruptLog) {
			t.Errorf("spoiled %s: %v", name, err)
		}
		if err := inner.StoreLog(&good); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.verifyEntries(0); err != nil {
		t.Errorf("whole log: %v", err)
	}
	// A gap is damage, unless a snapshot covers it.
	if err := inner.DeleteRange(1, 2); err != nil {
		t.Fatal(err)
	}
	if err := inner.StoreLog(&raft.Log{Index: 9, Term: 1}); err != nil {
		t.Fatal(err)
	}
	if err := s.StoreLog(&raft.Log{Index: 9, Term: 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.verifyEntries(5); !errors.Is(err, ErrCorruptLog) {
		t.Errorf("gap: %v", err)
	}
	if _, err := s.verifyEntries(8); err != nil {
		t.Errorf("gap covered by a snapshot: %v", err)
	}
}

func TestCacheIsBounded(t *testing.T) {
	_, s, _ := newFaultyStore(t, 0)
	big := make([]byte, 1<<20)
	for i := uint64(1); i <= 50; i++ {
		if err := s.StoreLog(&raft.Log{Index: i, Data: big}); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.cache) == 0 || s.bytes > cacheBytes {
		t.Errorf("%d entries, %d bytes in memory", len(s.cache), s.bytes)
	}
	var l raft.Log
	for _, i := range []uint64{1, 50} {
		if err := s.GetLog(i, &l); err != nil || l.Index != i {
			t.Errorf("entry %d: %+v, error %v", i, l.Index, err)
		}
	}
}
