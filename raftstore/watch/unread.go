package watch

import (
	"math"

	"keelson.dev/keelson/raftstore"
)

// maxUnread bounds the bytes that a watcher holds for its reader. A larger revision is held alone.
const maxUnread = 16 << 20

// revisionBytes returns the most memory that a revision can retain: keys and values, including
// replaced values. While history or the state hold them too, they cost nothing extra, and other
// watchers share them. The contents of a channel cannot be withdrawn later, so each watcher counts
// all of it from the start. A value that one revision wrote and the next replaced counts twice.
func revisionBytes(r raftstore.Events) int64 {
	var n int64
	for i := range r.Events {
		e := &r.Events[i]
		n += int64(len(e.Item.Key) + len(e.Item.Value))
		if e.Prev != nil {
			n += int64(len(e.Prev.Value)) // the key is the same string
		}
	}
	return n
}

// unreadCounter counts the bytes in a watcher's channel. Only the sender updates it. It derives
// what the reader has received from the length of the channel, so it may count too much but never
// too little. It is guarded like the watcher's cursor.
type unreadCounter struct {
	sentBytes [channelSize]uint32 // sizes of the last revisions sent, a ring buffer
	nextIndex int                 // index in the ring buffer
	count     int                 // how many of them may be unread
	total     int64               // their total size
}

// hasSpaceFor reports whether a revision of the given size may be sent to a channel that holds n
// revisions.
func (u *unreadCounter) hasSpaceFor(n int, bytes int64) bool {
	u.keepLast(n)
	return u.count == 0 || u.total+bytes <= maxUnread
}

// recordSent counts a revision that was sent.
func (u *unreadCounter) recordSent(bytes int64) {
	u.keepLast(channelSize - 1) // the channel had space for it
	w := uint32(min(bytes, math.MaxUint32))
	u.sentBytes[u.nextIndex] = w
	u.nextIndex = (u.nextIndex + 1) % channelSize
	u.count++
	u.total += int64(w)
}

// keepLast stops counting all but the last n revisions.
func (u *unreadCounter) keepLast(n int) {
	for ; u.count > n; u.count-- {
		u.total -= int64(u.sentBytes[(u.nextIndex-u.count+channelSize)%channelSize])
	}
}
