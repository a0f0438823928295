package registry

import (
	"strconv"
	"sync/atomic"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// entry is one state of one object. It is immutable, except for its cached encodings and forms.
type entry struct {
	key     string       // relative to the storage's prefix
	obj     api.Object   // with apiVersion, kind and resourceVersion
	light   bool         // obj is in the light form
	version *api.Version // version of obj: the storage's hub, except for some old objects
	rev     raftstore.Revision
	value   []byte                       // as stored; owned by the store
	unknown *[]metav1.ManagedFieldsEntry // managedFields in unknown forms; nil = none

	encoded encoded
	forms   atomic.Pointer[[]*form]
	moment  *moment // nil until an event refers to the entry; used by cache.run only
}

// snapshot is an immutable state of one storage.
type snapshot struct {
	objects
	unreadable unreadables
	changed    raftstore.Revision // revision of the newest change
}

// at returns an entry for the deletion of an object at rev: a copy of its last state with that
// revision.
func (e *entry) at(rev raftstore.Revision) *entry {
	obj := e.version.Shallow(e.obj)
	obj.SetResourceVersion(formatRevision(rev))
	return &entry{key: e.key, obj: obj, light: e.light, version: e.version, rev: rev, value: e.value, unknown: e.unknown}
}

// at returns a shallow copy of an object of the kind with the resourceVersion rev.
func at(k *api.Kind, obj api.Object, rev raftstore.Revision) api.Object {
	out := k.Ops.Shallow(obj)
	k.SetTypeMeta(out)
	out.SetResourceVersion(formatRevision(rev))
	return out
}

func formatRevision(rev raftstore.Revision) string { return strconv.FormatUint(uint64(rev), 10) }
