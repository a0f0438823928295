package raftfsm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// pair is two state machines with their hubs: one that applies everything at
// once, and one that lags and is sent snapshots; and the whole history.
type pair struct {
	t        *rapid.T
	ahead    *FSM
	behind   *FSM
	log      []*raft.Log
	applied  int // of log, by the one behind
	clock    int64
	sequence uint64
	history  []raftstore.Events
	readers  []*modelReader
}

// modelReader is a watcher and what it was given.
type modelReader struct {
	name   string
	prefix string
	after  raftstore.Revision
	w      raftstore.Watcher
	done   chan struct{}
	slow   bool

	mu  sync.Mutex
	got []string
	at  raftstore.Revision // the last revision or note
}

func newPair(t *rapid.T) *pair {
	p := &pair{t: t, clock: 1000}
	for _, f := range []**FSM{&p.ahead, &p.behind} {
		*f = New(context.Background(), func(err error) { t.Fatalf("state machine: %v", err) })
	}
	return p
}

// command applies a command to the one ahead and keeps it for the other.
func (p *pair) command(c *storev1.Command) {
	data, err := proto.Marshal(c)
	if err != nil {
		p.t.Fatal(err)
	}
	l := &raft.Log{Index: uint64(len(p.log) + 1), Term: 1, Type: raft.LogCommand, Data: data}
	p.log = append(p.log, l)
	before := p.ahead.View().Revision()
	p.ahead.Apply(l)
	after := p.ahead.View()
	if after.Revision() > before && after.Compacted() <= before {
		more, err := after.Read(before, 0)
		if err != nil {
			p.t.Fatal(err)
		}
		p.history = append(p.history, more...)
	}
}

func (p *pair) commit() {
	p.sequence++
	p.clock += int64(rapid.IntRange(0, 5).Draw(p.t, "ms"))
	b := &storev1.Proposal{Id: &storev1.ProposalID{Incarnation: 1, Sequence: p.sequence, Settled: p.sequence - 1,
		IssuedUnixMs: p.clock}, ProposedUnixMs: p.clock}
	for _, key := range []string{"/a/1", "/a/2", "/b/1"} {
		switch rapid.IntRange(0, 5).Draw(p.t, "op") {
		case 0, 1:
			b.Ops = append(b.Ops, &storev1.Op{Kind: uint32(raftstore.OpPut), Key: key,
				Value: []byte(fmt.Sprint(p.sequence))})
		case 2:
			b.Ops = append(b.Ops, &storev1.Op{Kind: uint32(raftstore.OpPut), Key: key,
				Value: []byte("short"), TtlMs: 10})
		case 3:
			b.Ops = append(b.Ops, &storev1.Op{Kind: uint32(raftstore.OpDelete), Key: key})
		}
	}
	if len(b.Ops) > 0 {
		p.command(
			&storev1.Command{Kind: &storev1.Command_Batch{Batch: &storev1.Batch{Proposals: []*storev1.Proposal{b}}}})
	}
}

// follow lets the one behind apply some of what it lacks, in one batch.
func (p *pair) follow(n int) {
	if n = min(n, len(p.log)-p.applied); n > 0 {
		p.behind.ApplyBatch(p.log[p.applied : p.applied+n])
		p.applied += n
	}
}

// install gives the one behind the state of the other as a snapshot.
func (p *pair) install() {
	s, err := p.ahead.Snapshot()
	if err != nil {
		p.t.Fatal(err)
	}
	sink := new(memorySink)
	if err := s.Persist(sink); err != nil {
		p.t.Fatal(err)
	}
	if err := p.behind.Restore(io.NopCloser(&sink.Buffer)); err != nil {
		p.t.Fatal(err)
	}
	p.applied = len(p.log)
}

type memorySink struct{ bytes.Buffer }

func (s *memorySink) Close() error  { return nil }
func (s *memorySink) ID() string    { return "memory" }
func (s *memorySink) Cancel() error { return nil }

// watch begins a watcher at a random revision on either.
func (p *pair) watch() {
	on, name := p.ahead, "ahead"
	if rapid.Bool().Draw(p.t, "behind") {
		on, name = p.behind, "behind"
	}
	v := on.View()
	r := &modelReader{
		name: name, prefix: rapid.SampledFrom([]string{"", "/a/", "/a/1", "/b/", "/none/"}).Draw(p.t, "prefix"),
		after: raftstore.Revision(rapid.IntRange(0, int(v.Revision())+1).Draw(p.t, "after")),
		slow:  rapid.IntRange(0, 3).Draw(p.t, "slow") == 0, done: make(chan struct{}),
	}
	w, err := on.Hub.Watch(context.Background(), r.prefix, r.after)
	switch {
	case r.after > v.Revision():
		if !errors.Is(err, raftstore.ErrFutureRevision) {
			p.t.Fatalf("watch after %d of a store at %d: %v", r.after, v.Revision(), err)
		}
		return
	case r.after != 0 && r.after < v.Compacted():
		if !errors.Is(err, raftstore.ErrCompacted) ||
			!strings.Contains(err.Error(), fmt.Sprintf("compacted up to %d", v.Compacted())) {
			p.t.Fatalf("watch after %d, compacted up to %d: %v", r.after, v.Compacted(), err)
		}
		return
	case err != nil:
		p.t.Fatalf("watch after %d: %v", r.after, err)
	case r.after == 0:
		r.after = v.Revision()
	}
	r.w, r.at = w, r.after
	p.readers = append(p.readers, r)
	go r.run()
}

func (r *modelReader) run() {
	defer close(r.done)
	for ev := range r.w.C() {
		if r.slow {
			pause := time.NewTimer(50 * time.Microsecond)
			<-pause.C
		}
		r.mu.Lock()
		r.at = max(r.at, ev.Revision)
		if len(ev.Events) > 0 {
			r.got = append(r.got, tell(ev))
		}
		r.mu.Unlock()
	}
}

// tell describes a revision, with all that an event says.
func tell(ev raftstore.Events) string {
	s := fmt.Sprint(ev.Revision)
	for _, e := range ev.Events {
		s += fmt.Sprintf(" %d %s=%s %d-%d %d", e.Kind, e.Item.Key, e.Item.Value, e.Item.Created, e.Item.Modified,
			e.Item.Expires)
		if e.Prev != nil {
			s += fmt.Sprintf(" was %s of %d", e.Prev.Value, e.Prev.Modified)
		}
	}
	return s
}

// check waits until a modelReader has everything, or has been cut off, and compares
// what it was given with the history.
func (r *modelReader) check(t *rapid.T, history []raftstore.Events) {
	last := raftstore.Revision(len(history))
	late := time.After(time.Minute)
	for whole := false; !whole; {
		r.w.(raftstore.ProgressRequester).RequestProgress()
		poll := time.NewTimer(time.Millisecond)
		select {
		case <-r.done:
			whole = true
		case <-late:
			t.Fatalf("watcher of %q after %d on the one %s is at %d of %d", r.prefix, r.after, r.name, r.at, last)
		case <-poll.C:
			r.mu.Lock()
			whole = r.at >= last
			r.mu.Unlock()
		}
	}
	r.w.Stop()
	<-r.done
	var want []string
	for _, ev := range history[r.after:] {
		part := raftstore.Events{Revision: ev.Revision}
		for _, e := range ev.Events {
			if strings.HasPrefix(e.Item.Key, r.prefix) {
				part.Events = append(part.Events, e)
			}
		}
		if len(part.Events) > 0 {
			want = append(want, tell(part))
		}
	}
	if err := r.w.Err(); err != nil {
		// Cut off: then what it got is the beginning of it.
		if !errors.Is(err, raftstore.ErrSlowWatcher) || !errors.Is(err, raftstore.ErrCompacted) ||
			len(r.got) > len(want) {
			t.Fatalf("watcher of %q after %d ended with %v and %d revisions of %d", r.prefix, r.after, err,
				len(r.got), len(want))
		}
		want = want[:len(r.got)]
	}
	for i := range want {
		if i >= len(r.got) || r.got[i] != want[i] {
			t.Fatalf("watcher of %q after %d on the one %s:\n got %q\nwant %q", r.prefix, r.after, r.name, r.got, want)
		}
	}
	if len(r.got) > len(want) {
		t.Fatalf("watcher of %q after %d on the one %s got too much: %q", r.prefix, r.after, r.name, r.got[len(want):])
	}
}

// Watchers from random revisions, on a replica that is up to date and on one
// that lags and is sent snapshots, see exactly the history: whole, in order,
// once, also while it is compacted and keys expire; or they are cut off having
// seen its beginning.
func TestWatchersSeeTheHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := newPair(t)
		defer p.ahead.Hub.Close()
		defer p.behind.Hub.Close()
		for range rapid.IntRange(1, 400).Draw(t, "steps") {
			switch rapid.IntRange(0, 24).Draw(t, "step") {
			case 0:
				p.watch()
			case 1:
				p.clock += int64(rapid.IntRange(0, 20).Draw(t, "later"))
				p.command(
					&storev1.Command{Kind: &storev1.Command_Expire{Expire: &storev1.Expire{UntilUnixMs: p.clock}}})
			case 2:
				upTo := rapid.IntRange(0, int(p.ahead.View().Revision())).Draw(t, "compact")
				p.command(
					&storev1.Command{Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: uint64(upTo)}}})
			case 3, 4, 5:
				p.follow(rapid.IntRange(1, 60).Draw(t, "batch"))
			case 6:
				if rapid.IntRange(0, 3).Draw(t, "snapshot") == 0 {
					p.install()
				}
			default:
				p.commit()
			}
		}
		p.watch()
		p.follow(len(p.log))
		if a, b := p.ahead.View(), p.behind.View(); a.Hash() != b.Hash() || a.Compacted() != b.Compacted() ||
			a.HistoryBytes() != b.HistoryBytes() {
			t.Fatalf("the two differ at revisions %d and %d", a.Revision(), b.Revision())
		}
		if n := p.ahead.View().Revision(); int(n) != len(p.history) {
			t.Fatalf("%d revisions, %d in the history", n, len(p.history))
		}
		for _, r := range p.readers {
			r.check(t, p.history)
		}
	})
}
