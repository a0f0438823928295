package raftfsm

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// sampleBatch is a batch of n puts of 1 KiB, and one proposal of every other form.
func sampleBatch(n int) *storev1.Command {
	b := &storev1.Batch{Proposals: []*storev1.Proposal{
		{}, // a barrier
		{Id: &storev1.ProposalID{Incarnation: 7, Sequence: 1 << 40}, Fence: 3, ProposedUnixMs: -1},
		{Ops: []*storev1.Op{
			{Kind: 1, Key: "/a", TtlMs: 90_000},
			{Kind: 2, Key: "/b", If: &storev1.Precondition{Revision: 900}},
			{Kind: 3, Key: "/ü", If: &storev1.Precondition{Absent: true}},
			{Kind: 1, Key: "/c", If: &storev1.Precondition{}},
		}},
	}}
	for i := range n {
		b.Proposals = append(b.Proposals, &storev1.Proposal{
			Id: &storev1.ProposalID{Incarnation: 1 << 63, Sequence: uint64(i), Settled: uint64(i / 2),
				IssuedUnixMs: 1},
			ProposedUnixMs: 1_700_000_000_000,
			Ops: []*storev1.Op{{Kind: 1, Key: "/registry/pods/default/pod",
				Value: bytes.Repeat([]byte{byte(i)}, 1024)}},
		})
	}
	return &storev1.Command{Kind: &storev1.Command_Batch{Batch: b}}
}

// FuzzDecodeCommand compares with protobuf, which defines what an entry says.
func FuzzDecodeCommand(f *testing.F) {
	for _, cmd := range []*storev1.Command{
		sampleBatch(3), {},
		{Kind: &storev1.Command_Batch{Batch: &storev1.Batch{}}},
		{Kind: &storev1.Command_Expire{Expire: &storev1.Expire{UntilUnixMs: 5}}},
		{Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: 5}}},
		{Kind: &storev1.Command_Alarm{Alarm: &storev1.SetAlarm{Clear: true}}},
	} {
		b, err := proto.Marshal(cmd)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		// A field of a later version, and a batch in two parts.
		f.Add(protowire.AppendVarint(protowire.AppendTag(bytes.Clone(b), 99, protowire.VarintType), 1))
		f.Add(append(bytes.Clone(b), b...))
	}
	op := func(fields ...byte) []byte { // in a command of one batch of one proposal
		for _, num := range []protowire.Number{2, 1, 1} {
			fields = protowire.AppendBytes(protowire.AppendTag(nil, num, protowire.BytesType), fields)
		}
		return fields
	}
	f.Add(op(0x12, 1, 0xff))              // a key that is not UTF-8
	f.Add(op(0x12, 1, 'a', 0x12, 1, 'b')) // two keys: the last counts
	f.Add(op(0x1a, 1, 'a', 0x1a, 0))      // a value, and none
	f.Add(op(0x22, 2, 8, 1, 0x22, 2, 16, 1))
	f.Add(op(0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1))
	f.Add(op(0x22, 2, 8, 2)) // true in another form
	f.Fuzz(func(t *testing.T, b []byte) {
		want := new(storev1.Command)
		wantErr := proto.Unmarshal(b, want)
		got, err := decodeCommand(b)
		switch {
		case (err == nil) != (wantErr == nil):
			t.Fatalf("error %v, protobuf's is %v", err, wantErr)
		case err == nil && !proto.Equal(got, want):
			t.Fatalf("got %v\nwant %v", got, want)
		}
	})
}

// What is decoded does not change with the bytes that it was decoded from.
func TestDecodedCommandOwnsItsBytes(t *testing.T) {
	want := sampleBatch(2)
	b, err := proto.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodeCommand(b)
	if err != nil {
		t.Fatal(err)
	}
	clear(b)
	if !proto.Equal(got, want) {
		t.Fatalf("got %v\nwant %v", got, want)
	}
}

func BenchmarkDecodeCommand(b *testing.B) {
	data, err := proto.Marshal(sampleBatch(40))
	if err != nil {
		b.Fatal(err)
	}
	b.Run("ours", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := decodeCommand(data); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("protobuf", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := proto.Unmarshal(data, new(storev1.Command)); err != nil {
				b.Fatal(err)
			}
		}
	})
}
