package replica

import (
	"context"
	"sync"
	"sync/atomic"

	"keelson.dev/keelson/raftstore/disk"
)

// FailingVotes is where a replica writes term and vote, until it breaks.
type FailingVotes struct {
	disk.RecordStore
	err atomic.Pointer[error]
}

// Put makes a replica write there.
func (f *FailingVotes) Put(c *Config) {
	c.Storage.votes = func(inner disk.RecordStore) disk.RecordStore {
		f.RecordStore = inner
		return f
	}
}

// Break makes every write fail from now on.
func (f *FailingVotes) Break(err error) { f.err.Store(&err) }

// Set implements recordKeeper.
func (f *FailingVotes) Set(key, value []byte) error {
	if err := f.err.Load(); err != nil {
		return *err
	}
	return f.RecordStore.Set(key, value)
}

// Ended is closed when Run has returned; Cause says why it had to.
func (r *Replica) Ended() <-chan struct{} { return r.node.stopped }
func (r *Replica) Cause() error           { return context.Cause(r.node.ctx) }

// HeldVotes is where a replica writes its term and votes. It can hold up every write.
type HeldVotes struct {
	disk.RecordStore
	held atomic.Pointer[chan struct{}]
}

// Put makes a replica write there.
func (h *HeldVotes) Put(c *Config) {
	c.Storage.votes = func(inner disk.RecordStore) disk.RecordStore {
		h.RecordStore = inner
		return h
	}
}

// Hold holds up every write until release is called, which may be called more than once.
func (h *HeldVotes) Hold() (release func()) {
	held := make(chan struct{})
	h.held.Store(&held)
	return sync.OnceFunc(func() {
		h.held.Store(nil)
		close(held)
	})
}

// Set implements recordKeeper.
func (h *HeldVotes) Set(key, value []byte) error {
	if held := h.held.Load(); held != nil {
		<-*held
	}
	return h.RecordStore.Set(key, value)
}
