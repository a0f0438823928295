package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/recovery/backups"
	"keelson.dev/keelson/internal/wait"
)

// wireBackups makes what keeps this replica's backups, where they are asked for.
func (r *Replica) wireBackups() (err error) {
	r.backups, err = backups.New(backups.Config{
		Options: r.cfg.Backups, Cluster: r.cluster.Name, ID: r.cluster.ID, Replica: r.cfg.Name, Write: r.store.Backup, Clear: r.store.ClearBackup,
		Store: r.cfg.DataDir,
		Leads: r.store.Leads,
		Log:   r.log.With("part", "backups"),
	})
	return err
}

// runBackups begins when there is something to keep: a replica that is to become a member has no store yet, and the store of
// a new cluster is empty until its defaults are there.
func (r *Replica) runBackups(ctx context.Context) error {
	if r.backups == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	err := wait.For(ctx, time.Second, func() error {
		if err := r.ready(ctx); err != nil {
			return err
		}
		if r.store.Status().Keys == 0 {
			return errors.New("the store is empty")
		}
		return nil
	})
	if err != nil {
		return err
	}
	return r.backups.Run(ctx)
}

// describeBackups says how this replica's backups go; nil where none exist, or another replica makes them.
func (r *Replica) describeBackups() *api.ClusterMemberBackups {
	if r.backups == nil || !r.backups.Mine() {
		return nil
	}
	s := r.backups.State()
	out := &api.ClusterMemberBackups{Failures: s.Failures}
	for at, into := range map[time.Time]*int64{s.Last: &out.Last, s.Next: &out.Next, s.Since: &out.Since} {
		if !at.IsZero() {
			*into = at.UnixMilli()
		}
	}
	if s.Error != nil {
		out.Error = s.Error.Error()
	}
	return out
}

// backupAlarms names the members that cannot make their backups.
func backupAlarms(s api.ClusterStatus) (out []api.ClusterAlarm) {
	for _, m := range s.Members {
		b := m.Backups
		if b == nil || b.Error == "" {
			continue
		}
		last := "and it has none"
		if b.Last != 0 {
			last = "and its last one is of " + time.UnixMilli(b.Last).UTC().Format(time.RFC3339)
		}
		out = append(out, api.ClusterAlarm{
			Kind: "backups", Member: m.Name, Since: b.Since,
			Message: fmt.Sprintf("%s could not make a backup, %d times in a row, %s: %s", m.Name, b.Failures, last, b.Error),
			Remedy:  fmt.Sprintf("see to --backup-folder or --backup-s3 of %s; 'kctl cluster backup FILE' makes one meanwhile", m.Name),
		})
	}
	return out
}
