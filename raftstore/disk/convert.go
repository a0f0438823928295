package disk

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore/disk/journal"
	"keelson.dev/keelson/raftstore/disk/wal"
)

// LogStoreKind is the kind of store for the raft log.
type LogStoreKind string

const (
	LogBolt LogStoreKind = "bolt" // raft-boltdb behind a journal (package journal)
	LogWAL  LogStoreKind = "wal"  // raft-wal in files of sectors (package wal)
)

// ErrLogStore is returned for a data directory with a log store other than the configured log
// store.
var ErrLogStore = errors.New("raftstore: data directory has another log store")

// convertBatch is the maximum number of entries, and convertBytes the maximum size of their data,
// that are copied at once.
const (
	convertBatch = 1024
	convertBytes = 4 << 20
)

// Convert changes the log store of a stopped replica. It needs c.Dir. If c.Name is not empty, the
// directory must belong to that replica. progress, if not nil, is called with the number of entries
// that are copied or compared so far, and the total. If the directory has the requested log store
// already, Convert does nothing.
//
// The new log is created beside the old log, read back, and compared. Then a new raft.db that names
// the new log replaces the old raft.db atomically. After a crash before this step, the old log is
// in use; after the step, the new log is. The next start removes the files of the log that is not
// in use.
func Convert(ctx context.Context, c Config, kind LogStoreKind, progress func(done, total uint64)) error {
	if kind != LogBolt && kind != LogWAL {
		return fmt.Errorf("converting %s: unknown log store %q, want %q or %q", c.Dir, kind, LogBolt, LogWAL)
	}
	if progress == nil {
		progress = func(uint64, uint64) {}
	}
	rec, err := readStableRecord(c.Dir, 0)
	switch {
	case err != nil:
		return fmt.Errorf("converting %s: %w", c.Dir, err)
	case c.Name != "" && rec.owner != c.Name:
		return fmt.Errorf("converting %s: it belongs to replica %q, not to %q: %w",
			c.Dir, rec.owner, c.Name, ErrForeignData)
	case rec.kind == kind:
		return nil
	}
	c.Name, c.LogStore = rec.owner, rec.kind
	c = c.withDefaults()
	if err := convertLog(ctx, c, kind, progress); err != nil {
		return fmt.Errorf("converting the log of %s to %q: %w", c.Dir, kind, err)
	}
	return removeLeftovers(c.Dir, kind)
}

func convertLog(ctx context.Context, c Config, kind LogStoreKind, progress func(done, total uint64)) error {
	if err := removeLeftovers(c.Dir, c.LogStore); err != nil {
		return err
	}
	path := filepath.Join(c.Dir, boltName)
	bolt, err := openBolt(path, c.NoSync)
	if err != nil {
		return err
	}
	old := &Data{closer: bolt}
	defer func() { old.Close() }()
	if old.stable, err = openStableStore(bolt, path, func(error) {}); err != nil {
		return err
	}
	if err := old.openLog(c, bolt, func(error) {}); err != nil {
		return err
	}
	rec := old.stable.currentRecord()
	rec.kind, rec.logID = kind, rand.Uint32()|1
	// The directory of raft-wal is moved into place before it is used. The files of a journal have
	// their final names, since no old journal exists.
	tmp := path + durable.TempSuffix
	if err := createBolt(tmp, rec, c.NoSync); err != nil {
		return err
	}
	fresh, err := createTargetLog(c, kind, rec.logID, tmp)
	if err != nil {
		return err
	}
	// The entries are copied as stored, encrypted or not.
	err = copyLog(ctx, old.Log.LogStore, fresh, progress)
	if err := errors.Join(err, fresh.Close(), ctx.Err()); err != nil {
		return err
	}
	if kind == LogWAL {
		folder := filepath.Join(c.Dir, walName)
		if err := os.RemoveAll(folder); err != nil {
			return err
		}
		if err := durable.Rename(folder+durable.TempSuffix, folder); err != nil {
			return err
		}
	}
	return durable.Rename(tmp, path)
}

// closableLog is a log store that the caller must close.
type closableLog interface {
	raft.LogStore
	Close() error
}

// createTargetLog creates and opens the new, empty log. logID is the number of the log, and bolt is
// the path of its raft.db.
func createTargetLog(c Config, kind LogStoreKind, logID uint32, bolt string) (closableLog, error) {
	if kind == LogBolt {
		if err := journal.Create(c.fileSystem(), filepath.Join(c.Dir, journalName), c.journalBytes()); err != nil {
			return nil, err
		}
		return openBolt(bolt, c.NoSync)
	}
	folder := filepath.Join(c.Dir, walName) + durable.TempSuffix
	if err := os.RemoveAll(folder); err != nil {
		return nil, err
	}
	if err := wal.Create(c.fileSystem(), folder, logID, c.segmentBytes()); err != nil {
		return nil, err
	}
	return wal.Open(c.fileSystem(), folder, logID, c.segmentBytes())
}

// copyLog copies all entries from source to target and compares the copies. An installed snapshot
// may leave a gap in the log, which raft-wal cannot store. In that case only the entries behind the
// last gap are copied, because the snapshot contains the earlier entries.
func copyLog(ctx context.Context, source, target raft.LogStore, progress func(done, total uint64)) error {
	first, err := source.FirstIndex()
	if err != nil {
		return err
	}
	last, err := source.LastIndex()
	if err != nil || last == 0 {
		return err
	}
	for i := last; i >= first; i-- {
		var l raft.Log
		err := source.GetLog(i, &l)
		if errors.Is(err, raft.ErrLogNotFound) {
			first = i + 1
			break
		}
		if err == nil && (len(l.Extensions) < clearExtension || l.Index != i || !hasValidChecksum(&l)) {
			err = fmt.Errorf("checksum does not match: %w", ErrCorruptLog)
		}
		if err != nil {
			return fmt.Errorf("entry %d: %w", i, err)
		}
	}
	total := 2 * (last - first + 1)
	for at := first; at <= last; {
		if err := ctx.Err(); err != nil {
			return err
		}
		var batch []*raft.Log
		for size := 0; at <= last && len(batch) < convertBatch && size < convertBytes; at++ {
			l := new(raft.Log)
			if err := source.GetLog(at, l); err != nil {
				return fmt.Errorf("entry %d: %w", at, err)
			}
			size += len(l.Data)
			batch = append(batch, l)
		}
		if err := target.StoreLogs(batch); err != nil {
			return err
		}
		progress(at-first, total)
	}
	return compareLogs(ctx, source, target, first, last, progress)
}

// compareLogs returns an error unless target contains exactly the entries of source from index
// first to index last.
func compareLogs(ctx context.Context, source, target raft.LogStore, first, last uint64,
	progress func(done, total uint64)) error {
	begin, err := target.FirstIndex()
	end, err2 := target.LastIndex()
	if err := errors.Join(err, err2); err != nil || begin != first || end != last {
		return errors.Join(fmt.Errorf("the new log has entries %d to %d, want %d to %d", begin, end, first, last), err)
	}
	n := last - first + 1
	for i := first; i <= last; i++ {
		if i%convertBatch == 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			progress(n+i-first, 2*n)
		}
		var a, b raft.Log
		if err := errors.Join(source.GetLog(i, &a), target.GetLog(i, &b)); err != nil {
			return fmt.Errorf("entry %d: %w", i, err)
		}
		if a.Index != b.Index || a.Term != b.Term || a.Type != b.Type ||
			string(a.Data) != string(b.Data) || string(a.Extensions) != string(b.Extensions) {
			return fmt.Errorf("entry %d differs in the new log: %w", i, ErrCorruptLog)
		}
	}
	progress(2*n, 2*n)
	return nil
}
