package fleet

import (
	"container/list"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// board says of the kinds that every node holds which object changed when: each once, in the order of its last change. A
// session remembers how far it has read and nothing else, so that what it costs does not grow with the cluster.
type board struct {
	most int // posts of objects that are gone

	mu    sync.Mutex
	at    uint64 // of the newest post; the first is 1
	posts map[key]*list.Element
	order *list.List // of post, oldest change first
	gone  list.List  // of the elements of order whose objects are gone, the oldest first
	floor uint64     // who has not read so far does not learn of everything that is gone
}

// post is the last change of an object.
type post struct {
	key  key
	uid  types.UID
	at   uint64
	gone *list.Element // in board.gone; nil while the object is there
}

// mostGone is how many deletions the board remembers: more than there are between two looks of any session that reads.
const mostGone = 16 << 10

func newBoard(most int) *board {
	return &board{most: most, posts: make(map[key]*list.Element), order: list.New()}
}

// put says that an object has changed or, with gone, that it is no more. What readers look up must show it already.
func (b *board) put(k key, uid types.UID, gone bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.at++
	if e := b.posts[k]; e != nil {
		b.remove(e)
	}
	e := b.order.PushBack(post{key: k, uid: uid, at: b.at})
	b.posts[k] = e
	if !gone {
		return
	}
	p := e.Value.(post)
	p.gone = b.gone.PushBack(e)
	e.Value = p
	if b.gone.Len() > b.most {
		oldest := b.gone.Front().Value.(*list.Element)
		b.floor = oldest.Value.(post).at
		b.remove(oldest)
	}
}

// remove is called under the lock.
func (b *board) remove(e *list.Element) {
	p := b.order.Remove(e).(post)
	delete(b.posts, p.key)
	if p.gone != nil {
		b.gone.Remove(p.gone)
	}
}

// since returns what has changed after a post, in no order, and how far that goes. 0 is for those who hold nothing yet:
// they are told of what is there.
func (b *board) since(at uint64) ([]post, uint64, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if at > 0 && at < b.floor {
		return nil, 0, errBehind
	}
	var out []post
	if at == 0 {
		out = make([]post, 0, b.order.Len()-b.gone.Len())
	}
	for e := b.order.Back(); e != nil && e.Value.(post).at > at; e = e.Prev() {
		if p := e.Value.(post); at > 0 || p.gone == nil {
			out = append(out, p)
		}
	}
	return out, b.at, nil
}

var errBehind = status.Error(codes.Aborted, "fleet: the agent has not read for so long that it must begin anew")
