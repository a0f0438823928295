package watch

import (
	"math"

	"keelson.dev/keelson/raftstore"
)

// maxUnread is the maximum total size, in bytes, of the revisions in a watcher's channel that its
// reader has not received yet. A single larger revision is sent when the channel is empty.
const maxUnread = 16 << 20

// revisionBytes returns the size that counts toward maxUnread for a revision: the keys and values
// of its events, including the replaced values. It is the most memory that the revision can retain.
// While history or other watchers also hold the values, the watcher retains no additional memory.
// But a revision cannot be withdrawn from a channel later, so each watcher counts the full size
// from the start.
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

// unreadCounter counts the bytes of the revisions in a watcher's channel. Only the sender updates
// it. It derives the number of received revisions from the length of the channel, so it may count
// too much but never too little. It needs the same lock as the watcher's cursor.
type unreadCounter struct {
	sentBytes [channelSize]uint32 // sizes of the last revisions sent, a ring buffer
	nextIndex int                 // index in the ring buffer
	count     int                 // how many of these revisions may be unread
	total     int64               // total size of the revisions that may be unread
}

// hasSpaceFor reports whether a revision of the given size may be sent to a channel that holds n
// revisions, without exceeding maxUnread. The result is true for an empty channel.
func (u *unreadCounter) hasSpaceFor(n int, bytes int64) bool {
	u.keepLast(n)
	return u.count == 0 || u.total+bytes <= maxUnread
}

// recordSent counts a revision of the given size that was sent to the channel.
func (u *unreadCounter) recordSent(bytes int64) {
	u.keepLast(channelSize - 1) // the channel had space for it
	w := uint32(min(bytes, math.MaxUint32))
	u.sentBytes[u.nextIndex] = w
	u.nextIndex = (u.nextIndex + 1) % channelSize
	u.count++
	u.total += int64(w)
}

// keepLast reduces the count to the last n revisions sent. The reader has received the earlier
// ones.
func (u *unreadCounter) keepLast(n int) {
	for ; u.count > n; u.count-- {
		u.total -= int64(u.sentBytes[(u.nextIndex-u.count+channelSize)%channelSize])
	}
}
