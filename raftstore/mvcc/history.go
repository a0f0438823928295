package mvcc

import (
	"keelson.dev/keelson/raftstore"
)

// segmentRevisions is how many revisions share one checkpoint of the tree.
// A read at a past revision undoes at most that many.
const segmentRevisions = 256

// segment holds consecutive revisions and the tree as it was before the first.
// Slots are written once, before the view that shows them is published.
type segment struct {
	first raftstore.Revision
	base  *tree
	slots [segmentRevisions]raftstore.Events
}

// history is the retained past. It is a small value: a copy of it, together
// with the revision up to which it may be read, is a stable picture, because
// the writer only fills slots beyond that revision and replaces the slice of
// segments when it drops some.
type history struct {
	compacted raftstore.Revision
	segments  []*segment
}

// append records a revision. items is the tree after it; the checkpoint of a
// new segment is taken by undoing the one revision that opens it.
func (h *history) append(ev raftstore.Events, items *tree) {
	last := h.last()
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
}

func (h *history) last() *segment {
	if len(h.segments) == 0 {
		return nil
	}
	return h.segments[len(h.segments)-1]
}

// compact forgets revisions up to and including upTo.
func (h *history) compact(upTo raftstore.Revision) {
	if upTo <= h.compacted {
		return
	}
	h.compacted = upTo
	drop := 0
	for drop < len(h.segments) && h.segments[drop].first+segmentRevisions-1 <= upTo {
		drop++
	}
	h.segments = append([]*segment(nil), h.segments[drop:]...)
}

// find returns the position of the segment that holds revision r.
func (h *history) find(r raftstore.Revision) int {
	return int((r - h.segments[0].first) / segmentRevisions)
}

// read returns revisions following after, up to and including now, without
// copying them: at most max, and possibly fewer.
func (h *history) read(after, now raftstore.Revision, max int) []raftstore.Events {
	if after >= now {
		return nil
	}
	seg := h.segments[h.find(after+1)]
	from := after + 1 - seg.first
	to := min(now+1-seg.first, segmentRevisions)
	if max > 0 && to-from > raftstore.Revision(max) {
		to = from + raftstore.Revision(max)
	}
	return seg.slots[from:to:to]
}

// since collects everything after one revision up to another.
func (h *history) since(after, now raftstore.Revision) []raftstore.Events {
	if after >= now {
		return nil
	}
	out := h.read(after, now, 0)
	for after += raftstore.Revision(len(out)); after < now; {
		more := h.read(after, now, 0)
		out = append(out, more...)
		after += raftstore.Revision(len(more))
	}
	return out
}
