package mvcc

import (
	"google.golang.org/protobuf/encoding/protowire"

	"keelson.dev/keelson/raftstore"
)

// Items and changes, of which a snapshot contains millions, are encoded directly in the protobuf
// format of store.proto. Intermediate messages would produce as much garbage as the size of the
// state.

// Protobuf field numbers of the messages in store.proto that this file encodes.
const (
	fieldFrameItems   = 2 // SnapshotFrame
	fieldFrameHistory = 5
	fieldChunkEntry   = 1 // ItemChunk, HistoryChunk
	fieldRevision     = 1 // History
	fieldChanges      = 2
	fieldKind         = 1 // Change
	fieldItem         = 2
	fieldKey          = 1 // Item
	fieldValue        = 2
	fieldCreated      = 3
	fieldModified     = 4
	fieldExpires      = 5
)

// sizeBytes returns the encoded length of a bytes field of n bytes, including its tag. All field
// numbers here fit into a one-byte tag.
func sizeBytes(n int) int { return 1 + protowire.SizeBytes(n) }

func sizeUint(n uint64) int {
	if n == 0 {
		return 0
	}
	return 1 + protowire.SizeVarint(n)
}

func appendLength(b []byte, field protowire.Number, n int) []byte {
	b = protowire.AppendTag(b, field, protowire.BytesType)
	return protowire.AppendVarint(b, uint64(n))
}

func appendUint(b []byte, field protowire.Number, n uint64) []byte {
	if n == 0 {
		return b
	}
	b = protowire.AppendTag(b, field, protowire.VarintType)
	return protowire.AppendVarint(b, n)
}

// itemSize returns the length of an item that is encoded as the protobuf message Item, without the
// tag and the length prefix.
func itemSize(it *raftstore.Item) int {
	n := sizeBytes(len(it.Key)) + sizeUint(uint64(it.Created)) + sizeUint(uint64(it.Modified)) +
		sizeUint(uint64(it.Expires))
	if len(it.Value) > 0 {
		n += sizeBytes(len(it.Value))
	}
	return n
}

// appendItem appends an item, encoded as the protobuf message Item, as the field with the given
// number of the enclosing message.
func appendItem(b []byte, field protowire.Number, it *raftstore.Item) []byte {
	b = appendLength(b, field, itemSize(it))
	b = append(appendLength(b, fieldKey, len(it.Key)), it.Key...)
	if len(it.Value) > 0 {
		b = append(appendLength(b, fieldValue, len(it.Value)), it.Value...)
	}
	b = appendUint(b, fieldCreated, uint64(it.Created))
	b = appendUint(b, fieldModified, uint64(it.Modified))
	return appendUint(b, fieldExpires, uint64(it.Expires))
}

func changeSize(e *raftstore.Event) int {
	return sizeUint(uint64(e.Kind)) + sizeBytes(itemSize(&e.Item))
}

// appendHistory appends one revision with its events as an entry of the protobuf message
// HistoryChunk.
func appendHistory(b []byte, r *raftstore.Events) []byte {
	n := sizeUint(uint64(r.Revision))
	for i := range r.Events {
		n += sizeBytes(changeSize(&r.Events[i]))
	}
	b = appendLength(b, fieldChunkEntry, n)
	b = appendUint(b, fieldRevision, uint64(r.Revision))
	for i := range r.Events {
		e := &r.Events[i]
		b = appendLength(b, fieldChanges, changeSize(e))
		b = appendUint(b, fieldKind, uint64(e.Kind))
		b = appendItem(b, fieldItem, &e.Item)
	}
	return b
}
