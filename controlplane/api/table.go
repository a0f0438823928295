package api

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Kinds is the registry of the served kinds. Kinds can be added and removed while the process runs.
// Use a Table for several lookups that must be consistent. Wait for Table.Changed to observe
// changes. Kinds is safe for concurrent use.
type Kinds struct {
	writing sync.Mutex
	current atomic.Pointer[Table]
	// occupied changes only while the mutex writing is held.
	occupied atomic.Pointer[Occupied]
}

// NewKinds returns a registry of the given kinds. It panics in the cases in which Change returns an
// error, because that is a programming error here.
func NewKinds(kinds ...*Kind) *Kinds {
	ks := &Kinds{}
	t, err := newTable(kinds)
	if err != nil {
		panic("api: " + err.Error())
	}
	ks.current.Store(t)
	ks.occupied.Store(&Occupied{changed: make(chan struct{})})
	return ks
}

// Table returns the current table of kinds.
func (ks *Kinds) Table() *Table { return ks.current.Load() }

// Register adds the kinds. On an error it adds none of them.
func (ks *Kinds) Register(added ...*Kind) error { return ks.Change(nil, added) }

// Drop removes the kinds. On an error it removes none of them.
func (ks *Kinds) Drop(dropped ...*Kind) error { return ks.Change(dropped, nil) }

// Change removes and adds kinds in one step, so that a kind can be replaced without an interval in
// which it is missing. On an error it changes nothing. The objects of a storage remain stored when
// no kind serves them.
func (ks *Kinds) Change(dropped, added []*Kind) error {
	ks.writing.Lock()
	defer ks.writing.Unlock()
	previous := ks.current.Load()
	var list []*Kind
	for _, k := range previous.list {
		if !slices.Contains(dropped, k) {
			list = append(list, k)
		}
	}
	if len(previous.list)-len(list) != len(dropped) {
		return errors.New("a kind to be dropped is not served, or is listed twice")
	}
	t, err := newTable(append(list, added...))
	if err != nil {
		return err
	}
	ks.current.Store(t)
	if len(dropped) > 0 {
		ks.dropUnservedStorages(t)
	}
	close(previous.changed)
	return nil
}

// All returns the current kinds in the order of their registration.
func (ks *Kinds) All() []*Kind { return ks.Table().All() }

// ByResource returns the kind of a group, version and resource, or nil.
func (ks *Kinds) ByResource(gvr schema.GroupVersionResource) *Kind { return ks.Table().ByResource(gvr) }

// ByGVK returns the kind of a group, version and kind, or nil.
func (ks *Kinds) ByGVK(gvk schema.GroupVersionKind) *Kind { return ks.Table().ByGVK(gvk) }

// ByType returns the kind of a Go type, given a value or a (possibly nil) pointer such as
// (*corev1.Pod)(nil). It returns nil if no kind, or more than one, has the type.
func (ks *Kinds) ByType(obj any) *Kind { return ks.Table().ByType(obj) }

// Table is an immutable table of kinds.
type Table struct {
	list   []*Kind
	stored []*Kind
	byGVR  map[schema.GroupVersionResource]*Kind
	byGVK  map[schema.GroupVersionKind]*Kind
	// byType maps the struct type (corev1.Pod) of each typed kind to the kind.
	byType  map[reflect.Type]*Kind
	changed chan struct{}
}

// All returns the kinds in the order of their registration.
func (t *Table) All() []*Kind { return t.list }

// Visible returns the kinds that are not hidden from clients.
func (t *Table) Visible() []*Kind {
	if !slices.ContainsFunc(t.list, func(k *Kind) bool { return k.Serving.Hidden }) {
		return t.list
	}
	return slices.DeleteFunc(slices.Clone(t.list), func(k *Kind) bool { return k.Serving.Hidden })
}

// Stored returns one kind for each storage, so that every stored object belongs to exactly one of
// them. It is the kind in the hub version if that is served, otherwise the first registered kind.
func (t *Table) Stored() []*Kind { return t.stored }

// Changed returns a channel that is closed when a newer Table exists.
func (t *Table) Changed() <-chan struct{} { return t.changed }

// Has reports whether exactly this Kind is served, and not another Kind for the same resource.
func (t *Table) Has(kind *Kind) bool { return kind != nil && t.byGVR[kind.GVR()] == kind }

// ByResource returns the kind of a group, version and resource, or nil.
func (t *Table) ByResource(gvr schema.GroupVersionResource) *Kind { return t.byGVR[gvr] }

// ByGVK returns the kind of a group, version and kind, or nil.
func (t *Table) ByGVK(gvk schema.GroupVersionKind) *Kind { return t.byGVK[gvk] }

// ByType returns the kind of obj's Go type: see Kinds.ByType.
func (t *Table) ByType(obj any) *Kind {
	if obj == nil {
		return nil
	}
	return t.byType[baseType(reflect.TypeOf(obj))]
}

func baseType(t reflect.Type) reflect.Type {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return t
}

func newTable(list []*Kind) (*Table, error) {
	t := &Table{
		list:    list,
		byGVR:   make(map[schema.GroupVersionResource]*Kind, len(list)),
		byGVK:   make(map[schema.GroupVersionKind]*Kind, len(list)),
		byType:  make(map[reflect.Type]*Kind, len(list)),
		changed: make(chan struct{}),
	}
	for _, k := range list {
		if err := t.addKind(k); err != nil {
			return nil, err
		}
	}
	return t, t.addStorages()
}

func (t *Table) addKind(k *Kind) error {
	if t.byGVR[k.GVR()] != nil || t.byGVK[k.GVK] != nil {
		return fmt.Errorf("%s (%s) is served already", k.GVK, k.Resource)
	}
	t.byGVR[k.GVR()], t.byGVK[k.GVK] = k, k
	if !k.Type.Typed {
		return nil
	}
	of := baseType(reflect.TypeOf(k.Type.New()))
	if other := t.byType[of]; other != nil {
		return fmt.Errorf("%s and %s both claim Go type %s", other.GVK, k.GVK, of)
	}
	t.byType[of] = k
	return nil
}

// addStorages selects the kind for each storage (see Stored). It returns an error if the prefix of
// one storage equals the prefix of another storage or starts with it.
func (t *Table) addStorages() error {
	at := make(map[*Storage]int, len(t.list))
	prefixes := make(map[string]*Kind, len(t.list))
	for _, k := range t.list {
		if err := k.checkStorage(); err != nil {
			return err
		}
		if k.Serving.Virtual {
			continue
		}
		i, known := at[k.Storage]
		switch {
		case !known:
			if other := prefixes[k.Storage.Prefix]; other != nil {
				return fmt.Errorf("%s and %s are both stored under %s", other.GVK, k.GVK, k.Storage.Prefix)
			}
			prefixes[k.Storage.Prefix] = k
			at[k.Storage] = len(t.stored)
			t.stored = append(t.stored, k)
		case k.GVK == k.Storage.Hub.GVK:
			t.stored[i] = k
		}
	}
	for prefix, k := range prefixes {
		// "/registry/a/b/" is inside "/registry/a/".
		outer := prefix[:strings.LastIndexByte(prefix[:len(prefix)-1], '/')+1]
		if other := prefixes[outer]; other != nil {
			return fmt.Errorf("the storage of %s would be inside the storage of %s (%s)", k.GVK, other.GVK, prefix)
		}
	}
	return nil
}

// StorageRoot is the common prefix of all storages. A storage's prefix has one or two more path
// segments.
const StorageRoot = "/registry/"

func (k *Kind) checkStorage() error {
	s := k.Storage
	switch {
	case k.Serving.Virtual:
		return nil
	case s == nil:
		return fmt.Errorf("%s has no storage", k.GVK)
	case k.Type.Ops.Shallow == nil || k.Type.Ops.Assign == nil || k.Type.Ops.List == nil || s.Hub.New == nil ||
		s.Hub.Shallow == nil:
		return fmt.Errorf("%s lacks operations of its Go type", k.GVK)
	case k.Namespaced != s.Namespaced:
		return fmt.Errorf("%s and its storage differ in whether objects have a namespace", k.GVK)
	case k.GVK != s.Hub.GVK && (k.Conversion == nil || k.Conversion.From == nil || k.Conversion.To == nil):
		return fmt.Errorf("%s has no conversion to %s, in which it is stored", k.GVK, s.Hub.GVK)
	}
	parts := strings.Split(strings.TrimPrefix(s.Prefix, StorageRoot), "/")
	if !strings.HasPrefix(s.Prefix, StorageRoot) || len(parts) < 2 || len(parts) > 3 || parts[len(parts)-1] != "" ||
		slices.Contains(parts[:len(parts)-1], "") {
		return fmt.Errorf("%s: %q is not a storage prefix, which has one or two parts below %s and ends in /",
			k.GVK, s.Prefix, StorageRoot)
	}
	return nil
}
