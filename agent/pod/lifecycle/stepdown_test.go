package lifecycle

import (
	"fmt"
	"testing"
)

// An instance that was only created does not replace the record of a container's restart count. F95
func TestSpareCountsRestarts(t *testing.T) {
	o := Observed{Listed: true, ReclaimDisk: true,
		Containers: []Container{{ID: "made", Name: "app", State: Created, Attempt: 2},
			{ID: "ended", Name: "app", State: Exited, Attempt: 1}, {ID: "before", Name: "app", State: Exited}}}
	for state, want := range map[State]string{Created: "[remove before (app#0)]",
		Running: "[remove ended (app#1) remove before (app#0)]",
		Unknown: "[remove ended (app#1) remove before (app#0)]"} {
		o.Containers[0].State = state
		s := planner{pod: simplePod("u1"), observed: &o, currentTime: epoch}
		s.planRecordRemoval()
		if got := fmt.Sprint(s.plan.Actions); got != want {
			t.Errorf("%v: %s, want %s", state, got, want)
		}
	}
}
