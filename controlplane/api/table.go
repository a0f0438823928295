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

// Kinds is the registry of the served kinds. Kinds are added and removed while the process runs.
// For several lookups that must be consistent, use a Table. To react to changes, wait for
// Table.Changed. Kinds is safe for concurrent use.
type Kinds struct {
	writing sync.Mutex
	now     atomic.Pointer[Table]
	// occupied changes only while writing is held.
	occupied atomic.Pointer[Occupied]
}

// NewKinds returns a registry of these kinds. It panics where Change would return an error, because
// that is a programming error here.
func NewKinds(list ...*Kind) *Kinds {
	ks := &Kinds{}
	t, err := newTable(list)
	if err != nil {
		panic("api: " + err.Error())
	}
	ks.now.Store(t)
	ks.occupied.Store(&Occupied{changed: make(chan struct{})})
	return ks
}

// Table returns the current table of kinds.
func (ks *Kinds) Table() *Table { return ks.now.Load() }

// Register adds all of the kinds, or none and an error.
func (ks *Kinds) Register(add ...*Kind) error { return ks.Change(nil, add) }

// Drop removes all of the kinds, or none and an error.
func (ks *Kinds) Drop(drop ...*Kind) error { return ks.Change(drop, nil) }

// Change removes and adds kinds in one step, or changes nothing and returns an error. One step lets
// a kind be replaced without a moment in which it is missing. The objects of a storage remain
// stored when no kind serves them.
func (ks *Kinds) Change(drop, add []*Kind) error {
	ks.writing.Lock()
	defer ks.writing.Unlock()
	was := ks.now.Load()
	var list []*Kind
	for _, k := range was.list {
		if !slices.Contains(drop, k) {
			list = append(list, k)
		}
	}
	if len(was.list)-len(list) != len(drop) {
		return errors.New("a kind that is to be dropped is not served, or named twice")
	}
	t, err := newTable(append(list, add...))
	if err != nil {
		return err
	}
	ks.now.Store(t)
	if len(drop) > 0 {
		ks.vacate(t)
	}
	close(was.changed)
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
	// byType maps the struct type (corev1.Pod) of the typed kinds.
	byType  map[reflect.Type]*Kind
	changed chan struct{}
}

// All returns the kinds in the order of their registration.
func (t *Table) All() []*Kind { return t.list }

// Shown returns the kinds that clients see.
func (t *Table) Shown() []*Kind {
	if !slices.ContainsFunc(t.list, func(k *Kind) bool { return k.Hidden }) {
		return t.list
	}
	return slices.DeleteFunc(slices.Clone(t.list), func(k *Kind) bool { return k.Hidden })
}

// Stored returns one kind for each storage, so that every stored object belongs to exactly one of
// them. It is the kind of the hub version if that is served, otherwise the first registered kind.
func (t *Table) Stored() []*Kind { return t.stored }

// Changed returns a channel that is closed when there is a newer table.
func (t *Table) Changed() <-chan struct{} { return t.changed }

// Has reports whether exactly k is served, and not another Kind for the same resource.
func (t *Table) Has(k *Kind) bool { return k != nil && t.byGVR[k.GVR()] == k }

// ByResource returns the kind of a group, version and resource, or nil.
func (t *Table) ByResource(gvr schema.GroupVersionResource) *Kind { return t.byGVR[gvr] }

// ByGVK returns the kind of a group, version and kind, or nil.
func (t *Table) ByGVK(gvk schema.GroupVersionKind) *Kind { return t.byGVK[gvk] }

// ByType returns the kind of obj's Go type: see Kinds.ByType.
func (t *Table) ByType(obj any) *Kind {
	if obj == nil {
		return nil
	}
	return t.byType[structType(reflect.TypeOf(obj))]
}

func structType(t reflect.Type) reflect.Type {
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
		if err := t.add(k); err != nil {
			return nil, err
		}
	}
	return t, t.addStorages()
}

func (t *Table) add(k *Kind) error {
	if t.byGVR[k.GVR()] != nil || t.byGVK[k.GVK] != nil {
		return fmt.Errorf("%s (%s) is served already", k.GVK, k.Resource)
	}
	t.byGVR[k.GVR()], t.byGVK[k.GVK] = k, k
	if !k.Typed {
		return nil
	}
	of := structType(reflect.TypeOf(k.New()))
	if other := t.byType[of]; other != nil {
		return fmt.Errorf("%s and %s both claim Go type %s", other.GVK, k.GVK, of)
	}
	t.byType[of] = k
	return nil
}

// addStorages selects the kind for each storage (see Stored). It returns an error if the prefix of
// one storage equals or contains that of another.
func (t *Table) addStorages() error {
	at := make(map[*Storage]int, len(t.list))
	prefixes := make(map[string]*Kind, len(t.list))
	for _, k := range t.list {
		if err := k.checkStorage(); err != nil {
			return err
		}
		if k.Virtual {
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
			return fmt.Errorf("%s would be stored inside of %s (%s)", k.GVK, other.GVK, prefix)
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
	case k.Virtual:
		return nil
	case s == nil:
		return fmt.Errorf("%s has no storage", k.GVK)
	case k.Ops.Shallow == nil || k.Ops.Assign == nil || k.Ops.List == nil || s.Hub.New == nil || s.Hub.Shallow == nil:
		return fmt.Errorf("%s lacks operations of its Go type", k.GVK)
	case k.Namespaced != s.Namespaced:
		return fmt.Errorf("%s and its storage differ in whether there are namespaces", k.GVK)
	case k.GVK != s.Hub.GVK && (k.Conversion == nil || k.Conversion.From == nil || k.Conversion.To == nil):
		return fmt.Errorf("%s has no conversion to %s, in which it is stored", k.GVK, s.Hub.GVK)
	}
	parts := strings.Split(strings.TrimPrefix(s.Prefix, StorageRoot), "/")
	if !strings.HasPrefix(s.Prefix, StorageRoot) || len(parts) < 2 || len(parts) > 3 || parts[len(parts)-1] != "" ||
		slices.Contains(parts[:len(parts)-1], "") {
		return fmt.Errorf("%s: %q is no prefix of a storage, which has one or two parts below %s and ends in /",
			k.GVK, s.Prefix, StorageRoot)
	}
	return nil
}
