package watchcache

import (
	"context"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
	"keelson.dev/keelson/raftstore"
)

// matchConverted converts the objects of entries to the kind's version. It returns the entries with
// objects that match the filter's versionFields, and these objects. It may call a conversion
// webhook once for all entries.
func (s *Served) matchConverted(ctx context.Context, f *filter, entries []*Entry) (
	matches []*Entry, objs []api.Object, err error,
) {
	shown, err := s.convertEntries(ctx, entries...)
	if err != nil {
		return nil, nil, err
	}
	for i, obj := range shown {
		if f.versionFields.Matches(f.fieldSet(obj)) {
			matches, objs = append(matches, entries[i]), append(objs, obj)
		}
	}
	return matches, objs, nil
}

// convertedPage is like pageOf, for a filter with a selector on fields of the kind's version
// (versionFields). Objects are converted before the filter is evaluated.
func convertedPage(
	ctx context.Context, served *Served, s *snapshot, rev raftstore.Revision, f *filter, after string, limit int,
) (*page, error) {
	p := &page{served: served, acceptsLight: f.acceptsLight, revision: rev, changed: s.changed}
	for {
		var entries []*Entry
		f.visitMatches(s, after, func(e *Entry) bool {
			entries = append(entries, e)
			return len(entries) < pageChunk
		})
		full, err := p.addConverted(ctx, f, entries, limit)
		if err != nil || full || len(entries) < pageChunk {
			return p, err
		}
		after = entries[len(entries)-1].key
	}
}

// addConverted converts the objects of entries, and adds those that match the filter to the page,
// until the page has limit objects (0 = unlimited). full reports that another match did not fit.
func (p *page) addConverted(ctx context.Context, f *filter, entries []*Entry, limit int) (full bool, err error) {
	matches, objs, err := p.served.matchConverted(ctx, f, entries)
	if err != nil {
		return false, err
	}
	for i, e := range matches {
		if limit > 0 && len(p.items) == limit {
			p.more = true
			return true, nil
		}
		p.addItem(e, objs[i])
	}
	return false, nil
}

// addConvertedItems decodes stored items and adds them to the page as addConverted does. It skips
// unreadable items.
func (p *page) addConvertedItems(ctx context.Context, c *Cache, f *filter, items []raftstore.Item, limit int) (
	full bool, err error,
) {
	var entries []*Entry
	for _, item := range items {
		if e := p.decodeItem(c, f, item); e != nil {
			entries = append(entries, e)
		}
	}
	return p.addConverted(ctx, f, entries, limit)
}

// convertChanges converts the objects of the changes to the kind's version, if the filter has a
// selector on fields of that version (versionFields). It stores the matching objects in
// w.converted.
func (w *Watcher) convertChanges(ctx context.Context, changes []change) error {
	if w.filter.versionFields == nil {
		return nil
	}
	var states []*Entry
	for _, c := range changes {
		for _, e := range []*Entry{c.cur, c.prev} {
			if e != nil && w.filter.matchesSelectors(e.Object) {
				states = append(states, e)
			}
		}
	}
	return w.convertMatching(ctx, states)
}

// convertMatching converts the objects of entries and stores those that match the filter in
// w.converted. They stay there until Next reads further events.
func (w *Watcher) convertMatching(ctx context.Context, entries []*Entry) error {
	matches, objs, err := w.served.matchConverted(ctx, w.filter, entries)
	if err != nil {
		return err
	}
	w.converted = make(map[*Entry]api.Object, len(matches))
	for i, e := range matches {
		w.converted[e] = objs[i]
	}
	return nil
}

// isMatch reports whether the object of an entry matches the filter's selectors. The entry must be
// in the filter's key range.
func (w *Watcher) isMatch(e *Entry) bool {
	if w.filter.versionFields != nil {
		return w.converted[e] != nil
	}
	return w.filter.matchesSelectors(e.Object)
}

// failConversion ends the watch with an error event, because an object cannot be converted to the
// watch's version.
func (w *Watcher) failConversion(err error) {
	w.endWith(storeerrors.StatusOf(storeerrors.ToStatus(err, "watching "+w.served.Kind.Resource)))
}
