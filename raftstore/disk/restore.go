package disk

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

// RestoreAhead is the minimum distance between the revision of a backup and the first revision of
// the store that is restored from it. The old cluster cannot have committed that many revisions
// since the backup was created.
const RestoreAhead = raftstore.Revision(1) << 32

const (
	baseEpoch  = 1577836800 // 2020-01-01, Unix seconds
	baseSecond = 24         // low bits of a revision, below the seconds; no store commits as many in a second
)

// RestoreBase returns the first revision of a restored or recovered store. revision is the revision
// of the backup or of the recovered data. The result also depends on currentTime, and grows with it
// faster than any store commits. If a backup is restored twice, or an older backup after a newer
// one, no revision is therefore used again with different content. If the clock is behind, the
// distance to revision is RestoreAhead.
func RestoreBase(revision raftstore.Revision, currentTime time.Time) raftstore.Revision {
	return max(revision+RestoreAhead, raftstore.Revision(max(0, currentTime.Unix()-baseEpoch))<<baseSecond)
}

var (
	// ErrNotEmpty is returned for a data directory that is not empty.
	ErrNotEmpty = errors.New("raftstore: data directory is not empty")
	// ErrHalfRestored is returned for a data directory in which a restore was interrupted.
	ErrHalfRestored = errors.New("raftstore: a restore was interrupted")
)

// RestoreOptions are the parameters of Restore.
type RestoreOptions struct {
	Advertise string // address at which other replicas connect to the restored replica
	Cluster   string // identity of the cluster
	// AnyCluster accepts a backup of another cluster.
	AnyCluster bool
	// Above is a revision that the restored store must exceed: the revision of the data that it
	// replaces. 0 means that no data is replaced.
	Above raftstore.Revision
	Now   time.Time // the current time; zero means time.Now
	// Amend returns additional changes to apply to the restored state. If Amend is nil, there are
	// none.
	Amend func(*mvcc.View) ([]raftstore.Op, error)
}

func (o RestoreOptions) currentTime() time.Time {
	if o.Now.IsZero() {
		return time.Now()
	}
	return o.Now
}

// Restore creates the data directory of a new raft cluster with one member from a backup. Other
// replicas join the cluster as empty replicas. c needs Name and Dir, and Keys if the backup or the
// new data is encrypted. A backup of another cluster than o.Cluster is rejected.
//
// The whole backup is verified before anything is written, and existing data is not overwritten.
// After a crash, a replica does not start in the directory, and Restore can be called again. The
// revisions of the restored store are far above those of the backup (see RestoreBase), and all
// earlier revisions are compacted. A watcher therefore cannot confuse the restored store with the
// old store.
func Restore(c Config, backup io.ReadSeeker, o RestoreOptions) (BackupInfo, error) {
	if c.Name == "" || c.Dir == "" || o.Advertise == "" {
		return BackupInfo{}, errors.New("restore: name, data directory and advertised address are required")
	}
	c = c.withDefaults()
	start, err := backup.Seek(0, io.SeekCurrent)
	if err != nil {
		return BackupInfo{}, fmt.Errorf("restore: %w", err)
	}
	b, err := openBackup(backup, c.Keys)
	if err != nil {
		return BackupInfo{}, errors.Join(fmt.Errorf("restore: %w", err), rewindBackup(backup, start))
	}
	machine, err := b.loadState()
	if err != nil {
		return BackupInfo{}, errors.Join(fmt.Errorf("restore: %w", err), rewindBackup(backup, start))
	}
	if !o.AnyCluster && b.info.Cluster != o.Cluster {
		return b.info, fmt.Errorf("restore: the backup is of cluster %q, this is %q: %w",
			b.info.Cluster, o.Cluster, ErrForeignBackup)
	}
	if err := requireVacant(c.Dir); err != nil {
		return b.info, fmt.Errorf("restore to %s: %w", c.Dir, err)
	}
	if o.Amend != nil {
		ops, err := o.Amend(machine.View())
		if err != nil {
			return b.info, fmt.Errorf("restore: %w", err)
		}
		machine.Amend(ops...)
	}
	if err := machine.Rebase(RestoreBase(max(machine.View().Revision(), o.Above), o.currentTime())); err != nil {
		return b.info, fmt.Errorf("restore: %w", err)
	}
	if err := buildData(c, o, machine); err != nil {
		return b.info, fmt.Errorf("restore to %s: %w", c.Dir, err)
	}
	return b.info, nil
}

// rewindBackup resets the position of a backup that was rejected to start.
func rewindBackup(backup io.Seeker, start int64) error {
	_, err := backup.Seek(start, io.SeekStart)
	return err
}

// requireVacant returns an error if a directory contains anything except the files of an
// interrupted restore.
func requireVacant(dir string) error {
	list, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	half, whole := false, false
	for _, e := range list {
		half = half || e.Name() == stagingName
		whole = whole || e.Name() == boltName
	}
	if len(list) == 0 || half && !whole {
		return nil
	}
	return ErrNotEmpty
}

// buildData creates the data in the staging directory inside of the data directory, and then moves
// it up into the data directory. raft.db is moved last, because the replica does not start without
// it.
func buildData(c Config, o RestoreOptions, machine *mvcc.Machine) error {
	final, staging := c.Dir, filepath.Join(c.Dir, stagingName)
	if err := durable.MakeDir(final); err != nil {
		return err
	}
	// files that an interrupted restore has moved already
	for _, name := range append(journalNames(), walName, dataKeysName, snapshotsName, stagingName) {
		if err := os.RemoveAll(filepath.Join(final, name)); err != nil {
			return err
		}
	}
	c.Dir = staging
	d, err := openDisk(c, func(error) {})
	if err != nil {
		return err
	}
	_, err = d.CreateRaftClusterID()
	if err == nil {
		err = writeFirstSnapshot(c.Name, o, d.Snapshots, machine)
	}
	if err := errors.Join(err, d.Close(), durable.Sync(staging), durable.Sync(final)); err != nil {
		return err
	}
	list, err := os.ReadDir(staging)
	if err != nil {
		return err
	}
	for _, e := range list {
		if e.Name() == boltName {
			continue
		}
		if err := os.Rename(filepath.Join(staging, e.Name()), filepath.Join(final, e.Name())); err != nil {
			return err
		}
	}
	if err := durable.Sync(final); err != nil {
		return err
	}
	if err := durable.Rename(filepath.Join(staging, boltName), filepath.Join(final, boltName)); err != nil {
		return err
	}
	return completeRestore(final, true)
}

// completeRestore removes the empty staging directory of a restore, if it exists. whole reports
// whether raft.db, which Restore moves last, is in the data directory. If whole is false and the
// staging directory exists, completeRestore returns ErrHalfRestored.
func completeRestore(dir string, whole bool) error {
	staging := filepath.Join(dir, stagingName)
	there, err := durable.Exists(staging)
	if err != nil || !there {
		return err
	}
	if !whole {
		return fmt.Errorf("%s: repeat the restore: %w", dir, ErrHalfRestored)
	}
	if err := os.Remove(staging); err != nil {
		return fmt.Errorf("%s: %w: %w", staging, err, ErrHalfRestored)
	}
	return durable.Sync(dir)
}

// writeFirstSnapshot writes the state of machine as the first snapshot of a raft cluster. The only
// member of the cluster is the replica with the given name.
func writeFirstSnapshot(name string, o RestoreOptions, snapshots raft.SnapshotStore, machine *mvcc.Machine) error {
	const index, term = 1, 1
	server := raft.Server{ID: raft.ServerID(name), Address: raft.ServerAddress(o.Advertise)}
	group := raft.Configuration{Servers: []raft.Server{server}}
	sink, err := snapshots.Create(raft.SnapshotVersionMax, index, term, group, index, nil)
	if err != nil {
		return err
	}
	if err := machine.Snapshot().Dump(sink, mvcc.Meta{Cluster: o.Cluster, Index: index, Term: term}); err != nil {
		return errors.Join(err, sink.Cancel())
	}
	return sink.Close()
}
