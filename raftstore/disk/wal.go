package disk

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

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

// GetLog implements raft.LogStore, as do the next three.
func (l *walLog) GetLog(index uint64, out *raft.Log) (err error) {
	defer guard(l.dir, &err)
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

// RecoverTail implements types.SegmentFiler. walMeta has made the file before
// the segment was known: it cannot be missing.
func (f *walFiler) RecoverTail(info types.SegmentInfo) (types.SegmentWriter, error) {
	w, err := f.Filer.RecoverTail(info)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s: the file is missing: %w", segment.FileName(info), ErrCorruptLog)
	}
	if err == nil && info.SealTime.IsZero() {
		f.files.setTail(w)
	}
	return w, err
}

// walMeta keeps the list of segments in a small file, written anew for every
// change. It implements types.MetaStore.
type walMeta struct {
	path  string
	files *walFiles
	fresh bool // there is none yet
}

// Load implements types.MetaStore.
func (m *walMeta) Load(string) (types.PersistentState, error) {
	var s types.PersistentState
	b, err := os.ReadFile(m.path)
	if m.fresh && errors.Is(err, os.ErrNotExist) {
		return s, nil
	}
	if errors.Is(err, os.ErrNotExist) {
		err = fmt.Errorf("the file is missing: %w", ErrCorruptLog)
	}
	if err == nil {
		s, err = parseWALMeta(b, m.files.id)
	}
	if err != nil {
		return s, fmt.Errorf("%s: %w", m.path, err)
	}
	return m.close(s)
}

// close completes what a crash may cut short: the last segment is full and
// closed in its file, but the list does not say so. raft-wal would take it for
// open, and append nothing to it for ever.
func (m *walMeta) close(s types.PersistentState) (types.PersistentState, error) {
	if len(s.Segments) == 0 || !s.Segments[len(s.Segments)-1].SealTime.IsZero() {
		return s, nil
	}
	last := &s.Segments[len(s.Segments)-1]
	w, err := (&walFiler{segment.NewFiler(filepath.Dir(m.path), m.files), m.files}).RecoverTail(*last)
	if err != nil {
		return s, err
	}
	sealed, start, err := w.Sealed()
	top := w.LastIndex()
	if err := errors.Join(err, w.Close()); err != nil || !sealed {
		return s, err
	}
	last.SealTime, last.MaxIndex, last.IndexStart = time.Now(), top, start
	s.Segments = append(s.Segments, types.SegmentInfo{
		ID: s.NextSegmentID, BaseIndex: top + 1, MinIndex: top + 1, SizeLimit: last.SizeLimit, Codec: last.Codec, CreateTime: time.Now(),
	})
	s.NextSegmentID++
	return s, m.CommitState(s)
}

func parseWALMeta(b []byte, id uint32) (types.PersistentState, error) {
	var s types.PersistentState
	if len(b) < 4 || binary.LittleEndian.Uint32(b) != crc32.Update(id, castagnoli, b[4:]) {
		return s, fmt.Errorf("checksum does not match: %w", ErrCorruptLog)
	}
	if err := json.Unmarshal(b[4:], &s); err != nil {
		return s, fmt.Errorf("%w: %w", err, ErrCorruptLog)
	}
	return s, nil
}

// CommitState implements types.MetaStore. The file of a new segment is on the
// disk before the list that names it.
func (m *walMeta) CommitState(s types.PersistentState) error {
	err := m.commit(s)
	if err != nil {
		m.files.note(err)
	}
	return err
}

func (m *walMeta) commit(s types.PersistentState) error {
	for _, info := range s.Segments {
		if info.SealTime.IsZero() {
			if err := m.files.prepare(segment.FileName(info), int64(info.SizeLimit)); err != nil {
				return err
			}
		}
	}
	list, err := json.Marshal(s)
	if err != nil {
		return err
	}
	b := binary.LittleEndian.AppendUint32(nil, crc32.Update(m.files.id, castagnoli, list))
	return platter.ReplaceFile(m.path, append(b, list...))
}

// GetStable implements types.MetaStore. Votes are not kept here.
func (m *walMeta) GetStable([]byte) ([]byte, error) { return nil, errors.ErrUnsupported }

// SetStable implements types.MetaStore.
func (m *walMeta) SetStable(_, _ []byte) error { return errors.ErrUnsupported }

// Close implements types.MetaStore.
func (m *walMeta) Close() error { return nil }

var (
	_ types.MetaStore    = (*walMeta)(nil)
	_ types.SegmentFiler = (*walFiler)(nil)
	_ types.VFS          = (*walFiles)(nil)
	_ io.Closer          = (*walLog)(nil)
)
