// Package raftstore is the vocabulary of Keelson's replicated store: an ordered
// map from string keys to bytes with one global revision, history, watches and
// atomic conditional commits. It knows bytes and revisions and nothing of
// Kubernetes.
//
// The packages below it are the parts: mvcc (the pure state machine), watch
// (fan-out of events), replica (hashicorp/raft around both) and storetest (one
// conformance suite for every implementation of Store).
package raftstore

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Revision numbers a state of the whole store. Every commit that changes
// something advances it by exactly one; all ops of one commit share it. Zero
// means "none" or "now", depending on the call; the first commit is revision 1.
type Revision uint64

// Item is one key with its value and the revisions that made it.
// Value belongs to the store: callers must not modify it.
type Item struct {
	Key      string
	Value    []byte
	Created  Revision // revision of the commit that created the key
	Modified Revision // revision of the commit that last wrote the key
	Expires  int64    // unix milliseconds after which the store deletes the key; 0 = never
}

// OpKind says what an Op does.
type OpKind uint8

const (
	OpPut    OpKind = 1 // write Value at Key
	OpDelete OpKind = 2 // remove Key; removing an absent key with precondition Any is a no-op
	OpCheck  OpKind = 3 // change nothing, only require the precondition
)

// Precondition restricts an Op to a state of its key.
// The zero value is "any": no restriction.
type Precondition struct {
	Absent   bool     // the key must not exist
	Revision Revision // the key must exist with exactly this Modified revision (when not zero)
}

// Op is one step of a commit.
type Op struct {
	Kind  OpKind
	Key   string
	Value []byte
	If    Precondition
	TTL   time.Duration // OpPut only: expire this long after the commit; 0 = never
}

// Put, Create, Update, Delete and DeleteAt are the common ops.
func Put(key string, value []byte) Op { return Op{Kind: OpPut, Key: key, Value: value} }
func Create(key string, value []byte) Op {
	return Op{Kind: OpPut, Key: key, Value: value, If: Precondition{Absent: true}}
}
func Update(key string, value []byte, at Revision) Op {
	return Op{Kind: OpPut, Key: key, Value: value, If: Precondition{Revision: at}}
}
func Delete(key string) Op { return Op{Kind: OpDelete, Key: key} }
func DeleteAt(key string, at Revision) Op {
	return Op{Kind: OpDelete, Key: key, If: Precondition{Revision: at}}
}

// Fence is the raft term of a leadership. The zero Fence means "not fenced".
type Fence uint64

// Commit is an atomic change: all ops apply, or none does.
// No key may appear twice.
type Commit struct {
	Ops []Op
	// Fence, when not zero, restricts the commit to the leadership under which
	// it was decided: it is proposed by this replica only (never forwarded) and
	// the state machine applies it in that term only; otherwise ErrFenced.
	Fence Fence
}

// EventKind says what happened to a key.
type EventKind uint8

const (
	EventPut    EventKind = 1
	EventDelete EventKind = 2
)

// Event is one change of one key. For EventDelete, Item holds Key, Created and
// Modified (= the revision of the deletion) and no Value.
type Event struct {
	Kind EventKind
	Item Item
	Prev *Item // the item before the change; nil when the key was absent
}

// Events is what a watch delivers: all events of one revision that match the
// prefix, in op order; or a progress note (no events), which says that
// everything up to and including Revision has been delivered.
type Events struct {
	Revision Revision
	Events   []Event
}

// Watcher is a running watch. C is closed when the watch ended; Err then says
// why (nil after Stop or cancellation, ErrCompacted, ErrSlowWatcher, ErrClosed).
type Watcher interface {
	C() <-chan Events
	Err() error
	Stop()
}

// ProgressRequester is implemented by watchers that can be asked to say at once
// how far they have come, with a progress note on C. Together with Store.Sync
// it tells a cache that it has seen everything acknowledged before the call.
type ProgressRequester interface{ RequestProgress() }

// ReadOptions choose how fresh a read is.
type ReadOptions struct {
	// Local serves from this replica's applied state without asking the leader.
	// By default a read is linearizable: it sees everything acknowledged before it began.
	Local bool
}

// ListOptions page through a prefix.
type ListOptions struct {
	ReadOptions
	Limit int      // most items to return; 0 = all
	After string   // return keys strictly greater than this one (the continue key)
	At    Revision // read the state at this revision; 0 = now. ErrCompacted when no longer retained
}

// List is a consistent snapshot of a prefix.
type List struct {
	Revision  Revision // the state that the list shows
	Items     []Item   // in key order
	More      bool     // Limit cut the list
	Remaining int64    // how many items follow when More
}

// Store is the contract. Every implementation passes storetest.Run.
//
// All calls honour ctx: during an election they wait and retry within its
// deadline, and a commit applies exactly once however often it is retried.
type Store interface {
	// Commit applies c atomically and returns its revision. When a
	// precondition fails it returns *ConflictError and changes nothing. When
	// the outcome cannot be known within the deadline: ErrOutcomeUnknown. When
	// ctx has ended before the call: its error and none of the above.
	Commit(ctx context.Context, c Commit) (Revision, error)
	// Get returns the item at key, or ErrNotFound. The revision is that of the
	// state it was read from, in both cases.
	Get(ctx context.Context, key string, o ReadOptions) (Item, Revision, error)
	// List returns the items whose keys begin with prefix.
	List(ctx context.Context, prefix string, o ListOptions) (List, error)
	// Watch delivers every event with revision > after whose key begins with
	// prefix: no gap, no duplicate, in order. after = 0 means "from now". A
	// revision that no replica has reached is ErrFutureRevision.
	// It never blocks a commit: a watcher too slow to keep up is caught up
	// from history or ended with ErrSlowWatcher.
	Watch(ctx context.Context, prefix string, after Revision) (Watcher, error)
	// Sync is a read-index: it returns once this replica's applied state
	// includes everything that was acknowledged, by any replica, before the
	// call; the result is the store revision of that state (or later).
	Sync(ctx context.Context) (Revision, error)
	// Applied is this replica's applied revision, without waiting.
	Applied() Revision
}

// Member is one replica of the raft group.
type Member struct {
	ID      string // the replica's name
	Address string // host:port of its peer listener
	Voter   bool
	Leader  bool
	// Applied is the last raft index the member is known to have applied and
	// Contact when that was heard, unix milliseconds; both 0 when never.
	Applied uint64
	Contact int64
}

// Status describes this replica's view of the group.
type Status struct {
	ID           string
	Term         uint64
	Leader       string // ID of the leader; "" when unknown
	Leaders      int    // how many leaders this replica has known within LeadersWithin, one that was elected again included
	Revision     Revision
	Compacted    Revision // history up to and including this revision is gone
	CommitIndex  uint64
	AppliedIndex uint64
	Keys         int
	Bytes        int64 // sum of key and value sizes
	Members      []Member

	HistoryBytes int64   // sum of key and value sizes of the old versions that history retains
	Quota        int64   // bytes of state and history at which the store turns read-only; 0 = none
	DiskBytes    int64   // log, journal and snapshots on this replica's disk
	Watchers     int     // running on this replica
	Alarms       []Alarm // that are up, the same on every replica
}

// LeadersWindow is the time over which Status.Leaders counts.
const LeadersWindow = 10 * time.Minute

// AlarmKind says what an alarm is about.
type AlarmKind uint8

const (
	// AlarmSpace: the space quota is used up. Until deletes and compaction have made
	// room, which clears it, a commit that puts a new key, grows a value by more than
	// 1 KiB, or grows the state beyond StateLimit, fails with ErrNoSpace.
	AlarmSpace AlarmKind = 1
	// AlarmDiverged: a replica's state differs from the leader's at the same revision.
	AlarmDiverged AlarmKind = 2
)

// String is the kind in a word.
func (k AlarmKind) String() string {
	switch k {
	case AlarmSpace:
		return "space"
	case AlarmDiverged:
		return "diverged"
	default:
		return fmt.Sprintf("kind %d", uint8(k))
	}
}

// Alarm is a condition of the group that a person should know of.
type Alarm struct {
	Kind    AlarmKind
	Member  string // the replica it is about; "" = the group
	Since   int64  // unix milliseconds
	Message string // what was found

	// Of AlarmSpace: the bytes of state up to which puts may grow it while the alarm
	// is up, and those of state and history; older history gives way to the latter.
	StateLimit, TotalLimit int64
}

// The errors of Store. Test with errors.Is / errors.As.
var (
	ErrNotFound       = errors.New("raftstore: key not found")
	ErrCompacted      = errors.New("raftstore: revision has been compacted")
	ErrFutureRevision = errors.New("raftstore: revision is in the future")
	ErrFenced         = errors.New("raftstore: commit was fenced: the leadership that decided it has ended")
	ErrNotLeader      = errors.New("raftstore: this replica is not the leader")
	ErrOutcomeUnknown = errors.New("raftstore: outcome of the commit is unknown")
	ErrUnavailable    = errors.New("raftstore: no leader within the deadline")
	ErrSlowWatcher    = errors.New("raftstore: watcher was too slow")
	ErrClosed         = errors.New("raftstore: store is closed")
	ErrInvalid        = errors.New("raftstore: invalid request") // wrapped with what is wrong
	ErrNoSpace        = errors.New("raftstore: space quota is used up: the store takes deletes and small updates only")
	ErrUnknownMember  = errors.New("raftstore: no such member")
	ErrMemberExists   = errors.New("raftstore: member exists already") // and is not the one to be added; wrapped with the remedy
	ErrNoMajority     = errors.New("raftstore: change would leave no majority")
	ErrTransferFailed = errors.New("raftstore: leadership was not transferred")                                  // wrapped with the voter and the reason
	ErrTooLarge       = errors.New("raftstore: request is too large")                                            // wrapped with sizes
	ErrTooOld         = errors.New("raftstore: replica is of a release that does not understand what is stored") // wrapped with the levels
)

// Size limits of a commit. Exceeding one is ErrTooLarge.
const (
	MaxKeyBytes    = 1024
	MaxValueBytes  = 3 << 19 // 1.5 MiB
	MaxCommitBytes = 8 << 20
	MaxCommitOps   = 128
)

// ConflictError reports the first op whose precondition failed. The replica that
// returns it has applied At, unless the caller's deadline ended first: a local
// read there shows that state or a later one.
type ConflictError struct {
	Key  string
	Want Precondition
	// Have is the key's item as of At, nil when the key was absent. Its revisions and
	// Expires are always those. Its Value is, too, as long as the replica can read that
	// state: the item is unchanged or At is in the retained history. Else NoValue is set.
	Have *Item
	At   Revision // the state that was examined
	// NoValue says that Have is without its Value, which Get may have anew: the commit
	// was retried so late that history is gone, or the deadline ended before the replica
	// had applied At.
	NoValue bool
}

func (e *ConflictError) Error() string {
	switch {
	case e.Want.Absent:
		return fmt.Sprintf("raftstore: key %q exists at revision %d", e.Key, e.Have.Modified)
	case e.Have == nil:
		return fmt.Sprintf("raftstore: key %q does not exist, wanted revision %d", e.Key, e.Want.Revision)
	default:
		return fmt.Sprintf("raftstore: key %q is at revision %d, wanted %d", e.Key, e.Have.Modified, e.Want.Revision)
	}
}

// Leader is the part of a replica that runs work on the leader only.
type Leader interface {
	// Lead calls lead each time this replica has become leader and has applied
	// everything committed before (a barrier). ctx ends when leadership is
	// lost; Lead waits for lead to return before it may call it again. Lead
	// itself returns when its own ctx ends.
	Lead(ctx context.Context, lead func(ctx context.Context, fence Fence) error) error
}
