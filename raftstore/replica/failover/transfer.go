package failover

import (
	"errors"
	"fmt"
	"time"
)

// MaxTransferLag is how many entries the successor of a leader may lack. Under load, some entries
// are always in transit.
const MaxTransferLag = 64

// ErrOutdatedTransfer is returned for a TimeoutNow that was not sent by the current leader of its
// target.
var ErrOutdatedTransfer = errors.New("outdated leadership transfer")

// ErrStalledDisk is returned if a disk is too slow for an election.
var ErrStalledDisk = errors.New("a disk write has been pending for too long")

// CheckTimeoutNow returns an error if this replica must not obey a TimeoutNow. sender is the
// replica that has sent it, possibly this replica itself. The request does not contain a term, and
// raft obeys it from any sender in any role. A request that arrives late would therefore depose the
// leader that it has created, or a later leader.
//
// A replica that becomes a candidate in place of an exited leader still follows that leader. If
// this replica has since voted for another replica, or follows another leader, its election could
// only depose the new leader.
func (p *Pledge) CheckTimeoutNow(s Settings, v View, sender string) error {
	if v.Log.isStalled() {
		return fmt.Errorf("%w: for %v", ErrStalledDisk, v.Log.WritePending.Round(time.Millisecond))
	}
	followsLeader := v.Role == Follower && v.Leader != ""
	if followsLeader && (sender == v.Leader || sender == s.Self && p.replaces == v.Leader) {
		return nil
	}
	return ErrOutdatedTransfer
}

// Successor selects the voter to which a leader transfers its leadership. From the request until
// the voter leads, raft accepts no proposals, and it first sends all missing entries to the voter.
// The successor must therefore respond, lack few entries, and have a working disk. It must also
// have received a message of this leader recently, because a voter that does not follow the leader
// would not obey.
type Successor struct {
	Best    LogPosition // the voter with the most up-to-date log so far; ID "" = none
	Stalled string      // ID of a voter with a stalled disk; "" = none

	settings Settings
	enough   uint64
}

// NewSuccessor returns a Successor without responses, for a leader with the last log index
// lastIndex.
func NewSuccessor(s Settings, lastIndex uint64) Successor {
	return Successor{settings: s, enough: lastIndex - min(lastIndex, MaxTransferLag)}
}

// Add counts the response of a voter; responded is false if the voter has not responded. silence is
// the time since the voter's last contact with its leader; 0 means that it follows no leader. Add
// reports whether the best voter's log is nearly complete, so that no further response is needed.
func (s *Successor) Add(log LogPosition, silence time.Duration, responded bool) bool {
	switch {
	case log.isStalled():
		s.Stalled = log.ID
		return false
	case !responded || silence >= s.settings.HeartbeatTimeout:
		return false
	case s.Best.ID == "" || s.Best.Less(log):
		s.Best = log
		return log.Index >= s.enough
	}
	return false
}

// IsReady reports whether the best voter lacks at most MaxTransferLag entries of the leader's log,
// which ends with lastIndex.
func (s *Successor) IsReady(lastIndex uint64) bool {
	return s.Best.ID != "" && s.Best.Index+MaxTransferLag >= lastIndex
}
