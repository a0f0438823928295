package failover

import (
	"slices"
	"time"
)

// Role is the role of a replica in raft.
type Role int

// The possible roles of a replica in raft.
const (
	Follower Role = iota
	Candidate
	Leader
)

// View is the state of raft in one replica at one time.
type View struct {
	Role        Role
	Leader      string    // ID of the leader that this replica follows; "" = unknown
	LastContact time.Time // when raft last received a message of its leader
	Voters      []string  // IDs of the voters, including this replica if it is a voter
	Log         LogPosition
}

// isVoter reports whether a replica is among the voters.
func (v View) isVoter(id string) bool { return slices.Contains(v.Voters, id) }

// majoritySize returns the number of voters that form a majority.
func (v View) majoritySize() int { return len(v.Voters)/2 + 1 }

// LogPosition is the end of a replica's log. Positions are ordered totally: by term, then by index,
// then by ID.
type LogPosition struct {
	Term, Index uint64
	ID          string // ID of the replica
	// WritePending is how long the oldest disk write has been pending. It is 0 for a replica of a
	// previous release, which does not report it.
	WritePending time.Duration
}

// Less reports whether the log of p is less up to date than the log of other: it ends with a lower
// term, or with the same term and a lower index. Equal logs are ordered by ID.
func (p LogPosition) Less(other LogPosition) bool {
	if p.Term != other.Term {
		return p.Term < other.Term
	}
	if p.Index != other.Index {
		return p.Index < other.Index
	}
	return p.ID < other.ID
}

// MaxPendingWrite is how long the oldest disk write of a replica may have been pending. A replica
// with an older pending write is not elected, because it must write its own vote.
const MaxPendingWrite = 500 * time.Millisecond

// isStalled reports whether the disk of the replica is too slow for an election.
func (p LogPosition) isStalled() bool { return p.WritePending > MaxPendingWrite }
