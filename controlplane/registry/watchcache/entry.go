package watchcache

import (
	"sync/atomic"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
)

// Entry is one state of one object: the decoded object and its stored bytes. It is immutable,
// except for its cached encodings and conversions.
type Entry struct {
	Object   api.Object // with apiVersion, kind and resourceVersion
	Revision raftstore.Revision
	Value    []byte                       // as stored; the store owns the bytes
	Unknown  *[]metav1.ManagedFieldsEntry // managedFields in encodings that this release does not know; nil = none

	key     string       // relative to the storage's prefix
	light   bool         // Object is in the light form, in which some fields are still encoded (see light.go)
	version *api.Version // version of Object: the storage's hub, except for some old objects

	encoded          encoded
	convertedObjects atomic.Pointer[[]*convertedObject]
	state            *objectState // nil until an event refers to the entry; used by Cache.Run only
}

// snapshot is an immutable state of all objects of one storage at one revision.
type snapshot struct {
	objects
	unreadable unreadables
	changed    raftstore.Revision // revision of the newest change
}

// atRevision returns a copy of the entry with the revision rev, at which the object was deleted.
func (e *Entry) atRevision(rev raftstore.Revision) *Entry {
	obj := e.version.Shallow(e.Object)
	obj.SetResourceVersion(storedform.FormatRevision(rev))
	return &Entry{key: e.key, Object: obj, light: e.light, version: e.version, Revision: rev, Value: e.Value,
		Unknown: e.Unknown}
}

// WithRevision returns a shallow copy of an object of the kind with the resourceVersion rev.
func WithRevision(k *api.Kind, obj api.Object, rev raftstore.Revision) api.Object {
	out := k.Type.Ops.Shallow(obj)
	k.SetTypeMeta(out)
	out.SetResourceVersion(storedform.FormatRevision(rev))
	return out
}
