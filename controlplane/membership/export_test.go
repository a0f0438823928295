package membership

import (
	"context"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/membership/autopilot"
	"keelson.dev/keelson/raftstore"
)

// RemoveDead removes a replica in the way in which ReplaceDead removes a dead voter.
func (r *Membership) RemoveDead(ctx context.Context, name string) error {
	rec, at, err := r.replacer.readAutopilotRecord(ctx)
	if err != nil {
		return err
	}
	d := autopilot.Decision{Action: autopilot.ActionRemove, Dead: name, Reason: name + " is silent"}
	return r.replacer.removeDead(ctx, nil, d, rec, at, raftstore.Fence(r.store.Status().Term))
}

// RecordRemoval records the removal of a replica that had the current keys.
func (r *Membership) RecordRemoval(ctx context.Context, name, reason string, removed time.Time) error {
	_, err := r.recordRemoval(ctx, name, reason, r.keys.HeldKeys(), removed)
	return err
}

// RecordPeers records the replicas in peers as the known members of a joining replica.
func RecordPeers(dir datadir.Dir, cluster datadir.Cluster, peers map[string]string) error {
	r := &Membership{config: Config{Dir: dir, Cluster: cluster}}
	return r.recordPeers(peers)
}
