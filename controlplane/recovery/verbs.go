package recovery

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/recovery/backups"
	"keelson.dev/keelson/raftstore/disk"
)

// Backups makes and reads backups for the HTTP API of a running replica. All methods are safe for
// concurrent use.
type Backups struct {
	Write            func(context.Context, io.Writer) error // writes a backup, encrypted with the store's keys
	WriteUnencrypted func(context.Context, io.Writer) error // writes a backup without encryption
	Keyring          func() *disk.Keyring                   // returns the current encryption keys, or nil
}

// Writer returns a function that writes a backup. If recipients is not empty, the function encrypts
// the backup with age for these recipients. Writer returns an error if a recipient is invalid.
func (b Backups) Writer(recipients []string) (func(context.Context, io.Writer) error, error) {
	keys := backups.Recipients{Keys: recipients}
	if !keys.IsSet() {
		return b.Write, nil
	}
	if err := keys.Check(); err != nil {
		return nil, err
	}
	return backups.EncryptWith(keys, b.WriteUnencrypted), nil
}

// Describe reads and verifies a whole backup and describes its contents. It returns an error for a
// backup that is encrypted with age, because replicas have no age identities.
func (b Backups) Describe(r io.Reader) (api.ClusterBackup, error) {
	body := bufio.NewReader(r)
	if head, _ := body.Peek(64); bytes.HasPrefix(head, []byte("age-encryption.org/")) {
		return api.ClusterBackup{},
			fmt.Errorf("%w: no replica has its identity: verify it with --identity on a machine that has the identity "+
				"and keelson-controlplane",
				backups.ErrNeedsIdentity)
	}
	info, view, err := disk.ReadBackup(body, b.Keyring())
	if err != nil {
		return api.ClusterBackup{}, err
	}
	return DescribeBackup(info, view, BuiltInKinds()), nil
}
