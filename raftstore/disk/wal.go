package disk

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"

	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"

	"keelson.dev/keelson/raftstore/disk/platter"
)

const (
	// walName is the folder of the log with LogWAL.
	walName     = "wal"
	walMetaName = "meta"
	// walSegment is how much a file of the log takes. The log is shortened by
	// whole files.
	walSegment = 16 << 20
)

// walLog is raft-wal, over files of ours. raft-wal has checksums for what it
// appended last; anything else that it cannot read it takes for the end of the
// log, without a word. The files here (walfile.go) know what was written.
type walLog struct {
	*wal.WAL
	files *walFiles
	dir   string
	order sync.Mutex // appending and deleting go one after the other
}

// makeWAL makes the folder of a new log.
func makeWAL(layer platter.Layer, dir string, id uint32, segment int) error {
	if err := platter.MakeFolder(dir); err != nil {
		return fmt.Errorf("log: %w", err)
	}
	l, err := openWALWith(layer, dir, id, segment, true)
	if err != nil {
		return err
	}
	return errors.Join(l.Close(), platter.SyncFolder(dir), platter.SyncFolder(filepath.Dir(dir)))
}

func openWAL(layer platter.Layer, dir string, id uint32, segment int) (*walLog, error) {
	return openWALWith(layer, dir, id, segment, false)
}

func openWALWith(layer platter.Layer, dir string, id uint32, size int, fresh bool) (l *walLog, err error) {
	defer guard(dir, &err)
	files := newWALFiles(layer, dir, id)
	files.length = walFileLength(int64(size))
	w, err := wal.Open(dir,
		wal.WithMetaStore(&walMeta{path: filepath.Join(dir, walMetaName), files: files, fresh: fresh}),
		wal.WithSegmentFiler(&walFiler{Filer: segment.NewFiler(dir, files), files: files}),
		wal.WithSegmentSize(size),
		wal.WithLogger(quietLogger()))
	if err != nil {
		return nil, errors.Join(walError(dir, err), files.Close())
	}
	return &walLog{WAL: w, files: files, dir: dir}, nil
}

// walError gives an error of raft-wal our name, where it is about damage.
func walError(dir string, err error) error {
	if err == nil || errors.Is(err, raft.ErrLogNotFound) {
		return err
	}
	if errors.Is(err, types.ErrCorrupt) && !errors.Is(err, ErrCorruptLog) {
		err = fmt.Errorf("%w: %w", err, ErrCorruptLog)
	}
	return fmt.Errorf("%s: %w", dir, err)
}

// GetLog implements raft.LogStore, as do the next three. raft-wal reads entries that
// were deleted for as long as the file is there; the key that opens them may not be.
func (l *walLog) GetLog(index uint64, out *raft.Log) (err error) {
	defer guard(l.dir, &err)
	if first, err := l.FirstIndex(); err != nil {
		return walError(l.dir, err)
	} else if index < first {
		return raft.ErrLogNotFound
	}
	return walError(l.dir, l.WAL.GetLog(index, out))
}

func (l *walLog) StoreLog(e *raft.Log) error { return l.StoreLogs([]*raft.Log{e}) }

func (l *walLog) StoreLogs(logs []*raft.Log) (err error) {
	defer guard(l.dir, &err)
	l.order.Lock()
	defer l.order.Unlock()
	if err := l.WAL.StoreLogs(logs); err != nil {
		// raft-wal closes segments beside appending and does not say why it could not.
		return walError(l.dir, errors.Join(err, l.files.noted()))
	}
	return nil
}

// DeleteRange waits until a segment that is full has been closed: raft-wal does
// so beside the caller, and would close the wrong one if the log were shortened first.
func (l *walLog) DeleteRange(first, last uint64) (err error) {
	defer guard(l.dir, &err)
	l.order.Lock()
	defer l.order.Unlock()
	if err := l.files.awaitTail(); err != nil {
		return walError(l.dir, err)
	}
	return walError(l.dir, l.WAL.DeleteRange(first, last))
}

// Close implements io.Closer.
func (l *walLog) Close() error { return errors.Join(l.WAL.Close(), l.files.Close()) }

// walFiler opens segments.
type walFiler struct {
	*segment.Filer
	files *walFiles
}

// Create implements types.SegmentFiler.
func (f *walFiler) Create(info types.SegmentInfo) (types.SegmentWriter, error) {
	w, err := f.Filer.Create(info)
	if err == nil {
		f.files.setTail(w)
	}
	return w, err
}

// Open implements types.SegmentFiler. A segment whose end was deleted while it
// was the last is closed by raft-wal without an index of its entries; it is
// read through instead.
func (f *walFiler) Open(info types.SegmentInfo) (types.SegmentReader, error) {
	if info.IndexStart == 0 {
		return f.RecoverTail(info)
	}
	return f.Filer.Open(info)
}

// RecoverTail implements types.SegmentFiler.
func (f *walFiler) RecoverTail(info types.SegmentInfo) (types.SegmentWriter, error) {
	w, err := f.Filer.RecoverTail(info)
	if err != nil || !info.SealTime.IsZero() {
		return w, err
	}
	if w, err = f.unseal(info, w); err != nil {
		return nil, err
	}
	f.files.setTail(w)
	return w, nil
}

var (
	_ types.MetaStore    = (*walMeta)(nil)
	_ types.SegmentFiler = (*walFiler)(nil)
	_ types.VFS          = (*walFiles)(nil)
	_ io.Closer          = (*walLog)(nil)
)
