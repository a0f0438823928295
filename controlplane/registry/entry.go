package registry

import (
	"strconv"
	"sync/atomic"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// entry is one state of one object. It never changes, apart from its encodings and forms.
type entry struct {
	key     string       // below the storage's prefix
	obj     api.Object   // with apiVersion, kind and resourceVersion
	light   bool         // obj is in the light form
	version *api.Version // that obj is of: the storage's hub, but for old objects
	rev     raftstore.Revision
	value   []byte                       // as stored; belongs to the store
	unknown *[]metav1.ManagedFieldsEntry // in forms that cannot be read; nil = none

	encoded encoded
	forms   atomic.Pointer[[]*form]
	moment  *moment // nil until an event is about it; the cache's run reads and sets it
}

// snapshot is the state of one storage. It never changes.
type snapshot struct {
	objects
	unreadable unreadables
	changed    raftstore.Revision // the newest change
}

// at returns the entry of an object that was deleted at rev: its last contents, in a struct of its own.
func (e *entry) at(rev raftstore.Revision) *entry {
	obj := e.version.Shallow(e.obj)
	obj.SetResourceVersion(formatRevision(rev))
	return &entry{key: e.key, obj: obj, light: e.light, version: e.version, rev: rev, value: e.value, unknown: e.unknown}
}

// at returns an object of the kind at rev: same contents, own struct.
func at(k *api.Kind, obj api.Object, rev raftstore.Revision) api.Object {
	out := k.Ops.Shallow(obj)
	k.SetTypeMeta(out)
	out.SetResourceVersion(formatRevision(rev))
	return out
}

func formatRevision(rev raftstore.Revision) string { return strconv.FormatUint(uint64(rev), 10) }
