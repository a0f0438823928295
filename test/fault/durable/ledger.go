// Package durable tests that no acknowledged commit is ever lost. Replicas run as processes, on
// real folders and on disks that lose unsynced data. They are killed, lose power or get disk errors
// at any moment, and must restart with every commit that they have acknowledged.
package durable

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"keelson.dev/keelson/raftstore"
)

// Prefix is the prefix of the keys in all commits of a Ledger.
const Prefix = "/durable/"

// Ledger generates commits and records their outcomes, to check later whether a store has the
// expected content. Nothing else may write to the store. A Ledger is safe for concurrent use.
type Ledger struct {
	mu      sync.Mutex
	commits map[string]*sentCommit
	acked   raftstore.Revision // the highest acknowledged revision
	base    raftstore.Revision // the revision before the first commit
	checked raftstore.Revision // the last revision in history
	history []*sentCommit      // the commits of the revisions from base+1 to checked
	state   map[string]raftstore.Item
}

// sentCommit is a commit that was sent to a store.
type sentCommit struct {
	token    string
	ops      []raftstore.Op
	fate     fate
	revision raftstore.Revision // if it is known to have been applied, else 0
	seen     bool               // it is in the history, or its loss was reported
}

type fate uint8

const (
	open    fate = iota // in progress, or the outcome is unknown
	acked               // acknowledged by the store
	refused             // rejected by the store: it must never be applied
)

// NewLedger returns a Ledger for a store at revision base, which is not 0. The store has no keys
// below Prefix.
func NewLedger(base raftstore.Revision) *Ledger {
	return &Ledger{base: base, checked: base, commits: make(map[string]*sentCommit),
		state: make(map[string]raftstore.Item)}
}

// Next returns the nth commit of a writer, and the token with which its outcome is passed to Done.
// A commit has several operations that must be applied together, with about size bytes of values in
// all. A writer sends its commits one after the other.
func (l *Ledger) Next(writer string, n, size int) (token string, c raftstore.Commit) {
	token = fmt.Sprintf("%s-%d", writer, n)
	value := []byte(token + strings.Repeat(".", size/2))
	at := Prefix + writer
	c.Ops = []raftstore.Op{raftstore.Put(at+"/first", value),
		raftstore.Put(fmt.Sprintf("%s/ring/%d", at, n%8), []byte(token)), raftstore.Put(at+"/second", value)}
	if n%3 == 0 {
		c.Ops = append(c.Ops, raftstore.Delete(fmt.Sprintf("%s/ring/%d", at, (n+5)%8)))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.commits[token] = &sentCommit{token: token, ops: c.Ops}
	return token, c
}

// Done records the store's response to a commit. With raftstore.ErrOutcomeUnknown the commit may or
// may not be applied.
func (l *Ledger) Done(token string, rev raftstore.Revision, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.commits[token]
	switch {
	case err == nil:
		t.fate, t.revision = acked, rev
		l.acked = max(l.acked, rev)
	case !errors.Is(err, raftstore.ErrOutcomeUnknown):
		t.fate = refused
	}
}

// Acknowledged returns the highest acknowledged revision.
func (l *Ledger) Acknowledged() raftstore.Revision {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.acked
}

// Checked returns the revision up to which the history has been checked.
func (l *Ledger) Checked() raftstore.Revision {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.checked
}

// Check compares the content of a store with the recorded outcomes, while no commits are written.
// It takes the store's current revision, all items below Prefix, and all events after a revision
// between base and Checked. It returns all differences.
func (l *Ledger) Check(
	now raftstore.Revision, items []raftstore.Item, after raftstore.Revision, events []raftstore.Events,
) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	if now < max(l.acked, l.checked) {
		errs = append(errs, fmt.Errorf("the store is at revision %d, and was at %d", now, max(l.acked, l.checked)))
	}
	if after < l.base || after > l.checked {
		return fmt.Errorf("the events after revision %d do not continue the history from %d to %d", after,
			l.base, l.checked)
	}
	next := after + 1
	for _, ev := range events {
		if ev.Revision != next {
			errs = append(errs, fmt.Errorf("revision %d is followed by %d", next-1, ev.Revision))
			break
		}
		errs = append(errs, l.recordEvents(ev))
		next++
	}
	if next != now+1 {
		errs = append(errs, fmt.Errorf("history ends with revision %d, the store is at %d", next-1, now))
	}
	for _, t := range l.commits {
		if t.fate == acked && !t.seen {
			errs = append(errs, fmt.Errorf("%s was acknowledged at revision %d and is not in the history",
				t.token, t.revision))
			t.seen = true // report the loss once
		}
	}
	return errors.Join(append(errs, l.compareItems(items))...)
}

// recordEvents adds the events of a revision to the history. For a revision in the history it
// checks that the events are the same.
func (l *Ledger) recordEvents(ev raftstore.Events) error {
	t, err := l.matchCommit(ev)
	if err != nil {
		return err
	}
	if ev.Revision <= l.checked {
		if was := l.history[ev.Revision-l.base-1]; was != t {
			return fmt.Errorf("revision %d was %s and is %s now", ev.Revision, was.token, t.token)
		}
		return nil
	}
	l.checked = ev.Revision
	l.history = append(l.history, t)
	l.applyEvents(ev)
	switch {
	case t.seen:
		return fmt.Errorf("%s is applied again at revision %d", t.token, ev.Revision)
	case t.fate == refused:
		return fmt.Errorf("%s was refused and is applied at revision %d", t.token, ev.Revision)
	case t.fate == acked && t.revision != ev.Revision:
		return fmt.Errorf("%s was acknowledged at revision %d and is applied at %d", t.token, t.revision, ev.Revision)
	}
	t.seen, t.revision = true, ev.Revision
	return nil
}

// matchCommit returns the commit to which the events of a revision belong. The operations and the
// events must match exactly.
func (l *Ledger) matchCommit(ev raftstore.Events) (*sentCommit, error) {
	if len(ev.Events) == 0 {
		return nil, fmt.Errorf("revision %d has no events", ev.Revision)
	}
	token, _, _ := strings.Cut(string(ev.Events[0].Item.Value), ".")
	t := l.commits[token]
	if t == nil {
		return nil, fmt.Errorf("revision %d writes %q to %s, which no commit did", ev.Revision, token,
			ev.Events[0].Item.Key)
	}
	at := 0
	for _, op := range t.ops {
		if at < len(ev.Events) && matchesOp(ev.Events[at], op, ev.Revision) {
			at++
			continue
		}
		if op.Kind != raftstore.OpDelete { // deleting an absent key makes no event
			return nil, fmt.Errorf("revision %d: %s is applied without its change of %s", ev.Revision, token, op.Key)
		}
	}
	if at != len(ev.Events) {
		return nil, fmt.Errorf("revision %d: %s has %d events, of which %d are not its own", ev.Revision, token,
			len(ev.Events), len(ev.Events)-at)
	}
	return t, nil
}

func matchesOp(e raftstore.Event, op raftstore.Op, rev raftstore.Revision) bool {
	if e.Item.Key != op.Key || e.Item.Modified != rev {
		return false
	}
	if op.Kind == raftstore.OpDelete {
		return e.Kind == raftstore.EventDelete
	}
	return e.Kind == raftstore.EventPut && bytes.Equal(e.Item.Value, op.Value)
}

func (l *Ledger) applyEvents(ev raftstore.Events) {
	for _, e := range ev.Events {
		if e.Kind == raftstore.EventDelete {
			delete(l.state, e.Item.Key)
			continue
		}
		l.state[e.Item.Key] = e.Item
	}
}

// compareItems returns the differences between the store's items and the result of the history.
func (l *Ledger) compareItems(items []raftstore.Item) error {
	var errs []error
	have := make(map[string]bool)
	for _, it := range items {
		have[it.Key] = true
		want, ok := l.state[it.Key]
		switch {
		case !ok:
			errs = append(errs, fmt.Errorf("%s exists, but was deleted or never written", it.Key))
		case it.Modified != want.Modified || it.Created != want.Created || !bytes.Equal(it.Value, want.Value):
			errs = append(errs, fmt.Errorf("%s is %s of revision %d, made at %d; the history says %s of %d, made at %d",
				it.Key, describeItem(it), it.Modified, it.Created, describeItem(want), want.Modified, want.Created))
		}
	}
	for key := range l.state {
		if !have[key] {
			errs = append(errs, fmt.Errorf("%s of revision %d is missing", key, l.state[key].Modified))
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

func describeItem(it raftstore.Item) string {
	token, rest, _ := strings.Cut(string(it.Value), ".")
	return fmt.Sprintf("%q and %d bytes", token, len(rest))
}
