package registry

import (
	"strings"

	"github.com/tidwall/btree"

	"keelson.dev/keelson/controlplane/api"
)

// objects is the set of readable objects of a storage: by key, and by the value of the storage's
// indexed field. A copy is cheap and independent of the original.
type objects struct {
	byKey   *btree.Map[string, *entry]
	byField *btree.Map[string, *entry] // by fieldKey; nil = no index
	index   *api.Index
}

func newObjects(s *api.Storage) objects {
	o := objects{byKey: btree.NewMap[string, *entry](treeDegree), index: s.Index}
	if o.index != nil {
		o.byField = btree.NewMap[string, *entry](treeDegree)
	}
	return o
}

func (o objects) copy() objects {
	o.byKey = o.byKey.Copy()
	if o.byField != nil {
		o.byField = o.byField.Copy()
	}
	return o
}

// fieldKey returns an index key that groups objects by value and sorts them by key. Object names
// contain no zero byte. If a value contained one, the scan might visit other objects too, but the
// selector excludes them.
func fieldKey(value, key string) string { return value + "\x00" + key }

// set stores an entry and returns the previous one of the object.
func (o objects) set(e *entry) (prev *entry) {
	prev, _ = o.byKey.Set(e.key, e)
	if o.byField == nil {
		return prev
	}
	value := o.index.Of(e.obj)
	if prev != nil {
		if was := o.index.Of(prev.obj); was != value {
			o.byField.Delete(fieldKey(was, e.key))
		}
	}
	o.byField.Set(fieldKey(value, e.key), e)
	return prev
}

// remove removes an object and returns it; nil if it does not exist.
func (o objects) remove(key string) *entry {
	prev, ok := o.byKey.Delete(key)
	if !ok {
		return nil
	}
	if o.byField != nil {
		o.byField.Delete(fieldKey(o.index.Of(prev.obj), key))
	}
	return prev
}

// ascend visits the objects with the key prefix after a key, in key order, until visit returns
// false. If value is not nil, it visits only the objects with that value of the indexed field.
func (o objects) ascend(value *string, prefix, after string, visit func(*entry) bool) {
	tree, head := o.byKey, ""
	if value != nil {
		tree, head = o.byField, fieldKey(*value, "")
	}
	tree.Ascend(head+max(prefix, after), func(at string, e *entry) bool {
		if !strings.HasPrefix(at, head+prefix) {
			return false
		}
		return e.key == after || visit(e)
	})
}

// crowd is a group of watchers that are interested in the same subset of objects: one object, a
// namespace, or a value of the indexed field.
type crowd struct {
	by    crowdedBy
	value string
}

type crowdedBy uint8

const (
	byNothing crowdedBy = iota // all objects
	byKey                      // one object
	byPrefix                   // one namespace
	byField                    // one value of the indexed field
)

// crowd returns the narrowest group for watchers with this filter.
func (f *filter) crowd() crowd {
	switch {
	case f.exact != "":
		return crowd{byKey, f.exact}
	case f.indexed != nil:
		return crowd{byField, *f.indexed}
	case f.prefix != "":
		return crowd{byPrefix, f.prefix}
	}
	return crowd{}
}

// crowds calls visit for each group that an event may concern.
func (ev *event) crowds(visit func(crowd)) {
	visit(crowd{})
	visit(crowd{byKey, ev.cur.key})
	if i := strings.IndexByte(ev.cur.key, '/'); i >= 0 {
		visit(crowd{byPrefix, ev.cur.key[:i+1]})
	}
	// Without an index this group is empty.
	visit(crowd{byField, ev.cur.field})
	if ev.prev != nil && ev.prev.field != ev.cur.field {
		visit(crowd{byField, ev.prev.field})
	}
}

// park marks a watcher as waiting: it has read all events. sc.mu is held, as in all functions
// below.
func (sc *storageCache) park(w *Watcher) {
	delete(sc.awake, w)
	c := w.filter.crowd()
	if sc.parked[c] == nil {
		sc.parked[c] = make(map[*Watcher]struct{})
	}
	sc.parked[c][w] = struct{}{}
}

func (sc *storageCache) isParked(w *Watcher) bool {
	_, is := sc.parked[w.filter.crowd()][w]
	return is
}

// rouse marks a parked watcher as awake. Its position becomes next, because earlier events did not
// concern it.
func (sc *storageCache) rouse(w *Watcher, next uint64) {
	c := w.filter.crowd()
	if _, slept := sc.parked[c][w]; slept {
		if delete(sc.parked[c], w); len(sc.parked[c]) == 0 {
			delete(sc.parked, c)
		}
		w.next = next
	}
	if !isClosed(w.stopped) && !isClosed(w.lost) {
		sc.awake[w] = struct{}{}
	}
}

// alert wakes the parked watchers that an event concerns. Parked watchers have read, or are not
// concerned by, all events before number next.
func (sc *storageCache) alert(events []*event, next uint64) {
	for _, ev := range events {
		ev.crowds(func(c crowd) {
			for w := range sc.parked[c] {
				if w.filter.concerned(ev) {
					sc.rouse(w, next)
					w.wakeUp()
				}
			}
		})
	}
}
