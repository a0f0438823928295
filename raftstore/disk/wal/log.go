// Package wal is a raft log that is written by hashicorp's raft-wal. The segments are stored in
// files of the package's own format.
//
// raft-wal has checksums for its last append only, and silently takes any other unreadable data for
// the end of the log. The file format of this package (file.go) detects such damage.
//
// The file of a dropped segment is kept for a later segment. A log that grows and is shortened
// continuously therefore overwrites existing blocks. The list of segments (list.go) contains the
// name of each segment's file, and the number of its first append: sectors with lower numbers are
// ignored. Writing the list assigns a file to a new segment, and makes the previous content of that
// file invalid, in one step. Files that are not in the list are removed when the log is opened.
package wal

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
	raftwal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore/disk/sector"
)

// DefaultSegmentBytes is the default size of a segment in bytes. The log is shortened by whole
// segments.
const DefaultSegmentBytes = 16 << 20

// Log is a raft.LogStore that stores entries in segments.
type Log struct {
	*raftwal.WAL
	files *segmentFiles
	dir   string
	order sync.Mutex // serializes appends and deletions
}

// Create creates the directory of a new, empty log, durably. id is the number of the log.
func Create(files durable.FS, dir string, id uint32, segmentBytes int) error {
	if err := durable.MakeDir(dir); err != nil {
		return fmt.Errorf("log: %w", err)
	}
	l, err := openLog(files, dir, id, segmentBytes, true)
	if err != nil {
		return err
	}
	return errors.Join(l.Close(), durable.Sync(dir), durable.Sync(filepath.Dir(dir)))
}

// Open opens the log in a directory and reads all its files. If a file is damaged, or belongs to a
// log with another number than id, the error is sector.ErrCorruptLog.
func Open(files durable.FS, dir string, id uint32, segmentBytes int) (*Log, error) {
	return openLog(files, dir, id, segmentBytes, false)
}

// openLog opens a log. If fresh is true, the list of segments may be missing.
func openLog(fs durable.FS, dir string, id uint32, segmentBytes int, fresh bool) (l *Log, err error) {
	defer recoverPanic(dir, &err)
	files := newSegmentFiles(fs, dir, id)
	files.length = fileLength(int64(segmentBytes))
	w, err := raftwal.Open(dir,
		raftwal.WithMetaStore(&metaStore{path: filepath.Join(dir, ListName), files: files, fresh: fresh}),
		raftwal.WithSegmentFiler(&segmentFiler{Filer: segment.NewFiler(dir, files), files: files}),
		raftwal.WithSegmentSize(segmentBytes),
		raftwal.WithLogger(hclog.NewNullLogger())) // the relevant events are returned as errors
	if err != nil {
		return nil, errors.Join(wrapError(dir, err), files.Close())
	}
	return &Log{WAL: w, files: files, dir: dir}, nil
}

// recoverPanic turns a panic of raft-wal into an error that names the directory, and stores it in
// err. It also recovers from an invalid memory access. It must be deferred.
func recoverPanic(dir string, err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("%s: reading its segments: %v: %w", dir, p, sector.ErrCorruptLog)
	}
}

// wrapError adds the directory to an error. For raft-wal's error about damage, it also adds
// sector.ErrCorruptLog. nil and raft.ErrLogNotFound are returned unchanged.
func wrapError(dir string, err error) error {
	if err == nil || errors.Is(err, raft.ErrLogNotFound) {
		return err
	}
	if errors.Is(err, types.ErrCorrupt) && !errors.Is(err, sector.ErrCorruptLog) {
		err = fmt.Errorf("%w: %w", err, sector.ErrCorruptLog)
	}
	return fmt.Errorf("%s: %w", dir, err)
}

// GetLog implements raft.LogStore. raft-wal returns deleted entries as long as their file exists.
// The data key of such entries may no longer exist, so GetLog returns raft.ErrLogNotFound for them.
func (l *Log) GetLog(index uint64, out *raft.Log) (err error) {
	defer recoverPanic(l.dir, &err)
	if first, err := l.FirstIndex(); err != nil {
		return wrapError(l.dir, err)
	} else if index < first {
		return raft.ErrLogNotFound
	}
	return wrapError(l.dir, l.WAL.GetLog(index, out))
}

// StoreLog implements raft.LogStore.
func (l *Log) StoreLog(e *raft.Log) error { return l.StoreLogs([]*raft.Log{e}) }

// StoreLogs implements raft.LogStore.
func (l *Log) StoreLogs(logs []*raft.Log) (err error) {
	defer recoverPanic(l.dir, &err)
	l.order.Lock()
	defer l.order.Unlock()
	if err := l.WAL.StoreLogs(logs); err != nil {
		// raft-wal closes segments concurrently with appends, and does not return its errors.
		return wrapError(l.dir, errors.Join(err, l.files.failure()))
	}
	return nil
}

// DeleteRange implements raft.LogStore. It waits until a full segment has been closed: raft-wal
// closes it concurrently, and would close the wrong segment if the log were shortened first.
func (l *Log) DeleteRange(first, last uint64) (err error) {
	defer recoverPanic(l.dir, &err)
	l.order.Lock()
	defer l.order.Unlock()
	if err := l.files.awaitTail(); err != nil {
		return wrapError(l.dir, err)
	}
	return wrapError(l.dir, l.WAL.DeleteRange(first, last))
}

// Close implements io.Closer.
func (l *Log) Close() error { return errors.Join(l.WAL.Close(), l.files.Close()) }

// segmentFiler creates, opens and recovers segments for raft-wal. It implements types.SegmentFiler.
type segmentFiler struct {
	*segment.Filer
	files *segmentFiles
}

// Create implements types.SegmentFiler.
func (f *segmentFiler) Create(info types.SegmentInfo) (types.SegmentWriter, error) {
	w, err := f.Filer.Create(info)
	if err == nil {
		f.files.setTail(w)
	}
	return w, err
}

// Open implements types.SegmentFiler. If the end of a segment is deleted while it is the last
// segment, raft-wal closes it without an index of its entries. Open reads the entries of such a
// segment instead.
func (f *segmentFiler) Open(info types.SegmentInfo) (types.SegmentReader, error) {
	if info.IndexStart == 0 {
		return f.RecoverTail(info)
	}
	return f.Filer.Open(info)
}

// RecoverTail implements types.SegmentFiler. It also removes an incomplete last append (see
// dropUnacknowledgedIndex).
func (f *segmentFiler) RecoverTail(info types.SegmentInfo) (types.SegmentWriter, error) {
	w, err := f.Filer.RecoverTail(info)
	if err != nil || !info.SealTime.IsZero() {
		return w, err
	}
	if w, err = f.dropUnacknowledgedIndex(info, w); err != nil {
		return nil, err
	}
	f.files.setTail(w)
	return w, nil
}

var (
	_ types.MetaStore    = (*metaStore)(nil)
	_ types.SegmentFiler = (*segmentFiler)(nil)
	_ types.VFS          = (*segmentFiles)(nil)
	_ io.Closer          = (*Log)(nil)
)
