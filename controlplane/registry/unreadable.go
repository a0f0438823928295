package registry

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/tidwall/btree"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// Unreadable is a stored value that cannot be decoded as an object of its kind. Lists and watches
// omit it, and lists name it in a warning. Reading or changing it returns a 500. It can be deleted.
type Unreadable struct {
	Kind      *api.Kind
	Namespace string
	Name      string
	Key       string // key in the store
	Revision  raftstore.Revision
	Reason    string
	Seen      time.Time // when this replica detected it
	// Dropped is the version of the stored value if its CustomResourceDefinition no longer has
	// that version; otherwise "".
	Dropped string

	short string // key relative to the storage's prefix
}

// unreadables is an immutable set of one storage's unreadable values, by short key. A nil map is
// empty.
type unreadables struct {
	byKey *btree.Map[string, *Unreadable]
}

func (u unreadables) with(one *Unreadable) unreadables {
	next := btree.NewMap[string, *Unreadable](treeDegree)
	if u.byKey != nil {
		next = u.byKey.Copy()
	}
	next.Set(one.short, one)
	return unreadables{next}
}

func (u unreadables) without(key string) unreadables {
	if u.get(key) == nil {
		return u
	}
	next := u.byKey.Copy()
	next.Delete(key)
	if next.Len() == 0 {
		return unreadables{}
	}
	return unreadables{next}
}

func (u unreadables) get(key string) *Unreadable {
	if u.byKey == nil {
		return nil
	}
	one, _ := u.byKey.Get(key)
	return one
}

// within returns the unreadable values in a filter's key range. Selectors are ignored, because they
// cannot be evaluated.
func (u unreadables) within(f *filter) []*Unreadable {
	if u.byKey == nil {
		return nil
	}
	var out []*Unreadable
	u.byKey.Ascend(f.prefix, func(key string, one *Unreadable) bool {
		if !strings.HasPrefix(key, f.prefix) {
			return false
		}
		if f.exact == "" || f.exact == key {
			out = append(out, one)
		}
		return true
	})
	return out
}

// unreadable describes a stored item that cannot be decoded, and logs it.
func (c *cache) unreadable(sc *storageCache, key string, it raftstore.Item, err error) *Unreadable {
	u := &Unreadable{Kind: sc.face.Load(), Key: it.Key, Revision: it.Modified, Reason: err.Error(), Seen: time.Now(), short: key}
	u.Namespace, u.Name = splitKey(sc.storage.Namespaced, key)
	var dropped *droppedVersionError
	if errors.As(err, &dropped) && u.Kind.Definition != "" {
		u.Dropped = dropped.version.Version
	}
	c.log.Error("a stored object is unreadable and is left out", "key", it.Key, "revision", uint64(it.Modified), "error", err)
	return u
}

// Unreadable returns all stored values of served kinds that cannot be decoded, sorted by key.
func (r *Registry) Unreadable() []Unreadable {
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

// Remedy returns instructions for the administrator.
func (u *Unreadable) Remedy() string {
	in := ""
	if u.Namespace != "" {
		in = " -n " + u.Namespace
	}
	if u.Dropped != "" {
		return fmt.Sprintf("add version %q to spec.versions of CustomResourceDefinition %q again ('served: false' is enough), "+
			"or delete the object without regard to its finalizers ('kubectl delete %s %s%s --wait=false')",
			u.Dropped, u.Kind.Definition, u.Kind.GroupResource(), u.Name, in)
	}
	return fmt.Sprintf("delete it ('kubectl delete %s %s%s --wait=false') and create it again, or restore a backup that has it whole",
		u.Kind.Resource, u.Name, in)
}

// state returns a description of the defect, for messages.
func (u *Unreadable) state() string {
	if u.Dropped != "" {
		return fmt.Sprintf("is of version %q, which the CustomResourceDefinition no longer has", u.Dropped)
	}
	return "is damaged: " + u.Reason
}

// error returns the error of a request for the object itself.
func (u *Unreadable) error() error {
	return newStatus(http.StatusInternalServerError, metav1.StatusReasonInternalError, fmt.Sprintf(
		"%s %q cannot be read: the value stored under %s at revision %d %s; %s",
		u.Kind.Resource, u.Name, u.Key, u.Revision, u.state(), u.Remedy()), 0)
}

// stub returns an empty object with the name, for uses that need only the name.
func (u *Unreadable) stub() api.Object {
	obj := u.Kind.New()
	u.Kind.SetTypeMeta(obj)
	obj.SetNamespace(u.Namespace)
	obj.SetName(u.Name)
	obj.SetResourceVersion(formatRevision(u.Revision))
	return obj
}

// namesWarned bounds the number of object names in a warning.
const namesWarned = 3

// warnUnreadable adds a warning to a list response about the omitted objects.
func warnUnreadable(ctx context.Context, k *api.Kind, left []*Unreadable) {
	if len(left) == 0 {
		return
	}
	names := make([]string, 0, namesWarned)
	for _, u := range left[:min(len(left), namesWarned)] {
		names = append(names, u.short)
	}
	more := ""
	if n := len(left) - len(names); n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	api.Warn(ctx, fmt.Sprintf("%d of the stored %s cannot be read and are left out: %s%s; get one of them to learn why and what to do",
		len(left), k.Resource, strings.Join(names, ", "), more))
}

// deleteUnreadable deletes an unreadable object. Its finalizers and grace period are unknown and do
// not delay the deletion. A request with a UID precondition is rejected, because the UID is
// unknown.
func (w *write) deleteUnreadable(ctx context.Context, u *Unreadable) (runtime.Object, bool, error) {
	stub := u.stub()
	if p := w.req.Delete.Preconditions; p != nil {
		if p.UID != nil {
			return nil, false, u.error()
		}
		if err := checkPreconditions(w.req, stub); err != nil {
			return nil, false, err
		}
	}
	ctx, cancel := w.r.bounded(ctx)
	defer cancel()
	if err := w.judge(ctx, w.begin(api.Delete, nil, stub)); err != nil {
		return nil, false, err
	}
	p := plan{w: w}
	defer p.release()
	p.own(raftstore.DeleteAt(u.Key, u.Revision))
	p.add(w.r.releaseAll(u.Key)...)
	p.companions(stub, false)
	if err := p.complete(ctx); err != nil {
		return nil, false, statusError(err, describe(w.req))
	}
	if w.dryRun {
		return stub, true, nil
	}
	rev, err := p.commit(ctx, nil)
	var conflict *raftstore.ConflictError
	if errors.As(err, &conflict) {
		if err := w.r.cache.waitFor(ctx, conflict.At); err != nil {
			return nil, false, statusError(err, describe(w.req))
		}
		return nil, false, apierrors.NewConflict(w.req.Kind.GroupResource(), w.req.Name, errModified)
	}
	if err != nil {
		return nil, false, statusError(err, describe(w.req))
	}
	w.r.log.Warn("an unreadable object was deleted", "key", u.Key, "user", w.req.User.Name)
	return at(u.Kind, stub, rev), true, nil
}

// releaseAll returns the operations that delete all reservations of a holder, given by its key.
func (r *Registry) releaseAll(holder string) []raftstore.Op {
	var ops []raftstore.Op
	r.cache.reserved.Load().Scan(func(res, by string) bool {
		if by == holder {
			ops = append(ops, raftstore.Delete(reservationsRoot+res))
		}
		return true
	})
	return ops
}
