package replica

import (
	"context"
	"fmt"

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
