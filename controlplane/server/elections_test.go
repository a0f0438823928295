package server

import (
	"strings"
	"testing"
	"time"
)

// A group that elects again and again says so, with what helps; one whose replicas are upgraded does not.
func TestElectionsAreToldOf(t *testing.T) {
	var o StoreOptions
	if got := o.electionAlarms(restless-1, time.Now()); len(got) != 0 {
		t.Errorf("%d leaders: %+v", restless-1, got)
	}
	for want, o := range map[string]StoreOptions{"600ms": {}, "3s": {Heartbeat: 3 * time.Second}} {
		got := o.electionAlarms(restless, time.Now())
		if len(got) != 1 || got[0].Kind != "elections" || got[0].Since == 0 || !strings.Contains(got[0].Message, "longer than "+want+" again") ||
			!strings.Contains(got[0].Remedy, "--heartbeat-timeout") {
			t.Errorf("%+v: %+v", o, got)
		}
	}
}

// What an operator chooses reaches the store.
func TestHeartbeatIsTheStores(t *testing.T) {
	c := Config{Name: "cp1", DataDir: t.TempDir(), Advertise: "127.0.0.1", Store: StoreOptions{Heartbeat: 3 * time.Second}}
	conf, err := c.offlineStore(Cluster{PeerPort: 6445})
	if err != nil {
		t.Fatal(err)
	}
	if conf.HeartbeatTimeout != 3*time.Second {
		t.Errorf("%v", conf.HeartbeatTimeout)
	}
}
