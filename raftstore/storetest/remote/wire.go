package remote

import (
	"fmt"
	"math"
	"time"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// maxTTLMs is the largest TTL in milliseconds that a time.Duration can hold.
const maxTTLMs = math.MaxInt64 / int64(time.Millisecond)

// commitFrom converts a request to a commit. It returns an error only for values that a
// raftstore.Commit cannot represent. The store checks everything else.
func commitFrom(req *storev1.RemoteCommitRequest) (raftstore.Commit, error) {
	c := raftstore.Commit{Fence: raftstore.Fence(req.GetFence()), Ops: make([]raftstore.Op, len(req.GetOps()))}
	for i, op := range req.GetOps() {
		switch {
		case op.GetKind() > math.MaxUint8:
			return c, fmt.Errorf("%w: key %q: op kind %d is not known", raftstore.ErrInvalid, op.GetKey(), op.GetKind())
		case op.GetTtlMs() < 0 || op.GetTtlMs() > maxTTLMs:
			return c, fmt.Errorf("%w: key %q: TTL of %d ms", raftstore.ErrInvalid, op.GetKey(), op.GetTtlMs())
		}
		c.Ops[i] = raftstore.Op{
			Kind: raftstore.OpKind(op.GetKind()), Key: op.GetKey(), Value: op.GetValue(),
			If:  preconditionFrom(op.GetIf()),
			TTL: time.Duration(op.GetTtlMs()) * time.Millisecond,
		}
	}
	return c, nil
}

func conflictTo(e *raftstore.ConflictError) *storev1.RemoteConflict {
	return &storev1.RemoteConflict{
		Key: e.Key, Want: &storev1.Precondition{Absent: e.Want.Absent, Revision: uint64(e.Want.Revision)},
		Have: itemTo(e.Have), At: uint64(e.At), NoValue: e.NoValue,
	}
}

func conflictFrom(c *storev1.RemoteConflict) *raftstore.ConflictError {
	e := &raftstore.ConflictError{
		Key: c.GetKey(), Want: preconditionFrom(c.GetWant()), Have: itemFrom(c.GetHave()),
		At: raftstore.Revision(c.GetAt()), NoValue: c.GetNoValue(),
	}
	if e.Want.Absent && e.Have == nil { // the text of the error names the existing item
		e.Have, e.NoValue = &raftstore.Item{Key: e.Key}, true
	}
	return e
}

func preconditionFrom(p *storev1.Precondition) raftstore.Precondition {
	return raftstore.Precondition{Absent: p.GetAbsent(), Revision: raftstore.Revision(p.GetRevision())}
}

func itemTo(it *raftstore.Item) *storev1.Item {
	if it == nil {
		return nil
	}
	return &storev1.Item{
		Key: it.Key, Value: it.Value,
		Created: uint64(it.Created), Modified: uint64(it.Modified), ExpiresUnixMs: it.Expires,
	}
}

func itemFrom(p *storev1.Item) *raftstore.Item {
	if p == nil {
		return nil
	}
	return &raftstore.Item{
		Key: p.GetKey(), Value: p.GetValue(),
		Created: raftstore.Revision(p.GetCreated()), Modified: raftstore.Revision(p.GetModified()),
		Expires: p.GetExpiresUnixMs(),
	}
}

// eventsTo converts the events of a revision to a message of about chunkBytes bytes. If not all
// events fit, the message has More set and the second result contains the remaining events. A
// revision may delete hundreds of megabytes.
func eventsTo(ev raftstore.Events) (*storev1.RemoteEvents, raftstore.Events) {
	out := &storev1.RemoteEvents{Revision: uint64(ev.Revision), Events: make([]*storev1.RemoteEvent, 0, len(ev.Events))}
	size := 0
	for i := range ev.Events {
		e := &ev.Events[i]
		size += len(e.Item.Key) + len(e.Item.Value)
		if e.Prev != nil {
			size += len(e.Prev.Key) + len(e.Prev.Value)
		}
		if i > 0 && size > chunkBytes {
			out.More = true
			return out, raftstore.Events{Revision: ev.Revision, Events: ev.Events[i:]}
		}
		out.Events = append(out.Events, &storev1.RemoteEvent{Kind: uint32(e.Kind), Item: itemTo(&e.Item),
			Prev: itemTo(e.Prev)})
	}
	return out, raftstore.Events{}
}

func eventsFrom(m *storev1.RemoteEvents) raftstore.Events {
	out := raftstore.Events{Revision: raftstore.Revision(m.GetRevision())}
	for _, e := range m.GetEvents() {
		ev := raftstore.Event{Kind: raftstore.EventKind(e.GetKind()), Prev: itemFrom(e.GetPrev())}
		if it := itemFrom(e.GetItem()); it != nil {
			ev.Item = *it
		}
		out.Events = append(out.Events, ev)
	}
	return out
}
