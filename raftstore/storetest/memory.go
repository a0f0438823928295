// Package storetest contains the tests of the Store contract: one conformance suite for every
// implementation, a simple store in memory, and a cluster of replicas in one process with fault
// injection.
package storetest

import (
	"context"
	"fmt"
	"sync"
	"time"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/watch"
)

// Memory is a Store in one process without disk or network. It uses the same state machine and
// watch hub as a replica, with a mutex in place of raft. It implements raftstore.Leader and is
// always the leader. Depose simulates a change of leadership: it increments the term.
type Memory struct {
	hub *watch.Hub

	mu      sync.Mutex // serializes writes
	machine *mvcc.Machine
	term    uint64
	deposed chan struct{} // closed when the term ends
	expiry  *time.Timer
	quota   int64
	closed  bool
}

// NewMemory returns an empty store. The caller must call Close.
func NewMemory() *Memory {
	m := &Memory{machine: mvcc.New(), term: 1, deposed: make(chan struct{})}
	m.hub = watch.New(memoryHistory{m.machine}, 0, watch.Options{})
	return m
}

var (
	_ raftstore.Store  = (*Memory)(nil)
	_ raftstore.Leader = (*Memory)(nil)
)

type memoryHistory struct{ machine *mvcc.Machine }

func (h memoryHistory) Read(after raftstore.Revision, limit int) ([]raftstore.Events, error) {
	return h.machine.View().Read(after, limit)
}

// Close stops the store and ends every watch. Later calls fail with ErrClosed.
func (m *Memory) Close() {
	m.mu.Lock()
	m.closed = true
	if m.expiry != nil {
		m.expiry.Stop()
	}
	m.mu.Unlock()
	m.hub.Close()
}

// Depose ends the current raft term and starts the next one, in which this store is the leader
// again. Commits with the fence of an earlier term are then refused.
func (m *Memory) Depose() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.term++
	close(m.deposed)
	m.deposed = make(chan struct{})
}

// Compact compacts history up to and including the revision upTo.
func (m *Memory) Compact(upTo raftstore.Revision) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.applyCommand(&storev1.Command{Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: uint64(upTo)}}})
}

// Commit implements raftstore.Store.
func (m *Memory) Commit(ctx context.Context, c raftstore.Commit) (raftstore.Revision, error) {
	p, err := mvcc.Proposal(c)
	if err != nil {
		return 0, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.checkOpen(ctx); err != nil {
		return 0, err
	}
	// Callers may reuse their buffers after the call, as with a replica.
	for _, op := range p.Ops {
		op.Value = append([]byte(nil), op.Value...)
	}
	p.ProposedUnixMs = time.Now().UnixMilli()
	res := m.applyCommand(
		&storev1.Command{Kind: &storev1.Command_Batch{Batch: &storev1.Batch{Proposals: []*storev1.Proposal{p}}}})
	m.watchSpace()
	out := res.Outcomes[0][0]
	return out.Revision, out.Err()
}

func (m *Memory) checkOpen(ctx context.Context) error {
	if m.closed {
		return raftstore.ErrClosed
	}
	return ctx.Err()
}

// SetQuota sets the space quota in bytes; 0 means no quota. When the size of keys and values
// reaches the quota, the store refuses new keys until the size is below nine tenths of the quota.
func (m *Memory) SetQuota(bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.quota = bytes
	m.watchSpace()
}

// watchSpace raises or clears the space alarm according to the quota and the current size of the
// state. The caller holds m.mu.
func (m *Memory) watchSpace() {
	v := m.machine.View()
	up := len(v.Alarms()) > 0
	over := m.quota > 0 && (v.Bytes() >= m.quota || up && v.Bytes() >= m.quota-m.quota/10)
	if over == up {
		return
	}
	m.applyCommand(&storev1.Command{Kind: &storev1.Command_Alarm{Alarm: &storev1.SetAlarm{
		Clear: up, QuotaBytes: m.quota, GrowthBytes: 1 << 20, HistoryBytes: raftstore.MaxCommitBytes,
		Alarm: &storev1.Alarm{Kind: uint32(raftstore.AlarmSpace), SinceUnixMs: time.Now().UnixMilli(),
			Message: "the quota is exceeded"},
	}}})
}

// applyCommand applies one command, publishes the resulting events to the watchers and sets the
// timer for the next expiry. The caller holds m.mu.
func (m *Memory) applyCommand(cmd *storev1.Command) mvcc.Result {
	res := m.machine.Apply(mvcc.Entry{Term: m.term, Command: cmd})
	m.hub.Publish(res.Events)
	if m.expiry != nil {
		m.expiry.Stop()
		m.expiry = nil
	}
	if next := m.machine.View().NextExpiry(); next != 0 && !m.closed {
		m.expiry = time.AfterFunc(time.Until(time.UnixMilli(next)), m.expireKeys)
	}
	return res
}

func (m *Memory) expireKeys() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return
	}
	m.applyCommand(
		&storev1.Command{Kind: &storev1.Command_Expire{Expire: &storev1.Expire{UntilUnixMs: time.Now().UnixMilli()}}})
	m.watchSpace()
}

// Get implements raftstore.Store.
func (m *Memory) Get(ctx context.Context, key string, _ raftstore.ReadOptions) (
	raftstore.Item, raftstore.Revision, error,
) {
	v, err := m.currentView(ctx)
	if err != nil {
		return raftstore.Item{}, 0, err
	}
	it, ok := v.Get(key)
	if !ok {
		return raftstore.Item{}, v.Revision(), fmt.Errorf("%q: %w", key, raftstore.ErrNotFound)
	}
	return it, v.Revision(), nil
}

// List implements raftstore.Store.
func (m *Memory) List(ctx context.Context, prefix string, o raftstore.ListOptions) (raftstore.List, error) {
	v, err := m.currentView(ctx)
	if err != nil {
		return raftstore.List{}, err
	}
	return v.List(prefix, o)
}

func (m *Memory) currentView(ctx context.Context) (*mvcc.View, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.checkOpen(ctx); err != nil {
		return nil, err
	}
	return m.machine.View(), nil
}

// Watch implements raftstore.Store.
func (m *Memory) Watch(ctx context.Context, prefix string, after raftstore.Revision) (raftstore.Watcher, error) {
	w, err := m.hub.Watch(ctx, prefix, after)
	if err != nil {
		return nil, err
	}
	return w, nil
}

// Sync implements raftstore.Store.
func (m *Memory) Sync(ctx context.Context) (raftstore.Revision, error) {
	v, err := m.currentView(ctx)
	if err != nil {
		return 0, err
	}
	return v.Revision(), nil
}

// Applied implements raftstore.Store.
func (m *Memory) Applied() raftstore.Revision { return m.machine.View().Revision() }

// Lead implements raftstore.Leader. This store is always the leader; Depose starts a new term.
func (m *Memory) Lead(ctx context.Context, lead func(ctx context.Context, fence raftstore.Fence) error) error {
	for ctx.Err() == nil {
		m.mu.Lock()
		term, deposed := m.term, m.deposed
		m.mu.Unlock()
		err := leadUntil(ctx, deposed, func(ctx context.Context) error { return lead(ctx, raftstore.Fence(term)) })
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("leading in term %d: %w", term, err)
		}
		select {
		case <-deposed:
		case <-ctx.Done():
		}
	}
	return nil
}

// leadUntil calls lead with a context that ends when deposed is closed, and returns the error of
// lead.
func leadUntil(ctx context.Context, deposed <-chan struct{}, lead func(ctx context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-deposed:
			cancel()
		case <-ctx.Done():
		}
	}()
	return lead(ctx)
}
