package disk

import (
	"errors"
	"fmt"
	"maps"
	"os"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore/disk/journal"
)

// A data key decrypts its data as long as that data is on the disk. It does not matter which
// key-encryption key wraps the data key. A person with an old key-encryption key must not find data
// that it decrypts. Therefore, after the rotation of a key-encryption key, all older data and the
// older data keys are removed.

// errKeyInUse means that a data key cannot be removed, because data that is encrypted under it
// still exists.
var errKeyInUse = errors.New("the old data must be removed first")

// CurrentDataKey returns the number of the data key for new data, or 0 if new data is not
// encrypted.
func (d *Data) CurrentDataKey() uint32 {
	if k := d.sealer.currentKey(); k != nil {
		return k.number
	}
	return 0
}

// RemoveSealedBefore removes all data keys with numbers below minKey, and the data that is not
// encrypted under minKey or a newer data key: snapshots and log entries. The newest snapshot must
// be encrypted under minKey or a newer data key, and must cover those entries. raft sends this
// snapshot to a peer that lacks a removed entry. If minKey is 0, RemoveSealedBefore does nothing.
func (d *Data) RemoveSealedBefore(minKey uint32) error {
	if minKey == 0 {
		return nil
	}
	if k, some := d.sealer.heldBefore(minKey); some {
		return fmt.Errorf("a snapshot is being written under data key %d: %w", k, errKeyInUse)
	}
	covered, err := d.Snapshots.removeSealedBefore(minKey)
	if err == nil {
		err = d.Log.removeSealedBefore(minKey, covered)
	}
	if err != nil {
		return err
	}
	// These locks wait until each reader that has found data under an older key has that key.
	d.Snapshots.opening.Lock()
	defer d.Snapshots.opening.Unlock()
	d.Log.reading.Lock()
	defer d.Log.reading.Unlock()
	return d.sealer.dropKeysBefore(minKey)
}

// removeSealedBefore removes the snapshots that are not encrypted under the data key minKey or a
// newer one. It returns the raft index that the newest snapshot covers.
func (s *snapshotStore) removeSealedBefore(minKey uint32) (covered uint64, err error) {
	list, err := s.readHeaders()
	if err != nil {
		return 0, err
	}
	if len(list) == 0 {
		return 0, nil
	}
	if list[0].Key < minKey {
		return 0, fmt.Errorf("the newest snapshot %s is encrypted under data key %d: %w",
			s.filePath(list[0].id), list[0].Key, errKeyInUse)
	}
	for _, k := range list[1:] {
		if k.Key >= minKey {
			continue
		}
		if err := s.removeSnapshot(k.id); err != nil && !errors.Is(err, os.ErrNotExist) {
			return 0, fmt.Errorf("removing an old snapshot: %w", err)
		}
	}
	return list[0].Index, nil
}

// removeSealedBefore removes the entries that are not encrypted under the data key minKey or a
// newer one. covered is the raft index that the newest snapshot covers. If an entry after this
// index would have to be removed, removeSealedBefore returns an error.
func (s *logStore) removeSealedBefore(minKey uint32, covered uint64) error {
	first, through, err := s.findSealedBefore(minKey)
	if err != nil {
		return err
	}
	if through > covered {
		return fmt.Errorf("%s: entry %d is older than data key %d, and the newest snapshot ends with entry %d: %w",
			s.name, through, minKey, covered, errKeyInUse)
	}
	if through > 0 {
		if err := s.DeleteRange(first, through); err != nil {
			return err
		}
	}
	if ahead, ok := s.LogStore.(*journal.Store); ok {
		if err := ahead.Drain(); err != nil { // the next start would restore the entries in the journal
			err = fmt.Errorf("%s: emptying the journal: %w", s.name, err)
			s.recordFailure(err)
			return err
		}
	}
	return nil
}

// findSealedBefore searches the log for entries that are not encrypted under the data key minKey or
// a newer one. through is the index of the last such entry, or 0. first is the index of the first
// entry of the log.
func (s *logStore) findSealedBefore(minKey uint32) (first, through uint64, err error) {
	if first, err = s.FirstIndex(); err != nil {
		return 0, 0, fmt.Errorf("%s: %w", s.name, err)
	}
	s.sealing.Lock() // entries that are written afterwards have a current key
	last, err := s.LastIndex()
	s.sealing.Unlock()
	if err != nil {
		return 0, 0, fmt.Errorf("%s: %w", s.name, err)
	}
	var l raft.Log
	for i := first; i != 0 && i <= last; i++ {
		err := s.LogStore.GetLog(i, &l)
		if errors.Is(err, raft.ErrLogNotFound) { // removed concurrently
			continue
		}
		if err != nil {
			return 0, 0, fmt.Errorf("%s: entry %d: %w", s.name, i, err)
		}
		number := uint32(0)
		if len(l.Extensions) == sealedExtension {
			number, _ = sealParameters(&l)
		}
		if number < minKey {
			through = i
		}
	}
	return first, through, nil
}

// heldBefore reports whether a file is being written under a data key with a number below minKey.
// number is the number of that data key.
func (s *sealer) heldBefore(minKey uint32) (number uint32, some bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := range s.held {
		if n < minKey {
			return n, true
		}
	}
	return 0, false
}

// dropKeysBefore removes the data keys with numbers below minKey from memory and from the file of
// data keys. The caller guarantees that no data is encrypted under them.
func (s *sealer) dropKeysBefore(minKey uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys, locked := maps.Clone(s.keys), s.locked
	maps.DeleteFunc(keys, func(n uint32, _ *dataKey) bool { return n < minKey })
	s.locked = maps.Clone(locked)
	maps.DeleteFunc(s.locked, func(n uint32, _ wrappedKey) bool { return n < minKey })
	if err := s.writeKeys(s.ring, keys, s.next); err != nil {
		s.locked = locked
		return fmt.Errorf("writing data keys to %s: %w", s.path, err)
	}
	s.keys = keys
	return nil
}
