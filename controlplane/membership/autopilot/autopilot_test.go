package autopilot

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// parseMembers parses a comma-separated list of members, each a name followed by attributes.
// Examples: "cp1 voter", "cp3 voter silent=11m", "cp4 standby applied=900", "cp5 standby level=1",
// "cp6 learner". A member responds unless it has the attribute silent.
func parseMembers(t *testing.T, text string) (out []Member) {
	t.Helper()
	for line := range strings.SplitSeq(text, ",") {
		f := strings.Fields(line)
		m := Member{Name: f[0], Responded: true, AppliedIndex: 1000, FeatureLevel: 2}
		for _, word := range f[1:] {
			key, value, _ := strings.Cut(word, "=")
			var err error
			switch key {
			case "voter":
				m.Voter = true
			case "standby":
				m.Standby = true
			case "learner":
			case "silent":
				m.Responded = false
				m.SilentFor, err = time.ParseDuration(value)
			case "applied":
				_, err = fmt.Sscan(value, &m.AppliedIndex)
			case "level":
				_, err = fmt.Sscan(value, &m.FeatureLevel)
			default:
				t.Fatalf("unknown attribute %q in %q", word, text)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		out = append(out, m)
	}
	return out
}

func TestDecisions(t *testing.T) {
	cp3Dead := "cp1 voter, cp2 voter, cp3 voter silent=11m"
	for _, c := range []struct {
		name, members string
		pending       *Replacement
		want          Action
		dead, standby string
		why           string
		blocked       bool
	}{
		{"all voters answer and a standby exists", "cp1 voter, cp2 voter, cp3 voter, cp4 standby", nil,
			ActionNone, "", "",
			"every voter answers; cp4 would be promoted next", false},
		{"all voters answer and there is no standby", "cp1 voter, cp2 voter, cp3 voter", nil, ActionNone, "", "",
			"there is no standby", false},
		{"a voter is silent for less than the limit", "cp1 voter, cp2 voter, cp3 voter silent=4m, cp4 standby", nil,
			ActionNone, "", "",
			"cp3 has not answered for 4m0s of 10m0s", false},
		{"a voter is silent for longer than the limit", cp3Dead + ", cp4 standby", nil, ActionRemove, "cp3", "cp4",
			"cp3 has not answered for 11m0s and is replaced by cp4", false},
		{"a voter is silent for exactly the limit", "cp1 voter, cp2 voter, cp3 voter silent=10m, cp4 standby",
			nil, ActionRemove, "cp3",
			"cp4", "", false},
		{"dead voter without a standby", cp3Dead, nil, ActionNone, "cp3", "",
			"there is no standby: run 'keelson-controlplane join --standby'",
			true},
		{"a learner that joins as a voter is not a standby", cp3Dead + ", cp4 learner", nil, ActionNone, "cp3", "",
			"there is no standby", true},
		{"all standbys lag behind", cp3Dead + ", cp4 standby applied=0, cp5 standby applied=900", nil,
			ActionNone, "cp3", "",
			"no standby is caught up: cp5 is 100 entries behind; cp4 is 1,000 entries behind", true},
		{"the standby runs an older release", cp3Dead + ", cp4 standby level=1", nil, ActionNone, "cp3", "",
			"the release of cp4 supports feature levels up to 1, and the cluster has level 2", true},
		{"the standby does not answer", cp3Dead + ", cp4 standby silent=1s", nil, ActionNone, "cp3", "",
			"cp4 does not answer", true},
		{"the standby with the most log entries is chosen",
			cp3Dead + ", cp4 standby applied=990, cp5 standby applied=999", nil, ActionRemove, "cp3",
			"cp5", "", false},
		{"the voter that is silent longest is replaced first",
			"cp1 voter, cp2 voter, cp3 voter, cp4 voter silent=11m, cp5 voter silent=12m, " +
				"cp6 standby", nil, ActionRemove, "cp5", "cp6", "", false},
		{"two of three voters are dead", "cp1 voter, cp2 voter silent=11m, cp3 voter silent=12m, cp4 standby", nil,
			ActionNone, "cp3", "",
			"of 3 voters only 1 answer and 2 are needed", true},
		{"one of two voters is dead", "cp1 voter, cp2 voter silent=11m, cp4 standby", nil, ActionNone, "cp2", "",
			"of 2 voters only 1 answer and 2 are needed", true},
		{"one voter is dead and another does not answer at present",
			"cp1 voter, cp2 voter silent=1s, cp3 voter silent=11m, cp4 standby", nil, ActionNone, "cp3", "",
			"1 answer and 2", true},

		{"pending replacement: the standby is promoted", "cp1 voter, cp2 voter, cp4 standby",
			&Replacement{"cp3", "cp4", 3}, ActionPromote,
			"cp3", "cp4", "cp4 receives the vote of cp3", false},
		{"pending replacement: the chosen standby is preferred",
			"cp1 voter, cp2 voter, cp4 standby applied=990, cp5 standby",
			&Replacement{"cp3", "cp4", 3}, ActionPromote, "cp3", "cp4", "", false},
		{"pending replacement: another standby is promoted if the chosen standby is dead",
			"cp1 voter, cp2 voter, cp4 standby silent=1s, cp5 standby",
			&Replacement{"cp3", "cp4", 3}, ActionPromote, "cp3", "cp5", "", false},
		{"pending replacement: the only standby is dead", "cp1 voter, cp2 voter, cp4 standby silent=1s",
			&Replacement{"cp3", "cp4", 3}, ActionNone, "cp3",
			"cp4", "cp3 was removed, and no standby is caught up: cp4 does not answer", true},
		{"pending replacement: the promotion would need the vote of the standby",
			"cp1 voter, cp2 voter silent=1s, cp4 standby",
			&Replacement{"cp3", "cp4", 3}, ActionNone, "cp3", "cp4", "1 answer and 2 are needed to promote", true},
		{"pending replacement: complete", "cp1 voter, cp2 voter, cp4 voter", &Replacement{"cp3", "cp4", 3},
			ActionDeleteRecord, "cp3", "cp4",
			"cp3 was replaced", false},
		{"pending replacement: the dead voter answers before its removal",
			"cp1 voter, cp2 voter, cp3 voter, cp4 standby",
			&Replacement{"cp3", "cp4", 3}, ActionDeleteRecord, "cp3", "cp4", "answers again", false},
		{"pending replacement of a previous leader: the new leader has not observed the silence",
			"cp1 voter, cp2 voter, cp3 voter silent=5s, cp4 standby",
			&Replacement{"cp3", "cp4", 3}, ActionDeleteRecord, "cp3", "cp4", "decided again", false},
		{"pending replacement: the removal has failed", cp3Dead + ", cp4 standby",
			&Replacement{"cp3", "cp4", 3}, ActionRemove,
			"cp3", "cp4", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := Decide(Observation{Leader: "cp1", Members: parseMembers(t, c.members), CommitIndex: 1000,
				FeatureLevel: 2,
				ReplaceAfter: 10 * time.Minute, Pending: c.pending})
			if got.Action != c.want || got.Dead != c.dead || got.Standby != c.standby && c.want != ActionNone ||
				!strings.Contains(got.Reason, c.why) || got.Blocked != c.blocked {
				t.Errorf("decision %+v, want %v of %q with standby %q, blocked %v, and a reason with %q",
					got, c.want, c.dead, c.standby, c.blocked, c.why)
			}
		})
	}
}

// The silence of a member counts from the first observation of a leader. Only the time between
// observations in short succession counts.
func TestSilenceTracker(t *testing.T) {
	w := NewSilenceTracker(time.Second)
	observe := func(now time.Duration, responded bool, want time.Duration) {
		t.Helper()
		m := []Member{{Name: "cp2", Responded: responded}}
		if w.Observe(now, m); m[0].SilentFor != want {
			t.Errorf("at %v: cp2 is silent for %v, want %v", now, m[0].SilentFor, want)
		}
	}
	observe(time.Hour, false, 0)
	observe(time.Hour+time.Second, false, time.Second)
	observe(time.Hour+2*time.Second, false, 2*time.Second)
	observe(2*time.Hour, false, 4*time.Second) // the leader was suspended
	observe(2*time.Hour+time.Second, true, 0)
	observe(2*time.Hour+2*time.Second, false, 0)
	observe(2*time.Hour+time.Second, false, 0) // a clock that goes back adds no silence
	w.Observe(3*time.Hour, nil)                // cp2 is no longer a member
	observe(3*time.Hour+time.Second, false, 0)
}
