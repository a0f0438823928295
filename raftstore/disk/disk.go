// Package disk manages the data directory of a replica: log, term and votes, snapshots, data keys,
// and backups of the state.
//
// All data has checksums, and damage is detected before the data is used. After a failed write or
// sync, the replica acknowledges nothing more.
//
//	raft ─▶ Log ─▶ journal ─▶ bbolt      or   Log ─▶ wal
//	     ─▶ StableStore ─▶ bbolt
//	     ─▶ PacedSnapshots ─▶ Snapshots
//
// The log's files are in the packages journal and wal. Convert, Restore, Inspect, and SetAside work
// on the directory of a stopped replica.
package disk

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore/disk/journal"
	"keelson.dev/keelson/raftstore/disk/wal"
)

// ErrForeignData is returned for a data directory that belongs to another replica.
var ErrForeignData = errors.New("raftstore: data directory belongs to another replica")

const (
	journalName = "raft.journal"
	// walName is the directory of the log with LogWAL.
	walName = "wal"
	// stagingName is the directory in which Restore builds a data directory.
	stagingName = "restoring"
)

// Config describes a data directory.
type Config struct {
	Name     string // name of the replica that owns the data
	Dir      string
	LogStore LogStoreKind // "" means LogBolt
	// Keys are the key-encryption keys. Without them, new data is not encrypted, and encrypted data
	// cannot be read.
	Keys *Keyring
	// NoSync omits fsync. It is for tests only: a power failure loses acknowledged writes.
	NoSync bool
	// Now returns the current time, which is stored in new snapshots. nil means time.Now.
	Now func() time.Time

	// For tests: how files are opened, how the stable record is written, and the sizes of the log's
	// files in bytes. Zero values mean the defaults.
	Files        durable.FS
	Votes        func(RecordStore) RecordStore // returns a wrapper around the store of the stable record
	JournalBytes int64                         // size of one file of the journal
	SegmentBytes int                           // size of one segment of raft-wal
}

func (c Config) withDefaults() Config {
	if c.LogStore == "" {
		c.LogStore = LogBolt
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	return c
}

// fileSystem returns the file system in which the replica's files are opened: Files, or the
// operating system's.
func (c Config) fileSystem() durable.FS {
	if c.Files != nil {
		return c.Files
	}
	return durable.OS{NoSync: c.NoSync}
}

// lockInterval is the time between attempts to lock a data directory. After lockTimeout the
// attempts end with an error.
const (
	lockTimeout  = 2 * time.Second
	lockInterval = 15 * time.Millisecond
)

// Data is an open data directory:
//
//	raft.db             term and vote, owner, and kind of the log; with LogBolt the log
//	raft.journal.0, .1  with LogBolt: entries that are not yet in raft.db
//	wal/                with LogWAL: the log
//	snapshots/
//	raft.keys           wrapped data keys, if anything is encrypted
//
// All files are read and verified when the directory is opened. raft.db is created first, and names
// the other files.
type Data struct {
	Log       *logStore
	stable    *stableStore
	Snapshots *snapshotStore
	sealer    *sealer
	closer    io.Closer
}

// openDisk opens the data directory of a replica, and creates it if it does not exist. fail is
// called once, with the first error after which the replica must stop.
func openDisk(c Config, fail func(error)) (*Data, error) {
	d, err := openData(c, fail)
	if err == nil {
		return d, nil
	}
	err = fmt.Errorf("disk of replica %s: %w", c.Name, err)
	for _, damage := range []error{ErrCorruptLog, ErrCorruptVotes, ErrCorruptSnapshot, ErrCorruptKeys} {
		if errors.Is(err, damage) {
			return nil,
				fmt.Errorf("%w; the replica does not serve: move its data aside and let it join again with an empty "+
					"data directory", err)
		}
	}
	return nil, err
}

func openData(c Config, fail func(error)) (*Data, error) {
	if err := durable.MakeDir(c.Dir); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	rec, err := loadOrCreateRecord(c)
	if err != nil {
		return nil, err
	}
	if err := removeLeftovers(c.Dir, rec.kind); err != nil {
		return nil, err
	}
	path := filepath.Join(c.Dir, boltName)
	bolt, err := openBolt(path, c.NoSync)
	if err != nil {
		return nil, err
	}
	d := &Data{closer: bolt}
	if err := d.openParts(c, bolt, path, fail); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// loadOrCreateRecord returns the record in raft.db. It creates raft.db if the replica is new. It
// returns an error if the record is damaged, or if it names another replica or another log store
// than c.
func loadOrCreateRecord(c Config) (stableRecord, error) {
	path := filepath.Join(c.Dir, boltName)
	there, err := durable.Exists(path)
	if err != nil {
		return stableRecord{}, err
	}
	if err := completeRestore(c.Dir, there); err != nil {
		return stableRecord{}, err
	}
	if !there {
		if err := rejectStrayFiles(c.Dir); err != nil {
			return stableRecord{}, err
		}
		if err := createBolt(path, stableRecord{owner: c.Name, kind: c.LogStore}, c.NoSync); err != nil {
			return stableRecord{}, fmt.Errorf("making %s: %w", path, err)
		}
	}
	rec, err := readStableRecord(c.Dir, lockTimeout)
	switch {
	case err != nil:
		return rec, err
	case rec.owner != c.Name:
		return rec, fmt.Errorf("%s belongs to replica %q, not to %q: %w", c.Dir, rec.owner, c.Name, ErrForeignData)
	case rec.kind != c.LogStore:
		return rec,
			fmt.Errorf("%s has log store %q, but %q is configured; convert it while the replica is stopped (kctl "+
				"cluster convert-log --to %s): %w",
				c.Dir, rec.kind, c.LogStore, c.LogStore, ErrLogStore)
	}
	return rec, nil
}

// rejectStrayFiles returns an error if a directory without raft.db contains other files of a
// replica.
func rejectStrayFiles(dir string) error {
	list, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range list {
		name := e.Name()
		full := name == walName || name == dataKeysName || strings.HasPrefix(name, journalName)
		if name == snapshotsName {
			inside, err := os.ReadDir(filepath.Join(dir, name))
			if err != nil {
				return err
			}
			full = len(inside) > 0
		}
		if full && !strings.HasSuffix(name, durable.TempSuffix) {
			return fmt.Errorf("%s exists, but %s is missing: %w", filepath.Join(dir, name), boltName, ErrCorruptVotes)
		}
	}
	return nil
}

// removeLeftovers removes the files that an interrupted conversion leaves: temporary files, and the
// files of each log store other than kind.
func removeLeftovers(dir string, kind LogStoreKind) error {
	gone := []string{
		boltName + durable.TempSuffix, boltName + durable.TempSuffix + durable.TempSuffix, walName + durable.TempSuffix,
	}
	if kind == LogBolt {
		gone = append(gone, walName)
	} else {
		for _, name := range journal.Names(journalName) {
			gone = append(gone, name)
		}
	}
	for _, name := range gone {
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("sweeping: %w", err)
		}
	}
	return nil
}

func (d *Data) openParts(c Config, bolt *boltLog, path string, fail func(error)) error {
	var err error
	var votes RecordStore = bolt
	if c.Votes != nil {
		votes = c.Votes(bolt)
	}
	if d.stable, err = openStableStore(votes, path, fail); err != nil {
		return err
	}
	if d.sealer, err = openSealer(filepath.Join(c.Dir, dataKeysName), c.Keys); err != nil {
		return err
	}
	if err := d.openLog(c, bolt, fail); err != nil {
		return err
	}
	d.Log.sealer = d.sealer
	if d.Snapshots, err = openSnapshotStore(c, d.sealer, fail); err != nil {
		return err
	}
	list, err := d.Snapshots.readHeaders()
	if err != nil {
		return err
	}
	var covered uint64
	if len(list) > 0 {
		covered = list[0].Index
	}
	used, err := d.Log.verifyEntries(covered)
	if err != nil {
		return err
	}
	if err := d.Snapshots.collectKeys(used); err != nil {
		return err
	}
	return d.sealer.startDataKey(used)
}

// openLog opens the log that the stable record names. It creates the log if the replica is new.
// fail is called once, with the first error after which the replica must stop.
func (d *Data) openLog(c Config, bolt *boltLog, fail func(error)) error {
	rec := d.stable.currentRecord()
	id := rec.logID
	folder := filepath.Join(c.Dir, walName)
	if id == 0 {
		id = rand.Uint32() | 1
		err := createLog(c, rec.kind, id)
		if err == nil {
			err = d.stable.update(func(r *stableRecord) { r.logID = id })
		}
		if err != nil {
			return fmt.Errorf("creating the log: %w", err)
		}
	}
	if rec.kind == LogWAL {
		w, err := wal.Open(c.fileSystem(), folder, id, c.segmentBytes())
		if err != nil {
			return err
		}
		d.Log, d.closer = newLogStore(w, folder, fail), closers{w, d.closer}
		d.Log.kind = LogWAL
		return nil
	}
	d.Log = newLogStore(nil, bolt.path, fail)
	store, err := journal.Open(bolt, c.fileSystem(), filepath.Join(c.Dir, journalName), id, c.journalBytes(),
		func(err error) { d.Log.recordFailure(fmt.Errorf("%s: %w", bolt.path, err)) })
	if err != nil {
		return err
	}
	d.Log.LogStore, d.closer = store, closers{store, d.closer}
	return nil
}

func (c Config) segmentBytes() int {
	if c.SegmentBytes != 0 {
		return c.SegmentBytes
	}
	return wal.DefaultSegmentBytes
}

func (c Config) journalBytes() int64 {
	if c.JournalBytes != 0 {
		return c.JournalBytes
	}
	return journal.DefaultFileBytes
}

// createLog creates the files of an empty log. logID is the number of the log.
func createLog(c Config, kind LogStoreKind, logID uint32) error {
	if kind == LogBolt {
		return journal.Create(c.fileSystem(), filepath.Join(c.Dir, journalName), c.journalBytes())
	}
	folder := filepath.Join(c.Dir, walName)
	if err := os.RemoveAll(folder); err != nil {
		return err
	}
	return wal.Create(c.fileSystem(), folder, logID, c.segmentBytes())
}

// closers closes several files in order, as one io.Closer.
type closers []io.Closer

// Close implements io.Closer.
func (c closers) Close() error {
	var errs []error
	for _, one := range c {
		errs = append(errs, one.Close())
	}
	return errors.Join(errs...)
}

// Close closes all files.
func (d *Data) Close() error { return d.closer.Close() }

// IsEmpty reports whether this replica has never been a member of a raft cluster.
func (d *Data) IsEmpty() (bool, error) {
	has, err := raft.HasExistingState(d.Log, d.stable, d.Snapshots)
	if err != nil {
		return false, fmt.Errorf("%s: %w", d.Log.name, err)
	}
	return !has, nil
}

// StartRaft starts raft by calling start, and returns the results of start. Afterwards, an error of
// the disk stops the replica without a panic in raft.
func (d *Data) StartRaft(start func() (*raft.Raft, error)) (*raft.Raft, error) {
	d.stable.mu.Lock()
	d.stable.live = true
	d.stable.mu.Unlock()
	d.Log.live.Store(true)
	var r *raft.Raft
	err := errors.New("the replica's disk failed")
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
			}
		}()
		r, err = start()
	}()
	<-done
	return r, err
}

// PacedSnapshots returns a snapshot store for a replica that serves requests while it writes a
// snapshot. The store limits how much unsynced data a snapshot has at any time (see
// pacedSnapshots).
func (d *Data) PacedSnapshots() raft.SnapshotStore {
	return newPacedSnapshots(d.Snapshots, d.Snapshots.dir)
}

// StableStore returns the store in which raft stores its term and vote.
func (d *Data) StableStore() raft.StableStore { return &voteStore{stableStore: d.stable} }

// ReloadKeys replaces the key-encryption keys by the keys in k. It starts a new data key and wraps
// all data keys again under the current key of k.
func (d *Data) ReloadKeys(k *Keyring) error { return d.sealer.changeKeyring(k) }
