package assign

import (
	"container/list"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// changeLog is a fan-out log of objects that every node gets. It contains the last change of each
// object, in the order of changes, already encoded. A session stores only its position in the log,
// so its memory does not grow with the cluster.
//
// There are two logs. Sessions read the log of Services and EndpointSlices immediately after a
// change, and the log of nodes in batches (see batches).
type changeLog struct {
	maxDeletions int // maximum number of records of deletions

	mu          sync.Mutex
	position    uint64 // position of the newest record; the first record has 1
	records     map[key]*list.Element
	order       *list.List // list of *logRecord, oldest change first
	deletions   list.List  // elements of order that are deletions, oldest first
	droppedUpTo uint64     // position of the newest deletion that was dropped; readers before it must resynchronize
	peers       digest     // digest of all nodes in the log
	nodes       int        // number of nodes in the log
}

// logEntry is an object with the encoding that is sent to nodes.
type logEntry struct {
	key      key
	uid      types.UID
	revision uint64
	encoded  []byte // encoded field of ObjectSet with its tag; nil after a deletion; shared, must not be modified
	digest   digest // only for peers
}

// logRecord is the record of an object's last change.
type logRecord struct {
	logEntry
	position uint64
	deletion *list.Element // element of changeLog.deletions; nil while the object exists
}

// maxDeletionRecords is the maximum number of records of deletions in a log. It is larger than the
// number of deletions between two reads of any active session.
const maxDeletionRecords = 16 << 10

func newChangeLog(maxDeletions int) *changeLog {
	return &changeLog{maxDeletions: maxDeletions, records: make(map[key]*list.Element), order: list.New()}
}

// recordChange records a change of an object, or its deletion if entry.encoded is nil.
func (l *changeLog) recordChange(entry logEntry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.position++
	if e := l.records[entry.key]; e != nil {
		l.dropRecord(e)
	}
	record := &logRecord{logEntry: entry, position: l.position}
	e := l.order.PushBack(record)
	l.records[entry.key] = e
	if entry.encoded != nil {
		l.countNode(record, 1)
		return
	}
	record.deletion = l.deletions.PushBack(e)
	if l.deletions.Len() > l.maxDeletions {
		oldest := l.deletions.Front().Value.(*list.Element)
		l.droppedUpTo = oldest.Value.(*logRecord).position
		l.dropRecord(oldest)
	}
}

// dropRecord drops a record from the log. The lock must be held.
func (l *changeLog) dropRecord(e *list.Element) {
	record := l.order.Remove(e).(*logRecord)
	delete(l.records, record.key)
	if record.deletion != nil {
		l.deletions.Remove(record.deletion)
	} else {
		l.countNode(record, -1)
	}
}

// countNode adds a node to the digest and the node count if difference is 1, or removes it if
// difference is -1. The lock must be held.
func (l *changeLog) countNode(record *logRecord, difference int) {
	if record.key.kind != kindNode {
		return
	}
	l.nodes += difference
	if difference > 0 {
		l.peers = l.peers.addDigest(record.digest)
	} else {
		l.peers = l.peers.subtractDigest(record.digest)
	}
}

// peerDigest returns the digest of all nodes except node. The lock must be held.
func (l *changeLog) peerDigest(node string) digest {
	e := l.records[key{kind: kindNode, name: node}]
	if e == nil || e.Value.(*logRecord).deletion != nil {
		return l.peers
	}
	return l.peers.subtractDigest(e.Value.(*logRecord).digest)
}

// nodeCount returns the number of nodes in the log.
func (l *changeLog) nodeCount() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.nodes
}

// readRequest describes one read of a log by a session.
type readRequest struct {
	at        uint64  // position of the last read; 0 reads all objects and no deletions
	node      string  // name of the session's node, which is not one of its own peers
	heldPeers *digest // digest of the peers that the agent holds, or nil; used only if at is 0
	visit     func(*logEntry)
}

// readSince calls r.visit for every change after the position r.at, newest first, and returns the
// new position. r.visit must not block. held is true if the agent already holds all peers; r.visit
// is then not called for peers. readSince returns errBehind if deletions after r.at were already
// dropped.
func (l *changeLog) readSince(r readRequest) (position uint64, held bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.at > 0 && r.at < l.droppedUpTo {
		return 0, false, errBehind
	}
	if held = r.at == 0 && r.heldPeers != nil && *r.heldPeers == l.peerDigest(r.node); held &&
		l.nodes == len(l.records)-l.deletions.Len() {
		return l.position, true, nil // fast path, because thousands of agents may reconnect at the same time
	}
	for e := l.order.Back(); e != nil; e = e.Prev() {
		record := e.Value.(*logRecord)
		if record.position <= r.at {
			break
		}
		if r.at == 0 && (record.deletion != nil || held && record.key.kind == kindNode) {
			continue
		}
		r.visit(&record.logEntry)
	}
	return l.position, held, nil
}

var errBehind = status.Error(codes.Aborted,
	"fleet: the agent has not read for so long that it must start a new session")
