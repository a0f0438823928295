// Package disk is the data directory of a replica: log, term and votes, snapshots
// and the keys they are sealed under, and the copies that are made of its state.
// Everything checks itself, and what is wrong is found before it is used;
// what a write or a flush has failed to do is never taken for done.
//
//	raft ─▶ Log ─▶ journal ─▶ bbolt      or   Log ─▶ raft-wal
//	     ─▶ Votes ─▶ bbolt
//	     ─▶ Paced ─▶ Snapshots
//
// Convert, Restore, Inspect and SetAside work on a directory that no replica uses.
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

	"keelson.dev/keelson/raftstore/disk/platter"
)

// ErrForeignData reports a data directory that belongs to another replica.
var ErrForeignData = errors.New("raftstore: data directory belongs to another replica")

const (
	journalName = "raft.journal"
	// stagingName is where Restore makes a data directory.
	stagingName = "restoring"
)

// Config says where the data of a replica lies, and how.
type Config struct {
	Name     string // of the replica that owns the data
	Dir      string
	LogStore LogStoreKind // "" = LogBolt
	// Keys are the key-encryption keys; without any, data is written in clear
	// and what is sealed does not open.
	Keys *Keyring
	// NoSync skips fsync. For tests only: a power cut loses acknowledged writes.
	NoSync bool
	// Now is the clock for the times of snapshots. time.Now when nil.
	Now func() time.Time

	// How files are opened, and of what size those of a log are, in bytes: for
	// tests and 0 otherwise.
	Files        platter.Layer
	Votes        func(RecordKeeper) RecordKeeper // where term and vote are written
	JournalBytes int64                           // of one file of the journal
	SegmentBytes int                             // of one file of raft-wal
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

// files is the layer that the replica's files are opened with.
func (c Config) files() platter.Layer {
	if c.Files != nil {
		return c.Files
	}
	return platter.OS{NoSync: c.NoSync}
}

// How long a lock of the data directory is waited for, and how often it is tried.
const (
	lockPatience = 2 * time.Second
	lockPause    = 15 * time.Millisecond
)

// Data is what a replica keeps:
//
//	raft.db             term and vote, owner, kind of the log; with LogBolt the log
//	raft.journal.0, .1  with LogBolt, what is on its way there
//	wal/                with LogWAL, the log
//	snapshots/
//	raft.keys           wrapped data keys, if anything is sealed
//
// Everything is read and checked when it is opened. raft.db is made first and
// says what else there must be.
type Data struct {
	Log       *logStore
	stable    *stableStore
	Snapshots *snapshotStore
	seals     *sealer
	closer    io.Closer
}

// openDisk opens the data directory of a replica, and makes it when none exists.
func openDisk(c Config, fail func(error)) (*Data, error) {
	d, err := openData(c, fail)
	if err == nil {
		return d, nil
	}
	err = fmt.Errorf("disk of replica %s: %w", c.Name, err)
	for _, damage := range []error{ErrCorruptLog, ErrCorruptVotes, ErrCorruptSnapshot, ErrCorruptKeys} {
		if errors.Is(err, damage) {
			return nil, fmt.Errorf("%w; the replica does not serve: set its data aside and let it join again empty", err)
		}
	}
	return nil, err
}

func openData(c Config, fail func(error)) (*Data, error) {
	if err := platter.MakeFolder(c.Dir); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	rec, err := layOut(c)
	if err != nil {
		return nil, err
	}
	if err := sweep(c.Dir, rec.kind); err != nil {
		return nil, err
	}
	path := filepath.Join(c.Dir, boltName)
	bolt, err := openBolt(path, c.NoSync)
	if err != nil {
		return nil, err
	}
	d := &Data{closer: bolt}
	if err := d.open(c, bolt, path, fail); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// layOut sees to it that there is a raft.db, that it is whole and this
// replica's, and returns what it says.
func layOut(c Config) (stableRecord, error) {
	path := filepath.Join(c.Dir, boltName)
	there, err := platter.Exists(path)
	if err != nil {
		return stableRecord{}, err
	}
	if err := settleRestore(c.Dir, there); err != nil {
		return stableRecord{}, err
	}
	if !there {
		if err := strays(c.Dir); err != nil {
			return stableRecord{}, err
		}
		if err := makeBolt(path, stableRecord{owner: c.Name, kind: c.LogStore}, c.NoSync); err != nil {
			return stableRecord{}, fmt.Errorf("making %s: %w", path, err)
		}
	}
	rec, err := lookRecord(c.Dir, lockPatience)
	switch {
	case err != nil:
		return rec, err
	case rec.owner != c.Name:
		return rec, fmt.Errorf("%s is of replica %q and not of %q: %w", c.Dir, rec.owner, c.Name, ErrForeignData)
	case rec.kind != c.LogStore:
		return rec, fmt.Errorf("%s has log store %q and %q is configured; convert it while the replica is stopped (kctl cluster convert-log --to %s): %w",
			c.Dir, rec.kind, c.LogStore, c.LogStore, ErrLogStore)
	}
	return rec, nil
}

// strays refuses a directory without raft.db that holds what belongs to one.
func strays(dir string) error {
	list, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range list {
		name := e.Name()
		full := name == walName || name == sealName || strings.HasPrefix(name, journalName)
		if name == snapshotsName {
			inside, err := os.ReadDir(filepath.Join(dir, name))
			if err != nil {
				return err
			}
			full = len(inside) > 0
		}
		if full && !strings.HasSuffix(name, platter.NewSuffix) {
			return fmt.Errorf("%s is there, %s is missing: %w", filepath.Join(dir, name), boltName, ErrCorruptVotes)
		}
	}
	return nil
}

// sweep removes what a conversion left behind, before or after it was decided.
func sweep(dir string, kind LogStoreKind) error {
	gone := []string{boltName + platter.NewSuffix, boltName + platter.NewSuffix + platter.NewSuffix, walName + platter.NewSuffix}
	if kind == LogBolt {
		gone = append(gone, walName)
	} else {
		for _, name := range journalNames(journalName) {
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

func (d *Data) open(c Config, bolt *boltLog, path string, fail func(error)) error {
	var err error
	var votes RecordKeeper = bolt
	if c.Votes != nil {
		votes = c.Votes(bolt)
	}
	if d.stable, err = openStable(votes, path, fail); err != nil {
		return err
	}
	if d.seals, err = openSealer(filepath.Join(c.Dir, sealName), c.Keys); err != nil {
		return err
	}
	if err := d.openLog(c, bolt, fail); err != nil {
		return err
	}
	d.Log.seals = d.seals
	if d.Snapshots, err = openSnapshots(c, d.seals, fail); err != nil {
		return err
	}
	list, err := d.Snapshots.list()
	if err != nil {
		return err
	}
	var covered uint64
	if len(list) > 0 {
		covered = list[0].Index
	}
	used, err := d.Log.verify(covered)
	if err != nil {
		return err
	}
	if err := d.Snapshots.keys(used); err != nil {
		return err
	}
	return d.seals.begin(used)
}

// openLog opens the log, and makes it first when the replica is new.
func (d *Data) openLog(c Config, bolt *boltLog, fail func(error)) error {
	rec := d.stable.record()
	id := rec.logID
	journal, folder := filepath.Join(c.Dir, journalName), filepath.Join(c.Dir, walName)
	if id == 0 {
		id = rand.Uint32() | 1
		err := makeLog(c, rec.kind, id)
		if err == nil {
			err = d.stable.change(func(r *stableRecord) { r.logID = id })
		}
		if err != nil {
			return fmt.Errorf("making the log: %w", err)
		}
	}
	if rec.kind == LogWAL {
		w, err := openWAL(c.files(), folder, id, c.segmentLimit())
		if err != nil {
			return err
		}
		d.Log, d.closer = newLogStore(w, folder, fail), closers{w, d.closer}
		d.Log.kind = LogWAL
		return nil
	}
	ahead, err := openAhead(bolt, c.files(), journal, id, c.journalLimit())
	if err != nil {
		return err
	}
	d.Log, d.closer = newLogStore(ahead, bolt.path, fail), closers{ahead, d.closer}
	ahead.halt = func(err error) { d.Log.halt(fmt.Errorf("%s: %w", bolt.path, err)) }
	return nil
}

func (c Config) segmentLimit() int {
	if c.SegmentBytes != 0 {
		return c.SegmentBytes
	}
	return walSegment
}

func (c Config) journalLimit() int64 {
	if c.JournalBytes != 0 {
		return c.JournalBytes
	}
	return journalBytes
}

// makeLog makes the files of an empty log.
func makeLog(c Config, kind LogStoreKind, id uint32) error {
	if kind == LogBolt {
		return makeJournal(c.files(), filepath.Join(c.Dir, journalName), c.journalLimit())
	}
	folder := filepath.Join(c.Dir, walName)
	if err := os.RemoveAll(folder); err != nil {
		return err
	}
	return makeWAL(c.files(), folder, id, c.segmentLimit())
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

// Close closes everything.
func (d *Data) Close() error { return d.closer.Close() }

// Empty reports whether this replica has never been part of a group.
func (d *Data) Empty() (bool, error) {
	has, err := raft.HasExistingState(d.Log, d.stable, d.Snapshots)
	if err != nil {
		return false, fmt.Errorf("%s: %w", d.Log.name, err)
	}
	return !has, nil
}

// StartRaft calls start, and whatever the disk does to it from then on is an
// error of the replica and no panic of the process.
func (d *Data) StartRaft(start func() (*raft.Raft, error)) (*raft.Raft, error) {
	d.stable.mu.Lock()
	d.stable.live = true
	d.stable.mu.Unlock()
	d.Log.live.Store(true)
	var r *raft.Raft
	err := errors.New("its disk failed")
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

// Paced is the store of snapshots for a replica that serves meanwhile.
func (d *Data) Paced() raft.SnapshotStore { return paceSnapshots(d.Snapshots, d.Snapshots.dir) }

// Votes is the stable store as raft is to see it.
func (d *Data) Votes() raft.StableStore { return &ballot{stableStore: d.stable} }

// ReloadKeys makes the disk use other key-encryption keys; data keys are wrapped anew under the
// current one.
func (d *Data) ReloadKeys(k *Keyring) error { return d.seals.reload(k) }
