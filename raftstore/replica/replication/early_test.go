package replication

import (
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/virtual"
)

var errBroken = errors.New("connection broken")

// peerDisk is a follower as raft makes one: its log, and what it has accepted.
// What it holds of a term's leader is known for sure, as one log is compared
// with the other.
type peerDisk struct {
	term     uint64
	log      []*raft.Log       // index i+1 at i
	commit   uint64            //
	accepted map[uint64]uint64 // by term: how far it held that leader's log
}

func newPeerDisk() *peerDisk { return &peerDisk{accepted: make(map[uint64]uint64)} }

func lastOf(log []*raft.Log) uint64 { return uint64(len(log)) }

// appendEntries follows raft's own, which takes all that it has up to the
// commit index for committed.
func (p *peerDisk) appendEntries(req *raft.AppendEntriesRequest) (resp raft.AppendEntriesResponse) {
	resp.Term, resp.LastLog = max(p.term, req.Term), lastOf(p.log)
	if req.Term < p.term {
		return resp
	}
	p.term = req.Term
	if prev := req.PrevLogEntry; prev > 0 && (prev > lastOf(p.log) || p.log[prev-1].Term != req.PrevLogTerm) {
		return resp
	}
	for i, l := range req.Entries {
		if l.Index > lastOf(p.log) {
			p.log = append(p.log, req.Entries[i:]...)
			break
		}
		if p.log[l.Index-1].Term != l.Term {
			p.log = append(p.log[:l.Index-1:l.Index-1], req.Entries[i:]...)
			break
		}
	}
	p.accepted[req.Term] = max(p.accepted[req.Term], lastIndexOf(req))
	p.commit = max(p.commit, min(req.LeaderCommitIndex, lastOf(p.log)))
	resp.Success = true
	return resp
}

// sentRequest is a request on its way to the peer.
type sentRequest struct {
	to   *peerDisk
	req  raft.AppendEntriesRequest
	done chan sentAnswer
}

type sentAnswer struct {
	resp raft.AppendEntriesResponse
	err  error
}

// replication is what raft keeps for one peer in one membership and term.
type replication struct {
	term uint64
	next uint64
	busy bool
	over bool
}

// stage is a leader with one peer in which nothing happens by itself.
type stage struct {
	t   *testing.T
	rng *rand.Rand
	e   EarlySender

	term      uint64
	log       []*raft.Log            // of this replica; what lies behind stored is announced only
	logs      map[uint64][]*raft.Log // by term that it led
	stored    uint64
	committed uint64 // committed in this term

	peer    *peerDisk
	member  *replication // nil when it is none
	mu      sync.Mutex   // held by whoever the code under test calls
	flying  []*sentRequest
	answers []func() // processed, and on their way back
	ghosts  []*sentRequest
	counts  map[string]int
}

func newStage(t *testing.T, seed uint64) *stage {
	s := &stage{t: t, rng: rand.New(rand.NewPCG(seed, 1)), term: 1, logs: make(map[uint64][]*raft.Log),
		peer: newPeerDisk(), counts: make(map[string]int)}
	s.e.Initialize(s.sendEarly, s.commitIndex)
	return s
}

// sendEarly is what the code under test sends of its own accord. Its commit
// index covers no more than the request makes the peer compare.
func (s *stage) sendEarly(
	id raft.ServerID, to raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	if len(req.Entries) == 0 || req.LeaderCommitIndex > req.PrevLogEntry {
		s.t.Errorf("%d entries after %d, commit index %d", len(req.Entries), req.PrevLogEntry, req.LeaderCommitIndex)
	}
	return s.send(id, to, req, resp)
}

// send is called by the code under test, on its own goroutines.
func (s *stage) send(
	_ raft.ServerID, _ raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	f := &sentRequest{to: s.peer, req: *req, done: make(chan sentAnswer)}
	s.mu.Lock()
	s.flying = append(s.flying, f)
	s.mu.Unlock()
	a := <-f.done
	*resp = a.resp
	return a.err
}

func (s *stage) commitIndex() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.committed
}

// announce appends entries to the log, which is not durable yet.
func (s *stage) announce(n int, kind raft.LogType) { s.announceSized(n, kind, 0) }

func (s *stage) announceSized(n int, kind raft.LogType, size int) {
	var logs []*raft.Log
	for range n {
		l := &raft.Log{Index: lastOf(s.log) + 1, Term: s.term, Type: kind, Data: make([]byte, size)}
		s.log = append(s.log[:len(s.log):len(s.log)], l)
		logs = append(logs, l)
	}
	s.logs[s.term] = s.log
	s.e.announceLogs(logs)
}

// store makes the log durable, and commits some of it if other peers hold it.
func (s *stage) store() {
	s.stored = lastOf(s.log)
	if n := s.stored - s.committed; n > 0 && s.rng.IntN(2) == 0 {
		s.committed += s.rng.Uint64N(n + 1)
	}
}

func (s *stage) join() { s.member = &replication{term: s.term, next: s.stored + 1} }

// call is one turn of raft's replication to the peer.
func (s *stage) call() {
	r := s.member
	if r == nil || r.busy || r.over {
		return
	}
	req := &raft.AppendEntriesRequest{Term: r.term, PrevLogEntry: r.next - 1, LeaderCommitIndex: s.committed}
	if r.next > 1 {
		req.PrevLogTerm = s.log[r.next-2].Term
	}
	if to := min(s.stored, r.next+3); to >= r.next {
		req.Entries = slices.Clone(s.log[r.next-1 : to])
	}
	r.busy = true
	log := s.log
	go func() {
		var resp raft.AppendEntriesResponse
		err := s.e.replicateEntries(s.send, "peer", "address", req, &resp)
		s.mu.Lock()
		defer s.mu.Unlock()
		r.busy = false
		last := lastIndexOf(req)
		switch {
		case r.over || err != nil:
		case resp.Term > r.term:
			r.over = true
		case !resp.Success:
			r.next = max(min(r.next-1, resp.LastLog+1), 1)
		default:
			s.counts["success"]++
			if s.peer.accepted[r.term] < last {
				s.t.Errorf("raft receives entry %d in term %d as stored by the peer, which has stored "+
					"entries up to %d only",
					last, r.term, s.peer.accepted[r.term])
			}
			if s.peer.term == r.term && (lastOf(s.peer.log) < last || last > 0 && s.peer.log[last-1] != log[last-1]) {
				s.t.Errorf("raft receives entry %d as stored by the peer, which does not have it", last)
			}
			r.next = last + 1
			s.committed = max(s.committed, last)
		}
	}()
}

// fly lets something happen to a request on its way.
func (s *stage) fly() {
	if len(s.flying) == 0 {
		return
	}
	i := s.rng.IntN(len(s.flying))
	f := s.flying[i]
	s.flying = slices.Delete(s.flying, i, i+1)
	switch fate := s.rng.IntN(20); {
	case fate == 0: // lost
		f.done <- sentAnswer{err: errBroken}
	case fate == 1: // late
		f.done <- sentAnswer{err: errBroken}
		s.ghosts = append(s.ghosts, f)
	case f.to != s.peer: // its connection ended with the process
		f.done <- sentAnswer{err: errBroken}
	default:
		resp := s.process(f)
		if fate == 2 {
			f.done <- sentAnswer{err: errBroken}
			return
		}
		s.answers = append(s.answers, func() { f.done <- sentAnswer{resp: resp} })
	}
}

// process checks what raft relies on: the peer never takes for committed what
// the leader did not mean.
func (s *stage) process(f *sentRequest) raft.AppendEntriesResponse {
	before := f.to.commit
	resp := f.to.appendEntries(&f.req)
	log := s.logs[f.req.Term]
	for i := before; i < f.to.commit; i++ {
		if f.to.log[i] != log[i] {
			s.t.Errorf("request of term %d after entry %d with commit index %d: the peer takes its entry %d of term "+
				"%d for committed",
				f.req.Term, f.req.PrevLogEntry, f.req.LeaderCommitIndex, i+1, f.to.log[i].Term)
		}
	}
	return resp
}

func (s *stage) answer() {
	if len(s.answers) == 0 {
		return
	}
	i := s.rng.IntN(len(s.answers))
	a := s.answers[i]
	s.answers = slices.Delete(s.answers, i, i+1)
	a()
}

func (s *stage) haunt() {
	if len(s.ghosts) == 0 {
		return
	}
	f := s.ghosts[0]
	s.ghosts = s.ghosts[1:]
	if f.to == s.peer {
		s.process(f)
	}
}

// depose lets another lead for one term, which shortens logs and adds to them.
func (s *stage) depose() {
	if s.stored != lastOf(s.log) {
		return // raft steps down when its write is over
	}
	if s.member != nil {
		s.member.over = true
	}
	keep := s.rng.Uint64N(lastOf(s.log) + 1)
	other := s.log[:keep:keep]
	for range s.rng.IntN(4) {
		other = append(other, &raft.Log{Index: lastOf(other) + 1, Term: s.term + 1})
	}
	s.logs[s.term+1] = other
	if s.rng.IntN(2) == 0 {
		s.log = other
		if added := other[keep:]; len(added) > 0 {
			s.e.announceLogs(added) // as a follower does
		}
	}
	if s.rng.IntN(2) == 0 {
		s.peer.term, s.peer.log, s.peer.commit = s.term+1, other, min(s.peer.commit, keep)
	}
	s.term += 2
	s.stored, s.committed = lastOf(s.log), 0
	s.logs[s.term] = s.log
	if s.member != nil {
		s.join()
	}
	s.announce(1, raft.LogNoop)
}

// swap removes the peer, or adds it again, perhaps as one without data.
func (s *stage) swap() {
	if s.stored != lastOf(s.log) {
		return
	}
	s.announce(1, raft.LogConfiguration)
	s.store()
	if s.member != nil {
		s.member.over = true
		s.member = nil
		return
	}
	if s.rng.IntN(2) == 0 {
		s.peer = newPeerDisk()
	}
	s.join()
}

// rest ends what is under way.
func (s *stage) rest() {
	for range 1000 {
		virtual.Wait()
		if len(s.flying) == 0 && len(s.answers) == 0 {
			return
		}
		flying, answers := s.flying, s.answers
		s.flying, s.answers = nil, nil
		for _, f := range flying {
			f.done <- sentAnswer{err: errBroken}
		}
		for _, a := range answers {
			a()
		}
	}
	s.t.Error("it does not come to rest")
}

// For any order of calls, answers, losses, delays, removals, wipes and elections: no entry is
// reported to raft that the peer did not accept in that term, and the peer regards only entries of
// the leader as committed. F52
func TestEarlyAnswersAreTrue(t *testing.T) {
	var early, late, successes uint64
	for seed := range uint64(2000) {
		virtual.Test(t, func(t *testing.T) {
			s := newStage(t, seed)
			s.join()
			s.announce(1, raft.LogNoop)
			calm := s.rng.IntN(3) // how much happens beside replication
			for range 150 {
				switch dice := s.rng.IntN(100); {
				case dice < 20:
					s.announce(1+s.rng.IntN(3), raft.LogCommand)
				case dice < 40:
					s.store()
				case dice < 60:
					s.call()
				case dice < 75:
					s.fly()
				case dice < 90:
					s.answer()
				case dice < 92:
					s.haunt()
				case dice < 92+2*calm:
					s.swap()
				case dice < 92+3*calm:
					s.depose()
				default:
					s.fly()
					virtual.Wait()
					s.answer()
				}
				virtual.Wait()
			}
			s.rest()
			s.e.Close()
			early, late, successes = early+s.e.Answered.Load(), late+s.e.Sent.Load(),
				successes+uint64(s.counts["success"])
			if t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		})
	}
	t.Logf("%d successes, %d early, %d late", successes, early, late)
	if early < 1000 || late < 1000 {
		t.Errorf("%d early and %d late: hardly anything was tried", early, late)
	}
}

// deliver lets all requests under way be answered well, and returns how many
// there were.
func (s *stage) deliver() (n int) {
	virtual.Wait()
	for ; len(s.flying) > 0; n++ {
		f := s.flying[0]
		s.flying = s.flying[1:]
		f.done <- sentAnswer{resp: s.process(f)}
		virtual.Wait()
	}
	return n
}

// onStage runs a test with a peer that holds the log and is in step.
func onStage(t *testing.T, f func(*testing.T, *stage)) {
	virtual.Test(t, func(t *testing.T) {
		s := newStage(t, 1)
		s.announce(1, raft.LogNoop)
		s.store()
		s.join()
		for range 3 { // refused, all of the log, all is well
			s.call()
			s.deliver()
		}
		s.e.Answered.Store(0)
		s.e.Sent.Store(0)
		f(t, s)
		s.rest()
		s.e.Close()
	})
}

// What is announced is on its way before it is stored, once, and raft's call
// for it sends nothing.
func TestEntriesGoWhileTheLeaderWrites(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		for round := range 10 {
			s.announce(2, raft.LogCommand)
			virtual.Wait()
			if len(s.flying) != 1 || len(s.flying[0].req.Entries) != 2 {
				t.Fatalf("round %d: %d requests while the leader writes, want 1", round, len(s.flying))
			}
			answerFirst := round%2 == 0
			if answerFirst {
				s.deliver()
			}
			s.store()
			s.call()
			if n := s.deliver(); answerFirst && n != 0 || !answerFirst && n != 1 {
				t.Fatalf("round %d: %d more requests", round, n)
			}
			if s.committed != s.stored || s.peer.accepted[s.term] != s.stored {
				t.Fatalf("round %d: stored %d, replicated %d", round, s.stored, s.committed)
			}
		}
		if early, late := s.e.Answered.Load(), s.e.Sent.Load(); early != 10 || late != 0 {
			t.Errorf("%d early, %d late", early, late)
		}
	})
}

// A peer that does not answer holds up nothing: who announces does not wait,
// and what waits for the peer is bounded.
func TestSilentPeerHoldsUpNothing(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		bounded := func() {
			t.Helper()
			virtual.Wait()
			if len(s.flying) != 1 {
				t.Fatalf("%d requests to a peer that does not answer", len(s.flying))
			}
			if w := s.e.sessions["peer"]; len(w.waiting) > earlyEntries || w.bytes > earlyBytes {
				t.Fatalf("%d entries wait, of %d bytes", len(w.waiting), w.bytes)
			}
		}
		for range 3 * earlyEntries {
			s.announceSized(1, raft.LogCommand, earlyBytes/earlyEntries+1)
			bounded()
			s.store()
		}
		s.announceSized(1, raft.LogCommand, earlyBytes/2)
		bounded()
		s.announceSized(1, raft.LogCommand, earlyBytes+1)
		bounded()
		s.announce(earlyEntries+1, raft.LogCommand)
		bounded()
		s.announce(earlyEntries, raft.LogCommand)
		bounded()
		s.store()
		s.call()
		s.deliver()
		for s.committed < s.stored {
			s.call()
			s.deliver()
		}
	})
}

// However much is written all the time, a peer that is out of step comes back
// into it.
func TestStepIsFoundAgainUnderLoad(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		load := func() {
			s.announce(1, raft.LogCommand)
			virtual.Wait()
			s.store()
		}
		load()
		virtual.Wait()
		s.flying[0].done <- sentAnswer{err: errBroken}
		s.flying = nil
		for range 20 {
			load()
			s.call()
			virtual.Wait()
			load()
			virtual.Wait()
			if len(s.flying) > 1 {
				t.Fatalf("%d requests at once", len(s.flying))
			}
			s.deliver()
		}
		if late := s.e.Sent.Load(); late > 3 {
			t.Errorf("%d of 20 calls were late", late)
		}
	})
}

// A peer for which raft does not ask any more is left alone.
func TestPeerThatRaftGaveUp(t *testing.T) {
	onStage(t, func(t *testing.T, s *stage) {
		sent := 0
		for range 10 * earlyUnclaimed {
			s.announce(1, raft.LogCommand)
			sent += s.deliver()
		}
		if sent == 0 || sent > earlyUnclaimed+1 || len(s.e.sessions) != 0 {
			t.Errorf("%d requests, %d sessions", sent, len(s.e.sessions))
		}
	})
}

// Another configuration, another leader and a snapshot end what was agreed.
func TestSessionsEnd(t *testing.T) {
	for name, cut := range map[string]func(*stage){
		"configuration": func(s *stage) { s.announce(1, raft.LogConfiguration) },
		"leader": func(s *stage) {
			s.e.announceLogs([]*raft.Log{{Index: 2, Term: s.term}, {Index: 3, Term: s.term + 1}})
		},
		"snapshot": func(s *stage) { s.e.endSessionWith("peer") },
		"end":      func(s *stage) { s.e.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(t *testing.T, s *stage) {
				if len(s.e.sessions) != 1 {
					t.Fatalf("%d sessions", len(s.e.sessions))
				}
				cut(s)
				if len(s.e.sessions) != 0 {
					t.Errorf("%d sessions", len(s.e.sessions))
				}
				s.announce(1, raft.LogCommand)
				if n := s.deliver(); n != 0 {
					t.Errorf("%d requests", n)
				}
			})
		})
	}
}
