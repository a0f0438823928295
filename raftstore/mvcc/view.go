package mvcc

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sort"
	"strings"

	"keelson.dev/keelson/raftstore"
)

// View is an immutable snapshot of the store's state at one revision. All methods may be called by
// any goroutine and take no lock.
type View struct {
	revision   raftstore.Revision
	items      *tree
	history    history
	bytes      int64
	nextExpiry int64
	clock      int64
	alarms     []raftstore.Alarm
}

// Revision returns the revision of the view.
func (v *View) Revision() raftstore.Revision { return v.revision }

// Compacted returns the revision up to and including which history was compacted.
func (v *View) Compacted() raftstore.Revision { return v.history.compacted }

// Keys returns the number of keys.
func (v *View) Keys() int { return v.items.Len() }

// Bytes returns the total size of keys and values.
func (v *View) Bytes() int64 { return v.bytes }

// HistoryBytes returns the total size of the keys and values that the retained events replaced.
// This is the memory that history uses in addition to the current state.
func (v *View) HistoryBytes() int64 { return v.history.bytes }

// Clock returns the store's clock in unix milliseconds: the latest time in any command.
func (v *View) Clock() int64 { return v.clock }

// Alarms returns the active alarms, sorted by kind and member. The slice must not be modified; it
// is replaced when an alarm changes.
func (v *View) Alarms() []raftstore.Alarm { return v.alarms }

// CompactTarget returns the revision to which history must be compacted so that HistoryBytes is at
// most the given number of bytes.
func (v *View) CompactTarget(bytes int64) raftstore.Revision {
	return v.history.revisionToKeep(v.revision, bytes)
}

// NextExpiry returns the time at which the next key expires, in unix milliseconds, or 0 if no key
// has a TTL.
func (v *View) NextExpiry() int64 { return v.nextExpiry }

// Get returns the item at key, and false if the key does not exist.
func (v *View) Get(key string) (raftstore.Item, bool) {
	it, ok := v.items.Get(key)
	if !ok {
		return raftstore.Item{}, false
	}
	return *it, true
}

// itemAt returns the item at key as it was at the given revision. It returns false if the key was
// absent, or if the revision is compacted or does not exist yet.
func (v *View) itemAt(key string, revision raftstore.Revision) (*raftstore.Item, bool) {
	if revision > v.revision {
		return nil, false
	}
	is, ok := v.items.Get(key)
	switch {
	case ok && is.Modified <= revision: // unchanged since
		return is, true
	case revision == v.revision, revision < v.history.compacted:
		return nil, false
	}
	p := v.stateAt(revision, key)
	was, undone := p.undo[key]
	if !undone {
		was, _ = p.items.Get(key)
	}
	return was, was != nil
}

// List returns the items with keys that have the prefix, at the revision o.At. If o.At is 0, it is
// the revision of the view. The error is ErrCompacted or ErrFutureRevision if the view does not
// contain that revision, and ErrInvalid for a negative limit.
func (v *View) List(prefix string, o raftstore.ListOptions) (raftstore.List, error) {
	at := o.At
	switch {
	case o.Limit < 0:
		return raftstore.List{}, fmt.Errorf("%w: list of %q: limit %d is negative", raftstore.ErrInvalid,
			prefix, o.Limit)
	case at == 0:
		at = v.revision
	case at > v.revision:
		return raftstore.List{}, fmt.Errorf("list of %q at revision %d: store is at %d: %w", prefix, at, v.revision,
			raftstore.ErrFutureRevision)
	case at < v.history.compacted:
		return raftstore.List{}, fmt.Errorf("list of %q at revision %d: compacted up to %d: %w", prefix, at,
			v.history.compacted, raftstore.ErrCompacted)
	}
	p := v.stateAt(at, prefix)
	out := raftstore.List{Revision: at}
	total := p.countKeys(prefix, o.After)
	n := total
	if o.Limit > 0 && o.Limit < n {
		n = o.Limit
	}
	if n <= 0 {
		return out, nil
	}
	out.Items = make([]raftstore.Item, 0, n)
	p.ascendItems(prefix, o.After, func(it *raftstore.Item) bool {
		out.Items = append(out.Items, *it)
		return len(out.Items) < n
	})
	out.Remaining = int64(total - n)
	out.More = out.Remaining > 0
	return out, nil
}

// Read returns the events of consecutive revisions, beginning with the first revision that is
// greater than after. It returns at most limit revisions, possibly fewer than exist. It returns no
// revisions if after is the newest revision, and ErrCompacted if they have been compacted. The
// slice and its contents must not be modified.
func (v *View) Read(after raftstore.Revision, limit int) ([]raftstore.Events, error) {
	if after < v.history.compacted {
		return nil, fmt.Errorf("history after revision %d: compacted up to %d: %w", after, v.history.compacted,
			raftstore.ErrCompacted)
	}
	return v.history.readRevisions(after, v.revision, limit), nil
}

// Hash returns a digest of the items at the view's revision. Replicas with the same state at the
// same revision return the same hash. Alarms, clock and stored outcomes are not included, because
// this part of the replicated state does not belong to a revision.
func (v *View) Hash() [sha256.Size]byte {
	h, err := v.HashAt(v.revision, func(int) error { return nil })
	if err != nil {
		panic(err) // the current revision is always retained
	}
	return h
}

// HashAt returns the same digest as Hash, but for the given retained revision. 0 means the view's
// revision. throttle is called with the size of every item in bytes. It may block to limit the
// rate. An error from throttle stops the computation and is returned.
func (v *View) HashAt(revision raftstore.Revision, throttle func(bytes int) error) ([sha256.Size]byte, error) {
	switch {
	case revision == 0:
		revision = v.revision
	case revision > v.revision:
		return [sha256.Size]byte{}, fmt.Errorf("hash of revision %d: store is at %d: %w", revision, v.revision,
			raftstore.ErrFutureRevision)
	case revision < v.history.compacted:
		return [sha256.Size]byte{}, fmt.Errorf("hash of revision %d: compacted up to %d: %w", revision,
			v.history.compacted,
			raftstore.ErrCompacted)
	}
	h := sha256.New()
	var buf []byte
	var stop error
	put := func(it *raftstore.Item) bool {
		buf = binary.AppendUvarint(buf[:0], uint64(len(it.Key)))
		buf = append(buf, it.Key...)
		buf = binary.AppendUvarint(buf, uint64(it.Created))
		buf = binary.AppendUvarint(buf, uint64(it.Modified))
		buf = binary.AppendVarint(buf, it.Expires)
		buf = binary.AppendUvarint(buf, uint64(len(it.Value)))
		h.Write(buf)
		h.Write(it.Value)
		stop = throttle(len(buf) + len(it.Value))
		return stop == nil
	}
	h.Write(binary.AppendUvarint(nil, uint64(revision)))
	v.stateAt(revision, "").ascendItems("", "", put)
	return [sha256.Size]byte(h.Sum(nil)), stop
}

// pastState is the state of the store at one revision. It consists of the tree of this or a later
// revision, and of the items that later revisions have replaced.
type pastState struct {
	items *tree
	undo  map[string]*raftstore.Item // nil item: the key was absent
	keys  []string                   // keys of undo, sorted
}

// stateAt returns the state at the given retained revision. The result is correct only for keys
// with the prefix.
func (v *View) stateAt(revision raftstore.Revision, prefix string) pastState {
	p := pastState{items: v.items}
	if revision == v.revision {
		return p
	}
	until := v.revision
	i := v.history.segmentIndex(revision + 1)
	if i+1 < len(v.history.segments) && v.history.segments[i+1].first <= v.revision {
		next := v.history.segments[i+1]
		p.items, until = next.base, next.first-1
	}
	p.undo = make(map[string]*raftstore.Item)
	for _, r := range v.history.readRevisions(revision, until, 0) {
		for j := range r.Events {
			key := r.Events[j].Item.Key
			if _, seen := p.undo[key]; !seen && strings.HasPrefix(key, prefix) {
				p.undo[key] = r.Events[j].Prev
				p.keys = append(p.keys, key)
			}
		}
	}
	sort.Strings(p.keys)
	return p
}

// countKeys returns the number of keys that have the prefix and are greater than after.
func (p pastState) countKeys(prefix, after string) int {
	n := p.items.Len()
	if bound := prefixEnd(prefix); bound != "" {
		n = countLess(p.items, bound)
	}
	n = max(0, n-countLess(p.items, firstKey(prefix, after)))
	for key, was := range p.undo {
		if key <= after && after != "" {
			continue
		}
		_, is := p.items.Get(key)
		switch {
		case was != nil && !is:
			n++
		case was == nil && is:
			n--
		}
	}
	return n
}

// ascendItems visits the items with the prefix and a key greater than after, in key order, until
// visit returns false.
func (p pastState) ascendItems(prefix, after string, visit func(*raftstore.Item) bool) {
	from := firstKey(prefix, after)
	keys := p.keys[sort.SearchStrings(p.keys, from):]
	more := true
	restored := func(before string, all bool) {
		for ; more && len(keys) > 0 && (all || keys[0] < before); keys = keys[1:] {
			if was := p.undo[keys[0]]; was != nil {
				more = visit(was)
			}
		}
	}
	p.items.Ascend(from, func(key string, it *raftstore.Item) bool {
		if !strings.HasPrefix(key, prefix) {
			return false
		}
		restored(key, false)
		if !more {
			return false
		}
		if _, undone := p.undo[key]; !undone {
			more = visit(it)
		} else if was := p.undo[key]; was != nil {
			more = visit(was)
			keys = keys[1:]
		} else {
			keys = keys[1:]
		}
		return more
	})
	restored("", true)
}

// firstKey returns the smallest possible key that has the prefix and is greater than after.
func firstKey(prefix, after string) string {
	if after == "" || after < prefix {
		return prefix
	}
	return after + "\x00"
}

// prefixEnd returns the smallest string that is greater than every key with the prefix, or "" if no
// such string exists.
func prefixEnd(prefix string) string {
	b := []byte(prefix)
	for i := len(b) - 1; i >= 0; i-- {
		if b[i] != 0xff {
			b[i]++
			return string(b[:i+1])
		}
	}
	return ""
}

// countLess returns how many keys of the tree are less than key. It is a binary search with indexed
// access, not a scan.
func countLess(t *tree, key string) int {
	return sort.Search(t.Len(), func(i int) bool {
		k, _, _ := t.GetAt(i)
		return k >= key
	})
}
