package disk

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

	"keelson.dev/keelson/raftstore/disk/platter"
)

// walMeta keeps the list of segments, and of the files they lie in, in a small
// file, written anew for every change. It implements types.MetaStore.
type walMeta struct {
	path  string
	files *walFiles
	fresh bool // none exists yet
}

// walList is what is in the file. A segment without a place is of the first
// version, which gave each segment a new file of its name.
type walList struct {
	types.PersistentState
	Places map[string]walPlace `json:",omitempty"` // by name of the segment
	Spares []string            `json:",omitempty"` // files that wait for a segment
	Next   uint64              `json:",omitempty"` // no sector has this number or a later one, but in the last segment
}

// walPlace is where a segment lies.
type walPlace struct {
	File string
	From uint64 // sectors with lower numbers are of earlier segments
	// blank says that nothing of it has been written.
	blank bool
}

// firstWALNumbers are beyond all numbers of the first version, which counted
// the openings of each file.
const firstWALNumbers = 1 << 32

// Load implements types.MetaStore.
func (m *walMeta) Load(string) (types.PersistentState, error) {
	b, err := os.ReadFile(m.path)
	if m.fresh && errors.Is(err, os.ErrNotExist) {
		return types.PersistentState{}, nil
	}
	if errors.Is(err, os.ErrNotExist) {
		err = fmt.Errorf("the file is missing: %w", ErrCorruptLog)
	}
	var l walList
	if err == nil {
		l, err = parseWALMeta(b, m.files.id)
	}
	if err != nil {
		return types.PersistentState{}, fmt.Errorf("%s: %w", m.path, err)
	}
	if err := m.files.restore(l); err != nil {
		return types.PersistentState{}, err
	}
	return m.close(l.PersistentState)
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

func parseWALMeta(b []byte, id uint32) (walList, error) {
	var l walList
	if len(b) < 4 || binary.LittleEndian.Uint32(b) != crc32.Update(id, castagnoli, b[4:]) {
		return l, fmt.Errorf("checksum does not match: %w", ErrCorruptLog)
	}
	if err := json.Unmarshal(b[4:], &l); err != nil {
		return l, fmt.Errorf("%w: %w", err, ErrCorruptLog)
	}
	places := make(map[string]walPlace, len(l.Segments))
	taken := make(map[string]struct{})
	for _, info := range l.Segments {
		name := segment.FileName(info)
		p, ok := l.Places[name]
		if !ok {
			p = walPlace{File: name}
		}
		places[name] = p
		taken[p.File] = struct{}{}
	}
	for _, name := range l.Spares {
		taken[name] = struct{}{}
	}
	if len(taken) != len(l.Segments)+len(l.Spares) {
		return l, fmt.Errorf("it names a file twice: %w", ErrCorruptLog)
	}
	for name := range taken {
		if filepath.Base(name) != name || filepath.Ext(name) != walSuffix {
			return l, fmt.Errorf("it names a file %q: %w", name, ErrCorruptLog)
		}
	}
	l.Places = places
	if l.Next == 0 {
		l.Next = firstWALNumbers
	}
	return l, nil
}

// CommitState implements types.MetaStore. The file of a new segment is on the
// disk before the list that names it. After a failure nobody knows which list
// the disk holds: files of either must stay as they are.
func (m *walMeta) CommitState(s types.PersistentState) error {
	err := m.files.noted()
	if err == nil {
		err = m.commit(s)
	}
	if err != nil {
		m.files.note(err)
	}
	return err
}

func (m *walMeta) commit(s types.PersistentState) error {
	for _, info := range s.Segments {
		if info.SealTime.IsZero() {
			if err := m.files.prepare(segment.FileName(info), walFileLength(int64(info.SizeLimit))); err != nil {
				return err
			}
		}
	}
	l, drop := m.files.list(s)
	list, err := json.Marshal(l)
	if err != nil {
		return err
	}
	b := binary.LittleEndian.AppendUint32(nil, crc32.Update(m.files.id, castagnoli, list))
	if err := platter.ReplaceFile(m.path, append(b, list...)); err != nil {
		return err
	}
	return m.files.drop(drop)
}

// GetStable implements types.MetaStore. Votes are not kept here.
func (m *walMeta) GetStable([]byte) ([]byte, error) { return nil, errors.ErrUnsupported }

// SetStable implements types.MetaStore.
func (m *walMeta) SetStable(_, _ []byte) error { return errors.ErrUnsupported }

// Close implements types.MetaStore.
func (m *walMeta) Close() error { return nil }
