package autopilot

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// members reads "cp1 voter", "cp3 voter silent=11m", "cp4 standby applied=900", "cp5 standby level=1", "cp6 learner".
func members(t *testing.T, text string) (out []Member) {
	t.Helper()
	for line := range strings.SplitSeq(text, ",") {
		f := strings.Fields(line)
		m := Member{Name: f[0], Heard: true, Applied: 1000, Level: 2}
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
				m.Heard = false
				m.Silent, err = time.ParseDuration(value)
			case "applied":
				_, err = fmt.Sscan(value, &m.Applied)
			case "level":
				_, err = fmt.Sscan(value, &m.Level)
			default:
				t.Fatalf("%q is no word of %q", word, text)
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
	three := "cp1 voter, cp2 voter, cp3 voter silent=11m"
	for _, c := range []struct {
		name, members string
		pending       *Replacement
		want          Act
		dead, standby string
		why           string
		blocked       bool
	}{
		{"all is well", "cp1 voter, cp2 voter, cp3 voter, cp4 standby", nil, Nothing, "", "", "every voter answers; cp4 would be the next", false},
		{"all is well, and nobody waits", "cp1 voter, cp2 voter, cp3 voter", nil, Nothing, "", "", "there is no standby", false},
		{"not yet", "cp1 voter, cp2 voter, cp3 voter silent=4m, cp4 standby", nil, Nothing, "", "", "cp3 has not answered for 4m0s of 10m0s", false},
		{"it is time", three + ", cp4 standby", nil, Remove, "cp3", "cp4", "cp3 has not answered for 11m0s and is replaced by cp4", false},
		{"right at the time", "cp1 voter, cp2 voter, cp3 voter silent=10m, cp4 standby", nil, Remove, "cp3", "cp4", "", false},
		{"nobody waits", three, nil, Nothing, "cp3", "", "there is no standby: 'keelson-controlplane join --standby'", true},
		{"a learner that is to be a voter is no standby", three + ", cp4 learner", nil, Nothing, "cp3", "", "there is no standby", true},
		{"behind", three + ", cp4 standby applied=0, cp5 standby applied=900", nil, Nothing, "cp3", "",
			"no standby is caught up: cp5 is 100 entries behind; cp4 is 1,000 entries behind", true},
		{"of an older release", three + ", cp4 standby level=1", nil, Nothing, "cp3", "", "cp4 is of a release that understands feature levels up to 1 of 2", true},
		{"dead, too", three + ", cp4 standby silent=1s", nil, Nothing, "cp3", "", "cp4 does not answer", true},
		{"the one that has most", three + ", cp4 standby applied=990, cp5 standby applied=999", nil, Remove, "cp3", "cp5", "", false},
		{"the longest dead goes first", "cp1 voter, cp2 voter, cp3 voter, cp4 voter silent=11m, cp5 voter silent=12m, cp6 standby", nil, Remove, "cp5", "cp6", "", false},
		{"no majority", "cp1 voter, cp2 voter silent=11m, cp3 voter silent=12m, cp4 standby", nil, Nothing, "cp3", "", "of 3 voters 1 answer where 2 are needed", true},
		{"no majority of two", "cp1 voter, cp2 voter silent=11m, cp4 standby", nil, Nothing, "cp2", "", "of 2 voters 1 answer where 2 are needed", true},
		{"one dead and another silent for a moment", "cp1 voter, cp2 voter silent=1s, cp3 voter silent=11m, cp4 standby", nil, Nothing, "cp3", "", "1 answer where 2", true},

		{"taken out: the vote is given", "cp1 voter, cp2 voter, cp4 standby", &Replacement{"cp3", "cp4", 3}, Promote, "cp3", "cp4", "cp4 gets the vote of cp3", false},
		{"to the one that was chosen", "cp1 voter, cp2 voter, cp4 standby applied=990, cp5 standby", &Replacement{"cp3", "cp4", 3}, Promote, "cp3", "cp4", "", false},
		{"to another when that one died", "cp1 voter, cp2 voter, cp4 standby silent=1s, cp5 standby", &Replacement{"cp3", "cp4", 3}, Promote, "cp3", "cp5", "", false},
		{"to nobody", "cp1 voter, cp2 voter, cp4 standby silent=1s", &Replacement{"cp3", "cp4", 3}, Nothing, "cp3", "cp4", "cp3 was taken out, and no standby is caught up: cp4 does not answer", true},
		{"not when it would count on the newcomer", "cp1 voter, cp2 voter silent=1s, cp4 standby", &Replacement{"cp3", "cp4", 3}, Nothing, "cp3", "cp4", "1 answer where 2 have to", true},
		{"done", "cp1 voter, cp2 voter, cp4 voter", &Replacement{"cp3", "cp4", 3}, Forget, "cp3", "cp4", "cp3 was replaced", false},
		{"it answers again before it was taken out", "cp1 voter, cp2 voter, cp3 voter, cp4 standby", &Replacement{"cp3", "cp4", 3}, Forget, "cp3", "cp4", "answers again", false},
		{"begun by a leader before: this one looks anew", "cp1 voter, cp2 voter, cp3 voter silent=5s, cp4 standby", &Replacement{"cp3", "cp4", 3}, Forget, "cp3", "cp4", "looked at anew", false},
		{"the removal failed", three + ", cp4 standby", &Replacement{"cp3", "cp4", 3}, Remove, "cp3", "cp4", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := Decide(Round{Self: "cp1", Members: members(t, c.members), Commit: 1000, Level: 2, After: 10 * time.Minute, Pending: c.pending})
			if got.Act != c.want || got.Dead != c.dead || got.Standby != c.standby && c.want != Nothing || !strings.Contains(got.Why, c.why) || got.Blocked != c.blocked {
				t.Errorf("%+v", got)
			}
		})
	}
}

// Time counts between looks that are not far apart, from the first look of this leader on.
func TestSilence(t *testing.T) {
	w := NewWatch(time.Second)
	look := func(now time.Duration, heard bool, want time.Duration) {
		t.Helper()
		m := []Member{{Name: "cp2", Heard: heard}}
		if w.Look(now, m); m[0].Silent != want {
			t.Errorf("at %v: silent for %v, want %v", now, m[0].Silent, want)
		}
	}
	look(time.Hour, false, 0)
	look(time.Hour+time.Second, false, time.Second)
	look(time.Hour+2*time.Second, false, 2*time.Second)
	look(2*time.Hour, false, 4*time.Second) // the leader was frozen
	look(2*time.Hour+time.Second, true, 0)
	look(2*time.Hour+2*time.Second, false, 0)
	look(2*time.Hour+time.Second, false, 0) // a clock that goes back counts for nothing
	w.Look(3*time.Hour, nil)                // it is no member any more
	look(3*time.Hour+time.Second, false, 0)
}
