package lifecycle

import (
	"testing"
	"time"
)

// A container that failed before its start has both times in its terminated state.
func TestTerminatedStateHasBothTimes(t *testing.T) {
	created := time.Date(2026, 11, 29, 1, 0, 0, 0, time.UTC)
	for name, c := range map[string]Container{
		"never started": {State: Exited, Times: InstanceTimes{Created: created,
			Finished: created.Add(time.Second)}, ExitCode: 128},
		"only an end": {State: Exited, Times: InstanceTimes{Finished: created.Add(time.Second)}, ExitCode: 1},
		"clock was set back": {State: Exited, Times: InstanceTimes{Created: created.Add(time.Hour), Finished: created},
			ExitCode: 1},
		"ran": {State: Exited, Times: InstanceTimes{Created: created, Started: created.Add(time.Second),
			Finished: created.Add(time.Second)}},
	} {
		got := (&statusBuilder{pod: simplePod("u1")}).terminatedState(c)
		if got.StartedAt.IsZero() || got.FinishedAt.Before(&got.StartedAt) ||
			!got.FinishedAt.Time.Equal(c.Times.Finished) {
			t.Errorf("%s: started %v, finished %v", name, got.StartedAt, got.FinishedAt)
		}
	}
}
