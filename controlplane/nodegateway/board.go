package nodegateway

import (
	"container/list"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// board is a fan-out log of objects that every node gets. It holds the last change of each object,
// in the order of changes, already encoded. A session keeps only its position in the log, so its
// memory does not grow with the cluster.
//
// Two logs exist. Sessions read that of Services and EndpointSlices at once, and that of nodes in
// batches (waves).
type board struct {
	most int // maximum number of deletion records

	mu    sync.Mutex
	at    uint64 // position of the newest record; the first is 1
	posts map[key]*list.Element
	order *list.List // of post, oldest change first
	gone  list.List  // elements of order that are deletions, oldest first
	floor uint64     // position of the newest deletion that was dropped; readers behind it must resynchronise
	peers digest     // digest of all nodes in the log
	nodes int        // number of nodes in the log
}

// notice is an object in the form in which nodes get it.
type notice struct {
	key      key
	uid      types.UID
	revision uint64
	wire     []byte // a field of ObjectSet with its tag; nil after deletion. Shared: do not modify
	digest   digest // set for peers only
}

// post is the log record of an object's last change.
type post struct {
	notice
	at   uint64
	gone *list.Element // element of board.gone; nil while the object exists
}

// mostGone bounds the deletion records of a board. It is larger than the number of deletions
// between two reads of any active session.
const mostGone = 16 << 10

func newBoard(most int) *board {
	return &board{most: most, posts: make(map[key]*list.Element), order: list.New()}
}

// put records a change of an object or, if n.wire is nil, its deletion.
func (b *board) put(n notice) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.at++
	if e := b.posts[n.key]; e != nil {
		b.remove(e)
	}
	p := &post{notice: n, at: b.at}
	e := b.order.PushBack(p)
	b.posts[n.key] = e
	if n.wire != nil {
		b.count(p, 1)
		return
	}
	p.gone = b.gone.PushBack(e)
	if b.gone.Len() > b.most {
		oldest := b.gone.Front().Value.(*list.Element)
		b.floor = oldest.Value.(*post).at
		b.remove(oldest)
	}
}

// remove drops a record from the log. The lock must be held.
func (b *board) remove(e *list.Element) {
	p := b.order.Remove(e).(*post)
	delete(b.posts, p.key)
	if p.gone != nil {
		b.gone.Remove(p.gone)
	} else {
		b.count(p, -1)
	}
}

// count adds or removes a node in the digest and the node count. The lock must be held.
func (b *board) count(p *post, by int) {
	if p.key.kind != kindNode {
		return
	}
	b.nodes += by
	if by > 0 {
		b.peers = b.peers.plus(p.digest)
	} else {
		b.peers = b.peers.minus(p.digest)
	}
}

// peersOf returns the digest of all nodes except the given one. The lock must be held.
func (b *board) peersOf(node string) digest {
	e := b.posts[key{kind: kindNode, name: node}]
	if e == nil || e.Value.(*post).gone != nil {
		return b.peers
	}
	return b.peers.minus(e.Value.(*post).digest)
}

// size returns the number of nodes in the log.
func (b *board) size() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.nodes
}

// reader describes one read of a board.
type reader struct {
	at    uint64  // position of the last read; 0: send the existing objects without deletions
	node  string  // name of the reading node; it is excluded from its own peers
	holds *digest // digest of the peers that the agent holds, or nil; used on the first read only
	take  func(*notice)
}

// read calls r.take for every change after r.at, newest first, and returns the new position. r.take
// must not block. held is true if the reader already holds all peers; take is not called for them.
// It returns errBehind if deletions after r.at were already dropped.
func (b *board) read(r reader) (now uint64, held bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.at > 0 && r.at < b.floor {
		return 0, false, errBehind
	}
	if held = r.at == 0 && r.holds != nil && *r.holds == b.peersOf(r.node); held && b.nodes == len(b.posts)-b.gone.Len() {
		return b.at, true, nil // fast path: thousands of agents may reconnect at once
	}
	for e := b.order.Back(); e != nil; e = e.Prev() {
		p := e.Value.(*post)
		if p.at <= r.at {
			break
		}
		if r.at == 0 && (p.gone != nil || held && p.key.kind == kindNode) {
			continue
		}
		r.take(&p.notice)
	}
	return b.at, held, nil
}

var errBehind = status.Error(codes.Aborted, "fleet: the agent has not read for so long that it must begin anew")
