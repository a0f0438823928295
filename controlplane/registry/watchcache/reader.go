package watchcache

import (
	"context"
	"fmt"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/internalversion/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
	"keelson.dev/keelson/raftstore"
)

// Reader serves reads and watches from a Cache and from the history of the cache's store. It is
// safe for concurrent use.
type Reader struct{ cache *Cache }

// NewReader returns a Reader of the given cache.
func NewReader(c *Cache) Reader { return Reader{c} }

// refresh waits until the cache includes every write that any replica acknowledged before the call,
// for a read of the kind. It records the request to the store in the metrics.
func (r Reader) refresh(ctx context.Context, s *Served, op Operation) (raftstore.Revision, error) {
	started := time.Now()
	rev, err := r.cache.Refresh(ctx)
	s.ObserveRequest(op, started, err)
	return rev, err
}

// waitForVersion waits until the cache is new enough for a read of the kind with the given
// resourceVersion. "" means every write acknowledged so far, "0" means any state, and N means at
// least revision N. A revision newer than the store is an error. op is the kind of read, for the
// metrics.
func (r Reader) waitForVersion(ctx context.Context, s *Served, op Operation, resourceVersion string) error {
	if resourceVersion == "" {
		_, err := r.refresh(ctx, s, op)
		return err
	}
	rev, err := storedform.ParseRevision(resourceVersion)
	if err != nil {
		return err
	}
	if rev > r.cache.progress.currentRevision() {
		// A revision that does not exist yet is an error; do not wait for it.
		current, err := r.refresh(ctx, s, op)
		if err != nil {
			return err
		}
		if rev > current {
			return tooLarge(rev, current)
		}
	}
	return r.cache.WaitFor(ctx, rev)
}

// storeRevisionIfOlder returns the store's current revision if it is older than rev, otherwise 0.
// It asks the leader only if this replica has not reached rev.
func (r Reader) storeRevisionIfOlder(
	ctx context.Context, s *Served, rev raftstore.Revision,
) (raftstore.Revision, error) {
	if err := r.cache.WaitFor(ctx, 0); err != nil || rev <= r.cache.progress.currentRevision() {
		return 0, err
	}
	current, err := r.refresh(ctx, s, OpList)
	if err != nil || rev <= current {
		return 0, err
	}
	return current, nil
}

// tooLarge returns the error that Kubernetes returns for a requested resourceVersion that is newer
// than the store's current revision.
func tooLarge(requested, current raftstore.Revision) error {
	err := apierrors.NewTimeoutError(fmt.Sprintf("Too large resource version: %d, current: %d", requested, current), 1)
	err.ErrStatus.Details.Causes = []metav1.StatusCause{{
		Type: metav1.CauseTypeResourceVersionTooLarge, Message: "Too large resource version",
	}}
	return err
}

// GetObject returns the object of the request. An unset resourceVersion is a linearizable read; "0"
// reads the cached state. The object is shared: do not modify it.
func (r Reader) GetObject(ctx context.Context, req *api.Request) (api.Object, error) {
	s, err := r.cache.Served(ctx, req)
	if err != nil {
		return nil, err
	}
	ctx, cancel := r.cache.WithTimeout(ctx)
	defer cancel()
	if err := r.waitForVersion(ctx, s, OpGet, req.Get.ResourceVersion); err != nil {
		return nil, storeerrors.ToStatus(err, storeerrors.DescribeRequest(req))
	}
	e, bad := s.Lookup(s.Key(req.Namespace, req.Name))
	switch {
	case e != nil:
		if s.isServable(e, req.Internal.Light) {
			return e.Object, nil
		}
		obj, err := s.Object(ctx, e)
		if err != nil {
			return nil, storeerrors.ToStatus(err, storeerrors.DescribeRequest(req))
		}
		return obj, nil
	case bad != nil:
		return nil, bad.StatusError()
	}
	return nil, apierrors.NewNotFound(req.Kind.GroupResource(), req.Name)
}

// List returns the objects that match the request, in the kind's list type, or as an
// *api.ObjectList if the request asks for pointers. The resourceVersion has the same meaning as in
// GetObject. The items are shared: do not modify them.
func (r Reader) List(ctx context.Context, req *api.Request) (runtime.Object, error) {
	s, err := r.cache.Served(ctx, req)
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
	ctx, cancel := r.cache.WithTimeout(ctx)
	defer cancel()
	page, err := r.readPage(ctx, s, f, req)
	if err == nil {
		err = page.convertItems(ctx)
	}
	if err != nil {
		return nil, storeerrors.ToStatus(err, storeerrors.DescribeRequest(req))
	}
	omitted := s.storage.snap.Load().unreadable.inRange(f)
	warnUnreadable(ctx, req.Kind, omitted)
	out, err := page.buildResponse(req)
	if all, ok := out.(*api.ObjectList); ok && err == nil {
		for _, u := range omitted {
			all.Unreadable = append(all.Unreadable, u.StatusError())
		}
	}
	return out, err
}

// checkListOptions returns an error (422) for combinations of options that Kubernetes rejects.
func checkListOptions(o *metav1.ListOptions, isWatch bool) error {
	errs := metavalidation.ValidateListOptions(&internalversion.ListOptions{
		Watch: isWatch, ResourceVersion: o.ResourceVersion, ResourceVersionMatch: o.ResourceVersionMatch,
		Continue: o.Continue, Limit: o.Limit, SendInitialEvents: o.SendInitialEvents,
	}, true)
	if len(errs) > 0 {
		return apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "ListOptions"}, "", errs)
	}
	return nil
}

// readPage returns the page of objects that a list request asks for. It reads the cache if the
// current state is requested, and otherwise the store's history.
func (r Reader) readPage(ctx context.Context, s *Served, f *filter, req *api.Request) (*page, error) {
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
			if _, err := r.refresh(ctx, s, OpList); err != nil {
				return nil, err
			}
			return s.cachedPage(ctx, f, token.After, limit)
		}
		return r.pageAt(ctx, s, f, pageRange{token.atRevision(), token.After, limit, req.Internal.Expect})
	}
	if o.ResourceVersionMatch == metav1.ResourceVersionMatchExact {
		rev, err := storedform.ParseRevision(o.ResourceVersion)
		if err != nil {
			return nil, err
		}
		if err := r.waitForVersion(ctx, s, OpList, o.ResourceVersion); err != nil {
			return nil, err
		}
		return r.pageAt(ctx, s, f, pageRange{rev, "", limit, req.Internal.Expect})
	}
	if err := r.waitForVersion(ctx, s, OpList, o.ResourceVersion); err != nil {
		return nil, err
	}
	return s.cachedPage(ctx, f, "", limit)
}

// page is the result of one list request: some of a kind's objects at one revision.
type page struct {
	served       *Served
	acceptsLight bool // objects in the light form are accepted (see light.go)
	revision     raftstore.Revision
	changed      raftstore.Revision
	items        []api.Object
	unconverted  []unconvertedItem
	bytes        int64  // stored size of the items
	last         string // key of the last item
	more         bool
	remaining    *int64 // only set for lists without selectors
}

// unconvertedItem is an item of a result that must still be converted to the kind's version, or
// decoded completely from its light form (see light.go). item is its index in the result.
type unconvertedItem struct {
	item  int
	entry *Entry
}

// addEntry adds an entry's object to the page. It records the object in p.unconverted if it must be
// converted before it is returned.
func (p *page) addEntry(e *Entry) {
	if !p.served.isServable(e, p.acceptsLight) {
		p.unconverted = append(p.unconverted, unconvertedItem{len(p.items), e})
	}
	p.addItem(e, e.Object)
}

// addItem adds obj, the object of entry e, to the page.
func (p *page) addItem(e *Entry, obj api.Object) {
	p.items = append(p.items, obj)
	p.bytes += int64(len(e.Value))
	p.last = e.key
}

// convertItems replaces all items in p.unconverted with complete objects in the page's version, in
// one conversion call.
func (p *page) convertItems(ctx context.Context) error {
	if len(p.unconverted) == 0 {
		return nil
	}
	entries := make([]*Entry, len(p.unconverted))
	for i, f := range p.unconverted {
		entries[i] = f.entry
	}
	shown, err := p.served.convertEntries(ctx, entries...)
	if err != nil {
		return err
	}
	for i, f := range p.unconverted {
		p.items[f.item] = shown[i]
	}
	return nil
}

// cachedPage returns a page of the newest snapshot: at most limit objects (0 = unlimited) with keys
// greater than after.
func (s *Served) cachedPage(ctx context.Context, f *filter, after string, limit int) (*page, error) {
	current, rev := s.storage.latestSnapshot()
	return pageOf(ctx, s, current, rev, f, after, limit)
}

// pageOf returns a page of a snapshot: at most limit objects (0 = unlimited) with keys greater than
// after. rev is the revision of the snapshot's state.
func pageOf(
	ctx context.Context, served *Served, s *snapshot, rev raftstore.Revision, f *filter, after string, limit int,
) (*page, error) {
	if f.versionFields != nil {
		return convertedPage(ctx, served, s, rev, f, after, limit)
	}
	p := &page{served: served, acceptsLight: f.acceptsLight, revision: rev, changed: s.changed}
	if limit <= 0 && !f.isSelective() && f.prefix == "" && f.exact == "" {
		p.items = make([]api.Object, 0, s.byKey.Len())
	}
	var remaining int64
	f.visitMatches(s, after, func(e *Entry) bool {
		if limit > 0 && len(p.items) == limit {
			p.more = true
			remaining++
			return !f.isSelective() // count the remaining items only without selectors, when it is cheap
		}
		p.addEntry(e)
		return true
	})
	if p.more && !f.isSelective() {
		p.remaining = &remaining
	}
	return p, nil
}

// pageRange is the part of a kind's objects at a past revision that a list request asks for.
type pageRange struct {
	at     raftstore.Revision
	after  string // key relative to the kind's prefix
	limit  int    // 0 = unlimited
	expect func(ctx context.Context, bytes int64) error
}

// pageAt returns a page of the kind's objects at a past revision. Its objects are decoded for this
// response only, so it waits for memory (pageRange.expect) before it decodes each chunk.
func (r Reader) pageAt(ctx context.Context, kind *Served, f *filter, requested pageRange) (*page, error) {
	if err := r.waitForVersion(ctx, kind, OpList, storedform.FormatRevision(requested.at)); err != nil {
		return nil, err
	}
	if current := kind.storage.snap.Load(); current.changed <= requested.at {
		// The kind has not changed since that revision.
		return pageOf(ctx, kind, current, requested.at, f, requested.after, requested.limit)
	}
	p := &page{served: kind, acceptsLight: f.acceptsLight, revision: requested.at, changed: requested.at}
	after := requested.after
	if after != "" {
		after = kind.storage.spec.Prefix + after
	}
	chunk := max(requested.limit, pageChunk)
	if requested.limit > 0 && !f.isSelective() {
		chunk = requested.limit
	}
	for {
		started := time.Now()
		list, err := r.cache.store.List(ctx, kind.storage.spec.Prefix+f.prefix, raftstore.ListOptions{
			ReadOptions: raftstore.ReadOptions{Local: true}, After: after, At: requested.at, Limit: chunk,
		})
		kind.ObserveRequest(OpList, started, err)
		if err != nil {
			return nil, pagingError(err, p, after)
		}
		if requested.expect != nil {
			if err := requested.expect(ctx, estimateDecodedBytes(list.Items)); err != nil {
				return nil, err
			}
		}
		if f.versionFields != nil {
			if full, err := p.addConvertedItems(ctx, r.cache, f, list.Items, requested.limit); err != nil || full {
				return p, err
			}
			if n := len(list.Items); n > 0 {
				after = list.Items[n-1].Key
			}
		} else {
			for _, item := range list.Items {
				after = item.Key
				if p.more = !p.addStoredItem(r.cache, f, item, requested.limit); p.more {
					return p, nil
				}
			}
		}
		if !list.More {
			return p, nil
		}
		if requested.limit > 0 && !f.isSelective() {
			p.more, p.remaining = true, &list.Remaining
			return p, nil
		}
	}
}

// estimateDecodedBytes estimates the memory of stored items after decoding, in bytes.
func estimateDecodedBytes(items []raftstore.Item) (bytes int64) {
	for _, item := range items {
		bytes += decodedSizeFactor*int64(len(item.Value)) + decodedOverhead
	}
	return bytes
}

// pageChunk is the number of objects that are read together from the store or a snapshot, if the
// page's limit does not determine the number.
const pageChunk = 500

// decodeItem returns the entry of a stored item. It returns nil if the filter does not match or the
// item is unreadable. List adds a warning about unreadable items.
func (p *page) decodeItem(c *Cache, f *filter, item raftstore.Item) *Entry {
	key := item.Key[len(p.served.storage.spec.Prefix):]
	if f.exact != "" && key != f.exact {
		return nil
	}
	e, err := c.decodeEntry(p.served.storage, key, item, nil)
	if err != nil || !f.matchesSelectors(e.Object) {
		return nil
	}
	return e
}

// addStoredItem adds a stored item to the page if it matches the filter. It returns false if the
// item matches but the page already has limit objects.
func (p *page) addStoredItem(c *Cache, f *filter, item raftstore.Item, limit int) bool {
	e := p.decodeItem(c, f, item)
	if e == nil {
		return true
	}
	if limit > 0 && len(p.items) == limit {
		return false
	}
	p.addEntry(e)
	return true
}

// pagingError returns the API status for an error of reading a page from the store. If the page's
// revision was compacted, the 410 contains a continue token for the current state. after is the
// last key that was read.
func pagingError(err error, p *page, after string) error {
	status := storeerrors.ToStatus(err, "continuing a list")
	if s, ok := status.(*apierrors.StatusError); ok && s.ErrStatus.Code == http.StatusGone && after != "" {
		s.ErrStatus.Message = "The provided continue parameter is too old to display a consistent list result. " +
			"Start a new list without it, or go on inconsistently with the continue token of this response."
		s.ErrStatus.ListMeta.Continue = continueToken{Revision: -1,
			After: after[len(p.served.storage.spec.Prefix):]}.encodeToken()
	}
	return status
}

// buildResponse returns the page as the response to a list request, in the type that List returns.
func (p *page) buildResponse(req *api.Request) (runtime.Object, error) {
	meta := metav1.ListMeta{ResourceVersion: storedform.FormatRevision(p.revision), RemainingItemCount: p.remaining}
	if p.more {
		meta.Continue = continueToken{Revision: int64(p.revision), After: p.last}.encodeToken()
	}
	if req.Internal.Pointers {
		l := &api.ObjectList{ListMeta: meta, Items: p.items, Bytes: p.bytes,
			Changed: storedform.FormatRevision(min(p.changed, p.revision))}
		l.SetGroupVersionKind(p.served.Kind.ListGVK())
		return l, nil
	}
	return TypedList(p.served.Kind, meta, p.items)
}

// Watch returns a watch of the changes that match the request, with bookmarks and initial events if
// the request asks for them. The result is a *Watcher, or an api.Follower if the request asks for
// one.
func (r Reader) Watch(ctx context.Context, req *api.Request) (watch.Interface, error) {
	s, err := r.cache.Served(ctx, req)
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
	rev, err := storedform.ParseRevision(o.ResourceVersion)
	if err != nil {
		return nil, err
	}
	startCtx, cancel := r.cache.WithTimeout(ctx)
	defer cancel()
	if req.Internal.Follow {
		// A follower reaches the current state without a wait for it, and needs no quorum to start.
		if err := r.cache.WaitFor(startCtx, 0); err != nil {
			return nil, storeerrors.ToStatus(err, "watching "+req.Kind.Resource)
		}
		return s.newFollower(ctx), nil
	}
	p := position{after: rev, initial: rev == 0}
	if o.SendInitialEvents != nil {
		p.initial = *o.SendInitialEvents
		p.endBookmark = p.initial
	}
	switch {
	case o.ResourceVersion == "" || (p.initial && rev > 0):
		err = r.waitForVersion(startCtx, s, OpList, o.ResourceVersion)
	default:
		p.storeRevision, err = r.storeRevisionIfOlder(startCtx, s, rev)
	}
	if err != nil {
		return nil, storeerrors.ToStatus(err, storeerrors.DescribeRequest(req))
	}
	if rev == 0 && !p.initial {
		_, p.after = s.storage.latestSnapshot() // from now on
	}
	return s.newWatcher(ctx, f, p, o), nil
}
