package operator

import (
	"strings"
	"testing"
	"time"
)

// Too many leaders within the window raise an alarm with a remedy. The leader changes of an upgrade
// do not raise an alarm.
func TestElectionAlarms(t *testing.T) {
	if got := electionAlarms(time.Second, maxLeaders-1, time.Now()); len(got) != 0 {
		t.Errorf("%d leaders raise the alarms %+v", maxLeaders-1, got)
	}
	for want, timeout := range map[string]time.Duration{"600ms": 600 * time.Millisecond, "3s": 3 * time.Second} {
		got := electionAlarms(timeout, maxLeaders, time.Now())
		if len(got) != 1 || got[0].Kind != "elections" || got[0].Since == 0 ||
			!strings.Contains(got[0].Message, "longer than "+want+",") ||
			!strings.Contains(got[0].Remedy, "--heartbeat-timeout") {
			t.Errorf("with the heartbeat timeout %s, the alarms are %+v", timeout, got)
		}
	}
}
