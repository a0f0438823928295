package replica

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

// restoreAhead is by how much a restored store's revision is moved ahead: far
// more than the old group can have committed after the backup was taken.
const restoreAhead = raftstore.Revision(1) << 32

var (
	// ErrForeignBackup reports a backup of another cluster.
	ErrForeignBackup = errors.New("raftstore: backup is of another cluster")
	// ErrBackupFormat reports a backup of another format version, or a file that is no backup.
	ErrBackupFormat = errors.New("raftstore: not a backup that this version reads")
	// ErrCorruptBackup reports a backup that is damaged.
	ErrCorruptBackup = errors.New("raftstore: backup is corrupt")
)

// ErrCorruptSnapshot reports a snapshot file that is not what was written.
var ErrCorruptSnapshot = errors.New("raftstore: snapshot is corrupt")

// BackupInfo describes a backup.
type BackupInfo struct {
	Cluster  string
	Revision raftstore.Revision
	Created  time.Time
	Keys     int
	Bytes    int64 // sum of key and value sizes
	Format   uint32
	Sealed   bool
	KeyID    string // of the key-encryption key it is sealed under
}

// RestoreOptions are for the cases that Restore refuses.
type RestoreOptions struct {
	// AnyCluster takes a backup of another cluster.
	AnyCluster bool
}

// VerifyBackup reads a whole backup and says what is in it. Any damage is an error.
func VerifyBackup(r io.Reader, keys *Keyring) (BackupInfo, error) {
	machine, meta, err := mvcc.Load(r)
	if err != nil {
		return BackupInfo{}, err
	}
	v := machine.View()
	return BackupInfo{Cluster: meta.Cluster, Revision: v.Revision(), Keys: v.Keys(), Bytes: v.Bytes(), Format: 1}, nil
}

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
func Restore(c Config, backup io.ReadSeeker, o RestoreOptions) (BackupInfo, error) {
	info, err := restore(c, backup)
	return info, err
}

func restore(c Config, backup io.Reader) (BackupInfo, error) {
	var info BackupInfo
	if c.Name == "" || c.DataDir == "" || c.Advertise == "" {
		return info, errors.New("restore: name, data directory and advertised address are needed")
	}
	c = c.withDefaults()
	machine, _, err := mvcc.Load(backup)
	if err != nil {
		return info, fmt.Errorf("restore: %w", err)
	}
	switch files, err := os.ReadDir(c.DataDir); {
	case err == nil && len(files) > 0:
		return info, fmt.Errorf("restore to %s: %w", c.DataDir, ErrNotEmpty)
	case err != nil && !errors.Is(err, os.ErrNotExist):
		return info, fmt.Errorf("restore: %w", err)
	}
	if err := machine.Rebase(machine.View().Revision() + restoreAhead); err != nil {
		return info, fmt.Errorf("restore: %w", err)
	}
	// Opening the disk marks it as this replica's.
	d, err := openDisk(c, func(error) {})
	if err != nil {
		return info, fmt.Errorf("restore: %w", err)
	}
	defer d.close.Close()
	if err := seed(c, d.snapshots, machine); err != nil {
		return info, fmt.Errorf("restore to %s: %w", c.DataDir, err)
	}
	return info, nil
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
