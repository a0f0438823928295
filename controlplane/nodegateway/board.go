package nodegateway

import (
	"container/list"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// board says of what every node is told which object changed when, and how it is told: each once, in the order of its last
// change. A session remembers how far it has read and nothing else, so that what it costs does not grow with the cluster.
// There are two: that of Services and EndpointSlices, which sessions read at once, and that of nodes, which they read when a
// wave goes out.
type board struct {
	most int // posts of objects that are gone

	mu    sync.Mutex
	at    uint64 // of the newest post; the first is 1
	posts map[key]*list.Element
	order *list.List // of post, oldest change first
	gone  list.List  // of the elements of order whose objects are gone, the oldest first
	floor uint64     // who has not read so far does not learn of everything that is gone
	peers digest     // of all nodes that are there
	nodes int        // their number
}

// notice is an object as it is told of.
type notice struct {
	key      key
	uid      types.UID
	revision uint64
	wire     []byte // a field of ObjectSet, with its tag; nil when the object is gone. Shared: do not modify
	digest   digest // of a peer
}

// post is the last change of an object.
type post struct {
	notice
	at   uint64
	gone *list.Element // in board.gone; nil while the object is there
}

// mostGone is how many deletions the board remembers: more than there are between two looks of any session that reads.
const mostGone = 16 << 10

func newBoard(most int) *board {
	return &board{most: most, posts: make(map[key]*list.Element), order: list.New()}
}

// put says that an object has changed or, without a wire form, that it is no more.
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

// remove is called under the lock.
func (b *board) remove(e *list.Element) {
	p := b.order.Remove(e).(*post)
	delete(b.posts, p.key)
	if p.gone != nil {
		b.gone.Remove(p.gone)
	} else {
		b.count(p, -1)
	}
}

// count is called under the lock.
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

// peersOf is the digest of all nodes but one. It is called under the lock.
func (b *board) peersOf(node string) digest {
	e := b.posts[key{kind: kindNode, name: node}]
	if e == nil || e.Value.(*post).gone != nil {
		return b.peers
	}
	return b.peers.minus(e.Value.(*post).digest)
}

// size is how many nodes there are.
func (b *board) size() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.nodes
}

// reader is who reads the board.
type reader struct {
	at    uint64  // how far it has read; 0 is for those who hold nothing: they are told of what is there
	node  string  // which is not its own peer
	holds *digest // of the peers that it holds, if it says so; of use at the beginning
	take  func(*notice)
}

// read calls take for all that has changed since, in no order, and says how far that goes. Take must not wait. With held,
// the reader holds the peers that there are, and was not told of them.
func (b *board) read(r reader) (now uint64, held bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.at > 0 && r.at < b.floor {
		return 0, false, errBehind
	}
	if held = r.at == 0 && r.holds != nil && *r.holds == b.peersOf(r.node); held && b.nodes == len(b.posts)-b.gone.Len() {
		return b.at, true, nil // thousands may come back at once: nothing is looked at for them
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
