package operator

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/raftstore"
)

// describeAlarm converts an alarm of the store to an alarm of the cluster status, and adds the
// remedy for it.
func describeAlarm(a raftstore.Alarm) api.ClusterAlarm {
	out := api.ClusterAlarm{Kind: fmt.Sprintf("kind %d", a.Kind), Member: a.Member, Since: a.Since, Message: a.Message}
	switch a.Kind {
	case raftstore.AlarmSpace:
		out.Kind = "space"
		out.Remedy = "delete objects that are not needed (watch history is discarded automatically), or " +
			"start every replica with a larger --store-quota. Then new objects are accepted again automatically"
	case raftstore.AlarmDiverged:
		out.Kind = "diverged"
		out.Remedy = fmt.Sprintf("stop %[1]s, run 'keelson-controlplane rebuild' on it and start it again: it copies "+
			"its data from the other replicas; "+
			"keep the folder that rebuild moves aside and report it", a.Member)
	}
	return out
}

// outdatedAlarms returns an alarm for each member whose release does not support the cluster's
// feature level. Such a member may not know feature levels at all, so it cannot raise the alarm
// itself.
func outdatedAlarms(s api.ClusterStatus) (alarms []api.ClusterAlarm) {
	for _, m := range s.Members {
		if m.Version == "" || m.FeatureLevel >= s.FeatureLevel {
			continue
		}
		alarms = append(alarms, api.ClusterAlarm{
			Kind: "too old", Member: m.Name, Since: time.Now().UnixMilli(),
			Message: fmt.Sprintf("%s runs release %s, which supports feature levels up to %d, and the cluster stores "+
				"forms of level %d",
				m.Name, m.Version, m.FeatureLevel, s.FeatureLevel),
			Remedy: fmt.Sprintf("stop %s, install the release of the other replicas there and start it again", m.Name),
		})
	}
	return alarms
}

// backupAlarms returns an alarm for each member whose scheduled backups fail.
func backupAlarms(s api.ClusterStatus) (alarms []api.ClusterAlarm) {
	for _, m := range s.Members {
		b := m.Backups
		if b == nil || b.Error == "" {
			continue
		}
		last := "and it has no backup"
		if b.Last != 0 {
			last = "and its last backup is from " + time.UnixMilli(b.Last).UTC().Format(time.RFC3339)
		}
		alarms = append(alarms, api.ClusterAlarm{
			Kind: "backups", Member: m.Name, Since: b.Since,
			Message: fmt.Sprintf("%s could not make a backup, %d times in a row, %s: %s", m.Name, b.Failures,
				last, b.Error),
			Remedy: fmt.Sprintf("check --backup-folder or --backup-s3 of %s; meanwhile make a backup with 'kctl "+
				"cluster backup FILE'", m.Name),
		})
	}
	return alarms
}

// maxLeaders is the number of leaders within raftstore.LeadersWindow from which on an alarm is
// raised. An upgrade of five replicas causes fewer leaders.
const maxLeaders = 10

// electionAlarms returns an alarm if the raft cluster had at least maxLeaders leaders within
// raftstore.LeadersWindow. The alarm's message mentions heartbeatTimeout.
func electionAlarms(heartbeatTimeout time.Duration, leaders int, now time.Time) []api.ClusterAlarm {
	if leaders < maxLeaders {
		return nil
	}
	return []api.ClusterAlarm{{
		Kind: "elections", Since: now.Add(-raftstore.LeadersWindow).UnixMilli(),
		Message: fmt.Sprintf("%d leaders in the last %.0f minutes: the replicas repeatedly receive nothing from each "+
			"other for longer than %s, and all writes wait for each election",
			leaders, raftstore.LeadersWindow.Minutes(), heartbeatTimeout),
		Remedy: "'role changed' in the logs of the replicas names the silent replicas: give their machines dedicated " +
			"processors and disks, " +
			"or run every replica with a longer --heartbeat-timeout (docs/explanation/leader-election.md)",
	}}
}

// maxUnreadableShown is the maximum number of objects that the alarm about undecodable objects
// lists.
const maxUnreadableShown = 5

// unreadableAlarm returns the alarm about the stored objects that cannot be decoded. all contains
// these objects, at least one.
func unreadableAlarm(all []registry.Unreadable) api.ClusterAlarm {
	alarm := api.ClusterAlarm{Kind: "unreadable", Since: all[0].Seen.UnixMilli()}
	var names []string
	for i, u := range all {
		alarm.Since = min(alarm.Since, u.Seen.UnixMilli())
		if i < maxUnreadableShown {
			names = append(names, fmt.Sprintf("%s (%s)", u.Key, u.Reason))
		}
	}
	if more := len(all) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	alarm.Message = fmt.Sprintf("%d stored objects cannot be read and are left out of lists: %s", len(all),
		strings.Join(names, ", "))
	alarm.Remedy = all[0].Remedy()
	alike := func(u registry.Unreadable) bool { return (u.Dropped == "") == (all[0].Dropped == "") }
	switch {
	case len(all) > 1 && !slices.ContainsFunc(all, func(u registry.Unreadable) bool { return !alike(u) }):
		alarm.Remedy += "; the same for the others"
	case len(all) > 1:
		alarm.Remedy += "; for the others, get each object ('kubectl get'): the error names its remedy"
	}
	return alarm
}
