package disk

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk/platter"
	"keelson.dev/keelson/raftstore/mvcc"
)

// RestoreAhead is by how much a restored store's revision is moved ahead at
// least: far more than the old group can have committed after the backup was taken.
const RestoreAhead = raftstore.Revision(1) << 32

const (
	baseEpoch  = 1577836800 // 2020-01-01, unix seconds
	baseSecond = 24         // bits of a revision below a second's: more than any store commits within one
)

// RestoreBase is where the revisions of a restored or recovered store begin,
// beyond have. It grows with the clock as well, and faster than any store
// commits: what is restored twice, or an older backup after a younger one, does
// not come to revisions that somebody has seen with other content. A clock that
// is behind leaves RestoreAhead.
func RestoreBase(have raftstore.Revision, now time.Time) raftstore.Revision {
	return max(have+RestoreAhead, raftstore.Revision(max(0, now.Unix()-baseEpoch))<<baseSecond)
}

var (
	// ErrNotEmpty reports a data directory that holds something already.
	ErrNotEmpty = errors.New("raftstore: data directory is not empty")
	// ErrHalfRestored reports a data directory in which a restore was cut short.
	ErrHalfRestored = errors.New("raftstore: a restore was cut short")
)

// RestoreOptions are for the cases that Restore refuses.
type RestoreOptions struct {
	Advertise string // where other replicas will reach the new one
	Cluster   string // the identity of the cluster
	// AnyCluster takes a backup of another cluster.
	AnyCluster bool
	// Above is a revision beyond which the restored store is to begin, too: that
	// of the data in whose place it comes; 0 = none is known.
	Above raftstore.Revision
	Now   time.Time // by the clock; zero = time.Now
	// Amend says what else is changed of the state that the backup holds; nil = nothing.
	Amend func(*mvcc.View) ([]raftstore.Op, error)
}

func (o RestoreOptions) now() time.Time {
	if o.Now.IsZero() {
		return time.Now()
	}
	return o.Now
}

// Restore makes the data directory of a new group of one from a backup; other
// replicas join it empty. c needs Name and Dir, and Keys when the backup is sealed
// or the new data is to be; a backup of another cluster than o.Cluster is refused.
//
// The whole backup is read and checked before anything is written, and nothing
// is written over existing data. A crash leaves a directory that does not start
// and into which Restore can be called again. Revisions of the restored store
// are far beyond those of the backup (RestoreBase) and everything before counts
// as compacted: no watcher can take it for the old one.
func Restore(c Config, backup io.ReadSeeker, o RestoreOptions) (BackupInfo, error) {
	if c.Name == "" || c.Dir == "" || o.Advertise == "" {
		return BackupInfo{}, errors.New("restore: name, data directory and advertised address are needed")
	}
	c = c.withDefaults()
	start, err := backup.Seek(0, io.SeekCurrent)
	if err != nil {
		return BackupInfo{}, fmt.Errorf("restore: %w", err)
	}
	b, err := openBackup(backup, c.Keys)
	if err != nil {
		return BackupInfo{}, errors.Join(fmt.Errorf("restore: %w", err), rewind(backup, start))
	}
	machine, err := b.load()
	if err != nil {
		return BackupInfo{}, errors.Join(fmt.Errorf("restore: %w", err), rewind(backup, start))
	}
	if !o.AnyCluster && b.info.Cluster != o.Cluster {
		return b.info, fmt.Errorf("restore: the backup is of cluster %q, this is %q: %w", b.info.Cluster, o.Cluster, ErrForeignBackup)
	}
	if err := vacant(c.Dir); err != nil {
		return b.info, fmt.Errorf("restore to %s: %w", c.Dir, err)
	}
	if o.Amend != nil {
		ops, err := o.Amend(machine.View())
		if err != nil {
			return b.info, fmt.Errorf("restore: %w", err)
		}
		machine.Amend(ops...)
	}
	if err := machine.Rebase(RestoreBase(max(machine.View().Revision(), o.Above), o.now())); err != nil {
		return b.info, fmt.Errorf("restore: %w", err)
	}
	if err := build(c, o, machine); err != nil {
		return b.info, fmt.Errorf("restore to %s: %w", c.Dir, err)
	}
	return b.info, nil
}

// rewind leaves a refused backup as it was given.
func rewind(backup io.Seeker, start int64) error {
	_, err := backup.Seek(start, io.SeekStart)
	return err
}

// vacant refuses a directory that holds anything but what a restore that was cut short left.
func vacant(dir string) error {
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

// build makes the data in a folder inside of the data directory and moves it
// up, raft.db last: without it nothing starts.
func build(c Config, o RestoreOptions, machine *mvcc.Machine) error {
	final, staging := c.Dir, filepath.Join(c.Dir, stagingName)
	if err := platter.MakeFolder(final); err != nil {
		return err
	}
	// What a restore that was cut short has moved already.
	for _, name := range append(journalFiles(), walName, sealName, snapshotsName, stagingName) {
		if err := os.RemoveAll(filepath.Join(final, name)); err != nil {
			return err
		}
	}
	c.Dir = staging
	d, err := openDisk(c, func(error) {})
	if err != nil {
		return err
	}
	_, err = d.Found()
	if err == nil {
		err = seed(c.Name, o, d.Snapshots, machine)
	}
	if err := errors.Join(err, d.Close(), platter.SyncFolder(staging), platter.SyncFolder(final)); err != nil {
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
	if err := platter.SyncFolder(final); err != nil {
		return err
	}
	if err := platter.MoveFile(filepath.Join(staging, boltName), filepath.Join(final, boltName)); err != nil {
		return err
	}
	return settleRestore(final, true)
}

// settleRestore completes a restore whose last step is done, and refuses one
// that was cut short before.
func settleRestore(dir string, whole bool) error {
	staging := filepath.Join(dir, stagingName)
	there, err := platter.Exists(staging)
	if err != nil || !there {
		return err
	}
	if !whole {
		return fmt.Errorf("%s: call it again: %w", dir, ErrHalfRestored)
	}
	if err := os.Remove(staging); err != nil {
		return fmt.Errorf("%s: %w: %w", staging, err, ErrHalfRestored)
	}
	return platter.SyncFolder(dir)
}

// seed writes the state as the first snapshot of a group of one.
func seed(name string, o RestoreOptions, snapshots raft.SnapshotStore, machine *mvcc.Machine) error {
	const index, term = 1, 1
	group := raft.Configuration{Servers: []raft.Server{{ID: raft.ServerID(name), Address: raft.ServerAddress(o.Advertise)}}}
	sink, err := snapshots.Create(raft.SnapshotVersionMax, index, term, group, index, nil)
	if err != nil {
		return err
	}
	if err := machine.Snapshot().Dump(sink, mvcc.Meta{Cluster: o.Cluster, Index: index, Term: term}); err != nil {
		return errors.Join(err, sink.Cancel())
	}
	return sink.Close()
}
