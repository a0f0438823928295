package disk

import (
	"errors"
	"fmt"
	"maps"
	"os"

	"github.com/hashicorp/raft"
)

// What was sealed under one data key opens with it for as long as it lies on the
// disk, whatever that key is wrapped under now. Who has come by the key is to find
// nothing that it opens: so once a key-encryption key was exchanged, all that is
// older than the exchange goes, and the data keys with it.

// errSealedBefore reports something that is sealed under a former data key and cannot go yet.
var errSealedBefore = errors.New("it has to go first")

// Sealing is the number of the data key that new data is sealed under; 0 = in clear.
func (d *Data) Sealing() uint32 {
	if k := d.seals.now(); k != nil {
		return k.number
	}
	return 0
}

// RemoveBefore removes snapshots and entries that are in clear or sealed under data
// keys older than since, and those keys. The newest snapshot must be sealed under
// since or later, and reach as far as those entries do. Nobody else may wait for the
// old entries: raft sends the snapshot instead. With since 0 it does nothing.
func (d *Data) RemoveBefore(since uint32) error {
	if since == 0 {
		return nil
	}
	if k, some := d.seals.holds(since); some {
		return fmt.Errorf("a snapshot is being written under data key %d: %w", k, errSealedBefore)
	}
	covered, err := d.Snapshots.removeBefore(since)
	if err == nil {
		err = d.Log.removeBefore(since, covered)
	}
	if err != nil {
		return err
	}
	// Who has found one of them meanwhile opens it first.
	d.Snapshots.opening.Lock()
	defer d.Snapshots.opening.Unlock()
	d.Log.reading.Lock()
	defer d.Log.reading.Unlock()
	return d.seals.dropBefore(since)
}

// removeBefore removes all but the newest that is older, and says how far that one reaches.
func (s *snapshotStore) removeBefore(since uint32) (covered uint64, err error) {
	list, err := s.list()
	if err != nil {
		return 0, err
	}
	if len(list) == 0 {
		return 0, nil
	}
	if list[0].Key < since {
		return 0, fmt.Errorf("snapshot %s, the newest, is sealed under data key %d: %w", s.path(list[0].id), list[0].Key, errSealedBefore)
	}
	for _, k := range list[1:] {
		if k.Key >= since {
			continue
		}
		if err := s.remove(k.id); err != nil && !errors.Is(err, os.ErrNotExist) {
			return 0, fmt.Errorf("removing an old snapshot: %w", err)
		}
	}
	return list[0].Index, nil
}

// removeBefore removes the older entries, which covered must reach.
func (s *logStore) removeBefore(since uint32, covered uint64) error {
	first, through, err := s.before(since)
	if err != nil {
		return err
	}
	if through > covered {
		return fmt.Errorf("%s: entry %d is older than data key %d, and the newest snapshot ends with entry %d: %w", s.name, through, since, covered, errSealedBefore)
	}
	if through > 0 {
		if err := s.DeleteRange(first, through); err != nil {
			return err
		}
	}
	if ahead, ok := s.LogStore.(*aheadStore); ok {
		if err := ahead.drain(); err != nil { // what it holds would come back at the next start
			err = fmt.Errorf("%s: emptying the journal: %w", s.name, err)
			s.halt(err)
			return err
		}
	}
	return nil
}

// before is the first entry of the log, and the last that is older; 0 when none is.
func (s *logStore) before(since uint32) (first, through uint64, err error) {
	if first, err = s.FirstIndex(); err != nil {
		return 0, 0, fmt.Errorf("%s: %w", s.name, err)
	}
	s.writing.Lock() // what is written from now on is not older
	last, err := s.LastIndex()
	s.writing.Unlock()
	if err != nil {
		return 0, 0, fmt.Errorf("%s: %w", s.name, err)
	}
	var l raft.Log
	for i := first; i != 0 && i <= last; i++ {
		err := s.LogStore.GetLog(i, &l)
		if errors.Is(err, raft.ErrLogNotFound) { // removed meanwhile
			continue
		}
		if err != nil {
			return 0, 0, fmt.Errorf("%s: entry %d: %w", s.name, i, err)
		}
		number := uint32(0)
		if len(l.Extensions) == sealedExtension {
			number, _ = sealedUnder(&l)
		}
		if number < since {
			through = i
		}
	}
	return first, through, nil
}

// holds says whether a file is being written under an older data key.
func (s *sealer) holds(since uint32) (number uint32, some bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := range s.held {
		if n < since {
			return n, true
		}
	}
	return 0, false
}

// dropBefore drops the older data keys, under which nothing is sealed any more.
func (s *sealer) dropBefore(since uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys, locked := maps.Clone(s.keys), s.locked
	maps.DeleteFunc(keys, func(n uint32, _ *dataKey) bool { return n < since })
	s.locked = maps.Clone(locked)
	maps.DeleteFunc(s.locked, func(n uint32, _ wrappedKey) bool { return n < since })
	if err := s.save(s.ring, keys, s.next); err != nil {
		s.locked = locked
		return fmt.Errorf("writing data keys to %s: %w", s.path, err)
	}
	s.keys = keys
	return nil
}
