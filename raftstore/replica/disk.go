package replica

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	"go.etcd.io/bbolt"
)

// ErrForeignData reports a data directory that belongs to another replica.
var ErrForeignData = errors.New("raftstore: data directory belongs to another replica")

// keyName holds the replica's name in the stable store.
var keyName = []byte("keelson.dev/replica")

// disk is what a replica keeps: log, votes and snapshots.
type disk struct {
	logs      *logStore
	stable    raft.StableStore
	snapshots raft.SnapshotStore
	close     io.Closer
}

func openDisk(c Config, fail func(error)) (*disk, error) {
	if err := os.MkdirAll(c.DataDir, 0o700); err != nil {
		return nil, fmt.Errorf("data directory of replica %s: %w", c.Name, err)
	}
	path := filepath.Join(c.DataDir, "raft.db")
	bolt, err := raftboltdb.New(raftboltdb.Options{
		Path:   path,
		NoSync: c.NoSync,
		BoltOptions: &bbolt.Options{
			// Another process holding the file is an error, not a reason to hang.
			Timeout: lockTimeout,
			// The list of free pages is found again by a scan at the start;
			// writing it would double what a small commit writes.
			NoFreelistSync: true,
			FreelistType:   bbolt.FreelistMapType,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("opening %s of replica %s: %w", path, c.Name, err)
	}
	d := &disk{stable: bolt, close: bolt}
	if err := d.open(c, bolt, path, fail); err != nil {
		d.close.Close()
		return nil, err
	}
	return d, nil
}

// closers are closed in order.
type closers []io.Closer

// Close implements io.Closer.
func (c closers) Close() error {
	var errs []error
	for _, one := range c {
		errs = append(errs, one.Close())
	}
	return errors.Join(errs...)
}

func (d *disk) open(c Config, bolt *raftboltdb.BoltStore, path string, fail func(error)) error {
	owner, err := bolt.Get(keyName)
	switch {
	case err != nil && err.Error() != raftboltdb.ErrKeyNotFound.Error():
		return fmt.Errorf("%s: %w", path, err)
	case len(owner) == 0:
		if err := bolt.Set(keyName, []byte(c.Name)); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	case string(owner) != c.Name:
		return fmt.Errorf("%s is of replica %q and not of %q: %w", c.DataDir, owner, c.Name, ErrForeignData)
	}
	ahead, err := openAhead(bolt, bolt, filepath.Join(c.DataDir, "raft.journal"), journalBytes, !c.NoSync)
	if err != nil {
		return fmt.Errorf("log of replica %s: %w", c.Name, err)
	}
	d.logs, d.close = newLogStore(ahead, path, fail), closers{ahead, bolt}
	d.snapshots, err = raft.NewFileSnapshotStoreWithLogger(c.DataDir, 2, newLogger(c.Logger.With("component", "snapshots")))
	if err != nil {
		return fmt.Errorf("snapshots of replica %s: %w", c.Name, err)
	}
	list, err := d.snapshots.List()
	if err != nil {
		return fmt.Errorf("snapshots of replica %s: %w", c.Name, err)
	}
	var covered uint64
	if len(list) > 0 {
		covered = list[0].Index
	}
	return d.logs.verify(covered)
}

// empty reports whether this replica has never been part of a group.
func (d *disk) empty() (bool, error) {
	has, err := raft.HasExistingState(d.logs, d.stable, d.snapshots)
	if err != nil {
		return false, fmt.Errorf("%s: %w", d.logs.name, err)
	}
	return !has, nil
}
