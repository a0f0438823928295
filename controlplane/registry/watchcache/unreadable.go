package watchcache

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/tidwall/btree"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
	"keelson.dev/keelson/raftstore"
)

// Unreadable is a stored value that cannot be decoded as an object of its kind. Lists and watches
// omit it; the response of a list has a warning about it. Reading or changing the object returns a
// 500. It can be deleted.
type Unreadable struct {
	Kind      *api.Kind
	Namespace string
	Name      string
	Key       string // key in the store
	Revision  raftstore.Revision
	Reason    string
	Seen      time.Time // when this replica detected the defect
	// Dropped is the version of the stored value if its CustomResourceDefinition no longer has
	// that version; otherwise "".
	Dropped string

	short string // key relative to the storage's prefix
}

// unreadables is an immutable set of one storage's unreadable values, by key relative to the
// storage's prefix. The zero value is the empty set.
type unreadables struct {
	byKey *btree.Map[string, *Unreadable]
}

func (u unreadables) withValue(value *Unreadable) unreadables {
	next := btree.NewMap[string, *Unreadable](treeDegree)
	if u.byKey != nil {
		next = u.byKey.Copy()
	}
	next.Set(value.short, value)
	return unreadables{next}
}

func (u unreadables) withoutKey(key string) unreadables {
	if u.byShortKey(key) == nil {
		return u
	}
	next := u.byKey.Copy()
	next.Delete(key)
	if next.Len() == 0 {
		return unreadables{}
	}
	return unreadables{next}
}

func (u unreadables) byShortKey(key string) *Unreadable {
	if u.byKey == nil {
		return nil
	}
	value, _ := u.byKey.Get(key)
	return value
}

// inRange returns the unreadable values in a filter's key range. It ignores the filter's selectors,
// because they cannot be evaluated on values that cannot be decoded.
func (u unreadables) inRange(f *filter) []*Unreadable {
	if u.byKey == nil {
		return nil
	}
	var out []*Unreadable
	u.byKey.Ascend(f.prefix, func(key string, value *Unreadable) bool {
		if !strings.HasPrefix(key, f.prefix) {
			return false
		}
		if f.exact == "" || f.exact == key {
			out = append(out, value)
		}
		return true
	})
	return out
}

// newUnreadable returns the Unreadable of a stored item that cannot be decoded because of err, and
// logs the error.
func (c *Cache) newUnreadable(sc *storageCache, key string, item raftstore.Item, err error) *Unreadable {
	u := &Unreadable{Kind: sc.defaultKind.Load(), Key: item.Key, Revision: item.Modified, Reason: err.Error(),
		Seen: time.Now(), short: key}
	u.Namespace, u.Name = storedform.SplitKey(sc.spec.Namespaced, key)
	var dropped *storedform.DroppedVersionError
	if errors.As(err, &dropped) && u.Kind.Serving.Definition != "" {
		u.Dropped = dropped.Version.Version
	}
	c.options.Log.Error("a stored object is unreadable; lists and watches omit it", "key", item.Key, "revision",
		uint64(item.Modified), "error", err)
	return u
}

// Unreadable returns all stored values of served kinds that cannot be decoded, sorted by key.
func (r Reader) Unreadable() []Unreadable {
	var out []Unreadable
	for _, sc := range r.cache.routes.Load().byStorage {
		if all := sc.snap.Load().unreadable; all.byKey != nil {
			all.byKey.Scan(func(_ string, u *Unreadable) bool {
				out = append(out, *u)
				return true
			})
		}
	}
	slices.SortFunc(out, func(a, b Unreadable) int { return strings.Compare(a.Key, b.Key) })
	return out
}

// Remedy returns text for the administrator that describes how to repair or delete the object.
func (u *Unreadable) Remedy() string {
	in := ""
	if u.Namespace != "" {
		in = " -n " + u.Namespace
	}
	if u.Dropped != "" {
		return fmt.Sprintf("add version %q to spec.versions of CustomResourceDefinition %q again ('served: "+
			"false' is enough), "+
			"or delete the object without regard to its finalizers ('kubectl delete %s %s%s --wait=false')",
			u.Dropped, u.Kind.Serving.Definition, u.Kind.GroupResource(), u.Name, in)
	}
	return fmt.Sprintf("delete it ('kubectl delete %s %s%s --wait=false') and create it again, or restore a backup "+
		"with an undamaged copy",
		u.Kind.Resource, u.Name, in)
}

// describeDefect returns the reason why the value cannot be decoded, as the end of a sentence.
func (u *Unreadable) describeDefect() string {
	if u.Dropped != "" {
		return fmt.Sprintf("is of version %q, which the CustomResourceDefinition no longer has", u.Dropped)
	}
	return "is damaged: " + u.Reason
}

// StatusError returns the error (500) for a request to read or change the object.
func (u *Unreadable) StatusError() error {
	return storeerrors.NewStatus(http.StatusInternalServerError, metav1.StatusReasonInternalError, fmt.Sprintf(
		"%s %q cannot be read: the value stored under %s at revision %d %s; %s",
		u.Kind.Resource, u.Name, u.Key, u.Revision, u.describeDefect(), u.Remedy()), 0)
}

// Stub returns an otherwise empty object with the name, namespace and resourceVersion of the
// unreadable object.
func (u *Unreadable) Stub() api.Object {
	obj := u.Kind.Type.New()
	u.Kind.SetTypeMeta(obj)
	obj.SetNamespace(u.Namespace)
	obj.SetName(u.Name)
	obj.SetResourceVersion(storedform.FormatRevision(u.Revision))
	return obj
}

// maxWarnedNames is the maximum number of object names in a warning about unreadable objects.
const maxWarnedNames = 3

// warnUnreadable adds a warning to the response of a list request about the unreadable objects that
// it omits.
func warnUnreadable(ctx context.Context, kind *api.Kind, omitted []*Unreadable) {
	if len(omitted) == 0 {
		return
	}
	names := make([]string, 0, maxWarnedNames)
	for _, u := range omitted[:min(len(omitted), maxWarnedNames)] {
		names = append(names, u.short)
	}
	more := ""
	if n := len(omitted) - len(names); n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	api.Warn(ctx,
		fmt.Sprintf("%d of the stored %s cannot be read and are omitted: %s%s; get one of these objects for the "+
			"reason and the remedy",
			len(omitted), kind.Resource, strings.Join(names, ", "), more))
}

// UnreadableIn returns the unreadable values in the key range of a list request. It returns nil if
// the request has selectors, because they cannot be evaluated on values that cannot be decoded.
func (r Reader) UnreadableIn(ctx context.Context, req *api.Request) ([]*Unreadable, error) {
	f, err := newFilter(req, &req.List)
	if err != nil || f.isSelective() {
		return nil, err
	}
	s, err := r.cache.Served(ctx, req)
	if err != nil {
		return nil, err
	}
	return s.storage.snap.Load().unreadable.inRange(f), nil
}
