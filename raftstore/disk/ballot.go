package disk

import (
	"encoding/binary"
	"sync"
)

// keyVoteFor is raft's key of whom it voted for.
const keyVoteFor = "LastVoteCand"

// ballot is the stable store as raft sees it. To vote, raft sets first the term
// and then, before it tells anybody, for whom. Here both become durable
// together with the second: elections and transfers wait for the disk a third
// less. A crash in between leaves the vote before, and nobody knows of a new one.
type ballot struct {
	*stableStore

	mu   sync.Mutex
	term []byte // of the vote that is being cast; nil = none
}

// SetUint64 implements raft.StableStore.
func (b *ballot) SetUint64(key []byte, value uint64) error {
	if string(key) != keyVoteTerm {
		return b.stableStore.SetUint64(key, value)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.term = binary.BigEndian.AppendUint64(nil, value)
	return nil
}

// Set implements raft.StableStore.
func (b *ballot) Set(key, value []byte) error {
	b.mu.Lock()
	term := b.term
	b.mu.Unlock()
	if term == nil || string(key) != keyVoteFor {
		return b.stableStore.Set(key, value)
	}
	if err := b.setBoth(keyVoteTerm, term, keyVoteFor, value); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.term = nil
	return nil
}

// GetUint64 implements raft.StableStore.
func (b *ballot) GetUint64(key []byte) (uint64, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.term != nil && string(key) == keyVoteTerm {
		return binary.BigEndian.Uint64(b.term), nil
	}
	return b.stableStore.GetUint64(key)
}
