package disk

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
)

// Of the format of raft-wal's segments: a header, then frames, each with a header of its own that ends with its length,
// filled up to whole headers.
const (
	walSegmentHeader = 32
	walFrameHeader   = 8
)

// unseal takes away what a power cut left of an append that was to fill a segment and was not acknowledged. raft-wal
// lets go of its entries, but where it finds the index of all entries that such an append ends with, and not the
// commit behind it, it still takes the segment for closed, by an index of entries that are not there.
func (f *walFiler) unseal(info types.SegmentInfo, w types.SegmentWriter) (types.SegmentWriter, error) {
	sealed, start, err := w.Sealed()
	if err != nil || !sealed {
		return w, err
	}
	entries := uint64(0)
	if top := w.LastIndex(); top > 0 {
		entries = top - info.BaseIndex + 1
	}
	end, err := f.cutShort(info, w, entries, start)
	if err != nil || end == 0 {
		return w, err
	}
	if err := errors.Join(w.Close(), f.endAt(info, end)); err != nil {
		return nil, fmt.Errorf("segment %s: taking away what was not written in full: %w", segment.FileName(info), err)
	}
	w, err = f.Filer.RecoverTail(info)
	if err != nil {
		return nil, err
	}
	if sealed, _, err := w.Sealed(); err != nil || sealed {
		return nil, fmt.Errorf("segment %s is closed by an index of entries that it lacks: %w", segment.FileName(info), errors.Join(err, types.ErrCorrupt))
	}
	return w, nil
}

// cutShort is where the acknowledged entries of a segment end when its index, at start, is of more entries than these;
// 0 when the index is theirs.
func (f *walFiler) cutShort(info types.SegmentInfo, w types.SegmentWriter, entries, start uint64) (end int64, err error) {
	file, err := f.files.OpenReader("", segment.FileName(info))
	if err != nil {
		return 0, err
	}
	defer file.Close()
	length := func(frame int64) (uint64, error) {
		var head [walFrameHeader]byte
		if _, err := file.ReadAt(head[:], frame); err != nil {
			return 0, fmt.Errorf("segment %s: the frame at %d: %w", segment.FileName(info), frame, err)
		}
		return uint64(binary.LittleEndian.Uint32(head[4:])), nil
	}
	indexed, err := length(int64(start) - walFrameHeader)
	if err != nil || indexed/4 == entries {
		return 0, err
	}
	if entries == 0 {
		return walSegmentHeader, nil
	}
	offsets, ok := w.(interface {
		OffsetForFrame(index uint64) (uint32, error)
	})
	if !ok {
		return 0, fmt.Errorf("segment %s: a %T does not say where its entries are", segment.FileName(info), w)
	}
	last, err := offsets.OffsetForFrame(info.BaseIndex + entries - 1)
	if err != nil {
		return 0, err
	}
	size, err := length(int64(last))
	if err != nil {
		return 0, err
	}
	padded := (int64(size) + walFrameHeader - 1) / walFrameHeader * walFrameHeader
	return int64(last) + walFrameHeader + padded + walFrameHeader, nil // the entry, and the commit behind it
}

// endAt makes a segment end there: a write is the end of what is in a file, and an empty frame the end of its frames.
func (f *walFiler) endAt(info types.SegmentInfo, end int64) error {
	file, err := f.files.OpenWriter("", segment.FileName(info))
	if err != nil {
		return err
	}
	var empty [walFrameHeader]byte
	_, err = file.WriteAt(empty[:], end)
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}
