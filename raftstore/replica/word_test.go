package replica

import (
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// A voter keeps its word to a replica that asks others for endedTurn, and to one that stands for as long as an election may take.
func TestWordLastsForAnElection(t *testing.T) {
	const election = 6 * endedTurn
	virtual.Test(t, func(t *testing.T) {
		var w word
		for _, step := range []struct {
			name       string
			wait       time.Duration
			leader, to string
			turn       time.Duration
			kept       bool
		}{
			{"to the first replica that asks", 0, "r1", "r2", endedTurn, true},
			{"not to the second", endedTurn / 2, "r1", "r3", endedTurn, false},
			{"to the first again when it stands", 0, "r1", "r2", election, true},
			{"not to the second after the turn of the first request", endedTurn, "r1", "r3", endedTurn, false},
			{"not shortened by a late request of the first", 0, "r1", "r2", endedTurn, true},
			{"so not to the second after that turn", 2 * endedTurn, "r1", "r3", endedTurn, false},
			{"to the second in the place of another leader", 0, "r2", "r3", endedTurn, true},
			{"not to a third there", 0, "r2", "r4", endedTurn, false},
			{"to the third after the turn of the second", 3 * endedTurn, "r2", "r4", endedTurn, true},
		} {
			time.Sleep(step.wait)
			if kept := w.keep(step.leader, step.to, step.turn); kept != step.kept {
				t.Errorf("%s: keep returned %v", step.name, kept)
			}
		}
	})
}
