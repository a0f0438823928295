package watch

import (
	"math"

	"keelson.dev/keelson/raftstore"
)

// maxUnread bounds the bytes that a watcher holds for its reader. A revision that
// is larger by itself is held alone.
const maxUnread = 16 << 20

// revisionBytes is how much a revision can keep alive: keys and values, the replaced ones
// as well. As long as history or the state has them too they cost nothing more,
// and other watchers share them; but what is in the channel cannot be taken back
// when these let go of them, so each watcher answers for all of it from the
// beginning. What one revision wrote and the next replaced counts twice.
func revisionBytes(r raftstore.Events) int64 {
	var n int64
	for i := range r.Events {
		e := &r.Events[i]
		n += int64(len(e.Item.Key) + len(e.Item.Value))
		if e.Prev != nil {
			n += int64(len(e.Prev.Value)) // its key is the same string
		}
	}
	return n
}

// unreadCounter knows how heavy is what a watcher's channel holds. Only the one who sends
// tells it; what the reader has taken it sees by how many are left. So it may
// count too much, never too little. It is owned as the watcher's cursor is.
type unreadCounter struct {
	sentBytes [channelSize]uint32 // of the last ones sent, a ring
	nextIndex int                 // in the ring
	count     int                 // how many of them may be unread
	total     int64               // the sum of these
}

// hasSpaceFor reports whether so many bytes may be sent to a channel that holds n.
func (u *unreadCounter) hasSpaceFor(n int, bytes int64) bool {
	u.keepLast(n)
	return u.count == 0 || u.total+bytes <= maxUnread
}

// recordSent takes note of what was sent.
func (u *unreadCounter) recordSent(bytes int64) {
	u.keepLast(channelSize - 1) // there was room for it
	w := uint32(min(bytes, math.MaxUint32))
	u.sentBytes[u.nextIndex] = w
	u.nextIndex = (u.nextIndex + 1) % channelSize
	u.count++
	u.total += int64(w)
}

// keepLast forgets all but the last n.
func (u *unreadCounter) keepLast(n int) {
	for ; u.count > n; u.count-- {
		u.total -= int64(u.sentBytes[(u.nextIndex-u.count+channelSize)%channelSize])
	}
}
