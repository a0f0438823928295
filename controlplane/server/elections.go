package server

import (
	"fmt"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/raftstore"
)

// restless is from how many leaders within raftstore.LeadersWindow on an alarm tells of them: an upgrade of five replicas has fewer.
const restless = 10

// electionAlarms tell that the group elects again and again, and what helps.
func electionAlarms(o datadir.StoreOptions, leaders int, now time.Time) []api.ClusterAlarm {
	if leaders < restless {
		return nil
	}
	within := o.Heartbeat
	if within == 0 {
		within = datadir.DefaultHeartbeat
	}
	return []api.ClusterAlarm{{
		Kind: "elections", Since: now.Add(-raftstore.LeadersWindow).UnixMilli(),
		Message: fmt.Sprintf("%d leaders in the last %.0f minutes: the replicas do not hear each other for longer than %s again and again, and everything waits for each election",
			leaders, raftstore.LeadersWindow.Minutes(), within),
		Remedy: "'role changed' in the replicas' logs names the silent ones: give their machines processors and disks of their own, " +
			"or run every replica with a longer --heartbeat-timeout (docs/explanation/leader-election.md)",
	}}
}
