package replica

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// makeFolder makes a folder, and those above it that are missing, so that a
// power cut does not take it away with all that was synced inside it. One that
// is there may be of a process that was killed before it could see to that.
func makeFolder(path string) error {
	there, err := exists(path)
	if err != nil {
		return err
	}
	if !there {
		if above := filepath.Dir(path); above != path {
			if err := makeFolder(above); err != nil {
				return err
			}
		}
		if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	err = syncFolder(filepath.Dir(path))
	if there && errors.Is(err, os.ErrPermission) {
		return nil // whoever made it for us has to care
	}
	return err
}

// startOver lets a founding be done again that a crash cut short. raft writes
// its first term before the configuration of the group; with a term and
// without a configuration it would wait for ever to be called by a leader.
// Whoever has voted or heard of a leader has a later term.
func (d *disk) startOver() error {
	last, err := d.logs.LastIndex()
	if err != nil || last != 0 {
		return err
	}
	list, err := d.snapshots.List()
	if err != nil || len(list) != 0 {
		return err
	}
	values := d.stable.record().values
	if term, err := d.stable.GetUint64(keyTerm); err != nil || term != 1 || len(values[keyVoteTerm]) != 0 {
		return nil
	}
	if err := d.stable.SetUint64(keyTerm, 0); err != nil {
		return fmt.Errorf("founding the group again: %w", err)
	}
	return nil
}

// Keys that raft uses in the stable store.
const keyVoteTerm = "LastVoteTerm"

var keyTerm = []byte("CurrentTerm")
