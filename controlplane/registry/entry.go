package registry

import (
	"strconv"
	"sync/atomic"
	"time"

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
	at      time.Time // when the cache took it in
}

// An object takes several times of memory what it takes in the store: so much about
// for each of its bytes, and so much besides.
const (
	decodedTimes = 5
	decodedBytes = 1 << 10
)

// size is about what the event takes, which is what the history's limit counts. The
// version before is that of an earlier event, or was loaded with the cache.
func (e *event) size() int64 {
	return decodedTimes*int64(len(e.cur.value)) + decodedBytes
}

// at returns a version of obj at rev: same contents, own struct.
func at(k *api.Kind, obj api.Object, rev raftstore.Revision) api.Object {
	out := shallow(obj)
	k.SetTypeMeta(out)
	out.SetResourceVersion(formatRevision(rev))
	return out
}

func formatRevision(rev raftstore.Revision) string { return strconv.FormatUint(uint64(rev), 10) }
