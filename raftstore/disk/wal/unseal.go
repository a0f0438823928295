package wal

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
)

// The format of raft-wal's segments: a header, then frames. Each frame has a header that ends with
// the frame's length. A frame is padded to a multiple of the size of this header.
const (
	segmentHeader = 32
	frameHeader   = 8
)

// dropUnacknowledgedIndex removes an incomplete append at the end of a segment: a power failure
// interrupted it when it sealed (closed) the segment. It returns a writer for the segment without
// this append. raft-wal itself drops the entries of such an append. But if the segment's index of
// entries was written and the commit frame after the index was not, raft-wal treats the segment as
// sealed. The index then lists entries that do not exist. w is the writer that raft-wal returned
// for the segment; in any other case it is returned unchanged.
func (f *segmentFiler) dropUnacknowledgedIndex(info types.SegmentInfo,
	w types.SegmentWriter) (types.SegmentWriter, error) {
	sealed, start, err := w.Sealed()
	if err != nil || !sealed {
		return w, err
	}
	entries := uint64(0)
	if top := w.LastIndex(); top > 0 {
		entries = top - info.BaseIndex + 1
	}
	end, err := f.acknowledgedEnd(info, w, entries, start)
	if err != nil || end == 0 {
		return w, err
	}
	if err := errors.Join(w.Close(), f.truncateSegment(info, end)); err != nil {
		return nil, fmt.Errorf("segment %s: removing an incomplete append: %w", segment.FileName(info), err)
	}
	w, err = f.Filer.RecoverTail(info)
	if err != nil {
		return nil, err
	}
	if sealed, _, err := w.Sealed(); err != nil || sealed {
		return nil, fmt.Errorf("segment %s is closed by an index of entries that it lacks: %w",
			segment.FileName(info), errors.Join(err, types.ErrCorrupt))
	}
	return w, nil
}

// acknowledgedEnd returns the offset of the end of the acknowledged entries in a segment. entries
// is the number of these entries, and start is the offset of the segment's index of entries. It
// returns 0 if the index lists exactly these entries, so that nothing is to be removed.
func (f *segmentFiler) acknowledgedEnd(info types.SegmentInfo, w types.SegmentWriter,
	entries, start uint64) (end int64, err error) {
	r, err := f.files.OpenReader("", segment.FileName(info))
	if err != nil {
		return 0, err
	}
	defer r.Close()
	frameLength := func(frame int64) (uint64, error) {
		var head [frameHeader]byte
		if _, err := r.ReadAt(head[:], frame); err != nil {
			return 0, fmt.Errorf("segment %s: the frame at %d: %w", segment.FileName(info), frame, err)
		}
		return uint64(binary.LittleEndian.Uint32(head[4:])), nil
	}
	indexed, err := frameLength(int64(start) - frameHeader)
	if err != nil || indexed/4 == entries {
		return 0, err
	}
	if entries == 0 {
		return segmentHeader, nil
	}
	offsets, ok := w.(interface {
		OffsetForFrame(index uint64) (uint32, error)
	})
	if !ok {
		return 0, fmt.Errorf("segment %s: a %T has no offsets of entries", segment.FileName(info), w)
	}
	last, err := offsets.OffsetForFrame(info.BaseIndex + entries - 1)
	if err != nil {
		return 0, err
	}
	size, err := frameLength(int64(last))
	if err != nil {
		return 0, err
	}
	padded := (int64(size) + frameHeader - 1) / frameHeader * frameHeader
	return int64(last) + frameHeader + padded + frameHeader, nil // the entry, and the commit frame after it
}

// truncateSegment removes the content of a segment after an offset. It writes an empty frame there:
// a write ends the content of a file, and an empty frame ends the frames of a segment.
func (f *segmentFiler) truncateSegment(info types.SegmentInfo, end int64) error {
	w, err := f.files.OpenWriter("", segment.FileName(info))
	if err != nil {
		return err
	}
	var empty [frameHeader]byte
	_, err = w.WriteAt(empty[:], end)
	if err == nil {
		err = w.Sync()
	}
	return errors.Join(err, w.Close())
}
