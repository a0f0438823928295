package disk

import (
	"errors"
	"fmt"
	"sync"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore/disk/platter"
)

// aheadStore is a raft.LogStore that writes ahead of another one, which pays
// a transaction with two flushes and several pages for every append: an append
// is durable once it is in the journal, and reaches the other store later,
// thousands of entries in one transaction. Reads find every entry in between.
//
// The changes in the journal name what they change in full: entries at their indexes,
// deleted ranges. Read back after a crash they may be made again, in order,
// on whatever part of them the other store holds already.
type aheadStore struct {
	inner   raft.LogStore
	journal *journal
	halt    func(error) // told of a move that failed; may be nil

	write sync.Mutex // held by who writes to the journal

	mu      sync.Mutex
	pending map[uint64]*raft.Log // not known to be in inner
	young   []*raft.Log          // those in the active file, oldest first
	failed  error                // of a move; the last word of this store
	moving  chan struct{}        // closed when the move under way is over; nil = none
}

// moveBytes bounds one transaction of the inner store.
const moveBytes = 1 << 20

// openAhead opens the journal at path and brings the inner store up to it. An
// inner store that ends sooner than the journal has seen it has lost entries.
func openAhead(inner raft.LogStore, layer platter.Layer, path string, id uint32, limit int64) (*aheadStore, error) {
	j, changes, err := openJournal(layer, path, id, limit)
	if err != nil {
		return nil, err
	}
	s := &aheadStore{inner: inner, journal: j, pending: make(map[uint64]*raft.Log)}
	if err := s.replay(changes); err != nil {
		j.Close()
		return nil, fmt.Errorf("%s: reading it back: %w", path, err)
	}
	last, err := inner.LastIndex()
	switch {
	case err != nil:
	case last < j.top:
		err = fmt.Errorf("the log ends with entry %d, but entry %d was written: %w", last, j.top, ErrCorruptLog)
	case len(changes) > 0 || last != j.top:
		j.top = last
		err = j.empty()
	}
	if err != nil {
		j.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

// replay makes the changes of the journal in the inner store. A crash on the
// way is harmless: they are made again.
func (s *aheadStore) replay(changes []change) error {
	var entries []*raft.Log
	for _, c := range changes {
		if c.entries != nil {
			entries = append(entries, c.entries...)
			continue
		}
		if err := s.store(entries); err != nil {
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
	return s.store(entries)
}

// StoreLog implements raft.LogStore.
func (s *aheadStore) StoreLog(l *raft.Log) error { return s.StoreLogs([]*raft.Log{l}) }

// StoreLogs implements raft.LogStore. The entries and their data must not be
// changed afterwards.
func (s *aheadStore) StoreLogs(logs []*raft.Log) error {
	if len(logs) == 0 {
		return nil
	}
	s.write.Lock()
	defer s.write.Unlock()
	for len(logs) > 0 {
		n, err := s.makeRoom(logs)
		if err != nil {
			return err
		}
		if n == 0 {
			n, err = 1, s.bypass(logs[:1])
		} else {
			err = s.append(logs[:n])
		}
		if err != nil {
			return err
		}
		logs = logs[n:]
	}
	return nil
}

// makeRoom says how many of the entries the next record takes; 0 when the
// first alone is more than a whole file.
func (s *aheadStore) makeRoom(logs []*raft.Log) (int, error) {
	size := entriesBytes(logs)
	if s.journal.fits(size) {
		return len(logs), nil
	}
	if s.journal.end > 0 {
		if err := s.turn(); err != nil {
			return 0, err
		}
	}
	for n := len(logs); n > 0; n-- {
		if s.journal.fits(size) {
			return n, nil
		}
		size -= entriesBytes(logs[n-1 : n])
	}
	return 0, nil
}

func (s *aheadStore) append(logs []*raft.Log) error {
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

// bypass brings an entry that is longer than the journal into the inner store.
// What is in the journal goes there before it, and must not come back after it.
func (s *aheadStore) bypass(logs []*raft.Log) error {
	if err := s.drainHeld(); err != nil {
		return err
	}
	if err := s.inner.StoreLogs(logs); err != nil {
		return err
	}
	return s.journal.appendTop(logs[len(logs)-1].Index)
}

// turn goes on in the journal's other file and moves what is in this one. It
// waits for the move before: no more than two files wait.
func (s *aheadStore) turn() error {
	if err := s.await(); err != nil {
		return err
	}
	file := s.journal.active
	through, top := s.journal.turn()
	s.mu.Lock()
	old := s.young
	s.young = nil
	over := make(chan struct{})
	s.moving = over
	s.mu.Unlock()
	go func() {
		defer close(over)
		err := s.move(old)
		if err == nil {
			err = s.journal.retire(file, through, top)
		}
		s.settle(err)
	}()
	return nil
}

// await waits for the move under way, if any, and returns what has failed.
func (s *aheadStore) await() error {
	s.mu.Lock()
	over := s.moving
	s.mu.Unlock()
	if over != nil {
		<-over
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed
}

func (s *aheadStore) settle(err error) {
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
	if first && s.halt != nil {
		s.halt(err)
	}
}

// move brings entries into the inner store.
func (s *aheadStore) move(logs []*raft.Log) error {
	if err := s.store(logs); err != nil {
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

// store puts entries into the inner store, so many at once as one transaction
// may hold without making readers and appenders of the disk wait for long.
func (s *aheadStore) store(logs []*raft.Log) error {
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

// settleAll moves everything; s.write is held.
func (s *aheadStore) settleAll() error {
	if err := s.await(); err != nil {
		return err
	}
	s.mu.Lock()
	logs := s.young
	s.young = nil
	s.mu.Unlock()
	err := s.move(logs)
	s.settle(err)
	return err
}

// drain brings everything into the inner store. Nothing that the journal's files
// hold is read back afterwards.
func (s *aheadStore) drain() error {
	s.write.Lock()
	defer s.write.Unlock()
	return s.drainHeld()
}

func (s *aheadStore) drainHeld() error {
	if err := s.settleAll(); err != nil {
		return err
	}
	return s.journal.empty()
}

// DeleteRange implements raft.LogStore.
func (s *aheadStore) DeleteRange(first, last uint64) error {
	// After a snapshot the oldest entries go, which are in no journal and which
	// nobody writes any more: appending need not wait for that.
	if begin, end, err := s.span(); err != nil {
		return err
	} else if first <= begin && last < end && !s.touches(first, last) {
		return s.inner.DeleteRange(first, last)
	}
	s.write.Lock()
	defer s.write.Unlock()
	begin, end, err := s.span()
	if err != nil {
		return err
	}
	if s.touches(first, last) {
		if err := s.settleAll(); err != nil {
			return err
		}
	}
	// The end of the log must not come back out of the journal. Its beginning
	// may: what the journal holds reaches up to the end, without a gap, unless
	// nothing is left of the log.
	if last >= end {
		c := change{first: first, last: last, before: end}
		if first <= begin {
			c.first = 0
		}
		if !s.journal.fits(16) {
			if err := s.turn(); err != nil {
				return err
			}
		}
		if err := s.journal.appendDelete(c.first, c.last, c.after()); err != nil {
			return err
		}
	}
	return s.inner.DeleteRange(first, last)
}

// span is the first and the last index of the log.
func (s *aheadStore) span() (begin, end uint64, err error) {
	if begin, err = s.FirstIndex(); err != nil {
		return 0, 0, err
	}
	end, err = s.LastIndex()
	return begin, end, err
}

// touches says that some of the range is pending.
func (s *aheadStore) touches(first, last uint64) bool {
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
func (s *aheadStore) GetLog(index uint64, out *raft.Log) error {
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
func (s *aheadStore) FirstIndex() (uint64, error) {
	low, _ := s.bounds()
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
func (s *aheadStore) LastIndex() (uint64, error) {
	_, high := s.bounds()
	last, err := s.inner.LastIndex()
	return max(last, high), err
}

// bounds are the lowest and highest pending index. To be asked before the
// inner store: entries only move there.
func (s *aheadStore) bounds() (low, high uint64) {
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

// Close ends a move under way. What is in the journal stays there.
func (s *aheadStore) Close() error {
	s.write.Lock()
	defer s.write.Unlock()
	return errors.Join(s.await(), s.journal.Close())
}
