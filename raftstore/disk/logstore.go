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

	"keelson.dev/keelson/raftstore/disk/sector"
)

// ErrCorruptLog is returned for a log that does not contain what was written to it.
var ErrCorruptLog = sector.ErrCorruptLog

// cacheBytes is the maximum total size of the newest entries that are cached for replication.
const cacheBytes = 8 << 20

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// logStore wraps a raft.LogStore. Each entry on disk has a checksum and may be encrypted. The
// newest entries are cached in memory. After the first failed write, all writes fail until the
// process is restarted, because the content of the disk is unknown after a failed fsync.
type logStore struct {
	raft.LogStore
	kind   LogStoreKind
	name   string      // name of the file, for messages
	sealer *sealer     // nil if entries are not encrypted
	fail   func(error) // called once, with the first error; the replica must stop
	live   atomic.Bool // raft is running

	sealing sync.Mutex   // held from the choice of a data key until the entries under this key are in the log
	reading sync.RWMutex // held for reading while an entry is read and decrypted

	mu     sync.Mutex
	broken error
	cache  map[uint64]*raft.Log
	oldest uint64
	newest uint64
	bytes  int
	sizes  logSizes // sizes of all entries of the log
}

func newLogStore(inner raft.LogStore, name string, fail func(error)) *logStore {
	return &logStore{LogStore: inner, kind: LogBolt, name: name, fail: fail, cache: make(map[uint64]*raft.Log)}
}

// The sizes, in bytes, of the Extensions field of an entry on disk. The field contains the
// checksum. For an encrypted entry it also contains the number of the data key, and the count from
// which the nonce is made.
const (
	clearExtension  = 4
	sealedExtension = 4 + 4 + 8
)

// entryChecksum returns the checksum of all fields of an entry that raft uses.
func entryChecksum(l *raft.Log) uint32 {
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

// GetLog implements raft.LogStore. It verifies an entry that is not cached. If the entry is damaged
// or cannot be read while raft runs, the replica stops and the calling goroutine ends.
func (s *logStore) GetLog(index uint64, out *raft.Log) error {
	s.mu.Lock()
	cached := s.cache[index]
	s.mu.Unlock()
	if cached != nil {
		*out = *cached
		return nil
	}
	return s.loadEntry(index, out)
}

func (s *logStore) loadEntry(index uint64, out *raft.Log) error {
	err := s.readEntry(index, out)
	switch {
	case err == nil, errors.Is(err, raft.ErrLogNotFound):
		return err
	case errors.Is(err, ErrSealed):
	case !errors.Is(err, ErrCorruptLog):
		err = fmt.Errorf("%w: %w", err, ErrCorruptLog)
	}
	err = fmt.Errorf("%s: entry %d: %w", s.name, index, err)
	s.recordFailure(err)
	if s.live.Load() {
		// raft panics if it cannot read an entry. To keep the process alive, only this goroutine
		// ends; the replica stops.
		runtime.Goexit()
	}
	return err
}

// readEntry reads an entry from the disk, verifies it and decrypts it.
func (s *logStore) readEntry(index uint64, out *raft.Log) error {
	s.reading.RLock()
	defer s.reading.RUnlock()
	err := s.LogStore.GetLog(index, out)
	if err == nil {
		err = s.openEntry(index, out)
	}
	return err
}

// openEntry verifies the entry l, which was read from the disk, and decrypts it in place. index is
// the index that l must have.
func (s *logStore) openEntry(index uint64, l *raft.Log) error {
	sealed := len(l.Extensions) == sealedExtension
	if !sealed && len(l.Extensions) != clearExtension || !hasValidChecksum(l) || l.Index != index {
		return fmt.Errorf("checksum does not match: %w", ErrCorruptLog)
	}
	if sealed {
		number, count := sealParameters(l)
		k, err := s.sealer.findDataKey(number)
		if err != nil {
			return err
		}
		if l.Data, err = k.openEntry(l, count); err != nil {
			return fmt.Errorf("it cannot be decrypted with data key %d: %w", number, ErrCorruptLog)
		}
	}
	l.Extensions = nil
	return nil
}

// hasValidChecksum reports whether the checksum in an entry's extension is correct.
func hasValidChecksum(l *raft.Log) bool {
	return binary.LittleEndian.Uint32(l.Extensions) == entryChecksum(l)
}

func sealParameters(l *raft.Log) (number uint32, count uint64) {
	return binary.LittleEndian.Uint32(l.Extensions[4:]), binary.LittleEndian.Uint64(l.Extensions[8:])
}

// StoreLog implements raft.LogStore.
func (s *logStore) StoreLog(l *raft.Log) error { return s.StoreLogs([]*raft.Log{l}) }

// StoreLogs implements raft.LogStore. It adds checksums, and encrypts the entries if there is a
// current data key.
func (s *logStore) StoreLogs(logs []*raft.Log) error {
	s.mu.Lock()
	err := s.broken
	s.mu.Unlock()
	if err != nil {
		return err
	}
	s.sealing.Lock()
	defer s.sealing.Unlock()
	sealed, err := s.encodeEntries(logs)
	if err != nil {
		s.recordFailure(err)
		return err
	}
	if err := s.LogStore.StoreLogs(sealed); err != nil {
		err = fmt.Errorf("%s: writing entries %d to %d: %w", s.name, logs[0].Index, logs[len(logs)-1].Index, err)
		s.recordFailure(err)
		return err
	}
	s.mu.Lock()
	for _, l := range logs {
		s.cacheEntry(l)
	}
	s.mu.Unlock()
	return nil
}

// encodeEntries returns copies of the entries as they are stored: with a checksum, and encrypted if
// there is a current data key.
func (s *logStore) encodeEntries(logs []*raft.Log) ([]*raft.Log, error) {
	var key *dataKey
	var count uint64
	extension := clearExtension
	if s.sealer != nil {
		var err error
		if key, count, err = s.sealer.entryKey(len(logs)); err != nil {
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
			c.Data = key.sealEntry(make([]byte, 0, len(l.Data)+sealOverhead), l, count+uint64(i))
		}
		binary.LittleEndian.PutUint32(c.Extensions, entryChecksum(c))
		out[i] = c
	}
	return out, nil
}

// cacheEntry caches a written entry, and drops the oldest entries beyond cacheBytes. The caller
// holds s.mu.
func (s *logStore) cacheEntry(l *raft.Log) {
	if len(s.cache) == 0 || l.Index != s.newest+1 {
		clear(s.cache)
		s.oldest, s.bytes = l.Index, 0
	}
	c := *l
	c.Extensions = nil
	s.sizes.addEntry(l.Index, int64(len(l.Data))+entryCost)
	s.cache[l.Index] = &c
	s.newest = l.Index
	s.bytes += len(l.Data) + 128
	for s.bytes > cacheBytes && s.oldest < s.newest {
		s.bytes -= len(s.cache[s.oldest].Data) + 128
		delete(s.cache, s.oldest)
		s.oldest++
	}
}

// entryCost is the approximate overhead of an entry on disk, in bytes: its size without its data.
const entryCost = 128

// EntriesWithin returns how many of the newest entries of the log have a total size of about the
// given number of bytes.
func (s *logStore) EntriesWithin(bytes int64) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sizes.countWithin(bytes)
}

// deleteChunk is the maximum number of entries that one transaction deletes. Appends wait for the
// transaction.
const deleteChunk = 256

// DeleteRange implements raft.LogStore. It deletes in an order in which an interruption by a crash
// cannot leave a gap in the log.
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
	if last >= s.sizes.last {
		s.sizes.truncateFrom(first)
	} else {
		s.sizes.dropThrough(last)
	}
	s.mu.Unlock()
	var err error
	if s.kind == LogWAL {
		err = s.LogStore.DeleteRange(first, last) // drops whole files, atomically
	} else if start, e := s.FirstIndex(); e != nil {
		err = e
	} else {
		err = s.deleteChunks(first, last, first > start)
	}
	if err != nil {
		err = fmt.Errorf("%s: deleting entries %d to %d: %w", s.name, first, last, err)
		s.recordFailure(err)
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

func (s *logStore) recordFailure(err error) {
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

// verifyEntries reads and verifies the whole log, before raft reads it. Entries up to the index
// covered may be missing, because an installed snapshot has replaced them. verifyEntries returns
// the numbers of the data keys under which entries are encrypted.
func (s *logStore) verifyEntries(covered uint64) (map[uint32]struct{}, error) {
	first, err := s.FirstIndex()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	last, err := s.LastIndex()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	if last > covered && first > covered+1 {
		return nil, s.failWith(fmt.Errorf("%s: the log begins with entry %d and the newest snapshot ends with %d: %w",
			s.name, first, covered, ErrCorruptLog))
	}
	used := make(map[uint32]struct{})
	var l raft.Log
	for i := first; i != 0 && i <= last; i++ {
		err := s.LogStore.GetLog(i, &l)
		if err == nil && len(l.Extensions) == sealedExtension {
			number, _ := sealParameters(&l)
			used[number] = struct{}{}
		}
		if err == nil {
			err = s.openEntry(i, &l)
			s.sizes.addEntry(i, int64(len(l.Data))+entryCost)
		}
		switch {
		case err == nil, errors.Is(err, raft.ErrLogNotFound) && i <= covered:
		case errors.Is(err, ErrCorruptLog), errors.Is(err, ErrSealed):
			return nil, s.failWith(fmt.Errorf("%s: entry %d: %w", s.name, i, err))
		default:
			return nil, s.failWith(fmt.Errorf("%s: reading entry %d: %w: %w", s.name, i, ErrCorruptLog, err))
		}
	}
	return used, nil
}

func (s *logStore) failWith(err error) error {
	s.recordFailure(err)
	return err
}
