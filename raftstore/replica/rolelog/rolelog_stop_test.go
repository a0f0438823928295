package rolelog

import (
	"slices"
	"testing"

	"github.com/hashicorp/raft"
)

// A replica that has told of its end says nothing more: raft may change its role once more while it ends.
func TestNoRoleAfterTheLast(t *testing.T) {
	var said []string
	var l Log
	l.Initialize("r1", 0, 0, func() {}, func(from, to, _ string) { said = append(said, from+" -> "+to) })
	l.changeRole(raft.Candidate, situation{})
	l.EndRole(nil)
	l.changeRole(raft.Candidate, situation{})
	l.changeRole(raft.Follower, situation{})
	if want := []string{"none -> follower", "follower -> candidate", "candidate -> none"}; !slices.Equal(said, want) {
		t.Errorf("it said %q, want %q", said, want)
	}
}
