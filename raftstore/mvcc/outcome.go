package mvcc

import (
	"errors"
	"fmt"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// Code is the kind of a proposal's outcome.
type Code = storev1.Outcome_Code

// The outcome codes of store.proto under shorter names.
const (
	OK       = storev1.Outcome_OK
	Conflict = storev1.Outcome_CONFLICT
	Fenced   = storev1.Outcome_FENCED
	Unknown  = storev1.Outcome_UNKNOWN
	Invalid  = storev1.Outcome_INVALID
	TooLarge = storev1.Outcome_TOO_LARGE
	NoSpace  = storev1.Outcome_NO_SPACE
)

// Outcome is the result of one proposal.
type Outcome struct {
	Code     Code
	Revision raftstore.Revision // revision after the proposal
	Conflict *raftstore.ConflictError
	Message  string
}

// Err returns the error that Store.Commit returns for the outcome, or nil if the outcome is OK.
func (o Outcome) Err() error {
	switch o.Code {
	case OK:
		return nil
	case Conflict:
		return o.Conflict
	case Fenced:
		return raftstore.ErrFenced
	case Invalid:
		return fmt.Errorf("%w: %s", raftstore.ErrInvalid, o.Message)
	case TooLarge:
		return fmt.Errorf("%w: %s", raftstore.ErrTooLarge, o.Message)
	case NoSpace:
		return fmt.Errorf("%w: %s", raftstore.ErrNoSpace, o.Message)
	case Unknown:
		return fmt.Errorf("%w: the proposal is so old that its outcome is no longer stored",
			raftstore.ErrOutcomeUnknown)
	default:
		return fmt.Errorf("%w: outcome of kind %d: %s", raftstore.ErrOutcomeUnknown, o.Code, o.Message)
	}
}

// refusedOutcome returns the outcome of a proposal that checkProposal rejected with err. revision
// is the current revision.
func refusedOutcome(err error, revision raftstore.Revision) Outcome {
	if errors.Is(err, raftstore.ErrTooLarge) {
		return Outcome{Code: TooLarge, Revision: revision, Message: err.Error()}
	}
	return Outcome{Code: Invalid, Revision: revision, Message: err.Error()}
}

// withoutValue returns a copy of the outcome for recentOutcomes, in which a conflicting item has no
// value. Otherwise the value would stay in memory and in snapshots for as long as the outcome is
// stored.
func (o Outcome) withoutValue() Outcome {
	if o.Conflict != nil && o.Conflict.Have != nil {
		c := *o.Conflict
		have := *c.Have
		have.Value = nil
		c.Have, c.NoValue = &have, true
		o.Conflict = &c
	}
	return o
}

// WithValue returns the outcome with the value of the conflicting item, which it reads from the
// view. The outcome is returned unchanged if it already has the value, or if the view can no longer
// read the item.
func (o Outcome) WithValue(v *View) Outcome {
	if o.Conflict == nil || !o.Conflict.NoValue {
		return o
	}
	// The item must be the one that was examined; otherwise the outcome is from another store.
	if have, ok := v.itemAt(o.Conflict.Key, o.Conflict.At); ok && have.Modified == o.Conflict.Have.Modified {
		c := *o.Conflict
		c.Have, c.NoValue = have, false
		o.Conflict = &c
	}
	return o
}

// Proto encodes the outcome for messages between replicas and for snapshots. A conflict is encoded
// without the item's value: the receiver can read the value from its own state, and a batch of
// conflicts stays small.
func (o Outcome) Proto() *storev1.Outcome {
	p := &storev1.Outcome{Code: o.Code, Revision: uint64(o.Revision), Message: o.Message}
	if c := o.Conflict; c != nil {
		p.Key = c.Key
		p.Want = &storev1.Precondition{Absent: c.Want.Absent, Revision: uint64(c.Want.Revision)}
		if c.Have != nil {
			p.Have = itemProto(c.Have)
			p.Have.Value = nil
		}
	}
	return p
}

// OutcomeFrom decodes an outcome that Proto encoded.
func OutcomeFrom(p *storev1.Outcome) Outcome {
	o := Outcome{Code: p.GetCode(), Revision: raftstore.Revision(p.GetRevision()), Message: p.GetMessage()}
	if o.Code == Conflict {
		o.Conflict = &raftstore.ConflictError{Key: p.GetKey(), Want: precondition(p.GetWant()), At: o.Revision}
		if p.GetHave() != nil {
			o.Conflict.Have = itemFrom(p.GetHave())
			o.Conflict.NoValue = len(p.GetHave().GetValue()) == 0 // older releases send the value
		}
		// A conflict about a key that must be absent has an item with that key.
		if o.Conflict.Want.Absent && o.Conflict.Have == nil {
			o.Conflict.Have, o.Conflict.NoValue = &raftstore.Item{Key: p.GetKey()}, true
		}
	}
	return o
}

func precondition(p *storev1.Precondition) raftstore.Precondition {
	return raftstore.Precondition{Absent: p.GetAbsent(), Revision: raftstore.Revision(p.GetRevision())}
}

func itemProto(it *raftstore.Item) *storev1.Item {
	return &storev1.Item{
		Key: it.Key, Value: it.Value,
		Created: uint64(it.Created), Modified: uint64(it.Modified), ExpiresUnixMs: it.Expires,
	}
}

func itemFrom(p *storev1.Item) *raftstore.Item {
	return &raftstore.Item{
		Key: p.GetKey(), Value: p.GetValue(),
		Created: raftstore.Revision(p.GetCreated()), Modified: raftstore.Revision(p.GetModified()),
		Expires: p.GetExpiresUnixMs(),
	}
}
