package registry

import (
	"bytes"
	"hash/maphash"
	"runtime"
	"slices"
	"sync"
	"weak"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// What managedFields say of objects that are made alike is the same. In memory they share it; on disk each entry is
// written in a form that is a tenth as long, once every replica can read that.
//
// The forms on disk are told apart by fieldsType: "FieldsV1" is Kubernetes' own, "K1" is form 1. Both are read, always.
// Which is written is a decision of the whole cluster (WithShortFields; its feature level): a release that does not know
// a form would take the entry for nobody's when it writes the object. So forms are read one release before any is written, and both are
// written only while all replicas are of a release that reads them. An entry in a form of a later release, which a
// replica finds after it was set back, is not shown, counts for nobody, and is stored again with the object as it is.

// A pod of one container, made by a user, takes 461 bytes in the store instead of 1,015, of which its set of fields is 77
// instead of 622; the set is written in 4 µs and read in 0.6 µs (BenchmarkFieldForm, BenchmarkPodsInCache). Marking an
// entry as "all of it" would save the 77 too, but then what it says would follow from the defaults, the schema and the
// admission of the release that reads it.

const (
	fieldsV1  = "FieldsV1"
	fieldsKV1 = "K1"
)

// ownForm says that a fieldsType is of a form of ours: of this release, or of a later one.
func ownForm(fieldsType string) bool {
	if len(fieldsType) < 2 || len(fieldsType) > 8 || fieldsType[0] != 'K' {
		return false
	}
	for _, c := range []byte(fieldsType[1:]) {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}

const maxManagers = 1024 // of which names are shared

// fieldShare gives objects the sets of fields that others have too. It keeps none of them alive.
type fieldShare struct {
	seed maphash.Seed

	mu       sync.Mutex
	sets     map[uint64]weak.Pointer[metav1.FieldsV1] // by hash
	managers map[string]string
	scratch  []byte
}

func newFieldShare() *fieldShare {
	return &fieldShare{seed: maphash.MakeSeed(), sets: make(map[uint64]weak.Pointer[metav1.FieldsV1]), managers: make(map[string]string)}
}

// shareFields brings the managedFields of an object that was just decoded into the form of FieldsV1, shared with
// other objects. What is in a form that cannot be read is taken out of the object and returned.
func (s *fieldShare) shareFields(obj api.Object) (unknown []metav1.ManagedFieldsEntry) {
	fields := obj.GetManagedFields()
	if len(fields) == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range fields {
		e := &fields[i]
		switch {
		case e.FieldsType == fieldsV1 && e.FieldsV1 != nil:
			e.FieldsV1 = s.set(e.FieldsV1.Raw, e.FieldsV1)
		case e.FieldsType == fieldsKV1 && e.FieldsV1 != nil:
			set, err := unpackFields(s.scratch[:0], e.FieldsV1.Raw)
			if err != nil {
				unknown = append(unknown, *e)
				continue
			}
			s.scratch = set
			e.FieldsV1 = s.set(set, nil)
		case ownForm(e.FieldsType):
			unknown = append(unknown, *e)
			continue
		default:
			continue
		}
		e.FieldsType, e.Manager = fieldsV1, s.manager(e.Manager)
		for _, op := range []metav1.ManagedFieldsOperationType{metav1.ManagedFieldsOperationUpdate, metav1.ManagedFieldsOperationApply} {
			if e.Operation == op {
				e.Operation = op
			}
		}
		if i > 0 && fields[i-1].APIVersion == e.APIVersion {
			e.APIVersion = fields[i-1].APIVersion
		}
	}
	if cap(s.scratch) > 64<<10 {
		s.scratch = nil
	}
	if unknown != nil {
		obj.SetManagedFields(slices.DeleteFunc(fields, func(e metav1.ManagedFieldsEntry) bool { return ownForm(e.FieldsType) }))
	}
	return unknown
}

// set returns the set that others have, or this one, in own or in a struct of its own. s.mu is held.
func (s *fieldShare) set(raw []byte, own *metav1.FieldsV1) *metav1.FieldsV1 {
	hash := maphash.Bytes(s.seed, raw)
	shared := s.sets[hash].Value()
	if shared != nil && bytes.Equal(shared.Raw, raw) {
		return shared
	}
	if own == nil {
		own = &metav1.FieldsV1{Raw: bytes.Clone(raw)}
	}
	if shared == nil { // or two have one hash
		s.sets[hash] = weak.Make(own)
		runtime.AddCleanup(own, s.forget, hash)
	}
	return own
}

// forget is called some time after nobody has a set any more.
func (s *fieldShare) forget(hash uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w, ok := s.sets[hash]; ok && w.Value() == nil {
		delete(s.sets, hash)
	}
}

// manager returns the name with the bytes of its first use. s.mu is held.
func (s *fieldShare) manager(name string) string {
	if shared, ok := s.managers[name]; ok {
		return shared
	}
	if len(s.managers) < maxManagers {
		s.managers[name] = name
	}
	return name
}

// storedFields returns what is stored as the managedFields of an object: in short forms if that is wanted, and with
// what stood there in forms that cannot be read.
func storedFields(fields []metav1.ManagedFieldsEntry, short bool, unknown []metav1.ManagedFieldsEntry) []metav1.ManagedFieldsEntry {
	foreign := slices.ContainsFunc(fields, func(e metav1.ManagedFieldsEntry) bool { return ownForm(e.FieldsType) })
	if len(unknown) == 0 && !foreign && (!short || len(fields) == 0) {
		return fields
	}
	out := make([]metav1.ManagedFieldsEntry, 0, len(fields)+len(unknown))
	for _, e := range fields {
		if ownForm(e.FieldsType) {
			continue // a client's: our forms are not for them to write
		}
		if short && e.FieldsType == fieldsV1 && e.FieldsV1 != nil {
			if text, ok := packFields(nil, e.FieldsV1.Raw); ok && len(text) < len(e.FieldsV1.Raw) {
				e.FieldsType, e.FieldsV1 = fieldsKV1, &metav1.FieldsV1{Raw: text}
			}
		}
		out = append(out, e)
	}
	return append(out, unknown...)
}

// encodeFields is the stored form of an object of the hub version, with its managedFields as they are stored.
func (w *write) encodeFields(obj api.Object, stored *entry) ([]byte, error) {
	var unknown []metav1.ManagedFieldsEntry
	if stored != nil && stored.unknown != nil {
		unknown = *stored.unknown
	}
	shown := obj.GetManagedFields()
	obj.SetManagedFields(storedFields(shown, w.r.shortFields(), unknown))
	defer obj.SetManagedFields(shown)
	return w.codec.encode(obj)
}
