package membership

import (
	"testing"

	"keelson.dev/keelson/raftstore"
)

// A previous voter joins again as a standby. The start of its log lists it as a voter, which must
// not count before the replica has caught up. F53
func TestOldMemberListGivesNoVote(t *testing.T) {
	var (
		old     = []raftstore.Member{{ID: "cp1", Voter: true}, {ID: "cp2", Voter: true}, {ID: "cp3", Voter: true}}
		current = []raftstore.Member{{ID: "cp1", Voter: true}, {ID: "cp2"}, {ID: "cp3", Voter: true},
			{ID: "cp4", Voter: true}}
	)
	for _, c := range []struct {
		name     string
		members  []raftstore.Member
		replica  string
		caughtUp bool
		want     bool
	}{
		{"the list is from before the replica has caught up", old, "cp2", false, false},
		{"the replica has caught up and has no vote", current, "cp2", true, false},
		{"the replica has caught up and has a vote", current, "cp4", true, true},
		{"the replica has a vote in its list and no leader", current, "cp4", false, false},
		{"the replica is not a member", old, "cp4", true, false},
	} {
		if got := hasVote(c.members, c.replica, c.caughtUp); got != c.want {
			t.Errorf("%s: vote %v, want %v", c.name, got, c.want)
		}
	}
}
