package mvcc

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// The hand-written encoding equals the encoding of the protobuf messages.
func TestEncodingByHand(t *testing.T) {
	item := rapid.Custom(func(t *rapid.T) raftstore.Item {
		number := rapid.OneOf(rapid.Just(uint64(0)), rapid.Uint64())
		return raftstore.Item{
			Key: rapid.StringN(1, 40, -1).Draw(t, "key"), Value: rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "value"),
			Created:  raftstore.Revision(number.Draw(t, "created")),
			Modified: raftstore.Revision(number.Draw(t, "modified")), Expires: int64(number.Draw(t, "expires")),
		}
	})
	rapid.Check(t, func(t *rapid.T) {
		var items storev1.ItemChunk
		var changes storev1.HistoryChunk
		var gotItems, gotChanges []byte
		for range rapid.IntRange(0, 4).Draw(t, "revisions") {
			r := raftstore.Events{Revision: raftstore.Revision(rapid.Uint64().Draw(t, "revision"))}
			h := &storev1.History{Revision: uint64(r.Revision)}
			for range rapid.IntRange(0, 3).Draw(t, "changes") {
				it := item.Draw(t, "item")
				items.Items = append(items.Items, itemProto(&it))
				gotItems = appendItem(gotItems, fieldChunkEntry, &it)
				e := raftstore.Event{Kind: raftstore.EventKind(rapid.IntRange(0, 2).Draw(t, "kind")), Item: it}
				r.Events = append(r.Events, e)
				h.Changes = append(h.Changes, &storev1.Change{Kind: uint32(e.Kind), Item: itemProto(&it)})
			}
			changes.History = append(changes.History, h)
			gotChanges = appendHistory(gotChanges, &r)
		}
		checkEncoding(t, &items, gotItems)
		checkEncoding(t, &changes, gotChanges)
		frame := &storev1.SnapshotFrame{Kind: &storev1.SnapshotFrame_Items{Items: &items}}
		checkEncoding(t, frame, append(appendLength(nil, fieldFrameItems, len(gotItems)), gotItems...))
		frame = &storev1.SnapshotFrame{Kind: &storev1.SnapshotFrame_History{History: &changes}}
		checkEncoding(t, frame, append(appendLength(nil, fieldFrameHistory, len(gotChanges)), gotChanges...))
	})
}

func checkEncoding(t *rapid.T, m proto.Message, got []byte) {
	t.Helper()
	want, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("%T:\n got %x\nwant %x", m, got, want)
	}
}
