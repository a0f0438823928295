package fieldowners

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

// Objects that are created in the same way have equal field sets in managedFields. In memory, such
// objects share the sets. On disk, each set is written in a compact encoding, which takes a tenth
// of the bytes, if every replica can read it.
//
// fieldsType distinguishes the encodings on disk: "FieldsV1" is the encoding of Kubernetes, "K1"
// the first compact encoding. Every release reads both. The feature level of the cluster decides
// which encoding is written (WithShortFields). A release that does not know an encoding would
// discard the entry's ownership when it writes the object. So each encoding is readable one release
// before it is written, and it is written only while all replicas can read it. After a downgrade, a
// replica may find an entry in an encoding of a later release. Such an entry is not returned to
// clients, owns nothing, and is stored again unchanged with the object.

// Measured: a pod of one container, created by a user, takes 461 bytes in the store instead of
// 1,015. Its field set takes 77 bytes instead of 622. Encoding takes 4 µs and decoding 0.6 µs
// (BenchmarkFieldForm, BenchmarkPodsInCache). An entry with the meaning "all fields" would save the
// 77 bytes too. But its meaning would depend on the defaults, the schema and the admission of the
// reading release.

const (
	typeFieldsV1 = "FieldsV1"
	typeCompact  = "K1"
)

// isCompactType reports whether a fieldsType ("K" and a number) is that of a compact encoding, of
// this release or a later one.
func isCompactType(fieldsType string) bool {
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

// maxManagers is the maximum number of manager names that a SetShare shares.
const maxManagers = 1024

// SetShare deduplicates the field sets in the managedFields of decoded objects, so that objects
// with equal sets share memory. It holds only weak pointers to the sets. It is safe for concurrent
// use.
type SetShare struct {
	seed maphash.Seed

	mu       sync.Mutex
	sets     map[uint64]weak.Pointer[metav1.FieldsV1] // by hash
	managers map[string]string
	scratch  []byte
}

// NewSetShare returns an empty SetShare.
func NewSetShare() *SetShare {
	return &SetShare{seed: maphash.MakeSeed(), sets: make(map[uint64]weak.Pointer[metav1.FieldsV1]),
		managers: make(map[string]string)}
}

// ShareFields converts the managedFields of a decoded object to FieldsV1. It replaces each field
// set with the equal set of an earlier object, if such a set exists. It removes entries in an
// encoding that this release does not know from the object, and returns them.
func (s *SetShare) ShareFields(obj api.Object) (unknown []metav1.ManagedFieldsEntry) {
	fields := obj.GetManagedFields()
	if len(fields) == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range fields {
		e := &fields[i]
		switch {
		case e.FieldsType == typeFieldsV1 && e.FieldsV1 != nil:
			e.FieldsV1 = s.sharedSet(e.FieldsV1.Raw, e.FieldsV1)
		case e.FieldsType == typeCompact && e.FieldsV1 != nil:
			set, err := decodeSet(s.scratch[:0], e.FieldsV1.Raw)
			if err != nil {
				unknown = append(unknown, *e)
				continue
			}
			s.scratch = set
			e.FieldsV1 = s.sharedSet(set, nil)
		case isCompactType(e.FieldsType):
			unknown = append(unknown, *e)
			continue
		default:
			continue
		}
		e.FieldsType, e.Manager = typeFieldsV1, s.sharedManager(e.Manager)
		for _, op := range []metav1.ManagedFieldsOperationType{metav1.ManagedFieldsOperationUpdate,
			metav1.ManagedFieldsOperationApply} {
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
		obj.SetManagedFields(slices.DeleteFunc(fields, func(e metav1.ManagedFieldsEntry) bool {
			return isCompactType(e.FieldsType)
		}))
	}
	return unknown
}

// sharedSet returns the shared field set with the given bytes. If no such set exists, it shares and
// returns owned, or a new set if owned is nil. The caller holds s.mu.
func (s *SetShare) sharedSet(raw []byte, owned *metav1.FieldsV1) *metav1.FieldsV1 {
	hash := maphash.Bytes(s.seed, raw)
	shared := s.sets[hash].Value()
	if shared != nil && bytes.Equal(shared.Raw, raw) {
		return shared
	}
	if owned == nil {
		owned = &metav1.FieldsV1{Raw: bytes.Clone(raw)}
	}
	if shared == nil { // otherwise two sets have the same hash
		s.sets[hash] = weak.Make(owned)
		runtime.AddCleanup(owned, s.removeCollected, hash)
	}
	return owned
}

// removeCollected removes the map entry of a field set after the set was garbage collected.
func (s *SetShare) removeCollected(hash uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w, ok := s.sets[hash]; ok && w.Value() == nil {
		delete(s.sets, hash)
	}
}

// sharedManager returns a manager name that is equal to name, so that all objects share one string.
// It shares at most maxManagers names and returns other names unchanged. The caller holds s.mu.
func (s *SetShare) sharedManager(name string) string {
	if shared, ok := s.managers[name]; ok {
		return shared
	}
	if len(s.managers) < maxManagers {
		s.managers[name] = name
	}
	return name
}

// StoredEntries returns the managedFields entries to store with an object. If compact is true,
// field sets are written in the compact encoding, unless that is longer. unknown are the entries
// that ShareFields removed from the object; they are added unchanged.
func StoredEntries(
	fields []metav1.ManagedFieldsEntry, compact bool, unknown []metav1.ManagedFieldsEntry,
) []metav1.ManagedFieldsEntry {
	clientForm := slices.ContainsFunc(fields, func(e metav1.ManagedFieldsEntry) bool {
		return isCompactType(e.FieldsType)
	})
	if len(unknown) == 0 && !clientForm && (!compact || len(fields) == 0) {
		return fields
	}
	out := make([]metav1.ManagedFieldsEntry, 0, len(fields)+len(unknown))
	for _, e := range fields {
		if isCompactType(e.FieldsType) {
			continue // from a client, which must not write compact encodings
		}
		if compact && e.FieldsType == typeFieldsV1 && e.FieldsV1 != nil {
			if text, ok := encodeSet(nil, e.FieldsV1.Raw); ok && len(text) < len(e.FieldsV1.Raw) {
				e.FieldsType, e.FieldsV1 = typeCompact, &metav1.FieldsV1{Raw: text}
			}
		}
		out = append(out, e)
	}
	return append(out, unknown...)
}
