package registry

import (
	"context"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// sift returns the entries that match the filter's late selector, and their objects in the kind's
// version. The conversion of all entries may be one call to a webhook.
func (s *served) sift(ctx context.Context, f *filter, entries []*entry) (wanted []*entry, objs []api.Object, err error) {
	shown, err := s.show(ctx, entries...)
	if err != nil {
		return nil, nil, err
	}
	for i, obj := range shown {
		if f.late.Matches(f.fieldSet(obj)) {
			wanted, objs = append(wanted, entries[i]), append(objs, obj)
		}
	}
	return wanted, objs, nil
}

// siftedPage is pageOf for a filter with a late selector.
func siftedPage(ctx context.Context, of *served, s *snapshot, rev raftstore.Revision, f *filter, after string, limit int) (*page, error) {
	p := &page{of: of, light: f.light, revision: rev, changed: s.changed}
	for {
		var some []*entry
		f.scan(s, after, func(e *entry) bool {
			some = append(some, e)
			return len(some) < pageChunk
		})
		full, err := p.sift(ctx, f, some, limit)
		if err != nil || full || len(some) < pageChunk {
			return p, err
		}
		after = some[len(some)-1].key
	}
}

// sift adds the matching entries to the page, up to the limit. full reports that the page is full.
func (p *page) sift(ctx context.Context, f *filter, some []*entry, limit int) (full bool, err error) {
	wanted, objs, err := p.of.sift(ctx, f, some)
	if err != nil {
		return false, err
	}
	for i, e := range wanted {
		if limit > 0 && len(p.items) == limit {
			p.more = true
			return true, nil
		}
		p.add(e, objs[i])
	}
	return false, nil
}

// siftStored decodes stored items and adds the matching ones like sift.
func (p *page) siftStored(ctx context.Context, c *cache, f *filter, items []raftstore.Item, limit int) (full bool, err error) {
	var some []*entry
	for _, it := range items {
		if e := p.decode(c, f, it); e != nil {
			some = append(some, e)
		}
	}
	return p.sift(ctx, f, some, limit)
}

// sift determines which states of the changes match the filter's late selector.
func (w *Watcher) sift(ctx context.Context, changes []change) error {
	if w.filter.late == nil {
		return nil
	}
	var states []*entry
	for _, c := range changes {
		for _, e := range []*entry{c.cur, c.prev} {
			if e != nil && w.filter.selects(e.obj) {
				states = append(states, e)
			}
		}
	}
	return w.keep(ctx, states)
}

// keep stores the matching states and their converted objects until the next collect.
func (w *Watcher) keep(ctx context.Context, states []*entry) error {
	wanted, objs, err := w.of.sift(ctx, w.filter, states)
	if err != nil {
		return err
	}
	w.wanted = make(map[*entry]api.Object, len(wanted))
	for i, e := range wanted {
		w.wanted[e] = objs[i]
	}
	return nil
}

// wants reports whether a state in the filter's key range matches the filter.
func (w *Watcher) wants(e *entry) bool {
	if w.filter.late != nil {
		return w.wanted[e] != nil
	}
	return w.filter.selects(e.obj)
}

// failConversion ends the watch because an object cannot be converted to the watch's version.
func (w *Watcher) failConversion(err error) {
	w.endWith(statusOf(statusError(err, "watching "+w.of.kind.Resource)))
}
