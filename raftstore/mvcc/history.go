package mvcc

import (
	"keelson.dev/keelson/raftstore"
)

// segmentRevisions is the number of consecutive revisions in a segment. Each segment has a
// checkpoint, which is the tree before its first revision. A read at a past revision therefore
// undoes at most this many revisions.
const segmentRevisions = 256

// segment holds up to segmentRevisions consecutive revisions, and the tree before the first of them
// as a checkpoint. Each slot is written once, before the view that contains its revision is
// published.
type segment struct {
	first raftstore.Revision
	base  *tree // nil if compaction has reached this segment
	slots [segmentRevisions]raftstore.Events
	bytes int64 // size of the items that the segment's uncompacted revisions replaced; used by the writer only
}

// history is the sequence of revisions that have not been compacted. It is a small value that can
// be copied. A copy is immutable up to the newest revision at the time of the copy: the writer only
// fills later slots, and replaces the slice of segments when it drops segments.
type history struct {
	compacted raftstore.Revision
	segments  []*segment
	bytes     int64 // size of the items that the retained events replaced
}

// replacedBytes returns the total size of the keys and values that a revision replaced. History
// retains this memory for the revision, in addition to the current state.
func replacedBytes(r raftstore.Events) int64 {
	var n int64
	for i := range r.Events {
		if prev := r.Events[i].Prev; prev != nil {
			n += itemBytes(prev)
		}
	}
	return n
}

// appendRevision appends the newest revision. items is the tree after that revision. If the
// revision starts a new segment, the segment's checkpoint is computed by undoing the revision in a
// copy of items.
func (h *history) appendRevision(ev raftstore.Events, items *tree) {
	last := h.lastSegment()
	if last == nil || ev.Revision-last.first == segmentRevisions {
		base := items.Copy()
		for i := len(ev.Events) - 1; i >= 0; i-- {
			if e := &ev.Events[i]; e.Prev != nil {
				base.Set(e.Item.Key, e.Prev)
			} else {
				base.Delete(e.Item.Key)
			}
		}
		last = &segment{first: ev.Revision, base: base}
		h.segments = append(h.segments[:len(h.segments):len(h.segments)], last)
	}
	last.slots[ev.Revision-last.first] = ev
	n := replacedBytes(ev)
	last.bytes += n
	h.bytes += n
}

func (h *history) lastSegment() *segment {
	if len(h.segments) == 0 {
		return nil
	}
	return h.segments[len(h.segments)-1]
}

// compactTo drops the revisions up to and including upTo from history.
func (h *history) compactTo(upTo raftstore.Revision) {
	if upTo <= h.compacted {
		return
	}
	was := h.compacted
	h.compacted = upTo
	drop := 0
	for drop < len(h.segments) && h.segments[drop].first+segmentRevisions-1 <= upTo {
		h.bytes -= h.segments[drop].bytes
		drop++
	}
	h.segments = append([]*segment(nil), h.segments[drop:]...)
	if len(h.segments) > 0 && h.segments[0].first <= upTo {
		// The last revisions of this segment are retained. Views hold the old segment: a copy
		// releases the dropped revisions, and the checkpoint, which serves only reads before them.
		s := *h.segments[0]
		for _, r := range s.slots[max(was+1, s.first)-s.first : upTo+1-s.first] {
			n := replacedBytes(r)
			s.bytes -= n
			h.bytes -= n
		}
		clear(s.slots[:upTo+1-s.first])
		s.base = nil
		h.segments[0] = &s
	}
}

// revisionToKeep returns the revision to which history must be compacted. The later revisions, up
// to newest, then retain at most the given number of bytes. The bytes are counted as in
// replacedBytes.
func (h *history) revisionToKeep(newest raftstore.Revision, bytes int64) raftstore.Revision {
	for at := newest; at > h.compacted; at-- {
		for _, r := range h.readRevisions(at-1, at, 1) {
			bytes -= replacedBytes(r)
		}
		if bytes < 0 {
			return at
		}
	}
	return h.compacted
}

// segmentIndex returns the index of the segment that contains revision r.
func (h *history) segmentIndex(r raftstore.Revision) int {
	return int((r - h.segments[0].first) / segmentRevisions)
}

// readRevisions returns consecutive revisions that are greater than after, up to and including
// newest. It does not copy them. It returns at most limit revisions if limit is positive. It may
// return fewer revisions than exist.
func (h *history) readRevisions(after, newest raftstore.Revision, limit int) []raftstore.Events {
	if after >= newest {
		return nil
	}
	seg := h.segments[h.segmentIndex(after+1)]
	from := after + 1 - seg.first
	to := min(newest+1-seg.first, segmentRevisions)
	if limit > 0 && to-from > raftstore.Revision(limit) {
		to = from + raftstore.Revision(limit)
	}
	return seg.slots[from:to:to]
}

// readAllSince returns all revisions that are greater than after, up to and including newest.
func (h *history) readAllSince(after, newest raftstore.Revision) []raftstore.Events {
	if after >= newest {
		return nil
	}
	out := h.readRevisions(after, newest, 0)
	for after += raftstore.Revision(len(out)); after < newest; {
		more := h.readRevisions(after, newest, 0)
		out = append(out, more...)
		after += raftstore.Revision(len(more))
	}
	return out
}
