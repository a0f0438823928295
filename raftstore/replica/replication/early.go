// Package replication extends raft's replication to followers. It sends entries while the leader
// writes them, sends commit notices, waits for absent peers, and repeats requests for votes.
package replication

import (
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"
)

// EarlySender sends entries to the followers while the leader still writes them to its own disk.
// raft writes first and then replicates, so that a commit would cost two disk flushes in sequence.
//
// raft itself is not aware of early requests. The log store announces the entries that it is about
// to write. Each peer that has accepted all previous entries receives them as an ordinary
// AppendEntries. When raft replicates the same entries, its call waits for the response to the
// early request and sends nothing. raft replicates only after its own write, so the leader still
// counts itself only when its write is durable.
//
// The response to an early request is returned to a call of raft under three conditions. Both have
// the same term. The peer has accepted the entries at least up to the end of the call. The call
// starts where the previous call succeeded. In one term a leader has only one log, so a peer that
// has accepted an entry has the leader's log up to that entry. A change of the configuration ends
// all sessions, because the ID of a peer may belong to another replica afterwards.
type EarlySender struct {
	send   SendAppend
	commit func() uint64 // returns the last index known to be committed
	// Answered counts the calls of raft that were answered by the response to an early request.
	// Sent counts the calls of raft that sent their entries themselves.
	Answered, Sent atomic.Uint64

	mu         sync.Mutex // not held while a request is sent: raft's main goroutine locks it
	closed     bool
	generation uint64 // incremented by each change of the configuration
	sessions   map[raft.ServerID]*session
	sending    sync.WaitGroup
}

// SendAppend is the method AppendEntries of a raft.Transport.
type SendAppend func(raft.ServerID, raft.ServerAddress, *raft.AppendEntriesRequest, *raft.AppendEntriesResponse) error

// Limits of the entries that wait for one peer, and of the responses of a peer that no call of raft
// has received yet. More responses accumulate only if raft no longer replicates to the peer.
const (
	earlyEntries   = 32
	earlyBytes     = 4 << 20
	earlyUnclaimed = 8
)

// session is the state of early replication to one peer. It starts with a successful call of raft.
// It ends when a request fails or is refused, when a call of raft does not continue it, and when
// the configuration changes.
type session struct {
	id      raft.ServerID
	address raft.ServerAddress
	base    raft.AppendEntriesRequest // the common fields of all requests

	claimed  uint64                     // calls of raft have reported success up to this index
	held     uint64                     // the peer has accepted entries up to this index
	answer   raft.AppendEntriesResponse // the peer's last response
	sent     uint64                     // index of the last entry of the last request
	sentTerm uint64
	told     uint64 // commit index in the last request

	busy      bool // a request with entries is in progress; there is at most one
	over      bool
	unclaimed int           // number of responses to early requests since the last call of raft
	waiting   []*raft.Log   // announced entries that have not been sent, without a gap
	bytes     int           // size of the data of the waiting entries
	moved     chan struct{} // closed and replaced when held, busy or over changes
}

func (e *EarlySender) Initialize(send SendAppend, commit func() uint64) {
	e.send, e.commit = send, commit
	e.sessions = make(map[raft.ServerID]*session)
}

// Close ends all sessions and waits for the requests in progress. The transport must have been
// closed before, so that the requests end.
func (e *EarlySender) Close() {
	e.mu.Lock()
	e.closed = true
	e.endSessions()
	e.mu.Unlock()
	e.sending.Wait()
}

// announceLogs starts sending entries that the log store is about to write. It does not block.
func (e *EarlySender) announceLogs(logs []*raft.Log) {
	if len(logs) == 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, l := range logs {
		if l.Type == raft.LogConfiguration {
			e.generation++
			e.endSessions()
			return
		}
	}
	first, last := logs[0].Term, logs[len(logs)-1].Term
	for _, s := range e.sessions {
		switch {
		case s.base.Term < last: // another replica leads
			e.endSession(s)
		case s.base.Term == first:
			s.queueLogs(logs)
			e.startSending(s)
		}
	}
}

// queueLogs appends entries to the waiting entries of the session. If this would cause a gap or
// exceed a limit, it first drops the waiting entries; raft sends the dropped entries itself.
func (s *session) queueLogs(logs []*raft.Log) {
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

// hasNext reports whether the session has waiting entries that directly follow the last entry of
// the last request.
func (s *session) hasNext() bool {
	return !s.over && len(s.waiting) > 0 && s.waiting[0].Index == s.sent+1
}

// startSending starts a goroutine that sends the waiting entries, unless a request is in progress.
// After that request, the waiting entries are sent anyway.
func (e *EarlySender) startSending(s *session) {
	if !s.busy && s.hasNext() && !e.closed {
		s.busy = true
		e.sending.Add(1)
		go e.sendWaiting(s)
	}
}

// sendWaiting sends the waiting entries of the session in one request after the other, until no
// entry is waiting that can be sent.
func (e *EarlySender) sendWaiting(s *session) {
	defer e.sending.Done()
	e.mu.Lock()
	defer e.mu.Unlock()
	for s.hasNext() {
		req := s.nextRequest(e.commit())
		e.mu.Unlock()
		var resp raft.AppendEntriesResponse
		err := e.send(s.id, s.address, req, &resp)
		e.mu.Lock()
		s.unclaimed++
		switch {
		case err != nil || !resp.Success || resp.Term != s.base.Term || s.unclaimed > earlyUnclaimed:
			e.endSession(s)
		default:
			s.held, s.answer = lastIndexOf(req), resp
			s.notifyChange()
		}
	}
	s.busy = false
	s.notifyChange()
}

// nextRequest returns a request with all waiting entries. commit is the last index known to be
// committed. A follower treats all of its entries up to the commit index of the request as
// committed. The commit index of the request is therefore at most the index of the entry before its
// entries.
func (s *session) nextRequest(commit uint64) *raft.AppendEntriesRequest {
	req := s.base
	req.PrevLogEntry, req.PrevLogTerm = s.sent, s.sentTerm
	req.LeaderCommitIndex = min(commit, s.sent)
	req.Entries = s.waiting
	s.sent, s.sentTerm, s.told = lastIndexOf(&req), s.base.Term, req.LeaderCommitIndex
	s.waiting, s.bytes = nil, 0
	return &req
}

func lastIndexOf(req *raft.AppendEntriesRequest) uint64 {
	return req.PrevLogEntry + uint64(len(req.Entries))
}

func (s *session) notifyChange() {
	close(s.moved)
	s.moved = make(chan struct{})
}

func (e *EarlySender) endSession(s *session) {
	s.over = true
	s.waiting, s.bytes = nil, 0
	s.notifyChange()
	if e.sessions[s.id] == s {
		delete(e.sessions, s.id)
	}
}

func (e *EarlySender) endSessions() {
	for _, s := range e.sessions {
		e.endSession(s)
	}
}

// endSessionWith ends the session with a peer, if there is one.
func (e *EarlySender) endSessionWith(id raft.ServerID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s := e.sessions[id]; s != nil {
		e.endSession(s)
	}
}

// NeedsNotice reports whether the commit index must be sent to a peer in a separate message,
// although newer entries are in the log. This is the case if these entries were sent early with a
// lower commit index.
func (e *EarlySender) NeedsNotice(id raft.ServerID, index uint64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.sessions[id]
	return s != nil && s.sent > index && s.told < index && len(s.waiting) == 0
}

// replicateEntries handles a call of raft that replicates entries to a peer. If the entries of the
// call were sent early, it waits for the response to them and returns it. Otherwise it calls send.
func (e *EarlySender) replicateEntries(send SendAppend, id raft.ServerID, target raft.ServerAddress,
	req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	e.mu.Lock()
	s := e.matchSession(id, target, req)
	if s != nil && s.awaitAnswer(&e.mu, req, resp) {
		e.mu.Unlock()
		e.Answered.Add(1)
		return nil
	}
	if len(req.Entries) > 0 {
		e.Sent.Add(1)
		if s != nil {
			s.busy = true
		}
	}
	generation := e.generation
	e.mu.Unlock()
	err := send(id, target, req, resp)
	e.mu.Lock()
	defer e.mu.Unlock()
	if s != nil && len(req.Entries) > 0 {
		s.busy = false
		s.notifyChange()
	}
	if err != nil || !resp.Success || resp.Term != req.Term {
		if now := e.sessions[id]; now != nil && now.base.Term <= req.Term {
			e.endSession(now)
		}
		return err
	}
	if generation == e.generation {
		e.recordSuccess(s, id, target, req, resp)
	}
	return nil
}

// matchSession returns the session with a peer if a call of raft continues it: the call has the
// term and address of the session, and its entries follow the last entry that was reported to raft.
// Otherwise it returns nil, and ends the session unless the call has an earlier term.
func (e *EarlySender) matchSession(id raft.ServerID, target raft.ServerAddress,
	req *raft.AppendEntriesRequest) *session {
	s := e.sessions[id]
	if s == nil || s.base.Term > req.Term {
		return nil
	}
	if s.base.Term != req.Term || s.address != target || s.claimed != req.PrevLogEntry {
		e.endSession(s)
		return nil
	}
	s.unclaimed = 0
	return s
}

// awaitAnswer waits as long as a request in progress may still produce the response to the call
// req. It copies the response to resp and returns true if the peer has accepted all entries of the
// call early. If it returns false, no request is in progress. The caller holds mu, which is
// released during the wait.
func (s *session) awaitAnswer(mu *sync.Mutex, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) bool {
	last := lastIndexOf(req)
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

// recordSuccess records that the peer has the log up to the last entry of req, a successful call of
// raft. If s is not the current session with the peer, it starts a new session.
func (e *EarlySender) recordSuccess(s *session, id raft.ServerID, target raft.ServerAddress,
	req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) {
	now := e.sessions[id]
	last, term := lastIndexOf(req), req.PrevLogTerm
	switch n := len(req.Entries); {
	case e.closed || now != nil && now.base.Term > req.Term:
		return
	case n > 0:
		term = req.Entries[n-1].Term
	case last == 0 || now != nil && now == s:
		return // without entries, the call adds nothing to the session
	}
	if now == nil || now != s {
		if now != nil {
			e.endSession(now)
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
	e.startSending(now)
}

// AnnounceLogs returns a log store that announces the entries that it is about to write to e, and
// writes them to store.
func (e *EarlySender) AnnounceLogs(store raft.LogStore) raft.LogStore {
	return &earlyLogs{store, e.announceLogs}
}

// earlyLogs is a raft.LogStore that announces entries to an EarlySender before it writes them.
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

// IsMonotonic implements raft.MonotonicLogStore. It returns the value of the underlying store.
func (s *earlyLogs) IsMonotonic() bool {
	m, ok := s.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}
