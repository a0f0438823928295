package wal

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore/disk/sector"
)

// ListName is the name of the file that contains the list of segments.
const ListName = "meta"

// metaStore stores the list of segments and of their files in a small file. Each change of the list
// replaces this file. metaStore implements types.MetaStore.
type metaStore struct {
	path  string
	files *segmentFiles
	fresh bool // the file may be missing
}

// List is the list of segments. A segment that is not in Places was written by the first version of
// the format. In that version, the file of a segment had the name of the segment.
type List struct {
	types.PersistentState
	Places map[string]place `json:",omitempty"` // the file of each segment, by the name of the segment
	Spares []string         `json:",omitempty"` // spare files: names of files for later segments
	Next   uint64           `json:",omitempty"` // append number of the next append when the list was written
}

// place describes the file in which a segment is stored.
type place struct {
	File string
	From uint64 // number of the segment's first append; sectors with lower numbers belong to earlier segments
	// blank means that the segment has no content yet.
	blank bool
}

// firstAppendNumber is the number of the first append. It is higher than all sector numbers of the
// first version of the format, which counted the openings of each file instead of appends.
const firstAppendNumber = 1 << 32

// Load implements types.MetaStore. It also restores the state of segmentFiles from the list.
func (m *metaStore) Load(string) (types.PersistentState, error) {
	b, err := os.ReadFile(m.path)
	if m.fresh && errors.Is(err, os.ErrNotExist) {
		return types.PersistentState{}, nil
	}
	if errors.Is(err, os.ErrNotExist) {
		err = fmt.Errorf("the file is missing: %w", sector.ErrCorruptLog)
	}
	var l List
	if err == nil {
		l, err = ParseList(b, m.files.id)
	}
	if err != nil {
		return types.PersistentState{}, fmt.Errorf("%s: %w", m.path, err)
	}
	if err := m.files.restore(l); err != nil {
		return types.PersistentState{}, err
	}
	return m.completeClose(l.PersistentState)
}

// completeClose completes the closing of a segment that a crash interrupted, and returns the
// resulting state. After such a crash, the last segment is full and closed in its file, but open in
// the list. raft-wal would never append to such a segment. In any other case completeClose returns
// the state s.
func (m *metaStore) completeClose(s types.PersistentState) (types.PersistentState, error) {
	if len(s.Segments) == 0 || !s.Segments[len(s.Segments)-1].SealTime.IsZero() {
		return s, nil
	}
	last := &s.Segments[len(s.Segments)-1]
	w, err := (&segmentFiler{segment.NewFiler(filepath.Dir(m.path), m.files), m.files}).RecoverTail(*last)
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
		ID: s.NextSegmentID, BaseIndex: top + 1, MinIndex: top + 1,
		SizeLimit: last.SizeLimit, Codec: last.Codec, CreateTime: time.Now(),
	})
	s.NextSegmentID++
	return s, m.CommitState(s)
}

// ParseList decodes the list of segments from b, the content of its file. id is the number of the
// log. If b is damaged, the error is sector.ErrCorruptLog.
func ParseList(b []byte, id uint32) (List, error) {
	var l List
	if len(b) < 4 || binary.LittleEndian.Uint32(b) != crc32.Update(id, castagnoli, b[4:]) {
		return l, fmt.Errorf("checksum does not match: %w", sector.ErrCorruptLog)
	}
	if err := json.Unmarshal(b[4:], &l); err != nil {
		return l, fmt.Errorf("%w: %w", err, sector.ErrCorruptLog)
	}
	places := make(map[string]place, len(l.Segments))
	files := make(map[string]struct{})
	for _, info := range l.Segments {
		name := segment.FileName(info)
		p, ok := l.Places[name]
		if !ok {
			p = place{File: name}
		}
		places[name] = p
		files[p.File] = struct{}{}
	}
	for _, name := range l.Spares {
		files[name] = struct{}{}
	}
	if len(files) != len(l.Segments)+len(l.Spares) {
		return l, fmt.Errorf("it names a file twice: %w", sector.ErrCorruptLog)
	}
	for name := range files {
		if filepath.Base(name) != name || filepath.Ext(name) != FileSuffix {
			return l, fmt.Errorf("it names a file %q: %w", name, sector.ErrCorruptLog)
		}
	}
	l.Places = places
	if l.Next == 0 {
		l.Next = firstAppendNumber
	}
	return l, nil
}

// CommitState implements types.MetaStore. After a failure it is unknown whether the disk has the
// old or the new list. All later changes then fail, and the files of both lists stay as they are.
func (m *metaStore) CommitState(s types.PersistentState) error {
	err := m.files.failure()
	if err == nil {
		err = m.commitList(s)
	}
	if err != nil {
		m.files.recordFailure(err)
	}
	return err
}

// commitList writes the list of segments for a new state of raft-wal. It first assigns a file to
// each new segment.
func (m *metaStore) commitList(s types.PersistentState) error {
	for _, info := range s.Segments {
		if info.SealTime.IsZero() {
			if err := m.files.assignFile(segment.FileName(info), fileLength(int64(info.SizeLimit))); err != nil {
				return err
			}
		}
	}
	l, dropped := m.files.planList(s)
	list, err := json.Marshal(l)
	if err != nil {
		return err
	}
	b := binary.LittleEndian.AppendUint32(nil, crc32.Update(m.files.id, castagnoli, list))
	if err := durable.Write(m.path, append(b, list...), durable.Persistent); err != nil {
		return err
	}
	return m.files.applyDrop(dropped)
}

// GetStable implements types.MetaStore. It is not supported, because votes are not stored here.
func (m *metaStore) GetStable([]byte) ([]byte, error) { return nil, errors.ErrUnsupported }

// SetStable implements types.MetaStore. It is not supported, because votes are not stored here.
func (m *metaStore) SetStable(_, _ []byte) error { return errors.ErrUnsupported }

// Close implements types.MetaStore. It does nothing.
func (m *metaStore) Close() error { return nil }
