package replica

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"sync"

	"github.com/hashicorp/raft"
)

// ErrCorruptLog reports a log entry that is not what was written.
var ErrCorruptLog = errors.New("raftstore: log is corrupt")

// cacheBytes bounds the newest entries kept in memory for replication.
const cacheBytes = 8 << 20

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// logStore wraps a raft.LogStore: every entry carries a checksum of ours on
// disk, the newest entries are served from memory, and the first error of a
// write is the last: after a failed fsync nobody knows what the disk holds, so
// nothing is acknowledged any more until the process has started again.
type logStore struct {
	raft.LogStore
	name string      // the file, for messages
	fail func(error) // called once, with the first error that must stop the replica

	mu     sync.Mutex
	broken error
	cache  map[uint64]*raft.Log
	oldest uint64
	newest uint64
	bytes  int
}

func newLogStore(inner raft.LogStore, name string, fail func(error)) *logStore {
	return &logStore{LogStore: inner, name: name, fail: fail, cache: make(map[uint64]*raft.Log)}
}

// sum is the checksum of an entry, over all that raft relies on.
func sum(l *raft.Log) uint32 {
	var head [17]byte
	binary.LittleEndian.PutUint64(head[:], l.Index)
	binary.LittleEndian.PutUint64(head[8:], l.Term)
	head[16] = byte(l.Type)
	return crc32.Update(crc32.Checksum(head[:], castagnoli), castagnoli, l.Data)
}

// GetLog implements raft.LogStore.
func (s *logStore) GetLog(index uint64, out *raft.Log) error {
	s.mu.Lock()
	cached := s.cache[index]
	s.mu.Unlock()
	if cached != nil {
		*out = *cached
		return nil
	}
	return s.fromDisk(index, out)
}

func (s *logStore) fromDisk(index uint64, out *raft.Log) error {
	if err := s.LogStore.GetLog(index, out); err != nil {
		return err
	}
	if len(out.Extensions) != 4 || binary.LittleEndian.Uint32(out.Extensions) != sum(out) || out.Index != index {
		err := fmt.Errorf("%s: entry %d: checksum does not match: %w", s.name, index, ErrCorruptLog)
		s.halt(err)
		return err
	}
	out.Extensions = nil
	return nil
}

// StoreLog implements raft.LogStore.
func (s *logStore) StoreLog(l *raft.Log) error { return s.StoreLogs([]*raft.Log{l}) }

// StoreLogs implements raft.LogStore.
func (s *logStore) StoreLogs(logs []*raft.Log) error {
	s.mu.Lock()
	err := s.broken
	s.mu.Unlock()
	if err != nil {
		return err
	}
	sealed := make([]*raft.Log, len(logs))
	copies := make([]raft.Log, len(logs))
	sums := make([]byte, 4*len(logs))
	for i, l := range logs {
		c := &copies[i]
		*c = *l
		c.Extensions = sums[4*i : 4*i+4 : 4*i+4]
		binary.LittleEndian.PutUint32(c.Extensions, sum(l))
		sealed[i] = c
	}
	if err := s.LogStore.StoreLogs(sealed); err != nil {
		err = fmt.Errorf("%s: writing entries %d to %d: %w", s.name, logs[0].Index, logs[len(logs)-1].Index, err)
		s.halt(err)
		return err
	}
	s.mu.Lock()
	for _, l := range logs {
		s.keep(l)
	}
	s.mu.Unlock()
	return nil
}

// keep caches an entry just written and drops the oldest beyond the bound.
func (s *logStore) keep(l *raft.Log) {
	if len(s.cache) == 0 || l.Index != s.newest+1 {
		clear(s.cache)
		s.oldest, s.bytes = l.Index, 0
	}
	c := *l
	c.Extensions = nil
	s.cache[l.Index] = &c
	s.newest = l.Index
	s.bytes += len(l.Data) + 128
	for s.bytes > cacheBytes && s.oldest < s.newest {
		s.bytes -= len(s.cache[s.oldest].Data) + 128
		delete(s.cache, s.oldest)
		s.oldest++
	}
}

// deleteChunk bounds how many entries are deleted in one transaction, for
// which appending has to wait.
const deleteChunk = 256

// DeleteRange implements raft.LogStore. It may stop half-way in a crash, so it
// works inwards from the end of the log that it shortens: no gap can remain.
func (s *logStore) DeleteRange(first, last uint64) error {
	s.mu.Lock()
	for i := first; i <= last && len(s.cache) > 0; i++ {
		if l := s.cache[i]; l != nil {
			s.bytes -= len(l.Data) + 128
			delete(s.cache, i)
		}
	}
	if last >= s.newest || len(s.cache) == 0 {
		clear(s.cache)
		s.bytes = 0
	} else {
		s.oldest = max(s.oldest, last+1)
	}
	s.mu.Unlock()
	start, err := s.FirstIndex()
	if err == nil {
		err = s.deleteChunks(first, last, first > start)
	}
	if err != nil {
		err = fmt.Errorf("%s: deleting entries %d to %d: %w", s.name, first, last, err)
		s.halt(err)
	}
	return err
}

func (s *logStore) deleteChunks(first, last uint64, fromEnd bool) error {
	for first <= last {
		from, to := first, min(last, first+deleteChunk-1)
		if fromEnd {
			from, to = max(first, last-min(last, deleteChunk-1)), last
		}
		if err := s.LogStore.DeleteRange(from, to); err != nil {
			return err
		}
		if fromEnd {
			last = from - 1
		} else {
			first = to + 1
		}
	}
	return nil
}

// IsMonotonic implements raft.MonotonicLogStore: gaps are allowed here.
func (s *logStore) IsMonotonic() bool { return false }

func (s *logStore) halt(err error) {
	s.mu.Lock()
	first := s.broken == nil
	if first {
		s.broken = err
	}
	s.mu.Unlock()
	if first {
		s.fail(err)
	}
}

// verify reads the whole log once, before raft does. Entries may be missing
// where a snapshot that was installed took their place, up to covered.
func (s *logStore) verify(covered uint64) error {
	first, err := s.FirstIndex()
	if err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	last, err := s.LastIndex()
	if err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	var l raft.Log
	for i := first; i != 0 && i <= last; i++ {
		err := s.fromDisk(i, &l)
		switch {
		case err == nil, errors.Is(err, raft.ErrLogNotFound) && i <= covered:
		case errors.Is(err, ErrCorruptLog):
			return err
		default:
			return fmt.Errorf("%s: reading entry %d: %w: %w", s.name, i, ErrCorruptLog, err)
		}
	}
	return nil
}
