package registry

import (
	"strings"

	"github.com/tidwall/btree"

	"keelson.dev/keelson/controlplane/api"
)

// objects are the readable objects of a storage: by key, and by the value of the field that the storage has an index
// of. A copy costs nothing and is not changed by what happens to the original.
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

// fieldKey puts the objects of a value together, in the order of their keys. Names have no zero byte; an object whose
// value had one would be looked at with others in vain, and not shown: the selector has the last word.
func fieldKey(value, key string) string { return value + "\x00" + key }

// set puts an object in its place and returns what was there.
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

// remove takes an object out and returns it; nil when there was none.
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

// ascend visits the objects below a prefix of keys after a key, in the order of keys, until visit returns false. Where
// value is not nil, only those of that value of the indexed field.
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

// crowd is what watchers have in common that are concerned by the same few objects.
type crowd struct {
	by    crowdedBy
	value string
}

type crowdedBy uint8

const (
	byNothing crowdedBy = iota // they may be concerned by any object
	byKey                      // of one object
	byPrefix                   // of a namespace
	byField                    // of one value of the indexed field
)

// crowd is the narrowest that the filter's watchers belong to.
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

// crowds calls visit with each crowd that an event may concern.
func (ev *event) crowds(visit func(crowd)) {
	visit(crowd{})
	visit(crowd{byKey, ev.cur.key})
	if i := strings.IndexByte(ev.cur.key, '/'); i >= 0 {
		visit(crowd{byPrefix, ev.cur.key[:i+1]})
	}
	// Without an index nobody is in these.
	visit(crowd{byField, ev.cur.field})
	if ev.prev != nil && ev.prev.field != ev.cur.field {
		visit(crowd{byField, ev.prev.field})
	}
}

// park puts a watcher to sleep that has seen everything. sc.mu is held, as by all that follow.
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

// rouse takes a watcher from those that sleep. What came before the event with the number next did not concern it.
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

// alert wakes the sleeping watchers that an event concerns. Who sleeps has seen, or is not concerned by, what came before
// the event with the number next.
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
