package replica

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"

	"github.com/hashicorp/raft"
)

// ErrForeignData reports a data directory that belongs to another replica.
var ErrForeignData = errors.New("raftstore: data directory belongs to another replica")

const (
	journalName = "raft.journal"
	// stagingName is where Restore makes a data directory.
	stagingName = "restoring"
)

// disk is what a replica keeps:
//
//	raft.db             term and vote, owner, kind of the log; with LogBolt the log
//	raft.journal.0, .1  with LogBolt, what is on its way there
//	wal/                with LogWAL, the log
//	snapshots/
//	raft.keys           wrapped data keys, if anything is sealed
//
// Everything is read and checked when it is opened. raft.db is made first and
// says what else there must be.
type disk struct {
	logs      *logStore
	stable    *stableStore
	snapshots *snapshotStore
	seals     *sealer
	close     io.Closer
}

// openDisk opens the data directory of a replica, and makes it when there is none.
func openDisk(c Config, fail func(error)) (*disk, error) {
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

func openData(c Config, fail func(error)) (*disk, error) {
	if err := makeFolder(c.DataDir); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	rec, err := layOut(c)
	if err != nil {
		return nil, err
	}
	if err := sweep(c.DataDir, rec.kind); err != nil {
		return nil, err
	}
	path := filepath.Join(c.DataDir, boltName)
	bolt, err := openBolt(path, c.NoSync)
	if err != nil {
		return nil, err
	}
	d := &disk{close: bolt}
	if err := d.open(c, bolt, path, fail); err != nil {
		return nil, errors.Join(err, d.close.Close())
	}
	return d, nil
}

// layOut sees to it that there is a raft.db, that it is whole and this
// replica's, and returns what it says.
func layOut(c Config) (stableRecord, error) {
	path := filepath.Join(c.DataDir, boltName)
	there, err := exists(path)
	if err != nil {
		return stableRecord{}, err
	}
	if err := settleRestore(c.DataDir, there); err != nil {
		return stableRecord{}, err
	}
	if !there {
		if err := strays(c.DataDir); err != nil {
			return stableRecord{}, err
		}
		if err := makeBolt(path, stableRecord{owner: c.Name, kind: c.LogStore}, c.NoSync); err != nil {
			return stableRecord{}, fmt.Errorf("making %s: %w", path, err)
		}
	}
	rec, err := lookRecord(c.DataDir, lockTimeout)
	switch {
	case err != nil:
		return rec, err
	case rec.owner != c.Name:
		return rec, fmt.Errorf("%s is of replica %q and not of %q: %w", c.DataDir, rec.owner, c.Name, ErrForeignData)
	case rec.kind != c.LogStore:
		return rec, fmt.Errorf("%s has log store %q and %q is configured; convert it while the replica is stopped (kctl cluster convert-log --to %s): %w",
			c.DataDir, rec.kind, c.LogStore, c.LogStore, ErrLogStore)
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
		if full && !strings.HasSuffix(name, newSuffix) {
			return fmt.Errorf("%s is there, %s is missing: %w", filepath.Join(dir, name), boltName, ErrCorruptVotes)
		}
	}
	return nil
}

// sweep removes what a conversion left behind, before or after it was decided.
func sweep(dir string, kind LogStoreKind) error {
	gone := []string{boltName + newSuffix, boltName + newSuffix + newSuffix, walName + newSuffix}
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

func (d *disk) open(c Config, bolt *boltLog, path string, fail func(error)) error {
	var err error
	if d.stable, err = openStable(bolt, path, fail); err != nil {
		return err
	}
	if d.seals, err = openSealer(filepath.Join(c.DataDir, sealName), c.Keys); err != nil {
		return err
	}
	if err := d.openLog(c, bolt, fail); err != nil {
		return err
	}
	d.logs.seals = d.seals
	if d.snapshots, err = openSnapshots(c, d.seals, fail); err != nil {
		return err
	}
	list, err := d.snapshots.list()
	if err != nil {
		return err
	}
	var covered uint64
	if len(list) > 0 {
		covered = list[0].Index
	}
	used, err := d.logs.verify(covered)
	if err != nil {
		return err
	}
	if err := d.snapshots.keys(used); err != nil {
		return err
	}
	return d.seals.begin(used)
}

// openLog opens the log, and makes it first when the replica is new.
func (d *disk) openLog(c Config, bolt *boltLog, fail func(error)) error {
	rec := d.stable.record()
	id := rec.logID
	journal, folder := filepath.Join(c.DataDir, journalName), filepath.Join(c.DataDir, walName)
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
		d.logs, d.close = newLogStore(w, folder, fail), closers{w, d.close}
		d.logs.kind = LogWAL
		return nil
	}
	ahead, err := openAhead(bolt, c.files(), journal, id, c.journalLimit())
	if err != nil {
		return err
	}
	d.logs, d.close = newLogStore(ahead, bolt.path, fail), closers{ahead, d.close}
	ahead.halt = func(err error) { d.logs.halt(fmt.Errorf("%s: %w", bolt.path, err)) }
	return nil
}

func (c Config) segmentLimit() int {
	if c.segmentBytes != 0 {
		return c.segmentBytes
	}
	return walSegment
}

func (c Config) journalLimit() int64 {
	if c.journalBytes != 0 {
		return c.journalBytes
	}
	return journalBytes
}

// makeLog makes the files of an empty log.
func makeLog(c Config, kind LogStoreKind, id uint32) error {
	if kind == LogBolt {
		return makeJournal(c.files(), filepath.Join(c.DataDir, journalName), c.journalLimit())
	}
	folder := filepath.Join(c.DataDir, walName)
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

// empty reports whether this replica has never been part of a group.
func (d *disk) empty() (bool, error) {
	has, err := raft.HasExistingState(d.logs, d.stable, d.snapshots)
	if err != nil {
		return false, fmt.Errorf("%s: %w", d.logs.name, err)
	}
	return !has, nil
}

// startRaft calls start, and whatever the disk does to it from then on is an
// error of the replica and no panic of the process.
func (d *disk) startRaft(start func() (*raft.Raft, error)) (*raft.Raft, error) {
	d.stable.mu.Lock()
	d.stable.live = true
	d.stable.mu.Unlock()
	d.logs.live.Store(true)
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
