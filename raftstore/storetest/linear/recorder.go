// Package linear checks whether a store keeps its contract while faults are injected. Random
// clients and watchers use the store and record their calls and results (Workload, Recorder). Check
// then compares the recording with the history of the store's revisions and with a model of a map
// without revisions. Any raftstore.Store can be checked, in this process or in another.
//
// Check has two requirements. Every commit that changes something under the prefix must be made
// through a Recorder. Each such commit must put at least one value that no other commit puts.
package linear

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"keelson.dev/keelson/raftstore"
)

// Door provides access to a store through one replica, during one run of the replica's process.
// Local reads through the same Door never return an older revision than before.
type Door struct {
	Name  string // unique per start of the replica
	Store raftstore.Store
}

// fate states whether a call took effect, as far as its result shows.
type fate uint8

const (
	done    fate = iota + 1 // the call took effect, or it was a read
	refused                 // a precondition of the commit failed
	failed                  // the call certainly had no effect
	unknown                 // the effect is unknown
)

type opKind uint8

const (
	opCommit opKind = iota + 1
	opGet
	opList
	opSync
)

// op is one recorded call and its result.
type op struct {
	kind      opKind
	door      string
	call, ret time.Duration // times since the start of the recording
	inTime    bool          // the call returned before the deadline of its context

	commit raftstore.Commit
	key    string // key of a Get, or prefix of a List
	read   raftstore.ListOptions

	fate     fate
	err      error
	rev      raftstore.Revision
	item     *raftstore.Item
	list     raftstore.List
	conflict *raftstore.ConflictError
}

// Recorder records the calls of clients and the deliveries to watchers. Check verifies the
// recording.
type Recorder struct {
	prefix string
	base   raftstore.List // the items under the prefix at the start of the recording
	began  time.Time

	mu       sync.Mutex
	ops      []*op
	sessions []*session
	fence    raftstore.Fence // the greatest fence with which a commit was acknowledged
}

// NewRecorder starts a recording of the keys under a prefix. Only clients of this recorder may
// write there.
func NewRecorder(ctx context.Context, s raftstore.Store, prefix string) (*Recorder, error) {
	// An empty store is at revision 0, after which a watch cannot start.
	if _, err := s.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(prefix+"~begin", nil)}}); err != nil {
		return nil, fmt.Errorf("starting the recording: %w", err)
	}
	base, err := s.List(ctx, prefix, raftstore.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("listing the initial state of the recording: %w", err)
	}
	return &Recorder{prefix: prefix, base: base, began: time.Now()}, nil
}

func (r *Recorder) elapsed() time.Duration { return time.Since(r.began) }

// Client makes calls to a store through one replica and records them with their results.
type Client struct {
	rec  *Recorder
	door Door
}

// Through returns a client that makes its calls through the replica of d.
func (r *Recorder) Through(d Door) Client { return Client{r, d} }

// recordCall executes call, and records o with the start and end of the call, its error, and its
// fate. It returns the error of call.
func (c Client) recordCall(ctx context.Context, o *op, call func() error) error {
	o.door, o.call = c.door.Name, c.rec.elapsed()
	err := call()
	o.ret, o.inTime, o.err = c.rec.elapsed(), ctx.Err() == nil, err
	o.fate = fateOf(err, o)
	c.rec.mu.Lock()
	defer c.rec.mu.Unlock()
	c.rec.ops = append(c.rec.ops, o)
	if o.kind == opCommit && o.fate == done {
		c.rec.fence = max(c.rec.fence, o.commit.Fence)
	}
	return err
}

// fateOf derives the fate of a call from its error, according to the contract of raftstore.Store.
// For a conflict, it also sets o.conflict.
func fateOf(err error, o *op) fate {
	switch {
	case err == nil, o.kind == opGet && errors.Is(err, raftstore.ErrNotFound):
		return done
	case errors.As(err, &o.conflict):
		return refused
	case errors.Is(err, raftstore.ErrOutcomeUnknown):
		return unknown
	}
	if sureError(err) != nil {
		return failed
	}
	if o.kind != opCommit && (errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)) {
		return failed
	}
	return unknown
}

// sureError returns the error of raftstore that err wraps, if that error guarantees that the call
// had no effect. Otherwise it returns nil.
func sureError(err error) error {
	for _, sure := range []error{
		raftstore.ErrUnavailable, raftstore.ErrFenced, raftstore.ErrNotLeader, raftstore.ErrClosed,
		raftstore.ErrCompacted,
		raftstore.ErrFutureRevision, raftstore.ErrInvalid, raftstore.ErrTooLarge, raftstore.ErrNoSpace,
	} {
		if errors.Is(err, sure) {
			return sure
		}
	}
	return nil
}

// Commit calls raftstore.Store.Commit and records the call.
func (c Client) Commit(ctx context.Context, commit raftstore.Commit) (raftstore.Revision, error) {
	o := &op{kind: opCommit, commit: commit}
	err := c.recordCall(ctx, o, func() (err error) {
		o.rev, err = c.door.Store.Commit(ctx, commit)
		return err
	})
	return o.rev, err
}

// Get calls raftstore.Store.Get and records the call.
func (c Client) Get(ctx context.Context, key string, ro raftstore.ReadOptions) (
	raftstore.Item, raftstore.Revision, error,
) {
	o := &op{kind: opGet, key: key, read: raftstore.ListOptions{ReadOptions: ro}}
	var it raftstore.Item
	err := c.recordCall(ctx, o, func() (err error) {
		it, o.rev, err = c.door.Store.Get(ctx, key, ro)
		if err == nil {
			o.item = &it
		}
		return err
	})
	return it, o.rev, err
}

// List calls raftstore.Store.List and records the call.
func (c Client) List(ctx context.Context, prefix string, lo raftstore.ListOptions) (raftstore.List, error) {
	o := &op{kind: opList, key: prefix, read: lo}
	err := c.recordCall(ctx, o, func() (err error) {
		o.list, err = c.door.Store.List(ctx, prefix, lo)
		o.rev = o.list.Revision
		return err
	})
	return o.list, err
}

// Sync calls raftstore.Store.Sync and records the call.
func (c Client) Sync(ctx context.Context) (raftstore.Revision, error) {
	o := &op{kind: opSync}
	err := c.recordCall(ctx, o, func() (err error) {
		o.rev, err = c.door.Store.Sync(ctx)
		return err
	})
	return o.rev, err
}

// Fence returns the greatest fence with which a commit was acknowledged.
func (r *Recorder) Fence() raftstore.Fence {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.fence
}

// Calls returns the number of recorded calls.
func (r *Recorder) Calls() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.ops)
}
