package replica

import (
	"context"
	"fmt"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
)

// ReloadKeys makes the replica use other key-encryption keys without a
// restart: its data keys are wrapped anew under the current one and what is
// written from now on is sealed under a new data key. When it returns, keys
// that are not in k are needed no more, but for backups taken before.
// Encryption is turned off by a key file with a line "clear", not by nil.
func (r *Replica) ReloadKeys(k *disk.Keyring) error {
	if k == nil {
		return fmt.Errorf("reloading keys of replica %s: no keys given: %w", r.cfg.Name, disk.ErrKeyFile)
	}
	ctx, cancel := context.WithTimeout(r.ctx, transferTimeout)
	defer cancel()
	if err := r.up(ctx); err != nil {
		return err
	}
	if err := r.disk.ReloadKeys(k); err != nil {
		return fmt.Errorf("reloading keys of replica %s: %w", r.cfg.Name, err)
	}
	r.log.Info("keys reloaded", "current", k.Current(), "keys", k.IDs())
	return nil
}

// removal asks for what was sealed before a data key to be removed.
type removal struct {
	since uint32
	done  chan<- error // buffered
}

// Rewrite takes a snapshot and removes what was sealed before under other data
// keys, snapshots and entries of the log, and those keys. A follower that still
// wants such an entry is sent the snapshot. After an error, which says what is
// in the way, it can be called again.
func (r *Replica) Rewrite(ctx context.Context) error {
	if err := r.up(ctx); err != nil {
		return err
	}
	since := r.disk.Sealing()
	if err := r.Snapshot(ctx); err != nil {
		return err
	}
	q, done := r.removals, make(chan error, 1)
	for {
		select {
		case q <- removal{since, done}:
			q = nil // asked once
		case err := <-done:
			if err != nil {
				err = fmt.Errorf("removing what replica %s has sealed under former data keys: %w", r.cfg.Name, err)
			}
			return err
		case <-ctx.Done():
			return ctx.Err()
		case <-r.ctx.Done():
			return raftstore.ErrClosed
		}
	}
}
