package replica

import (
	"sync"

	"github.com/hashicorp/raft"
)

// early sends entries to the followers while the leader still writes them to
// its own disk. raft writes, and only then replicates, so that a commit would
// cost two flushes, one after the other.
//
// raft knows nothing of it. The log store announces what it is about to write;
// each peer that is in step is sent it, as an AppendEntries like any other; and
// when raft comes to replicate the same entries, its call waits for that answer
// and sends nothing. As before, the leader counts itself once its own write is
// durable: raft does not ask for what is not.
//
// An answer serves a call of raft when both are of one term, the peer took the
// entries at least as far as the call goes, and the call begins where the one
// before it had succeeded. In one term a leader has one log, so that a peer
// that took an entry holds that log up to there. A change of the configuration
// ends all that: the name of a peer may be another's after it.
type early struct {
	send   sendAppend
	commit func() uint64 // the last index that is known to be committed
	meters *meters

	mu         sync.Mutex // not held while anything is sent: raft's main goroutine takes it
	closed     bool
	generation uint64 // grows with each change of the configuration
	sessions   map[raft.ServerID]*session
	sending    sync.WaitGroup
}

// sendAppend is AppendEntries of a raft.Transport.
type sendAppend func(raft.ServerID, raft.ServerAddress, *raft.AppendEntriesRequest, *raft.AppendEntriesResponse) error

// Bounds of what waits to be sent to one peer, and of the answers from it that
// wait for raft: there are more when raft has given the peer up.
const (
	earlyEntries   = 32
	earlyBytes     = 4 << 20
	earlyUnclaimed = 8
)

// session is what raft and a peer have agreed on since a first success. It ends
// with a failure or a refusal, and when raft begins anew.
type session struct {
	id      raft.ServerID
	address raft.ServerAddress
	base    raft.AppendEntriesRequest // what all requests have in common

	claimed  uint64                     // raft has been told that the peer holds the log up to here
	held     uint64                     // the peer has said so
	answer   raft.AppendEntriesResponse // with these words
	sent     uint64                     // where the last request ended
	sentTerm uint64
	told     uint64 // the commit index that it named

	busy      bool // a request with entries is under way: there is one at a time
	over      bool
	unclaimed int           // answers since raft called last
	waiting   []*raft.Log   // announced and not sent, without a gap among them
	bytes     int           // of their data
	moved     chan struct{} // closed and replaced when held, busy or over change
}

func (e *early) init(send sendAppend, commit func() uint64, m *meters) {
	e.send, e.commit, e.meters = send, commit, m
	e.sessions = make(map[raft.ServerID]*session)
}

// close ends all sessions and waits for the requests under way. The transport
// must have ended before, and they with it.
func (e *early) close() {
	e.mu.Lock()
	e.closed = true
	e.endAll()
	e.mu.Unlock()
	e.sending.Wait()
}

// announce is told of entries that are about to be written. It does not block.
func (e *early) announce(logs []*raft.Log) {
	if len(logs) == 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, l := range logs {
		if l.Type == raft.LogConfiguration {
			e.generation++
			e.endAll()
			return
		}
	}
	first, last := logs[0].Term, logs[len(logs)-1].Term
	for _, s := range e.sessions {
		switch {
		case s.base.Term < last: // another leads
			e.end(s)
		case s.base.Term == first:
			s.add(logs)
			e.start(s)
		}
	}
}

// add puts entries behind those that wait. When there are too many the oldest
// go: the newest will fit behind what raft sends by itself.
func (s *session) add(logs []*raft.Log) {
	size := 0
	for _, l := range logs {
		size += len(l.Data)
	}
	n := len(s.waiting)
	if n > 0 && (s.waiting[n-1].Index+1 != logs[0].Index || n+len(logs) > earlyEntries || s.bytes+size > earlyBytes) {
		s.waiting, s.bytes = nil, 0
	}
	if len(logs) <= earlyEntries && size <= earlyBytes {
		s.waiting = append(s.waiting, logs...)
		s.bytes += size
	}
}

// ready reports whether what waits goes on where the last request ended.
func (s *session) ready() bool {
	return !s.over && len(s.waiting) > 0 && s.waiting[0].Index == s.sent+1
}

// start sends what waits, unless a request is under way: then it follows that.
func (e *early) start(s *session) {
	if !s.busy && s.ready() && !e.closed {
		s.busy = true
		e.sending.Add(1)
		go e.deliver(s)
	}
}

// deliver sends what waits until nothing does.
func (e *early) deliver(s *session) {
	defer e.sending.Done()
	e.mu.Lock()
	defer e.mu.Unlock()
	for s.ready() {
		req := s.next(e.commit())
		e.mu.Unlock()
		var resp raft.AppendEntriesResponse
		err := e.send(s.id, s.address, req, &resp)
		e.mu.Lock()
		s.unclaimed++
		switch {
		case err != nil || !resp.Success || resp.Term != s.base.Term || s.unclaimed > earlyUnclaimed:
			e.end(s)
		default:
			s.held, s.answer = lastEntry(req), resp
			s.signal()
		}
	}
	s.busy = false
	s.signal()
}

// next makes a request of all that waits. A follower takes whatever it has up
// to the commit index for committed: that must not reach beyond what the
// request makes sure of.
func (s *session) next(commit uint64) *raft.AppendEntriesRequest {
	req := s.base
	req.PrevLogEntry, req.PrevLogTerm = s.sent, s.sentTerm
	req.LeaderCommitIndex = min(commit, s.sent)
	req.Entries = s.waiting
	s.sent, s.sentTerm, s.told = lastEntry(&req), s.base.Term, req.LeaderCommitIndex
	s.waiting, s.bytes = nil, 0
	return &req
}

func lastEntry(req *raft.AppendEntriesRequest) uint64 {
	return req.PrevLogEntry + uint64(len(req.Entries))
}

func (s *session) signal() {
	close(s.moved)
	s.moved = make(chan struct{})
}

func (e *early) end(s *session) {
	s.over = true
	s.waiting, s.bytes = nil, 0
	s.signal()
	if e.sessions[s.id] == s {
		delete(e.sessions, s.id)
	}
}

func (e *early) endAll() {
	for _, s := range e.sessions {
		e.end(s)
	}
}

// forget ends the session with a peer, if there is one.
func (e *early) forget(id raft.ServerID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s := e.sessions[id]; s != nil {
		e.end(s)
	}
}

// untold reports whether a commit index must be told to a peer in a message of
// its own although newer entries are in the log: they have been sent without it.
func (e *early) untold(id raft.ServerID, index uint64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.sessions[id]
	return s != nil && s.sent > index && s.told < index && len(s.waiting) == 0
}

// call is a call of raft's that replicates to a peer. It is answered with what
// went early, or else sent by plain.
func (e *early) call(plain sendAppend, id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	e.mu.Lock()
	s := e.converse(id, target, req)
	if s != nil && s.await(&e.mu, req, resp) {
		e.mu.Unlock()
		e.meters.early.Add(1)
		return nil
	}
	if len(req.Entries) > 0 {
		e.meters.late.Add(1)
		if s != nil {
			s.busy = true
		}
	}
	generation := e.generation
	e.mu.Unlock()
	err := plain(id, target, req, resp)
	e.mu.Lock()
	defer e.mu.Unlock()
	if s != nil && len(req.Entries) > 0 {
		s.busy = false
		s.signal()
	}
	if err != nil || !resp.Success || resp.Term != req.Term {
		if now := e.sessions[id]; now != nil && now.base.Term <= req.Term {
			e.end(now)
		}
		return err
	}
	if generation == e.generation {
		e.succeeded(s, id, target, req, resp)
	}
	return nil
}

// converse returns the session with a peer if a call of raft goes on with it.
func (e *early) converse(id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest) *session {
	s := e.sessions[id]
	if s == nil || s.base.Term > req.Term {
		return nil
	}
	if s.base.Term != req.Term || s.address != target || s.claimed != req.PrevLogEntry {
		e.end(s)
		return nil
	}
	s.unclaimed = 0
	return s
}

// await waits while the answer to a call may still come, and reports whether
// it has. Else no request is under way. mu is held before and after.
func (s *session) await(mu *sync.Mutex, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) bool {
	last := lastEntry(req)
	for len(req.Entries) > 0 && !s.over && s.held < last && s.busy {
		moved := s.moved
		mu.Unlock()
		<-moved
		mu.Lock()
	}
	if len(req.Entries) == 0 || s.over || s.held < last || s.claimed != req.PrevLogEntry {
		return false
	}
	s.claimed = last
	*resp = s.answer
	return true
}

// succeeded takes note of a call that was sent: the peer holds the log up to
// the call's last entry.
func (e *early) succeeded(s *session, id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) {
	now := e.sessions[id]
	last, term := lastEntry(req), req.PrevLogTerm
	switch n := len(req.Entries); {
	case e.closed || now != nil && now.base.Term > req.Term:
		return
	case n > 0:
		term = req.Entries[n-1].Term
	case last == 0 || now != nil && now == s:
		return // it is known
	}
	if now == nil || now != s {
		if now != nil {
			e.end(now)
		}
		now = &session{id: id, address: target, moved: make(chan struct{})}
		now.base.RPCHeader, now.base.Term, now.base.Leader = req.RPCHeader, req.Term, req.Leader
		e.sessions[id] = now
	}
	now.claimed, now.held, now.answer = last, last, *resp
	now.sent, now.sentTerm, now.told = last, term, req.LeaderCommitIndex
	for len(now.waiting) > 0 && now.waiting[0].Index <= last {
		now.bytes -= len(now.waiting[0].Data)
		now.waiting = now.waiting[1:]
	}
	e.start(now)
}

// earlyLogs announces what the store below is about to write.
type earlyLogs struct {
	raft.LogStore
	announce func([]*raft.Log)
}

// StoreLog implements raft.LogStore.
func (s *earlyLogs) StoreLog(l *raft.Log) error { return s.StoreLogs([]*raft.Log{l}) }

// StoreLogs implements raft.LogStore.
func (s *earlyLogs) StoreLogs(logs []*raft.Log) error {
	s.announce(logs)
	return s.LogStore.StoreLogs(logs)
}

// IsMonotonic implements raft.MonotonicLogStore: as the store below.
func (s *earlyLogs) IsMonotonic() bool {
	m, ok := s.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}
