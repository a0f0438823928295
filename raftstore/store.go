// Package raftstore defines the types, interfaces and errors of Keelson's replicated store. The
// store is an ordered map from string keys to bytes with one global revision, history, watches and
// atomic conditional commits. It is independent of Kubernetes.
//
// The packages below it are: mvcc (the pure state machine), watch (fan-out of events), replica
// (hashicorp/raft around both), disk (durable storage) and storetest (the conformance suite of
// Store).
package raftstore

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Revision is the number of a state of the whole store. Every commit that changes something
// increments it by exactly one; all ops of one commit have the same revision. Zero means "none" or
// "current", depending on the call. The first commit is revision 1.
type Revision uint64

// Item is one key with its value and the revisions of the commits that created and last wrote it.
// Value belongs to the store: callers must not modify it.
type Item struct {
	Key      string
	Value    []byte
	Created  Revision // revision of the commit that created the key
	Modified Revision // revision of the commit that last wrote the key
	Expires  int64    // unix milliseconds after which the store deletes the key; 0 = never
}

// OpKind is the kind of an Op.
type OpKind uint8

const (
	OpPut    OpKind = 1 // write Value at Key
	OpDelete OpKind = 2 // remove Key; removing an absent key with precondition Any is a no-op
	OpCheck  OpKind = 3 // change nothing, only require the precondition
)

// Precondition is a condition on the state of an Op's key. If it does not hold, the whole commit
// fails. The zero value means no condition.
type Precondition struct {
	Absent   bool     // the key must not exist
	Revision Revision // the key must exist with exactly this Modified revision (when not zero)
}

// Op is one step of a commit: a put, a delete or a check of one key. If is the precondition of the
// whole commit on that key.
type Op struct {
	Kind  OpKind
	Key   string
	Value []byte
	If    Precondition
	TTL   time.Duration // OpPut only: expire this long after the commit; 0 = never
}

// Put, Create, Update, Delete and DeleteAt return the common ops. Create requires that the key does
// not exist. Update and DeleteAt require that the key's Modified revision equals the argument
// revision.
func Put(key string, value []byte) Op { return Op{Kind: OpPut, Key: key, Value: value} }
func Create(key string, value []byte) Op {
	return Op{Kind: OpPut, Key: key, Value: value, If: Precondition{Absent: true}}
}
func Update(key string, value []byte, revision Revision) Op {
	return Op{Kind: OpPut, Key: key, Value: value, If: Precondition{Revision: revision}}
}
func Delete(key string) Op { return Op{Kind: OpDelete, Key: key} }
func DeleteAt(key string, revision Revision) Op {
	return Op{Kind: OpDelete, Key: key, If: Precondition{Revision: revision}}
}

// Fence is the raft term in which a replica became the leader. It restricts a commit to that term.
// The zero Fence means "not fenced".
type Fence uint64

// Commit is an atomic change: either all ops are applied, or none. No key may appear twice.
type Commit struct {
	Ops []Op
	// Fence, if not zero, restricts the commit to one raft term: the term in which this replica, as
	// the leader, decided to make the commit. This replica then never forwards the commit to
	// another leader. The state machine applies it only in that term; otherwise the error is
	// ErrFenced.
	Fence Fence
}

// EventKind is the kind of a change.
type EventKind uint8

const (
	EventPut    EventKind = 1
	EventDelete EventKind = 2
)

// Event is one change of one key. For EventDelete, Item contains only Key, Created and Modified,
// which is the revision of the deletion.
type Event struct {
	Kind EventKind
	Item Item
	Prev *Item // the item before the change; nil if the key was absent
}

// Events is one delivery of a watch: all events of one revision with keys that match the watched
// prefix, in the order of the commit's ops. A delivery without events is a progress note:
// everything up to and including Revision has been delivered.
type Events struct {
	Revision Revision
	Events   []Event
}

// Watcher is a running watch. C is closed when the watch has ended. Err then returns the reason:
// nil after Stop or cancellation, ErrCompacted, ErrSlowWatcher, or ErrClosed.
type Watcher interface {
	C() <-chan Events
	Err() error
	Stop()
}

// ProgressRequester is implemented by watchers that can send a progress note (an Events value
// without events) on C when requested. A cache can call Store.Sync and then RequestProgress. When
// the note arrives, the cache has received everything that was acknowledged before the call of
// Sync.
type ProgressRequester interface{ RequestProgress() }

// ReadOptions select how recent the state of a read must be.
type ReadOptions struct {
	// Local reads this replica's applied state without contacting the leader. By default a read is
	// linearizable: it observes everything that was acknowledged before it started.
	Local bool
}

// ListOptions select the items of a prefix that List returns, and the revision at which they are
// read.
type ListOptions struct {
	ReadOptions
	Limit int      // maximum number of items to return; 0 = all
	After string   // return keys strictly greater than this one (the continue key)
	At    Revision // revision of the state to read; 0 = current. ErrCompacted if it is no longer retained
}

// List is the result of listing a prefix at one revision.
type List struct {
	Revision  Revision // revision of the snapshot
	Items     []Item   // in key order
	More      bool     // there are more items than Limit
	Remaining int64    // number of items that follow, if More is set
}

// Store is the interface of the replicated store. Every implementation passes storetest.Run.
//
// All calls honor ctx: during an election they wait and retry within its deadline. A commit applies
// exactly once however often it is retried.
type Store interface {
	// Commit applies c atomically and returns its revision. If a precondition fails, it returns
	// *ConflictError and changes nothing. If the outcome cannot be determined within the deadline,
	// it returns ErrOutcomeUnknown. If ctx has ended before the call, it returns ctx's error.
	Commit(ctx context.Context, c Commit) (Revision, error)
	// Get returns the item at key, or ErrNotFound. In both cases it returns the revision of the
	// state that was read.
	Get(ctx context.Context, key string, o ReadOptions) (Item, Revision, error)
	// List returns the items with keys that have the prefix.
	List(ctx context.Context, prefix string, o ListOptions) (List, error)
	// Watch delivers every event with a revision greater than after, for keys with the prefix, in
	// order, without a gap or a duplicate. 0 means the current revision. If no replica has reached
	// the revision after, the error is ErrFutureRevision. A watch never blocks a commit: a slow
	// watcher catches up from history, or ends with ErrSlowWatcher.
	Watch(ctx context.Context, prefix string, after Revision) (Watcher, error)
	// Sync is a read-index operation. It returns once this replica's applied state includes
	// everything that any replica acknowledged before the call. The result is the revision of that
	// state or a later one.
	Sync(ctx context.Context) (Revision, error)
	// Applied returns this replica's applied revision without waiting.
	Applied() Revision
}

// Member is one replica of the raft cluster.
type Member struct {
	ID      string // the replica's name
	Address string // host:port of its peer listener
	Voter   bool
	Leader  bool
	// Applied is the last raft index that the member is known to have applied. Contact is the time
	// at which it reported that, in unix milliseconds. Both are 0 if there was no report.
	Applied uint64
	Contact int64
}

// Status is the state of the raft cluster as this replica knows it.
type Status struct {
	ID     string
	Term   uint64
	Leader string // ID of the leader; "" when unknown
	// number of leader changes that this replica has observed within LeadersWindow, including
	// reelections of the same leader
	Leaders      int
	Revision     Revision
	Compacted    Revision // history up to and including this revision has been compacted
	CommitIndex  uint64
	AppliedIndex uint64
	Keys         int
	Bytes        int64 // sum of key and value sizes
	Members      []Member

	HistoryBytes int64   // sum of key and value sizes of the old versions that history retains
	Quota        int64   // bytes of state and history above which the store becomes read-only; 0 = no quota
	DiskBytes    int64   // log, journal and snapshots on this replica's disk
	Watchers     int     // number of watchers on this replica
	Alarms       []Alarm // active alarms, the same on every replica
}

// LeadersWindow is the time window of Status.Leaders.
const LeadersWindow = 10 * time.Minute

// AlarmKind is the kind of an alarm.
type AlarmKind uint8

const (
	// AlarmSpace means that the space quota is exceeded. A commit then fails with ErrNoSpace if it
	// puts a new key or grows a value by more than 1 KiB. It also fails if it grows the state
	// beyond StateLimit. This lasts until deletes and compaction have freed enough space.
	AlarmSpace AlarmKind = 1
	// AlarmDiverged means that a replica's state differs from the leader's state at the same
	// revision.
	AlarmDiverged AlarmKind = 2
)

// String returns the name of the kind.
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

// Alarm is a problem of the raft cluster or of one replica that an operator should solve. All
// replicas store the active alarms.
type Alarm struct {
	Kind    AlarmKind
	Member  string // ID of the replica; "" = the whole cluster
	Since   int64  // unix milliseconds
	Message string // description of the condition

	// StateLimit and TotalLimit belong to AlarmSpace. Puts may grow the state up to StateLimit, and
	// state and history together up to TotalLimit; the oldest history is compacted to stay below
	// TotalLimit.
	StateLimit, TotalLimit int64
}

// The errors of Store. Test with errors.Is / errors.As.
var (
	ErrNotFound       = errors.New("raftstore: key not found")
	ErrCompacted      = errors.New("raftstore: revision has been compacted")
	ErrFutureRevision = errors.New("raftstore: revision is in the future")
	ErrFenced         = errors.New("raftstore: commit was fenced: the leadership in which it was decided has ended")
	ErrNotLeader      = errors.New("raftstore: this replica is not the leader")
	ErrOutcomeUnknown = errors.New("raftstore: outcome of the commit is unknown")
	ErrUnavailable    = errors.New("raftstore: no leader within the deadline")
	ErrSlowWatcher    = errors.New("raftstore: watcher was too slow")
	ErrClosed         = errors.New("raftstore: store is closed")
	ErrInvalid        = errors.New("raftstore: invalid request") // wrapped with the reason
	ErrNoSpace        = errors.New("raftstore: space quota is exceeded: the store accepts only deletes " +
		"and small updates")
	ErrUnknownMember = errors.New("raftstore: no such member")
	// a different member with the same ID or address; wrapped with the remedy
	ErrMemberExists = errors.New("raftstore: member exists already")
	ErrNoMajority   = errors.New("raftstore: change would leave no majority")
	// wrapped with the ID of the voter and the reason
	ErrTransferFailed = errors.New("raftstore: leadership was not transferred")
	// wrapped with the sizes
	ErrTooLarge = errors.New("raftstore: request is too large")
	// wrapped with the feature levels
	ErrTooOld = errors.New("raftstore: replica is of a release that does not understand what is stored")
)

// Size limits of a commit. A commit that exceeds one of them fails with ErrTooLarge.
const (
	MaxKeyBytes    = 1024
	MaxValueBytes  = 3 << 19 // 1.5 MiB
	MaxCommitBytes = 8 << 20
	MaxCommitOps   = 128
)

// ConflictError is returned for a commit with a precondition that does not hold. It describes the
// first op with such a precondition. The replica that returns it has applied the revision At,
// unless the caller's deadline ended first. A local read on that replica then returns the state at
// that revision or a later one.
type ConflictError struct {
	Key  string
	Want Precondition
	// Have is the key's item as of At, nil if the key was absent. Its revisions and Expires are
	// always as of At. Its Value is set if the replica can read that state: the item is unchanged,
	// or At is in the retained history. Otherwise NoValue is set.
	Have *Item
	At   Revision // revision of the state in which the precondition was checked
	// NoValue means that Have has no Value; Get returns the current one. The commit was retried
	// after its history was compacted, or the deadline ended before the replica had applied At.
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

// Leader is implemented by a store that can run a function while its replica is the raft leader.
type Leader interface {
	// Lead calls the function lead each time this replica has become the leader and has applied
	// everything that was committed before. lead receives the new raft term as its fence. The
	// context of lead ends when the replica loses leadership. Lead waits until lead has returned
	// before it calls lead again. Lead itself returns when ctx ends.
	Lead(ctx context.Context, lead func(ctx context.Context, fence Fence) error) error
}
