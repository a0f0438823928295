package disk

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore/disk/platter"
)

// LogStoreKind names what keeps the raft log on disk.
type LogStoreKind string

const (
	LogBolt LogStoreKind = "bolt" // raft-boltdb, behind a journal of our own
	LogWAL  LogStoreKind = "wal"  // raft-wal
)

// ErrLogStore reports a data directory made with another log store than the
// configured one.
var ErrLogStore = errors.New("raftstore: data directory has another log store")

// convertBatch is how many entries, and bytes of them, are copied at once.
const (
	convertBatch = 1024
	convertBytes = 4 << 20
)

// Convert changes the log store of a replica that does not run. It needs
// c.Dir, and c.Name to be sure whose data that is. progress, which may be
// nil, is told of entries done and their total. Nothing is to be done when the
// directory has that log store already.
//
// The new log is made beside the old one, read back and compared. Then a new
// raft.db that names it takes the place of the old one, in one step. A crash
// leaves the old log in use, and pieces of a new one that are removed at the
// next start, or the new log in use, and pieces of the old one.
func Convert(ctx context.Context, c Config, to LogStoreKind, progress func(done, total uint64)) error {
	if to != LogBolt && to != LogWAL {
		return fmt.Errorf("converting %s: log store %q is not known, want %q or %q", c.Dir, to, LogBolt, LogWAL)
	}
	if progress == nil {
		progress = func(uint64, uint64) {}
	}
	rec, err := lookRecord(c.Dir, 0)
	switch {
	case err != nil:
		return fmt.Errorf("converting %s: %w", c.Dir, err)
	case c.Name != "" && rec.owner != c.Name:
		return fmt.Errorf("converting %s: it is of replica %q and not of %q: %w", c.Dir, rec.owner, c.Name, ErrForeignData)
	case rec.kind == to:
		return nil
	}
	c.Name, c.LogStore = rec.owner, rec.kind
	c = c.withDefaults()
	if err := convert(ctx, c, to, progress); err != nil {
		return fmt.Errorf("converting the log of %s to %q: %w", c.Dir, to, err)
	}
	return sweep(c.Dir, to)
}

func convert(ctx context.Context, c Config, to LogStoreKind, progress func(done, total uint64)) error {
	if err := sweep(c.Dir, c.LogStore); err != nil {
		return err
	}
	path := filepath.Join(c.Dir, boltName)
	bolt, err := openBolt(path, c.NoSync)
	if err != nil {
		return err
	}
	old := &Data{closer: bolt}
	defer func() { old.Close() }()
	if old.stable, err = openStable(bolt, path, func(error) {}); err != nil {
		return err
	}
	if err := old.openLog(c, bolt, func(error) {}); err != nil {
		return err
	}
	rec := old.stable.record()
	rec.kind, rec.logID = to, rand.Uint32()|1
	// A folder can be moved into place before it counts, and files of the
	// journal have no old ones to be mistaken for.
	tmp := path + platter.NewSuffix
	if err := makeBolt(tmp, rec, c.NoSync); err != nil {
		return err
	}
	fresh, err := convertInto(c, to, rec.logID, tmp)
	if err != nil {
		return err
	}
	// The entries go as they lie on the disk, sealed or not.
	err = copyLog(ctx, old.Log.LogStore, fresh, progress)
	if err := errors.Join(err, fresh.Close(), ctx.Err()); err != nil {
		return err
	}
	if to == LogWAL {
		folder := filepath.Join(c.Dir, walName)
		if err := os.RemoveAll(folder); err != nil {
			return err
		}
		if err := platter.MoveFile(folder+platter.NewSuffix, folder); err != nil {
			return err
		}
	}
	return platter.MoveFile(tmp, path)
}

// closableLog is a log store that belongs to the caller.
type closableLog interface {
	raft.LogStore
	Close() error
}

// convertInto makes the new, empty log. It needs nothing of the old one.
func convertInto(c Config, to LogStoreKind, id uint32, bolt string) (closableLog, error) {
	if to == LogBolt {
		if err := makeJournal(c.files(), filepath.Join(c.Dir, journalName), c.journalLimit()); err != nil {
			return nil, err
		}
		return openBolt(bolt, c.NoSync)
	}
	folder := filepath.Join(c.Dir, walName) + platter.NewSuffix
	if err := os.RemoveAll(folder); err != nil {
		return nil, err
	}
	if err := makeWAL(c.files(), folder, id, c.segmentLimit()); err != nil {
		return nil, err
	}
	return openWAL(c.files(), folder, id, c.segmentLimit())
}

// copyLog copies all entries and reads them back. Of a log with a gap, which an
// installed snapshot may leave and raft-wal cannot hold, what is beyond the
// last gap is copied: the rest is in the snapshot.
func copyLog(ctx context.Context, from, to raft.LogStore, progress func(done, total uint64)) error {
	first, err := from.FirstIndex()
	if err != nil {
		return err
	}
	last, err := from.LastIndex()
	if err != nil || last == 0 {
		return err
	}
	for i := last; i >= first; i-- {
		var l raft.Log
		err := from.GetLog(i, &l)
		if errors.Is(err, raft.ErrLogNotFound) {
			first = i + 1
			break
		}
		if err == nil && (len(l.Extensions) < clearExtension || l.Index != i || !intact(&l)) {
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
			if err := from.GetLog(at, l); err != nil {
				return fmt.Errorf("entry %d: %w", at, err)
			}
			size += len(l.Data)
			batch = append(batch, l)
		}
		if err := to.StoreLogs(batch); err != nil {
			return err
		}
		progress(at-first, total)
	}
	return compareLogs(ctx, from, to, first, last, progress)
}

func compareLogs(ctx context.Context, from, to raft.LogStore, first, last uint64, progress func(done, total uint64)) error {
	begin, err := to.FirstIndex()
	end, err2 := to.LastIndex()
	if err := errors.Join(err, err2); err != nil || begin != first || end != last {
		return errors.Join(fmt.Errorf("the new log reaches from %d to %d and not from %d to %d", begin, end, first, last), err)
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
		if err := errors.Join(from.GetLog(i, &a), to.GetLog(i, &b)); err != nil {
			return fmt.Errorf("entry %d: %w", i, err)
		}
		if a.Index != b.Index || a.Term != b.Term || a.Type != b.Type || string(a.Data) != string(b.Data) || string(a.Extensions) != string(b.Extensions) {
			return fmt.Errorf("entry %d differs in the new log: %w", i, ErrCorruptLog)
		}
	}
	progress(2*n, 2*n)
	return nil
}
