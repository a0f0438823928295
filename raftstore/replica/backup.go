package replica

import (
	"context"
	"fmt"
	"io"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
)

// Backup writes the state of the store to w. The state is as recent as that of a linearizable read.
// It is an immutable view, so a slow w delays neither reads nor commits. A replica that encrypts
// its data encrypts the backup with the current key-encryption key.
func (r *Replica) Backup(ctx context.Context, w io.Writer) error {
	return r.writeBackup(ctx, w, r.node.disk.WriteBackup)
}

// BackupUnencrypted writes an unencrypted backup. Otherwise it does the same as Backup. The caller
// is responsible for encrypting the output.
func (r *Replica) BackupUnencrypted(ctx context.Context, w io.Writer) error {
	return r.writeBackup(ctx, w, disk.WriteClearBackup)
}

type backupWriter func(w io.Writer, cluster string, created time.Time, v *mvcc.View) error

func (r *Replica) writeBackup(ctx context.Context, w io.Writer, write backupWriter) error {
	if err := r.node.awaitRunning(ctx); err != nil {
		return err
	}
	if _, err := r.reads.syncIndex(ctx); err != nil {
		return fmt.Errorf("backup: %w", err)
	}
	v := r.node.fsm.View()
	if err := write(&cancelableWriter{ctx: ctx, w: w}, r.node.cfg.Cluster, r.node.cfg.Now(), v); err != nil {
		return fmt.Errorf("backup of revision %d: %w", v.Revision(), err)
	}
	return nil
}

// cancelableWriter writes to w until ctx ends. After that, Write returns the error of ctx.
type cancelableWriter struct {
	ctx context.Context
	w   io.Writer
}

func (i *cancelableWriter) Write(p []byte) (int, error) {
	if err := i.ctx.Err(); err != nil {
		return 0, err
	}
	return i.w.Write(p)
}

// ReloadKeys makes the replica use the key-encryption keys in k without a restart. All data keys
// are wrapped again with the current key, and new data is encrypted with a new data key. After
// ReloadKeys has returned, previous keys that are not in k are needed only to read older backups. A
// key file with the line "clear" turns encryption off. A nil k is an error.
func (r *Replica) ReloadKeys(k *disk.Keyring) error {
	if k == nil {
		return fmt.Errorf("reloading keys of replica %s: no keys given: %w", r.node.cfg.Name, disk.ErrKeyFile)
	}
	ctx, cancel := context.WithTimeout(r.node.ctx, transferTimeout)
	defer cancel()
	if err := r.node.awaitRunning(ctx); err != nil {
		return err
	}
	if err := r.node.disk.ReloadKeys(k); err != nil {
		return fmt.Errorf("reloading keys of replica %s: %w", r.node.cfg.Name, err)
	}
	r.node.log.Info("keys reloaded", "current", k.Current(), "keys", k.IDs())
	return nil
}

// sealedRemoval is a request to remove all data that is encrypted with a data key that has a number
// below since, and all unencrypted data.
type sealedRemoval struct {
	since uint32
	done  chan<- error // receives the result; buffered, so that the sender does not block
}

// Rewrite takes a snapshot and removes everything that was encrypted with previous data keys:
// snapshots, entries of the log, and the data keys themselves. A follower that lacks a removed
// entry receives the snapshot. If something prevents the removal, the error names it, and Rewrite
// can be called again.
func (r *Replica) Rewrite(ctx context.Context) error {
	if err := r.node.awaitRunning(ctx); err != nil {
		return err
	}
	since := r.node.disk.CurrentDataKey()
	if err := r.Snapshot(ctx); err != nil {
		return err
	}
	q, done := r.snapshots.removals, make(chan error, 1)
	for {
		select {
		case q <- sealedRemoval{since, done}:
			q = nil // the request is sent once
		case err := <-done:
			if err != nil {
				err = fmt.Errorf("removing data of replica %s that is encrypted with previous data keys: %w",
					r.node.cfg.Name, err)
			}
			return err
		case <-ctx.Done():
			return ctx.Err()
		case <-r.node.ctx.Done():
			return raftstore.ErrClosed
		}
	}
}
