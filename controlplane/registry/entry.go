package registry

import (
	"strconv"
	"sync/atomic"

	"github.com/tidwall/btree"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// entry is one version of one object. It never changes, apart from its encodings.
type entry struct {
	key   string     // below the kind's prefix
	obj   api.Object // with apiVersion, kind and resourceVersion
	rev   raftstore.Revision
	value []byte // as stored; belongs to the store

	encoded [mediaTypes]atomic.Pointer[[]byte]
}

// snapshot is the state of one kind. It never changes.
type snapshot struct {
	objects    *btree.Map[string, *entry]
	unreadable unreadables
	changed    raftstore.Revision // the newest change of this kind
}

// event is one change of one object.
type event struct {
	rev raftstore.Revision
	// cur is the object after the change. For a deletion it is the last state
	// with the resourceVersion of the deletion.
	cur     *entry
	prev    *entry // before the change; nil when it was created
	deleted bool
}

// size is what the event is counted as in the history's byte limit.
func (e *event) size() int64 {
	n := len(e.cur.value)
	if e.prev != nil {
		n += len(e.prev.value)
	}
	return int64(n) + 512
}

// at returns a version of obj at rev: same contents, own struct.
func at(k *api.Kind, obj api.Object, rev raftstore.Revision) api.Object {
	out := shallow(obj)
	k.SetTypeMeta(out)
	out.SetResourceVersion(formatRevision(rev))
	return out
}

func formatRevision(rev raftstore.Revision) string { return strconv.FormatUint(uint64(rev), 10) }
