package registry

import (
	"context"
	"fmt"
	"net/http"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/internalversion/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// describe returns a text for errors: the request's verb, resource and object.
func describe(req *api.Request) string {
	s := string(req.Verb) + " " + req.Kind.Resource
	if req.Subresource != "" {
		s += "/" + req.Subresource
	}
	if key := objectKey(req.Kind, req.Namespace, req.Name); key != "/" && key != "" {
		s += " " + key
	}
	return s
}

// parseRevision parses a resourceVersion parameter; "" and "0" are 0.
func parseRevision(s string) (raftstore.Revision, error) {
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, apierrors.NewBadRequest(fmt.Sprintf("invalid resource version %q: it is not a number", s))
	}
	return raftstore.Revision(n), nil
}

// notOlderThan waits until the cache satisfies the resourceVersion of a read. Unset means
// everything acknowledged so far, "0" means any state, and N means at least revision N.
func (r *Registry) notOlderThan(ctx context.Context, resourceVersion string) error {
	if resourceVersion == "" {
		_, err := r.fresh(ctx)
		return err
	}
	rev, err := parseRevision(resourceVersion)
	if err != nil {
		return err
	}
	if rev > r.cache.progress.at() {
		// A revision that does not exist yet is an error; do not wait for it.
		now, err := r.fresh(ctx)
		if err != nil {
			return err
		}
		if rev > now {
			return tooLarge(rev, now)
		}
	}
	return r.cache.waitFor(ctx, rev)
}

// notYet returns the store's current revision if it is older than rev, else 0. It asks the leader
// if this replica is behind.
func (r *Registry) notYet(ctx context.Context, rev raftstore.Revision) (raftstore.Revision, error) {
	if err := r.cache.waitFor(ctx, 0); err != nil || rev <= r.cache.progress.at() {
		return 0, err
	}
	now, err := r.fresh(ctx)
	if err != nil || rev <= now {
		return 0, err
	}
	return now, nil
}

// tooLarge returns Kubernetes' error for a resourceVersion that is newer than the store.
func tooLarge(asked, have raftstore.Revision) error {
	err := apierrors.NewTimeoutError(fmt.Sprintf("Too large resource version: %d, current: %d", asked, have), 1)
	err.ErrStatus.Details.Causes = []metav1.StatusCause{{
		Type: metav1.CauseTypeResourceVersionTooLarge, Message: "Too large resource version",
	}}
	return err
}

// Get returns an object. An unset resourceVersion is a linearizable read, "0" reads the cache as it
// is. The object is shared: do not modify it.
func (r *Registry) Get(ctx context.Context, req *api.Request) (api.Object, error) {
	s, err := r.served(ctx, req)
	if err != nil {
		return nil, err
	}
	ctx, cancel := r.bounded(ctx)
	defer cancel()
	if err := r.notOlderThan(ctx, req.Get.ResourceVersion); err != nil {
		return nil, statusError(err, describe(req))
	}
	e, bad := s.find(objectKey(req.Kind, req.Namespace, req.Name))
	switch {
	case e != nil:
		if s.shows(e, req.Light) {
			return e.obj, nil
		}
		obj, err := s.one(ctx, e)
		if err != nil {
			return nil, statusError(err, describe(req))
		}
		return obj, nil
	case bad != nil:
		return nil, bad.error()
	}
	return nil, apierrors.NewNotFound(req.Kind.GroupResource(), req.Name)
}

// List returns the kind's list type, or an *api.ObjectList if the request asks for pointers. The
// resourceVersion has the same meaning as in Get. The items are shared: do not modify them.
func (r *Registry) List(ctx context.Context, req *api.Request) (runtime.Object, error) {
	s, err := r.served(ctx, req)
	if err != nil {
		return nil, err
	}
	if err := checkListOptions(&req.List, false); err != nil {
		return nil, err
	}
	f, err := newFilter(req, &req.List)
	if err != nil {
		return nil, err
	}
	ctx, cancel := r.bounded(ctx)
	defer cancel()
	page, err := r.page(ctx, s, f, req)
	if err == nil {
		err = page.convert(ctx)
	}
	if err != nil {
		return nil, statusError(err, describe(req))
	}
	left := s.snap.Load().unreadable.within(f)
	warnUnreadable(ctx, req.Kind, left)
	out, err := page.object(req)
	if all, ok := out.(*api.ObjectList); ok && err == nil {
		for _, u := range left {
			all.Unreadable = append(all.Unreadable, u.error())
		}
	}
	return out, err
}

// checkListOptions rejects combinations of options that Kubernetes rejects (422).
func checkListOptions(o *metav1.ListOptions, watching bool) error {
	errs := metavalidation.ValidateListOptions(&internalversion.ListOptions{
		Watch: watching, ResourceVersion: o.ResourceVersion, ResourceVersionMatch: o.ResourceVersionMatch,
		Continue: o.Continue, Limit: o.Limit, SendInitialEvents: o.SendInitialEvents,
	}, true)
	if len(errs) > 0 {
		return apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "ListOptions"}, "", errs)
	}
	return nil
}

// page returns the result of one list call: from the cache if the current state is requested, else
// from the store's history.
func (r *Registry) page(ctx context.Context, s *served, f *filter, req *api.Request) (*page, error) {
	o := &req.List
	limit := int(o.Limit)
	if o.Continue != "" {
		token, err := parseContinue(o.Continue, f.prefix)
		if err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		if rv := o.ResourceVersion; rv != "" && rv != "0" {
			return nil, apierrors.NewBadRequest("specifying resource version is not allowed when using continue")
		}
		if token.Revision < 0 {
			if _, err := r.fresh(ctx); err != nil {
				return nil, err
			}
			return s.cachedPage(ctx, f, token.After, limit)
		}
		return r.pageAt(ctx, s, f, span{token.at(), token.After, limit, req.Expect})
	}
	if o.ResourceVersionMatch == metav1.ResourceVersionMatchExact {
		rev, err := parseRevision(o.ResourceVersion)
		if err != nil {
			return nil, err
		}
		if err := r.notOlderThan(ctx, o.ResourceVersion); err != nil {
			return nil, err
		}
		return r.pageAt(ctx, s, f, span{rev, "", limit, req.Expect})
	}
	if err := r.notOlderThan(ctx, o.ResourceVersion); err != nil {
		return nil, err
	}
	return s.cachedPage(ctx, f, "", limit)
}

// page is a part of a kind's objects at one revision.
type page struct {
	of        *served
	light     bool // the light form is sufficient
	revision  raftstore.Revision
	changed   raftstore.Revision
	items     []api.Object
	foreign   []foreign
	bytes     int64  // stored size of the items
	last      string // key of the last item
	more      bool
	remaining *int64 // only set for lists without selectors
}

// foreign is an item that must be converted or unpacked before it is returned.
type foreign struct {
	item  int
	entry *entry
}

// take adds an entry's object, and marks it as foreign if necessary.
func (p *page) take(e *entry) {
	if !p.of.shows(e, p.light) {
		p.foreign = append(p.foreign, foreign{len(p.items), e})
	}
	p.add(e, e.obj)
}

// add adds an item.
func (p *page) add(e *entry, obj api.Object) {
	p.items = append(p.items, obj)
	p.bytes += int64(len(e.value))
	p.last = e.key
}

// convert replaces all foreign items by objects in the page's version, in one call.
func (p *page) convert(ctx context.Context) error {
	if len(p.foreign) == 0 {
		return nil
	}
	entries := make([]*entry, len(p.foreign))
	for i, f := range p.foreign {
		entries[i] = f.entry
	}
	shown, err := p.of.show(ctx, entries...)
	if err != nil {
		return err
	}
	for i, f := range p.foreign {
		p.items[f.item] = shown[i]
	}
	return nil
}

// cachedPage returns a page of the newest snapshot.
func (s *served) cachedPage(ctx context.Context, f *filter, after string, limit int) (*page, error) {
	now, rev := s.state()
	return pageOf(ctx, s, now, rev, f, after, limit)
}

func pageOf(ctx context.Context, of *served, s *snapshot, rev raftstore.Revision, f *filter, after string, limit int) (*page, error) {
	if f.late != nil {
		return siftedPage(ctx, of, s, rev, f, after, limit)
	}
	p := &page{of: of, light: f.light, revision: rev, changed: s.changed}
	if limit <= 0 && !f.selective() && f.prefix == "" && f.exact == "" {
		p.items = make([]api.Object, 0, s.byKey.Len())
	}
	var left int64
	f.scan(s, after, func(e *entry) bool {
		if limit > 0 && len(p.items) == limit {
			p.more = true
			left++
			return !f.selective() // count the remaining items only without selectors, when it is cheap
		}
		p.take(e)
		return true
	})
	if p.more && !f.selective() {
		p.remaining = &left
	}
	return p, nil
}

// span is the requested part of a past state.
type span struct {
	at     raftstore.Revision
	after  string // key relative to the kind's prefix
	limit  int    // 0 = unlimited
	expect func(ctx context.Context, bytes int64) error
}

// pageAt returns a page of the state at a past revision. Its objects are decoded for this response
// only, so it waits for memory (span.expect) before each chunk.
func (r *Registry) pageAt(ctx context.Context, of *served, f *filter, s span) (*page, error) {
	if err := r.notOlderThan(ctx, formatRevision(s.at)); err != nil {
		return nil, err
	}
	if now := of.snap.Load(); now.changed <= s.at {
		return pageOf(ctx, of, now, s.at, f, s.after, s.limit) // the kind has not changed since that revision
	}
	p := &page{of: of, light: f.light, revision: s.at, changed: s.at}
	after := s.after
	if after != "" {
		after = of.storage.Prefix + after
	}
	chunk := max(s.limit, pageChunk)
	if s.limit > 0 && !f.selective() {
		chunk = s.limit
	}
	for {
		list, err := r.store.List(ctx, of.storage.Prefix+f.prefix, raftstore.ListOptions{
			ReadOptions: raftstore.ReadOptions{Local: true}, After: after, At: s.at, Limit: chunk,
		})
		if err != nil {
			return nil, pagingError(err, p, after)
		}
		if s.expect != nil {
			if err := s.expect(ctx, decoded(list.Items)); err != nil {
				return nil, err
			}
		}
		if f.late != nil {
			if full, err := p.siftStored(ctx, r.cache, f, list.Items, s.limit); err != nil || full {
				return p, err
			}
			if n := len(list.Items); n > 0 {
				after = list.Items[n-1].Key
			}
		} else {
			for _, it := range list.Items {
				after = it.Key
				if p.more = !p.takeStored(r.cache, f, it, s.limit); p.more {
					return p, nil
				}
			}
		}
		if !list.More {
			return p, nil
		}
		if s.limit > 0 && !f.selective() {
			p.more, p.remaining = true, &list.Remaining
			return p, nil
		}
	}
}

// decoded estimates the memory of items after decoding.
func decoded(items []raftstore.Item) (bytes int64) {
	for _, it := range items {
		bytes += decodedTimes*int64(len(it.Value)) + decodedBytes
	}
	return bytes
}

// pageChunk is how many objects are read at once if the page's length does not determine it.
const pageChunk = 500

// decode decodes a stored item. It returns nil if the filter does not match or the item is
// unreadable; List warns about unreadable items.
func (p *page) decode(c *cache, f *filter, it raftstore.Item) *entry {
	key := it.Key[len(p.of.storage.Prefix):]
	if f.exact != "" && key != f.exact {
		return nil
	}
	e, err := c.decode(p.of.storageCache, key, it, nil)
	if err != nil || !f.selects(e.obj) {
		return nil
	}
	return e
}

// takeStored adds a stored item to the page if the filter matches. It returns false if the item
// matches but the page is full.
func (p *page) takeStored(c *cache, f *filter, it raftstore.Item, limit int) bool {
	e := p.decode(c, f, it)
	if e == nil {
		return true
	}
	if limit > 0 && len(p.items) == limit {
		return false
	}
	p.take(e)
	return true
}

// pagingError converts the error of a compacted revision to a 410 with a token that continues with
// the current state.
func pagingError(err error, p *page, after string) error {
	status := statusError(err, "continuing a list")
	if s, ok := status.(*apierrors.StatusError); ok && s.ErrStatus.Code == http.StatusGone && after != "" {
		s.ErrStatus.Message = "The provided continue parameter is too old to display a consistent list result. " +
			"Start a new list without it, or go on inconsistently with the continue token of this response."
		s.ErrStatus.ListMeta.Continue = continueToken{Revision: -1, After: after[len(p.of.storage.Prefix):]}.encode()
	}
	return status
}

// object returns the response of a page.
func (p *page) object(req *api.Request) (runtime.Object, error) {
	meta := metav1.ListMeta{ResourceVersion: formatRevision(p.revision), RemainingItemCount: p.remaining}
	if p.more {
		meta.Continue = continueToken{Revision: int64(p.revision), After: p.last}.encode()
	}
	if req.Pointers {
		l := &api.ObjectList{ListMeta: meta, Items: p.items, Bytes: p.bytes, Changed: formatRevision(min(p.changed, p.revision))}
		l.SetGroupVersionKind(p.of.kind.ListGVK())
		return l, nil
	}
	return typedList(p.of.kind, meta, p.items)
}

// Watch streams changes, with bookmarks and, on request, initial events. The result is a *Watcher,
// or an api.Follower.
func (r *Registry) Watch(ctx context.Context, req *api.Request) (watch.Interface, error) {
	s, err := r.served(ctx, req)
	if err != nil {
		return nil, err
	}
	o := &req.List
	if err := checkListOptions(o, true); err != nil {
		return nil, err
	}
	f, err := newFilter(req, o)
	if err != nil {
		return nil, err
	}
	rev, err := parseRevision(o.ResourceVersion)
	if err != nil {
		return nil, err
	}
	opening, cancel := r.bounded(ctx)
	defer cancel()
	if req.Follow {
		// A follower reaches the current state by itself, and needs no quorum to start.
		if err := r.cache.waitFor(opening, 0); err != nil {
			return nil, statusError(err, "watching "+req.Kind.Resource)
		}
		return s.newFollower(ctx), nil
	}
	p := position{after: rev, initial: rev == 0}
	if o.SendInitialEvents != nil {
		p.initial = *o.SendInitialEvents
		p.endMark = p.initial
	}
	switch {
	case o.ResourceVersion == "" || (p.initial && rev > 0):
		err = r.notOlderThan(opening, o.ResourceVersion)
	default:
		p.future, err = r.notYet(opening, rev)
	}
	if err != nil {
		return nil, statusError(err, describe(req))
	}
	if rev == 0 && !p.initial {
		_, p.after = s.state() // from now on
	}
	return s.newWatcher(ctx, f, p, o), nil
}
