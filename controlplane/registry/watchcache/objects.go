package watchcache

import (
	"strings"

	"github.com/tidwall/btree"

	"keelson.dev/keelson/controlplane/api"
)

// objects is the set of readable objects of a storage: by key, and by the value of the storage's
// indexed field (api.Index). copyTrees returns an independent copy in constant time.
type objects struct {
	byKey   *btree.Map[string, *Entry]
	byField *btree.Map[string, *Entry] // by fieldKey; nil = no index
	index   *api.Index
}

func newObjects(s *api.Storage) objects {
	o := objects{byKey: btree.NewMap[string, *Entry](treeDegree), index: s.Index}
	if o.index != nil {
		o.byField = btree.NewMap[string, *Entry](treeDegree)
	}
	return o
}

func (o objects) copyTrees() objects {
	o.byKey = o.byKey.Copy()
	if o.byField != nil {
		o.byField = o.byField.Copy()
	}
	return o
}

// fieldKey returns a key for the index tree, which groups objects by the value of the indexed field
// and sorts them by key. Object names contain no zero byte. If a value contained a zero byte, a
// scan might visit other objects too, but the selector excludes them.
func fieldKey(value, key string) string { return value + "\x00" + key }

// setEntry stores an entry and returns the previous entry of the object, or nil.
func (o objects) setEntry(e *Entry) (prev *Entry) {
	prev, _ = o.byKey.Set(e.key, e)
	if o.byField == nil {
		return prev
	}
	value := o.index.Of(e.Object)
	if prev != nil {
		if old := o.index.Of(prev.Object); old != value {
			o.byField.Delete(fieldKey(old, e.key))
		}
	}
	o.byField.Set(fieldKey(value, e.key), e)
	return prev
}

// removeEntry removes an object and returns its entry. It returns nil if the object does not exist.
func (o objects) removeEntry(key string) *Entry {
	prev, ok := o.byKey.Delete(key)
	if !ok {
		return nil
	}
	if o.byField != nil {
		o.byField.Delete(fieldKey(o.index.Of(prev.Object), key))
	}
	return prev
}

// visitRange calls visit for the objects with the key prefix, in key order, until visit returns
// false. It starts behind the key after. If fieldValue is not nil, it visits only the objects with
// that value of the indexed field.
func (o objects) visitRange(fieldValue *string, prefix, after string, visit func(*Entry) bool) {
	tree, head := o.byKey, ""
	if fieldValue != nil {
		tree, head = o.byField, fieldKey(*fieldValue, "")
	}
	tree.Ascend(head+max(prefix, after), func(at string, e *Entry) bool {
		if !strings.HasPrefix(at, head+prefix) {
			return false
		}
		return e.key == after || visit(e)
	})
}

// watchGroup identifies the waiting watchers that select the same subset of objects: one object, a
// namespace, a value of the indexed field, or all objects.
type watchGroup struct {
	by    groupBy
	value string
}

type groupBy uint8

const (
	allObjects     groupBy = iota // all objects
	byObjectKey                   // one object
	byNamespace                   // one namespace
	byIndexedField                // one value of the indexed field
)

// narrowestGroup returns the group that a watcher with this filter joins while it waits: that of
// the smallest subset that includes every matching object.
func (f *filter) narrowestGroup() watchGroup {
	switch {
	case f.exact != "":
		return watchGroup{byObjectKey, f.exact}
	case f.indexed != nil:
		return watchGroup{byIndexedField, *f.indexed}
	case f.prefix != "":
		return watchGroup{byNamespace, f.prefix}
	}
	return watchGroup{}
}

// visitGroups calls visit for each group of watchers that the event may concern: the groups of all
// objects, of the object, of its namespace, and of its old and new value of the indexed field.
func (ev *event) visitGroups(visit func(watchGroup)) {
	visit(watchGroup{})
	visit(watchGroup{byObjectKey, ev.cur.key})
	if i := strings.IndexByte(ev.cur.key, '/'); i >= 0 {
		visit(watchGroup{byNamespace, ev.cur.key[:i+1]})
	}
	// Without an indexed field, no watcher is in this group.
	visit(watchGroup{byIndexedField, ev.cur.field})
	if ev.prev != nil && ev.prev.field != ev.cur.field {
		visit(watchGroup{byIndexedField, ev.prev.field})
	}
}

// markWaiting marks a watcher as waiting for events, because it has read all of them. The caller
// holds sc.mu, as in all functions below.
func (sc *storageCache) markWaiting(w *Watcher) {
	delete(sc.watchers.awake, w)
	g := w.filter.narrowestGroup()
	if sc.watchers.waiting[g] == nil {
		sc.watchers.waiting[g] = make(map[*Watcher]struct{})
	}
	sc.watchers.waiting[g][w] = struct{}{}
}

func (sc *storageCache) isWaiting(w *Watcher) bool {
	_, parked := sc.watchers.waiting[w.filter.narrowestGroup()][w]
	return parked
}

// markAwake marks a watcher as having unread events. If the watcher was waiting, its position
// becomes next, because no earlier event concerns it.
func (sc *storageCache) markAwake(w *Watcher, next uint64) {
	g := w.filter.narrowestGroup()
	if _, parked := sc.watchers.waiting[g][w]; parked {
		if delete(sc.watchers.waiting[g], w); len(sc.watchers.waiting[g]) == 0 {
			delete(sc.watchers.waiting, g)
		}
		w.cursor.next = next
	}
	if !isClosed(w.lifetime.stopped) && !isClosed(w.cursor.expired) {
		sc.watchers.awake[w] = struct{}{}
	}
}

// wakeWatchers wakes the waiting watchers that the new events may concern. next is the number of
// the first of these events: no earlier event concerns a waiting watcher.
func (sc *storageCache) wakeWatchers(events []*event, next uint64) {
	for _, ev := range events {
		ev.visitGroups(func(g watchGroup) {
			for w := range sc.watchers.waiting[g] {
				if w.filter.isAffected(ev) {
					sc.markAwake(w, next)
					w.wakeUp()
				}
			}
		})
	}
}
