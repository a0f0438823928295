package replica

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

// restoreAhead is by how much a restored store's revision is moved ahead: far
// more than the old group can have committed after the backup was taken.
const restoreAhead = raftstore.Revision(1) << 32

// ErrNotEmpty reports a data directory that holds something already.
var ErrNotEmpty = errors.New("raftstore: data directory is not empty")

// Backup writes the state of this replica, as new as a linearizable read would
// show it, to w. It disturbs neither reads nor writes. The file checks itself
// when it is restored.
func (r *Replica) Backup(ctx context.Context, w io.Writer) error {
	if err := r.up(ctx); err != nil {
		return err
	}
	if _, err := r.syncIndex(ctx); err != nil {
		return fmt.Errorf("backup: %w", err)
	}
	if err := r.Snapshot(ctx); err != nil {
		return fmt.Errorf("backup: %w", err)
	}
	list, err := r.disk.snapshots.List()
	if err != nil || len(list) == 0 {
		return fmt.Errorf("backup: finding the snapshot: %w", errors.Join(err, raft.ErrNothingNewToSnapshot))
	}
	_, content, err := r.disk.snapshots.Open(list[0].ID)
	if err != nil {
		return fmt.Errorf("backup: opening snapshot %s: %w", list[0].ID, err)
	}
	defer content.Close()
	if _, err := io.Copy(w, content); err != nil {
		return fmt.Errorf("backup: copying snapshot %s: %w", list[0].ID, err)
	}
	return nil
}

// Restore makes the data directory of a new group of one from a backup; other
// replicas join it empty. c needs Name, DataDir and Advertise. Nothing is
// written unless the backup is whole, and never over existing data. Revisions
// of the restored store are far beyond those of the backup and everything
// before counts as compacted: no watcher can take it for the old one.
func Restore(c Config, backup io.Reader) error {
	if c.Name == "" || c.DataDir == "" || c.Advertise == "" {
		return errors.New("restore: name, data directory and advertised address are needed")
	}
	c = c.withDefaults()
	machine, _, err := mvcc.Load(backup)
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	switch files, err := os.ReadDir(c.DataDir); {
	case err == nil && len(files) > 0:
		return fmt.Errorf("restore to %s: %w", c.DataDir, ErrNotEmpty)
	case err != nil && !errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("restore: %w", err)
	}
	if err := machine.Rebase(machine.View().Revision() + restoreAhead); err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	// Opening the disk marks it as this replica's.
	d, err := openDisk(c, func(error) {})
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	defer d.close.Close()
	if err := seed(c, d.snapshots, machine); err != nil {
		return fmt.Errorf("restore to %s: %w", c.DataDir, err)
	}
	return nil
}

// seed writes the state as the first snapshot of a group of one.
func seed(c Config, snapshots raft.SnapshotStore, machine *mvcc.Machine) error {
	const index, term = 1, 1
	group := raft.Configuration{Servers: []raft.Server{{ID: raft.ServerID(c.Name), Address: raft.ServerAddress(c.Advertise)}}}
	// The transport would only be asked for addresses by formats of old.
	_, trans := raft.NewInmemTransport(raft.ServerAddress(c.Advertise))
	defer trans.Close()
	sink, err := snapshots.Create(raft.SnapshotVersionMax, index, term, group, index, trans)
	if err != nil {
		return err
	}
	if err := machine.Snapshot().Dump(sink, mvcc.Meta{Index: index, Term: term}); err != nil {
		return errors.Join(err, sink.Cancel())
	}
	return sink.Close()
}
