// Package durable tests that nothing acknowledged is ever lost: replicas as
// processes, on real folders and on disks that forget what was not synced, are
// killed, lose their power or their disks' service at any moment, and must come
// back with everything they had acknowledged.
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

// Prefix is where the keys of all commits of a Ledger are.
const Prefix = "/durable/"

// Ledger hands out commits and remembers what became of each, so that it can
// say whether a store still holds what it should. The store must be written to
// by nobody else.
type Ledger struct {
	mu      sync.Mutex
	tries   map[string]*try
	acked   raftstore.Revision // the highest that anyone was told of
	base    raftstore.Revision // before the first commit
	checked raftstore.Revision // up to here history is known
	history []*try             // of the revisions after base up to checked
	state   map[string]raftstore.Item
}

// try is a commit that was given to a store.
type try struct {
	token    string
	ops      []raftstore.Op
	fate     fate
	revision raftstore.Revision // when it is known to have been applied
	seen     bool               // in the history
}

type fate uint8

const (
	open    fate = iota // under way, or its outcome is unknown
	acked               // applied, says the store
	refused             // not applied, says the store
)

// NewLedger is of a store at revision base, not 0, without keys below Prefix.
func NewLedger(base raftstore.Revision) *Ledger {
	return &Ledger{base: base, checked: base, tries: make(map[string]*try), state: make(map[string]raftstore.Item)}
}

// Next is the next commit of a writer, who makes one after the other: several
// ops that must apply together, with values of about size bytes in all.
func (l *Ledger) Next(writer string, n, size int) (token string, c raftstore.Commit) {
	token = fmt.Sprintf("%s-%d", writer, n)
	value := []byte(token + strings.Repeat(".", size/2))
	at := Prefix + writer
	c.Ops = []raftstore.Op{raftstore.Put(at+"/first", value), raftstore.Put(fmt.Sprintf("%s/ring/%d", at, n%8), []byte(token)), raftstore.Put(at+"/second", value)}
	if n%3 == 0 {
		c.Ops = append(c.Ops, raftstore.Delete(fmt.Sprintf("%s/ring/%d", at, (n+5)%8)))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tries[token] = &try{token: token, ops: c.Ops}
	return token, c
}

// Done notes what the store said of a commit.
func (l *Ledger) Done(token string, rev raftstore.Revision, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.tries[token]
	switch {
	case err == nil:
		t.fate, t.revision = acked, rev
		l.acked = max(l.acked, rev)
	case !errors.Is(err, raftstore.ErrOutcomeUnknown):
		t.fate = refused
	}
}

// Acknowledged is the highest revision that anyone was told of.
func (l *Ledger) Acknowledged() raftstore.Revision {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.acked
}

// Checked is the revision up to which the history has been checked.
func (l *Ledger) Checked() raftstore.Revision {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.checked
}

// Check compares what a store tells while nobody writes: its revision now, all
// its items below Prefix, and all events after a revision not beyond Checked. It
// returns everything that is wrong.
func (l *Ledger) Check(now raftstore.Revision, items []raftstore.Item, after raftstore.Revision, events []raftstore.Events) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	if now < max(l.acked, l.checked) {
		errs = append(errs, fmt.Errorf("the store is at revision %d, and was at %d", now, max(l.acked, l.checked)))
	}
	if after < l.base || after > l.checked {
		return fmt.Errorf("events after %d do not join the history from %d to %d", after, l.base, l.checked)
	}
	next := after + 1
	for _, ev := range events {
		if ev.Revision != next {
			errs = append(errs, fmt.Errorf("revision %d is followed by %d", next-1, ev.Revision))
			break
		}
		errs = append(errs, l.take(ev))
		next++
	}
	if next != now+1 {
		errs = append(errs, fmt.Errorf("history ends with revision %d, the store is at %d", next-1, now))
	}
	for _, t := range l.tries {
		if t.fate == acked && !t.seen {
			errs = append(errs, fmt.Errorf("%s was acknowledged at revision %d and is not in the history", t.token, t.revision))
			t.seen = true // told once
		}
	}
	return errors.Join(append(errs, l.compare(items))...)
}

// take notes the events of a revision, or compares them with what they were before.
func (l *Ledger) take(ev raftstore.Events) error {
	t, err := l.find(ev)
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
	l.replay(ev)
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

// find says whose commit a revision is. All its ops must be there, and nothing else.
func (l *Ledger) find(ev raftstore.Events) (*try, error) {
	if len(ev.Events) == 0 {
		return nil, fmt.Errorf("revision %d has no events", ev.Revision)
	}
	token, _, _ := strings.Cut(string(ev.Events[0].Item.Value), ".")
	t := l.tries[token]
	if t == nil {
		return nil, fmt.Errorf("revision %d writes %q to %s, which nobody did", ev.Revision, token, ev.Events[0].Item.Key)
	}
	at := 0
	for _, op := range t.ops {
		if at < len(ev.Events) && is(ev.Events[at], op, ev.Revision) {
			at++
			continue
		}
		if op.Kind != raftstore.OpDelete { // to delete what is absent makes no event
			return nil, fmt.Errorf("revision %d: %s is applied without its change of %s", ev.Revision, token, op.Key)
		}
	}
	if at != len(ev.Events) {
		return nil, fmt.Errorf("revision %d: %s has %d events, of which %d are not its own", ev.Revision, token, len(ev.Events), len(ev.Events)-at)
	}
	return t, nil
}

func is(e raftstore.Event, op raftstore.Op, rev raftstore.Revision) bool {
	if e.Item.Key != op.Key || e.Item.Modified != rev {
		return false
	}
	if op.Kind == raftstore.OpDelete {
		return e.Kind == raftstore.EventDelete
	}
	return e.Kind == raftstore.EventPut && bytes.Equal(e.Item.Value, op.Value)
}

func (l *Ledger) replay(ev raftstore.Events) {
	for _, e := range ev.Events {
		if e.Kind == raftstore.EventDelete {
			delete(l.state, e.Item.Key)
			continue
		}
		l.state[e.Item.Key] = e.Item
	}
}

// compare compares the items with what the history has made of them.
func (l *Ledger) compare(items []raftstore.Item) error {
	var errs []error
	have := make(map[string]bool)
	for _, it := range items {
		have[it.Key] = true
		want, ok := l.state[it.Key]
		switch {
		case !ok:
			errs = append(errs, fmt.Errorf("%s is there, and was deleted or never written", it.Key))
		case it.Modified != want.Modified || it.Created != want.Created || !bytes.Equal(it.Value, want.Value):
			errs = append(errs, fmt.Errorf("%s is %s of revision %d, made at %d; the history says %s of %d, made at %d",
				it.Key, brief(it), it.Modified, it.Created, brief(want), want.Modified, want.Created))
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

func brief(it raftstore.Item) string {
	token, rest, _ := strings.Cut(string(it.Value), ".")
	return fmt.Sprintf("%q and %d bytes", token, len(rest))
}
