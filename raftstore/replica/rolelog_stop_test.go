package replica

import (
	"slices"
	"testing"

	"github.com/hashicorp/raft"
)

// A replica that has told of its end says nothing more: raft may change its role once more while it ends.
func TestNoRoleAfterTheLast(t *testing.T) {
	var said []string
	l := roleLog{self: "r1", answered: nil, ballot: map[string]string{}, campaigns: func() {},
		changed: func(from, to, reason string) { said = append(said, from+" -> "+to) }}
	l.moved(raft.Candidate, situation{})
	l.stop(nil)
	l.moved(raft.Candidate, situation{})
	l.moved(raft.Follower, situation{})
	if want := []string{"none -> follower", "follower -> candidate", "candidate -> none"}; !slices.Equal(said, want) {
		t.Errorf("it said %q, want %q", said, want)
	}
}
