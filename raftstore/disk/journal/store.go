package journal

import (
	"errors"
	"fmt"
	"sync"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore/disk/sector"
)

// Store is a raft.LogStore in front of an inner log store with expensive appends: each append is a
// transaction with two flushes and several pages. An append to Store is durable when it is in the
// journal. The entries are moved to the inner store later, thousands of them in a few transactions.
// Reads find an entry in the journal or in the inner store.
//
// A record of the journal is complete: it contains entries with their indexes, or a deleted range.
// After a crash all records are therefore applied again in order, even if the inner store already
// contains some of the changes.
type Store struct {
	inner     raft.LogStore
	journal   *journal
	onFailure func(error) // called once, if entries cannot be moved to the inner store

	write sync.Mutex // held while the journal is written; taken before mu

	mu      sync.Mutex
	pending map[uint64]*raft.Log // entries that may not be in the inner store yet, by index
	young   []*raft.Log          // the entries in the active file, oldest first
	failed  error                // error of the first failed move; all later appends fail
	moving  chan struct{}        // closed when the current move to the inner store has ended; nil if there was no move
}

// moveBytes is the maximum size of the entries' data in one transaction of the inner store, in
// bytes. A single larger entry has a transaction of its own.
const moveBytes = 1 << 20

// Open opens the journal at path and applies its records to the inner store. Each file of the
// journal has limit bytes. id is the number of the log: a journal with another number is damaged.
// If the inner store lacks entries that were already moved to it, the error is
// sector.ErrCorruptLog.
//
// onFailure is called once, from another goroutine, if entries cannot be moved to the inner store.
// After that all appends fail.
func Open(inner raft.LogStore, files durable.FS, path string, id uint32, limit int64,
	onFailure func(error)) (*Store, error) {
	j, changes, err := openJournal(files, path, id, limit)
	if err != nil {
		return nil, err
	}
	s := &Store{inner: inner, journal: j, onFailure: onFailure, pending: make(map[uint64]*raft.Log)}
	if err := s.applyChanges(changes); err != nil {
		j.Close()
		return nil, fmt.Errorf("%s: applying its records: %w", path, err)
	}
	last, err := inner.LastIndex()
	switch {
	case err != nil:
	case last < j.top:
		err = fmt.Errorf("the log ends with entry %d, but entry %d was written: %w", last, j.top, sector.ErrCorruptLog)
	case len(changes) > 0 || last != j.top:
		j.top = last
		err = j.retireBoth()
	}
	if err != nil {
		j.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

// applyChanges applies changes, which are the content of the journal, to the inner store. It may be
// repeated after a crash: changes that the inner store already contains have no effect.
func (s *Store) applyChanges(changes []change) error {
	var entries []*raft.Log
	for _, c := range changes {
		if c.entries != nil {
			entries = append(entries, c.entries...)
			continue
		}
		if err := s.storeInner(entries); err != nil {
			return err
		}
		entries = nil
		if c.top != 0 {
			continue
		}
		if err := s.inner.DeleteRange(c.first, c.last); err != nil {
			return err
		}
	}
	return s.storeInner(entries)
}

// StoreLog implements raft.LogStore.
func (s *Store) StoreLog(l *raft.Log) error { return s.StoreLogs([]*raft.Log{l}) }

// StoreLogs implements raft.LogStore. The caller must not change the entries or their data
// afterwards.
func (s *Store) StoreLogs(logs []*raft.Log) error {
	if len(logs) == 0 {
		return nil
	}
	s.write.Lock()
	defer s.write.Unlock()
	for len(logs) > 0 {
		n, err := s.reserveRecord(logs)
		if err != nil {
			return err
		}
		if n == 0 {
			n, err = 1, s.storeDirectly(logs[:1])
		} else {
			err = s.appendRecord(logs[:n])
		}
		if err != nil {
			return err
		}
		logs = logs[n:]
	}
	return nil
}

// reserveRecord returns how many of the given entries, counted from the first one, fit into the
// next record. It switches to the other file if not all entries fit into the active file. It
// returns 0 if the first entry is longer than a file. The caller holds s.write.
func (s *Store) reserveRecord(logs []*raft.Log) (int, error) {
	size := entriesBytes(logs)
	if s.journal.fitsActiveFile(size) {
		return len(logs), nil
	}
	if s.journal.end > 0 {
		if err := s.moveActiveFile(); err != nil {
			return 0, err
		}
	}
	for n := len(logs); n > 0; n-- {
		if s.journal.fitsActiveFile(size) {
			return n, nil
		}
		size -= entriesBytes(logs[n-1 : n])
	}
	return 0, nil
}

func (s *Store) appendRecord(logs []*raft.Log) error {
	if err := s.journal.appendEntries(logs); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range logs {
		s.pending[l.Index] = l
	}
	s.young = append(s.young, logs...)
	return s.failed
}

// storeDirectly writes entries that are longer than a file of the journal to the inner store. It
// first moves all earlier entries to the inner store and empties the journal: otherwise a later
// Open would apply them after these entries. The caller holds s.write.
func (s *Store) storeDirectly(logs []*raft.Log) error {
	if err := s.drainLocked(); err != nil {
		return err
	}
	if err := s.inner.StoreLogs(logs); err != nil {
		return err
	}
	return s.journal.appendTop(logs[len(logs)-1].Index)
}

// moveActiveFile switches to the other file of the journal, and starts to move the entries of the
// previously active file to the inner store. It first waits for an earlier move. The caller holds
// s.write.
func (s *Store) moveActiveFile() error {
	if err := s.awaitMove(); err != nil {
		return err
	}
	file := s.journal.active
	through, top := s.journal.switchFiles()
	s.mu.Lock()
	entries := s.young
	s.young = nil
	ended := make(chan struct{})
	s.moving = ended
	s.mu.Unlock()
	go func() {
		defer close(ended)
		err := s.moveEntries(entries)
		if err == nil {
			err = s.journal.retire(file, through, top)
		}
		s.recordFailure(err)
	}()
	return nil
}

// awaitMove waits until the current move of entries to the inner store, if any, has ended. It
// returns the error of the first failed move.
func (s *Store) awaitMove() error {
	s.mu.Lock()
	ended := s.moving
	s.mu.Unlock()
	if ended != nil {
		<-ended
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed
}

// recordFailure records the result of moving entries to the inner store. It stores the first error
// and calls onFailure with it. It ignores later errors and nil.
func (s *Store) recordFailure(err error) {
	if err == nil {
		return
	}
	err = fmt.Errorf("moving entries out of the journal: %w", err)
	s.mu.Lock()
	first := s.failed == nil
	if first {
		s.failed = err
	}
	s.mu.Unlock()
	if first && s.onFailure != nil {
		s.onFailure(err)
	}
}

// moveEntries writes entries to the inner store and removes them from the pending entries (see
// Store.pending).
func (s *Store) moveEntries(logs []*raft.Log) error {
	if err := s.storeInner(logs); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range logs {
		if s.pending[l.Index] == l {
			delete(s.pending, l.Index)
		}
	}
	return nil
}

// storeInner writes entries to the inner store, in transactions of at most moveBytes. Larger
// transactions would delay readers of the inner store and other writers of the disk.
func (s *Store) storeInner(logs []*raft.Log) error {
	for len(logs) > 0 {
		n, size := 0, 0
		for n < len(logs) && (n == 0 || size+len(logs[n].Data) <= moveBytes) {
			size += len(logs[n].Data)
			n++
		}
		if err := s.inner.StoreLogs(logs[:n]); err != nil {
			return err
		}
		logs = logs[n:]
	}
	return nil
}

// moveAll moves all entries to the inner store. The caller holds s.write.
func (s *Store) moveAll() error {
	if err := s.awaitMove(); err != nil {
		return err
	}
	s.mu.Lock()
	logs := s.young
	s.young = nil
	s.mu.Unlock()
	err := s.moveEntries(logs)
	s.recordFailure(err)
	return err
}

// Drain moves all entries to the inner store and retires both files of the journal. A later Open
// does not apply their records.
func (s *Store) Drain() error {
	s.write.Lock()
	defer s.write.Unlock()
	return s.drainLocked()
}

func (s *Store) drainLocked() error {
	if err := s.moveAll(); err != nil {
		return err
	}
	return s.journal.retireBoth()
}

// DeleteRange implements raft.LogStore. After a deletion at the end of the log, the journal does
// not restore the deleted entries.
func (s *Store) DeleteRange(first, last uint64) error {
	// After a snapshot the oldest entries are deleted. They are not pending, and appends need not
	// wait for their deletion.
	if begin, end, err := s.indexRange(); err != nil {
		return err
	} else if first <= begin && last < end && !s.hasPending(first, last) {
		return s.inner.DeleteRange(first, last)
	}
	s.write.Lock()
	defer s.write.Unlock()
	begin, end, err := s.indexRange()
	if err != nil {
		return err
	}
	if s.hasPending(first, last) {
		if err := s.moveAll(); err != nil {
			return err
		}
	}
	// Deleted entries at the end of the log must not be restored from the journal. Entries at its
	// beginning may: the journal reaches to the end of the log without a gap, unless the whole log
	// is deleted.
	if last >= end {
		c := change{first: first, last: last, before: end}
		if first <= begin {
			c.first = 0
		}
		if !s.journal.fitsActiveFile(16) {
			if err := s.moveActiveFile(); err != nil {
				return err
			}
		}
		if err := s.journal.appendDelete(c.first, c.last, c.topAfter()); err != nil {
			return err
		}
	}
	return s.inner.DeleteRange(first, last)
}

// indexRange returns the first and the last index of the log.
func (s *Store) indexRange() (begin, end uint64, err error) {
	if begin, err = s.FirstIndex(); err != nil {
		return 0, 0, err
	}
	end, err = s.LastIndex()
	return begin, end, err
}

// hasPending reports whether any entry from index first to index last is pending (see
// Store.pending).
func (s *Store) hasPending(first, last uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.pending {
		if first <= i && i <= last {
			return true
		}
	}
	return false
}

// GetLog implements raft.LogStore.
func (s *Store) GetLog(index uint64, out *raft.Log) error {
	s.mu.Lock()
	l := s.pending[index]
	s.mu.Unlock()
	if l != nil {
		*out = *l
		return nil
	}
	return s.inner.GetLog(index, out)
}

// FirstIndex implements raft.LogStore.
func (s *Store) FirstIndex() (uint64, error) {
	low, _ := s.pendingRange()
	first, err := s.inner.FirstIndex()
	if err != nil || first == 0 {
		return low, err
	}
	if low != 0 {
		first = min(first, low)
	}
	return first, nil
}

// LastIndex implements raft.LogStore.
func (s *Store) LastIndex() (uint64, error) {
	_, high := s.pendingRange()
	last, err := s.inner.LastIndex()
	return max(last, high), err
}

// pendingRange returns the lowest and the highest index of the pending entries, or 0 if no entry is
// pending. It must be called before the inner store is read, because entries move only from the
// journal to the inner store.
func (s *Store) pendingRange() (low, high uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.pending {
		if low == 0 || i < low {
			low = i
		}
		high = max(high, i)
	}
	return low, high
}

// Close waits for the current move of entries, if any, and closes the files. Entries in the journal
// stay there.
func (s *Store) Close() error {
	s.write.Lock()
	defer s.write.Unlock()
	return errors.Join(s.awaitMove(), s.journal.Close())
}
