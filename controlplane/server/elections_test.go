package server

import (
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
)

// A group that elects again and again says so, with what helps; one whose replicas are upgraded does not.
func TestElectionsAreToldOf(t *testing.T) {
	var o datadir.StoreOptions
	if got := electionAlarms(o, restless-1, time.Now()); len(got) != 0 {
		t.Errorf("%d leaders: %+v", restless-1, got)
	}
	for want, o := range map[string]datadir.StoreOptions{"600ms": {}, "3s": {Heartbeat: 3 * time.Second}} {
		got := electionAlarms(o, restless, time.Now())
		if len(got) != 1 || got[0].Kind != "elections" || got[0].Since == 0 || !strings.Contains(got[0].Message, "longer than "+want+" again") ||
			!strings.Contains(got[0].Remedy, "--heartbeat-timeout") {
			t.Errorf("%+v: %+v", o, got)
		}
	}
}
