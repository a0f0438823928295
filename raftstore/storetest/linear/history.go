package linear

import (
	"bytes"
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"keelson.dev/keelson/raftstore"
)

// history is the sequence of revisions under the recorder's prefix, as the watchers have received
// it, with the state at each revision.
type history struct {
	base      raftstore.Revision
	revisions []raftstore.Revision // revisions that changed a key under the prefix, in order
	events    map[raftstore.Revision]sighting
	versions  map[string][]version // versions of each key, in order of their revisions
}

// version is the item of a key from one revision until the key's next version.
type version struct {
	from raftstore.Revision
	item *raftstore.Item // the item; nil = the key is absent
}

// composeHistory returns the history according to the deliveries to the followers of the whole
// prefix. It reports to rep each revision that was delivered differently to two followers.
func (r *Recorder) composeHistory(rep *Report) *history {
	h := &history{base: r.base.Revision, events: make(map[raftstore.Revision]sighting),
		versions: make(map[string][]version)}
	teller := make(map[raftstore.Revision]string)
	for _, s := range r.sessions {
		if s.prefix != r.prefix {
			continue
		}
		for _, ev := range s.seen {
			if len(ev.Events.Events) == 0 {
				continue
			}
			known, told := h.events[ev.Revision]
			switch {
			case !told:
				h.events[ev.Revision], teller[ev.Revision] = ev, s.door
				h.revisions = append(h.revisions, ev.Revision)
			case !sameEvents(known.Events.Events, ev.Events.Events):
				rep.addViolation(WatchDiffer, "revision %d: watcher at %s saw %s, watcher at %s saw %s",
					ev.Revision, teller[ev.Revision], formatEvents(known.Events), s.door, formatEvents(ev.Events))
			case ev.at < known.at:
				h.events[ev.Revision] = ev
			}
		}
	}
	slices.Sort(h.revisions)
	for i := range r.base.Items {
		it := &r.base.Items[i]
		h.versions[it.Key] = []version{{h.base, it}}
	}
	for _, rev := range h.revisions {
		h.replayRevision(rep, rev, h.events[rev].Events.Events)
	}
	rep.Revisions = len(h.revisions)
	return h
}

// replayRevision adds the versions that revision rev made to the history. It reports to rep each
// event that contradicts the state before the revision.
func (h *history) replayRevision(rep *Report, rev raftstore.Revision, events []raftstore.Event) {
	for i := range events {
		ev := &events[i]
		key := ev.Item.Key
		was := h.itemAt(key, rev-1)
		want := rev
		if was != nil {
			want = was.Created
		}
		if !sameItem(ev.Prev, was) || ev.Item.Modified != rev || ev.Item.Created != want {
			rep.addViolation(WatchDiffer, "revision %d: event about %s (created %d, modified %d, before it %s) does "+
				"not follow from the state before, which is %s",
				rev, key, ev.Item.Created, ev.Item.Modified, formatItem(ev.Prev), formatItem(was))
		}
		now := version{from: rev}
		if ev.Kind == raftstore.EventPut {
			now.item = &ev.Item
		}
		h.versions[key] = append(h.versions[key], now)
	}
}

// itemAt returns the item of a key at a revision, or nil if the key was absent.
func (h *history) itemAt(key string, rev raftstore.Revision) *raftstore.Item {
	v := h.versions[key]
	i := sort.Search(len(v), func(i int) bool { return v[i].from > rev })
	if i == 0 {
		return nil
	}
	return v[i-1].item
}

// listAt returns the items at a revision with keys that have the prefix and are greater than after,
// sorted by key.
func (h *history) listAt(prefix, after string, rev raftstore.Revision) []raftstore.Item {
	var out []raftstore.Item
	for key := range h.versions {
		if !strings.HasPrefix(key, prefix) || after != "" && key <= after {
			continue
		}
		if it := h.itemAt(key, rev); it != nil {
			out = append(out, *it)
		}
	}
	slices.SortFunc(out, func(a, b raftstore.Item) int { return strings.Compare(a.Key, b.Key) })
	return out
}

// latestRevision returns the last revision up to and including rev that changed a key under the
// prefix. If no such revision exists, it returns the revision at the start of the recording.
func (h *history) latestRevision(rev raftstore.Revision) raftstore.Revision {
	i := sort.Search(len(h.revisions), func(i int) bool { return h.revisions[i] > rev })
	if i == 0 {
		return h.base
	}
	return h.revisions[i-1]
}

// checkSession compares the deliveries of one watch with the history. It reports missing, repeated
// and different revisions to rep.
func (h *history) checkSession(rep *Report, s *session) {
	rep.Sessions++
	who := fmt.Sprintf("watcher %d of %q at %s, begun after %d", s.watcher, s.prefix, s.door, s.after)
	at := s.after
	for _, ev := range s.seen {
		rep.Deliveries++
		note := len(ev.Events.Events) == 0
		if ev.Revision < at || ev.Revision == at && !note {
			rep.addViolation(WatchRepeat, "%s: revision %d after %d", who, ev.Revision, at)
			continue
		}
		for i := sort.Search(len(h.revisions), func(i int) bool {
			return h.revisions[i] > at
		}); i < len(h.revisions) && h.revisions[i] <= ev.Revision; i++ {
			due := h.revisions[i]
			want := eventsWithPrefix(h.events[due].Events.Events, s.prefix)
			switch {
			case len(want) == 0:
			case due < ev.Revision || note:
				rep.addViolation(WatchGap, "%s: revision %d came after %d without %d", who, ev.Revision, at, due)
			case !sameEvents(want, ev.Events.Events):
				rep.addViolation(WatchDiffer, "%s: revision %d is %s, want %s", who, due, formatEvents(ev.Events),
					formatEvents(raftstore.Events{Revision: due, Events: want}))
			}
		}
		if !note && len(eventsWithPrefix(h.events[ev.Revision].Events.Events, s.prefix)) == 0 {
			rep.addViolation(WatchDiffer, "%s: no other watch reports revision %d: %s", who, ev.Revision,
				formatEvents(ev.Events))
		}
		at = ev.Revision
	}
}

func sameItem(a, b *raftstore.Item) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Key == b.Key && a.Created == b.Created && a.Modified == b.Modified && a.Expires == b.Expires &&
		bytes.Equal(a.Value, b.Value)
}

func sameEvents(a, b []raftstore.Event) bool {
	return slices.EqualFunc(a, b, func(a, b raftstore.Event) bool {
		return a.Kind == b.Kind && sameItem(&a.Item, &b.Item) && sameItem(a.Prev, b.Prev)
	})
}

func eventsWithPrefix(events []raftstore.Event, prefix string) []raftstore.Event {
	var out []raftstore.Event
	for _, ev := range events {
		if strings.HasPrefix(ev.Item.Key, prefix) {
			out = append(out, ev)
		}
	}
	return out
}

func formatEvents(ev raftstore.Events) string {
	var parts []string
	for i := range ev.Events {
		e := &ev.Events[i]
		verb := "put "
		if e.Kind == raftstore.EventDelete {
			verb = "delete "
		}
		parts = append(parts, verb+e.Item.Key+" "+formatItem(&e.Item)+" over "+formatItem(e.Prev))
	}
	return "[" + strings.Join(parts, "; ") + "]"
}

func formatItem(it *raftstore.Item) string {
	if it == nil {
		return "nothing"
	}
	s := fmt.Sprintf("%q(%d,%d)", it.Value, it.Created, it.Modified)
	if it.Expires != 0 {
		s += " until " + time.UnixMilli(it.Expires).UTC().Format("15:04:05.000")
	}
	return s
}
