package replica

import (
	"errors"
	"fmt"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// Each change of role becomes one line that says why.
func TestRoleLogTellsReasons(t *testing.T) {
	var lines []string
	l := &overheard{Logger: hclog.NewNullLogger(), roles: &roleLog{changed: func(from, to, reason string) {
		lines = append(lines, fmt.Sprintf("%s -> %s: %s", from, to, reason))
	}}}
	l.Info("entering follower state", "follower", "x", "leader-address", "", "leader-id", "")
	l.Warn("heartbeat timeout reached, starting election", "last-leader-addr", "", "last-leader-id", "r2")
	l.Info("entering candidate state", "node", "x", "term", 3)
	l.Info("election won", "term", 3, "tally", 2)
	l.Info("entering leader state", "leader", "x")
	l.Warn("failed to contact quorum of nodes, stepping down")
	l.Info("entering follower state", "follower", "x", "leader-address", "", "leader-id", "")
	l.Info("entering candidate state", "node", "x", "term", 4)
	l.Info("entering follower state", "follower", "x", "leader-address", "a:1", "leader-id", "r3")
	l.Info("entering leader state", "leader", "x")
	to := raft.ServerID("r2")
	l.Debug("starting leadership transfer", "id", &to, "address", "a:2")
	l.Debug("lost leadership because received a requestVote with a newer term")
	l.Info("entering follower state", "follower", "x", "leader-address", "", "leader-id", "")
	l.Info("entering leader state", "leader", "x")
	l.Error("peer has newer term, stopping replication", "peer", "r3")
	l.Info("entering follower state", "follower", "x", "leader-address", "", "leader-id", "")
	l.Debug("lost leadership because received a requestVote with a newer term") // as a follower
	l.Warn("heartbeat timeout reached, starting election", "last-leader-addr", "", "last-leader-id", raft.ServerID(""))
	l.Info("entering candidate state", "node", "x", "term", 5)
	l.roles.stop(errors.New("disk is full"))
	l.roles.stop(nil)
	want := []string{
		"none -> follower: started",
		"follower -> candidate: leader r2 is silent",
		"candidate -> leader: elected in term 3",
		"leader -> follower: lease lost: no majority answered in time",
		"follower -> candidate: the leader hands over",
		"candidate -> follower: r3 leads",
		"follower -> leader: raft gave none",
		"leader -> follower: stepping down on request: handing over to r2",
		"follower -> leader: raft gave none",
		"leader -> follower: higher term from r3",
		"follower -> candidate: no leader is known",
		"candidate -> none: disk is full",
	}
	if fmt.Sprintf("%q", lines) != fmt.Sprintf("%q", want) {
		t.Errorf("got\n%q\nwant\n%q", lines, want)
	}
}
