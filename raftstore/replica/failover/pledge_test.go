package failover

import (
	"testing"
	"time"
)

// A voter keeps its pledge to a replica that still requests others for PledgeDuration, and to a confirmed candidate for as
// long as an election may take.
func TestPledgeLastsForAnElection(t *testing.T) {
	const election = 6 * PledgeDuration
	now := time.Now()
	var p Pledge
	for _, step := range []struct {
		name              string
		wait              time.Duration
		leader, candidate string
		duration          time.Duration
		granted           bool
	}{
		{"to the first replica that requests it", 0, "r1", "r2", PledgeDuration, true},
		{"not to the second", PledgeDuration / 2, "r1", "r3", PledgeDuration, false},
		{"to the first again when it is confirmed", 0, "r1", "r2", election, true},
		{"not to the second after the duration of the first request", PledgeDuration, "r1", "r3",
			PledgeDuration, false},
		{"not shortened by a late request of the first", 0, "r1", "r2", PledgeDuration, true},
		{"so not to the second after that duration", 2 * PledgeDuration, "r1", "r3", PledgeDuration, false},
		{"to the second in the place of another leader", 0, "r2", "r3", PledgeDuration, true},
		{"not to a third there", 0, "r2", "r4", PledgeDuration, false},
		{"to the third after the duration of the second", 3 * PledgeDuration, "r2", "r4", PledgeDuration, true},
	} {
		now = now.Add(step.wait)
		if granted := p.Grant(step.leader, step.candidate, step.duration, now); granted != step.granted {
			t.Errorf("%s: Grant returned %v", step.name, granted)
		}
	}
}

// The responses of a majority are enough: a voter whose process is frozen delays no campaign.
func TestFrozenVoterIsNotWaitedFor(t *testing.T) {
	pledged, ahead := PledgeResponse{Pledged: true}, PledgeResponse{BetterLog: true}
	for name, of := range map[string]struct {
		responses       []PledgeResponse
		pledged, better int
	}{
		"a majority has pledged itself":   {[]PledgeResponse{pledged, pledged}, 3, 0},
		"a majority, and one better":      {[]PledgeResponse{ahead, pledged, pledged}, 3, 1},
		"all have responded, no majority": {[]PledgeResponse{pledged, {}, ahead, {}}, 2, 1},
	} {
		t.Run(name, func(t *testing.T) {
			tally := NewTally(4, 3)
			for i := 0; !tally.IsDone(); i++ {
				if i == len(of.responses) {
					t.Fatal("the tally waits for another response")
				}
				tally.Add(of.responses[i])
			}
			if tally.Pledged != of.pledged || tally.Better != of.better {
				t.Errorf("%d have pledged themselves and %d have better logs, want %d and %d", tally.Pledged,
					tally.Better, of.pledged, of.better)
			}
		})
	}
}

// A replica obeys its own TimeoutNow only while it follows the leader in whose place it stands, and another's only if that is
// its leader.
func TestTimeoutNowIsObeyedWhileItIsCurrent(t *testing.T) {
	settings := Settings{Self: "r2", HeartbeatTimeout: time.Second}
	var p Pledge
	p.RecordCandidacy("r1")
	for name, of := range map[string]struct {
		role   Role
		leader string
		from   string
		err    error
	}{
		"own, still a follower of the exited leader": {Follower, "r1", "r2", nil},
		"own, follower of another leader since":      {Follower, "r3", "r2", ErrOutdatedTransfer},
		"own, without a leader after a vote":         {Follower, "", "r2", ErrOutdatedTransfer},
		"own, leader since":                          {Leader, "r2", "r2", ErrOutdatedTransfer},
		"of the leader":                              {Follower, "r3", "r3", nil},
		"of the previous leader":                     {Follower, "r3", "r1", ErrOutdatedTransfer},
		"of the leader, candidate already":           {Candidate, "r3", "r3", ErrOutdatedTransfer},
	} {
		t.Run(name, func(t *testing.T) {
			if err := p.CheckTimeoutNow(settings, View{Role: of.role, Leader: of.leader}, of.from); err != of.err {
				t.Errorf("error %v, want %v", err, of.err)
			}
		})
	}
}
