package server

import (
	"context"
	"errors"
	"time"

	"keelson.dev/keelson/controlplane/recovery/backups"
	"keelson.dev/keelson/internal/wait"
)

// wireBackups sets r.backups to the backups.Keeper, which makes the scheduled backups of this
// replica. It sets nil if no backups are configured.
func (r *Replica) wireBackups() (err error) {
	r.backups, err = backups.New(backups.Config{
		Options: r.cfg.Backups, Cluster: r.cluster.Name, ID: r.cluster.ID, Replica: r.cfg.Name, Write: r.store.Backup,
		WriteUnencrypted: r.store.BackupUnencrypted,
		Store:            r.cfg.DataDir,
		IsLeader:         r.store.Leads,
		Log:              r.log.With("part", "backups"),
	})
	return err
}

// runBackups makes the scheduled backups until ctx ends. It first waits until the store exists and
// contains the default objects.
func (r *Replica) runBackups(ctx context.Context) error {
	if r.backups == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	err := wait.For(ctx, time.Second, func() error {
		if err := r.checkReady(ctx); err != nil {
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
