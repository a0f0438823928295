package mvcc

import (
	"cmp"
	"fmt"
	"unicode/utf8"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// Proposal converts a commit to a proposal without an ID. The error is ErrInvalid or ErrTooLarge,
// wrapped with the key and the sizes.
func Proposal(c raftstore.Commit) (*storev1.Proposal, error) {
	if len(c.Ops) > raftstore.MaxCommitOps {
		return nil, fmt.Errorf("%w: commit of %d ops, at most %d", raftstore.ErrTooLarge, len(c.Ops),
			raftstore.MaxCommitOps)
	}
	p := &storev1.Proposal{Fence: uint64(c.Fence), Ops: make([]*storev1.Op, len(c.Ops))}
	ops := make([]storev1.Op, len(c.Ops))
	for i := range c.Ops {
		from, to := &c.Ops[i], &ops[i]
		to.Kind, to.Key, to.Value = uint32(from.Kind), from.Key, from.Value
		to.TtlMs = from.TTL.Milliseconds()
		if from.TTL != 0 && to.TtlMs == 0 { // a TTL below a millisecond must not become 0, which means never
			to.TtlMs = int64(cmp.Compare(from.TTL, 0))
		}
		if from.If != (raftstore.Precondition{}) {
			to.If = &storev1.Precondition{Absent: from.If.Absent, Revision: uint64(from.If.Revision)}
		}
		p.Ops[i] = to
	}
	if err := checkProposal(p); err != nil {
		return nil, err
	}
	return p, nil
}

// checkProposal returns an error if a proposal has no ops, exceeds a size limit, contains a key
// twice or contains an invalid op. The error wraps ErrInvalid or ErrTooLarge. checkProposal is
// called before a proposal is sent, and again when the state machine applies it: the state machine
// does not rely on the proposer.
func checkProposal(p *storev1.Proposal) error {
	ops := p.GetOps()
	switch {
	case len(ops) == 0:
		return fmt.Errorf("%w: commit without ops", raftstore.ErrInvalid)
	case len(ops) > raftstore.MaxCommitOps:
		return fmt.Errorf("%w: commit of %d ops, at most %d", raftstore.ErrTooLarge, len(ops), raftstore.MaxCommitOps)
	}
	total, largest := 0, ops[0]
	for i, op := range ops {
		if err := checkOp(op); err != nil {
			return err
		}
		total += len(op.GetKey()) + len(op.GetValue())
		if len(op.GetValue()) > len(largest.GetValue()) {
			largest = op
		}
		// A commit has few ops: comparing with all previous ops is cheaper than a map.
		for _, earlier := range ops[:i] {
			if earlier.GetKey() == op.GetKey() {
				return fmt.Errorf("%w: key %q appears twice in one commit", raftstore.ErrInvalid, op.GetKey())
			}
		}
	}
	if total > raftstore.MaxCommitBytes {
		return fmt.Errorf("%w: commit of %d bytes in %d ops, at most %d: %q has %d of them", raftstore.ErrTooLarge,
			total, len(ops), raftstore.MaxCommitBytes, largest.GetKey(), len(largest.GetValue()))
	}
	return nil
}

func checkOp(op *storev1.Op) error {
	key, kind := op.GetKey(), raftstore.OpKind(op.GetKind())
	switch {
	case key == "":
		return fmt.Errorf("%w: empty key", raftstore.ErrInvalid)
	case len(key) > raftstore.MaxKeyBytes:
		return fmt.Errorf("%w: key of %d bytes, at most %d: %.64q...", raftstore.ErrTooLarge, len(key),
			raftstore.MaxKeyBytes, key)
	case !utf8.ValidString(key):
		return fmt.Errorf("%w: key %q is not valid UTF-8", raftstore.ErrInvalid, key)
	case len(op.GetValue()) > raftstore.MaxValueBytes:
		return fmt.Errorf("%w: value of key %q has %d bytes, at most %d", raftstore.ErrTooLarge, key,
			len(op.GetValue()), raftstore.MaxValueBytes)
	case kind != raftstore.OpPut && kind != raftstore.OpDelete && kind != raftstore.OpCheck:
		return fmt.Errorf("%w: key %q: unknown op kind %d", raftstore.ErrInvalid, key, kind)
	case kind != raftstore.OpPut && len(op.GetValue()) > 0:
		return fmt.Errorf("%w: key %q: only a put has a value", raftstore.ErrInvalid, key)
	case op.GetTtlMs() < 0 || op.GetTtlMs() > 0 && kind != raftstore.OpPut:
		return fmt.Errorf("%w: key %q: TTL of %d ms", raftstore.ErrInvalid, key, op.GetTtlMs())
	case op.GetIf().GetAbsent() && op.GetIf().GetRevision() != 0:
		return fmt.Errorf("%w: key %q: precondition requires it to be both absent and at revision %d",
			raftstore.ErrInvalid, key, op.GetIf().GetRevision())
	}
	return nil
}
