package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"
)

// ErrCorruptLog reports a log entry that is not what was written.
var ErrCorruptLog = errors.New("raftstore: log is corrupt")

// cacheBytes bounds the newest entries kept in memory for replication.
const cacheBytes = 8 << 20

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Log wraps a raft.LogStore: every entry carries a checksum of ours on
// disk, the newest entries are served from memory, and the first error of a
// write is the last: after a failed fsync nobody knows what the disk holds, so
// nothing is acknowledged any more until the process has started again.
type logStore struct {
	raft.LogStore
	kind  LogStoreKind
	name  string      // the file, for messages
	seals *sealer     // nil = in clear
	fail  func(error) // called once, with the first error that must stop the replica
	live  atomic.Bool // raft's own goroutines read

	writing sync.Mutex   // from the choice of a data key until what is sealed under it is in the log
	reading sync.RWMutex // held for reading from before an entry is read until it is opened

	mu     sync.Mutex
	broken error
	cache  map[uint64]*raft.Log
	oldest uint64
	newest uint64
	bytes  int
	extent extent // of the whole log
}

func newLogStore(inner raft.LogStore, name string, fail func(error)) *logStore {
	return &logStore{LogStore: inner, kind: LogBolt, name: name, fail: fail, cache: make(map[uint64]*raft.Log)}
}

// Extensions on the disk: the checksum and, when the data is sealed, the
// number of the data key and the count that makes the nonce.
const (
	clearExtension  = 4
	sealedExtension = 4 + 4 + 8
)

// sum is the checksum of an entry, over all that raft relies on.
func sum(l *raft.Log) uint32 {
	var head [17]byte
	binary.LittleEndian.PutUint64(head[:], l.Index)
	binary.LittleEndian.PutUint64(head[8:], l.Term)
	head[16] = byte(l.Type)
	c := crc32.Checksum(head[:], castagnoli)
	if len(l.Extensions) > clearExtension {
		c = crc32.Update(c, castagnoli, l.Extensions[clearExtension:])
	}
	return crc32.Update(c, castagnoli, l.Data)
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
	err := s.opened(index, out)
	switch {
	case err == nil, errors.Is(err, raft.ErrLogNotFound):
		return err
	case errors.Is(err, ErrSealed):
	case !errors.Is(err, ErrCorruptLog):
		err = fmt.Errorf("%w: %w", err, ErrCorruptLog)
	}
	err = fmt.Errorf("%s: entry %d: %w", s.name, index, err)
	s.halt(err)
	if s.live.Load() {
		// raft panics when it cannot read an entry. The replica stops; so that the
		// process lives on, only the goroutine that wanted the entry ends.
		runtime.Goexit()
	}
	return err
}

// opened is an entry of the disk.
func (s *logStore) opened(index uint64, out *raft.Log) error {
	s.reading.RLock()
	defer s.reading.RUnlock()
	err := s.LogStore.GetLog(index, out)
	if err == nil {
		err = s.check(index, out)
	}
	return err
}

// check verifies an entry from the disk and opens it.
func (s *logStore) check(index uint64, l *raft.Log) error {
	sealed := len(l.Extensions) == sealedExtension
	if !sealed && len(l.Extensions) != clearExtension || !intact(l) || l.Index != index {
		return fmt.Errorf("checksum does not match: %w", ErrCorruptLog)
	}
	if sealed {
		number, count := sealedUnder(l)
		k, err := s.seals.key(number)
		if err != nil {
			return err
		}
		if l.Data, err = k.open(l, count); err != nil {
			return fmt.Errorf("it does not open with data key %d: %w", number, ErrCorruptLog)
		}
	}
	l.Extensions = nil
	return nil
}

// intact says that an entry with an extension has the checksum that is in it.
func intact(l *raft.Log) bool { return binary.LittleEndian.Uint32(l.Extensions) == sum(l) }

func sealedUnder(l *raft.Log) (number uint32, count uint64) {
	return binary.LittleEndian.Uint32(l.Extensions[4:]), binary.LittleEndian.Uint64(l.Extensions[8:])
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
	s.writing.Lock()
	defer s.writing.Unlock()
	sealed, err := s.prepare(logs)
	if err != nil {
		s.halt(err)
		return err
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

// prepare makes entries as they go to the disk: sealed, if so, and with a checksum.
func (s *logStore) prepare(logs []*raft.Log) ([]*raft.Log, error) {
	var key *dataKey
	var count uint64
	extension := clearExtension
	if s.seals != nil {
		var err error
		if key, count, err = s.seals.entryKey(len(logs)); err != nil {
			return nil, err
		}
	}
	if key != nil {
		extension = sealedExtension
	}
	out := make([]*raft.Log, len(logs))
	copies := make([]raft.Log, len(logs))
	extensions := make([]byte, extension*len(logs))
	for i, l := range logs {
		c := &copies[i]
		*c = *l
		c.Extensions = extensions[extension*i : extension*(i+1) : extension*(i+1)]
		if key != nil {
			binary.LittleEndian.PutUint32(c.Extensions[4:], key.number)
			binary.LittleEndian.PutUint64(c.Extensions[8:], count+uint64(i))
			c.Data = key.seal(make([]byte, 0, len(l.Data)+sealedBytes), l, count+uint64(i))
		}
		binary.LittleEndian.PutUint32(c.Extensions, sum(c))
		out[i] = c
	}
	return out, nil
}

// keep caches an entry just written and drops the oldest beyond the bound.
func (s *logStore) keep(l *raft.Log) {
	if len(s.cache) == 0 || l.Index != s.newest+1 {
		clear(s.cache)
		s.oldest, s.bytes = l.Index, 0
	}
	c := *l
	c.Extensions = nil
	s.extent.add(l.Index, int64(len(l.Data))+entryCost)
	s.cache[l.Index] = &c
	s.newest = l.Index
	s.bytes += len(l.Data) + 128
	for s.bytes > cacheBytes && s.oldest < s.newest {
		s.bytes -= len(s.cache[s.oldest].Data) + 128
		delete(s.cache, s.oldest)
		s.oldest++
	}
}

// entryCost is what an entry takes besides its data, about.
const entryCost = 128

// Within is how many entries at the end of the log take about so many bytes.
func (s *logStore) Within(bytes int64) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.extent.within(bytes)
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
	if last >= s.extent.last {
		s.extent.cut(first)
	} else {
		s.extent.drop(last)
	}
	s.mu.Unlock()
	var err error
	if s.kind == LogWAL {
		err = s.LogStore.DeleteRange(first, last) // drops files, in one step
	} else if start, e := s.FirstIndex(); e != nil {
		err = e
	} else {
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

// IsMonotonic implements raft.MonotonicLogStore: bbolt allows gaps, raft-wal does not.
func (s *logStore) IsMonotonic() bool { return s.kind == LogWAL }

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
// where a snapshot that was installed took their place, up to covered. It
// returns the data keys that the log needs.
func (s *logStore) verify(covered uint64) (map[uint32]struct{}, error) {
	first, err := s.FirstIndex()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	last, err := s.LastIndex()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	if last > covered && first > covered+1 {
		return nil, s.lost(fmt.Errorf("%s: the log begins with entry %d and the newest snapshot ends with %d: %w", s.name, first, covered, ErrCorruptLog))
	}
	used := make(map[uint32]struct{})
	var l raft.Log
	for i := first; i != 0 && i <= last; i++ {
		err := s.LogStore.GetLog(i, &l)
		if err == nil && len(l.Extensions) == sealedExtension {
			number, _ := sealedUnder(&l)
			used[number] = struct{}{}
		}
		if err == nil {
			err = s.check(i, &l)
			s.extent.add(i, int64(len(l.Data))+entryCost)
		}
		switch {
		case err == nil, errors.Is(err, raft.ErrLogNotFound) && i <= covered:
		case errors.Is(err, ErrCorruptLog), errors.Is(err, ErrSealed):
			return nil, s.lost(fmt.Errorf("%s: entry %d: %w", s.name, i, err))
		default:
			return nil, s.lost(fmt.Errorf("%s: reading entry %d: %w: %w", s.name, i, ErrCorruptLog, err))
		}
	}
	return used, nil
}

func (s *logStore) lost(err error) error {
	s.halt(err)
	return err
}
