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

// kindOf finds the cache of the request's kind.
func (r *Registry) kindOf(req *api.Request) (*kindCache, error) {
	if req.Kind == nil {
		return nil, apierrors.NewBadRequest("the request names no kind")
	}
	kc := r.cache.byKind[req.Kind]
	if kc == nil {
		return nil, apierrors.NewMethodNotSupported(req.Kind.GroupResource(), string(req.Verb))
	}
	return kc, nil
}

// describe says what a request does, for errors.
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

// parseRevision reads a resourceVersion parameter; "" and "0" are 0.
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

// notOlderThan waits for what a resourceVersion parameter asks of a read: unset
// is everything acknowledged so far, "0" is whatever there is, N is at least N.
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
		// A revision that the store does not have yet is an error, not a reason to wait.
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

// tooLarge is Kubernetes' answer to a resourceVersion from the future.
func tooLarge(asked, have raftstore.Revision) error {
	err := apierrors.NewTimeoutError(fmt.Sprintf("Too large resource version: %d, current: %d", asked, have), 1)
	err.ErrStatus.Details.Causes = []metav1.StatusCause{{
		Type: metav1.CauseTypeResourceVersionTooLarge, Message: "Too large resource version",
	}}
	return err
}

// Get and List honour resourceVersion semantics: unset is linearizable, "0" is whatever the cache holds.
// Objects in the results are shared: do not modify.
func (r *Registry) Get(ctx context.Context, req *api.Request) (api.Object, error) {
	kc, err := r.kindOf(req)
	if err != nil {
		return nil, err
	}
	ctx, cancel := r.bounded(ctx)
	defer cancel()
	if err := r.notOlderThan(ctx, req.Get.ResourceVersion); err != nil {
		return nil, statusError(err, describe(req))
	}
	e, bad := kc.find(objectKey(req.Kind, req.Namespace, req.Name))
	switch {
	case e != nil:
		return e.obj, nil
	case bad != nil:
		return nil, bad.error()
	}
	return nil, apierrors.NewNotFound(req.Kind.GroupResource(), req.Name)
}

// List returns the kind's list type with shared items, or an *api.ObjectList when the request asks for pointers.
func (r *Registry) List(ctx context.Context, req *api.Request) (runtime.Object, error) {
	kc, err := r.kindOf(req)
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
	page, err := r.page(ctx, kc, f, &req.List)
	if err != nil {
		return nil, statusError(err, describe(req))
	}
	warnUnreadable(ctx, req.Kind, kc.snap.Load().unreadable.within(f))
	return page.object(req)
}

// checkListOptions refuses combinations that Kubernetes refuses (422).
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

// page answers one list call: from the cache when the wanted state is the
// cache's, from the store's history otherwise.
func (r *Registry) page(ctx context.Context, kc *kindCache, f *filter, o *metav1.ListOptions) (*page, error) {
	limit := int(o.Limit)
	if o.Continue != "" {
		token, err := parseContinue(o.Continue, f.prefix)
		if err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		if token.Revision < 0 {
			if _, err := r.fresh(ctx); err != nil {
				return nil, err
			}
			return kc.cachedPage(f, token.After, limit), nil
		}
		return r.pageAt(ctx, kc, f, token.at(), token.After, limit)
	}
	if o.ResourceVersionMatch == metav1.ResourceVersionMatchExact {
		rev, err := parseRevision(o.ResourceVersion)
		if err != nil {
			return nil, err
		}
		if err := r.notOlderThan(ctx, o.ResourceVersion); err != nil {
			return nil, err
		}
		return r.pageAt(ctx, kc, f, rev, "", limit)
	}
	if err := r.notOlderThan(ctx, o.ResourceVersion); err != nil {
		return nil, err
	}
	return kc.cachedPage(f, "", limit), nil
}

// page is a part of a kind's objects at one revision.
type page struct {
	kc        *kindCache
	revision  raftstore.Revision
	changed   raftstore.Revision
	items     []api.Object
	bytes     int64  // of the items as stored
	last      string // key of the last item
	more      bool
	remaining *int64 // known for lists without selectors
}

// cachedPage reads from the newest snapshot.
func (kc *kindCache) cachedPage(f *filter, after string, limit int) *page {
	s, rev := kc.state()
	return pageOf(kc, s, rev, f, after, limit)
}

func pageOf(kc *kindCache, s *snapshot, rev raftstore.Revision, f *filter, after string, limit int) *page {
	p := &page{kc: kc, revision: rev, changed: s.changed}
	if limit <= 0 && !f.selective() && f.prefix == "" && f.exact == "" {
		p.items = make([]api.Object, 0, s.objects.Len())
	}
	var left int64
	f.scan(s, after, func(e *entry) bool {
		if limit > 0 && len(p.items) == limit {
			p.more = true
			left++
			return !f.selective() // count what remains only where that is cheap
		}
		p.items = append(p.items, e.obj)
		p.bytes += int64(len(e.value))
		p.last = e.key
		return true
	})
	if p.more && !f.selective() {
		p.remaining = &left
	}
	return p
}

// pageAt reads the state at a past revision.
func (r *Registry) pageAt(ctx context.Context, kc *kindCache, f *filter, rev raftstore.Revision, after string, limit int) (*page, error) {
	if err := r.notOlderThan(ctx, formatRevision(rev)); err != nil {
		return nil, err
	}
	if s := kc.snap.Load(); s.changed <= rev {
		return pageOf(kc, s, rev, f, after, limit), nil // nothing of this kind has changed since
	}
	p := &page{kc: kc, revision: rev, changed: rev}
	if after != "" {
		after = kc.prefix + after
	}
	chunk := max(limit, 0)
	if limit > 0 && f.selective() {
		chunk = max(limit, selectiveChunk)
	}
	for {
		list, err := r.store.List(ctx, kc.prefix+f.prefix, raftstore.ListOptions{
			ReadOptions: raftstore.ReadOptions{Local: true}, After: after, At: rev, Limit: chunk,
		})
		if err != nil {
			return nil, pagingError(err, p, after)
		}
		for _, it := range list.Items {
			after = it.Key
			if p.more = !p.add(r.cache, f, it, limit); p.more {
				return p, nil
			}
		}
		if !list.More {
			return p, nil
		}
		if !f.selective() {
			p.more, p.remaining = true, &list.Remaining
			return p, nil
		}
	}
}

// selectiveChunk is how many objects are looked at in one go for a page of those that match.
const selectiveChunk = 500

// add takes a stored item into the page if the filter wants it. It returns false,
// and the page is left as it is, when the item is wanted and the page is full.
func (p *page) add(c *cache, f *filter, it raftstore.Item, limit int) bool {
	key := it.Key[len(p.kc.prefix):]
	if f.exact != "" && key != f.exact {
		return true
	}
	e, err := c.decode(p.kc, key, it)
	if err != nil || !f.selects(e.obj) {
		return true // the caller is warned of what is unreadable
	}
	if limit > 0 && len(p.items) == limit {
		return false
	}
	p.items, p.last = append(p.items, e.obj), key
	p.bytes += int64(len(it.Value))
	return true
}

// pagingError turns a compacted revision into 410 with a token that goes on with the present state.
func pagingError(err error, p *page, after string) error {
	status := statusError(err, "continuing a list")
	if s, ok := status.(*apierrors.StatusError); ok && s.ErrStatus.Code == http.StatusGone && after != "" {
		s.ErrStatus.Message = "The provided continue parameter is too old to display a consistent list result. " +
			"Start a new list without it, or go on inconsistently with the continue token of this response."
		s.ErrStatus.ListMeta.Continue = continueToken{Revision: -1, After: after[len(p.kc.prefix):]}.encode()
	}
	return status
}

// object makes the answer of a page.
func (p *page) object(req *api.Request) (runtime.Object, error) {
	meta := metav1.ListMeta{ResourceVersion: formatRevision(p.revision), RemainingItemCount: p.remaining}
	if p.more {
		meta.Continue = continueToken{Revision: int64(p.revision), After: p.last}.encode()
	}
	if req.Pointers {
		l := &api.ObjectList{ListMeta: meta, Items: p.items, Bytes: p.bytes, Changed: formatRevision(min(p.changed, p.revision))}
		l.SetGroupVersionKind(p.kc.kind.ListGVK())
		return l, nil
	}
	return typedList(p.kc.kind, meta, p.items)
}

// Watch streams changes with bookmarks and, when asked, the initial events. The
// result is a *Watcher.
func (r *Registry) Watch(ctx context.Context, req *api.Request) (watch.Interface, error) {
	kc, err := r.kindOf(req)
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
	p := position{after: rev, initial: rev == 0}
	if o.SendInitialEvents != nil {
		p.initial = *o.SendInitialEvents
		p.endMark = p.initial
	}
	switch {
	case o.ResourceVersion == "" || (p.initial && rev > 0):
		err = r.notOlderThan(opening, o.ResourceVersion)
	default:
		err = r.cache.waitFor(opening, 0)
	}
	if err != nil {
		return nil, statusError(err, describe(req))
	}
	if rev == 0 && !p.initial {
		_, p.after = kc.state() // from now on
	}
	return kc.newWatcher(ctx, f, p, o), nil
}
