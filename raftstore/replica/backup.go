package replica

import (
	"context"
	"fmt"
	"io"
	"time"

	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
)

// Backup writes the state of the store, as new as a linearizable read would
// show it, to w. It reads a picture that commits do not touch, so it holds up
// neither reads nor writes, however slow w is. A replica that seals its data
// seals the backup, under the current key-encryption key.
func (r *Replica) Backup(ctx context.Context, w io.Writer) error {
	return r.backup(ctx, w, r.disk.WriteBackup)
}

// ClearBackup is Backup in clear, for who seals it himself before it leaves the process.
func (r *Replica) ClearBackup(ctx context.Context, w io.Writer) error {
	return r.backup(ctx, w, disk.WriteClearBackup)
}

type backupWriter func(w io.Writer, cluster string, created time.Time, v *mvcc.View) error

func (r *Replica) backup(ctx context.Context, w io.Writer, write backupWriter) error {
	if err := r.up(ctx); err != nil {
		return err
	}
	if _, err := r.syncIndex(ctx); err != nil {
		return fmt.Errorf("backup: %w", err)
	}
	v := r.fsm.view()
	if err := write(&interruptible{ctx: ctx, w: w}, r.cfg.Cluster, r.cfg.Now(), v); err != nil {
		return fmt.Errorf("backup of revision %d: %w", v.Revision(), err)
	}
	return nil
}

// interruptible ends a long copy when nobody waits for it any more.
type interruptible struct {
	ctx context.Context
	w   io.Writer
}

func (i *interruptible) Write(p []byte) (int, error) {
	if err := i.ctx.Err(); err != nil {
		return 0, err
	}
	return i.w.Write(p)
}
