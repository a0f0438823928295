package raftfsm

import (
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// decodeCommand decodes the command of a raft entry. Nearly all entries are batches, which are
// decoded here with few allocations per batch. A command in any other encoding than that of this
// release is decoded by protobuf. Keys and values are copied one by one, because a retained value
// must not retain the memory of its whole batch.
func decodeCommand(data []byte) (*storev1.Command, error) {
	if b, ok := soleField(data, 1); ok {
		if batch, ok := decodeBatch(b); ok {
			return &storev1.Command{Kind: &storev1.Command_Batch{Batch: batch}}, nil
		}
	}
	cmd := new(storev1.Command)
	if err := proto.Unmarshal(data, cmd); err != nil {
		return nil, err
	}
	return cmd, nil
}

// soleField returns the content of a message that consists only of the given bytes field. For any
// other message it returns false.
func soleField(b []byte, field protowire.Number) ([]byte, bool) {
	num, typ, n := protowire.ConsumeTag(b)
	if n < 0 || num != field || typ != protowire.BytesType {
		return nil, false
	}
	content, m := protowire.ConsumeBytes(b[n:])
	return content, m >= 0 && n+m == len(b)
}

// field is one decoded field of a protobuf message: a number or bytes.
type field struct {
	num   protowire.Number
	bytes []byte // nil for a number
	value uint64
}

// nextField returns the first field of a message, and the rest of the message. ok is false if the
// field is neither a number nor bytes.
func nextField(b []byte) (f field, rest []byte, ok bool) {
	num, typ, n := protowire.ConsumeTag(b)
	if n < 0 {
		return f, nil, false
	}
	f.num, b = num, b[n:]
	switch typ {
	case protowire.VarintType:
		f.value, n = protowire.ConsumeVarint(b)
	case protowire.BytesType:
		if f.bytes, n = protowire.ConsumeBytes(b); f.bytes == nil {
			f.bytes = []byte{}
		}
	default:
		return f, nil, false
	}
	if n < 0 {
		return f, nil, false
	}
	return f, b[n:], true
}

// eachField calls visit for every field of a message. It returns false if a field is neither a
// number nor bytes, or if visit returns false.
func eachField(b []byte, visit func(field) bool) bool {
	for len(b) > 0 {
		f, rest, ok := nextField(b)
		if !ok || !visit(f) {
			return false
		}
		b = rest
	}
	return true
}

// slabs is the memory into which a batch is decoded: one slice for all proposals, one for all IDs,
// and two for all ops.
type slabs struct {
	proposals []storev1.Proposal
	ids       []storev1.ProposalID
	ops       []storev1.Op
	places    []*storev1.Op
}

// decodeBatch decodes a batch. It first counts the proposals and ops, and then decodes them into
// slabs of exactly that size. It returns false if only protobuf can decode the batch.
func decodeBatch(b []byte) (*storev1.Batch, bool) {
	proposals, ops := 0, 0
	countOp := func(f field) bool {
		if f.num == 2 {
			ops++
		}
		return true
	}
	if !eachField(b, func(f field) bool {
		proposals++
		return f.num == 1 && f.bytes != nil && eachField(f.bytes, countOp)
	}) {
		return nil, false
	}
	s := slabs{
		proposals: make([]storev1.Proposal, proposals), ids: make([]storev1.ProposalID, proposals),
		ops: make([]storev1.Op, ops), places: make([]*storev1.Op, 0, ops),
	}
	batch := &storev1.Batch{Proposals: make([]*storev1.Proposal, proposals)}
	for i := range batch.Proposals {
		f, rest, _ := nextField(b)
		b = rest
		p := &s.proposals[i]
		if !s.decodeProposal(p, &s.ids[i], f.bytes) {
			return nil, false
		}
		batch.Proposals[i] = p
	}
	return batch, true
}

func (s *slabs) decodeProposal(p *storev1.Proposal, id *storev1.ProposalID, b []byte) bool {
	from := len(s.places)
	if !eachField(b, func(f field) bool {
		switch isBytes := f.bytes != nil; {
		case f.num == 1 && isBytes && p.Id == nil:
			p.Id = id
			return decodeID(id, f.bytes)
		case f.num == 2 && isBytes:
			op := &s.ops[len(s.places)]
			s.places = append(s.places, op)
			return decodeOp(op, f.bytes)
		case f.num == 3 && !isBytes:
			p.Fence = f.value
		case f.num == 4 && !isBytes:
			p.ProposedUnixMs = int64(f.value)
		default:
			return false
		}
		return true
	}) {
		return false
	}
	if to := len(s.places); to > from {
		p.Ops = s.places[from:to:to]
	}
	return true
}

func decodeID(id *storev1.ProposalID, b []byte) bool {
	return eachField(b, func(f field) bool {
		switch f.num {
		case 1:
			id.Incarnation = f.value
		case 2:
			id.Sequence = f.value
		case 3:
			id.Settled = f.value
		case 4:
			id.IssuedUnixMs = int64(f.value)
		default:
			return false
		}
		return f.bytes == nil
	})
}

func decodeOp(op *storev1.Op, b []byte) bool {
	return eachField(b, func(f field) bool {
		switch isBytes := f.bytes != nil; {
		case f.num == 1 && !isBytes:
			op.Kind = uint32(f.value)
		case f.num == 2 && isBytes:
			if !utf8.Valid(f.bytes) {
				return false
			}
			op.Key = string(f.bytes)
		case f.num == 3 && isBytes:
			op.Value = append([]byte(nil), f.bytes...)
		case f.num == 4 && isBytes && op.If == nil:
			op.If = new(storev1.Precondition)
			return decodePrecondition(op.If, f.bytes)
		case f.num == 5 && !isBytes:
			op.TtlMs = int64(f.value)
		default:
			return false
		}
		return true
	})
}

func decodePrecondition(p *storev1.Precondition, b []byte) bool {
	return eachField(b, func(f field) bool {
		switch f.num {
		case 1:
			p.Absent = protowire.DecodeBool(f.value)
		case 2:
			p.Revision = f.value
		default:
			return false
		}
		return f.bytes == nil
	})
}
