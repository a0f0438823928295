package replica

import (
	"io"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

// patientTransport is raft's transport with patience for peers that are away.
// raft waits ever longer, up to ten seconds, between its attempts to replicate
// to a peer that does not answer; one that comes back would miss a majority for
// as long. Here an attempt does not fail while the peer is away: it waits, asks
// with heartbeats, and goes on as soon as one is answered. What went early is
// not sent again, and who takes in a snapshot is known. Everything else, pre-vote
// and the fast path of heartbeats among it, is the transport's own.
type patientTransport struct {
	*raft.NetworkTransport
	// unpooled makes a connection for each call.
	unpooled *raft.NetworkTransport
	// worth reports whether it makes sense to wait for a peer: this replica
	// still leads in the term, and the peer is still a member.
	worth func(term uint64, peer raft.ServerID) bool
	// early may have the answer already.
	early *early
	// installs is told of snapshots that are sent.
	installs *installs
}

const (
	firstProbe = 20 * time.Millisecond
	lastProbe  = 200 * time.Millisecond
)

// AppendEntries implements raft.Transport.
func (t *patientTransport) AppendEntries(id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	if args.PrevLogEntry == 0 && len(args.Entries) == 0 && args.LeaderCommitIndex == 0 {
		return t.NetworkTransport.AppendEntries(id, target, args, resp) // a heartbeat
	}
	return t.early.call(t.patiently, id, target, args, resp)
}

// patiently sends until the peer answers, or there is no point in it.
func (t *patientTransport) patiently(id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	err := t.NetworkTransport.AppendEntries(id, target, args, resp)
	for err != nil && t.await(id, target, args.RPCHeader, args.Term) {
		*resp = raft.AppendEntriesResponse{}
		err = t.NetworkTransport.AppendEntries(id, target, args, resp)
	}
	return err
}

// InstallSnapshot implements raft.Transport. The content can be read once only,
// so the peer is made sure of before.
func (t *patientTransport) InstallSnapshot(id raft.ServerID, target raft.ServerAddress, args *raft.InstallSnapshotRequest, resp *raft.InstallSnapshotResponse, data io.Reader) error {
	t.early.forget(id)
	if !t.probe(id, target, args.RPCHeader, args.Term) {
		t.await(id, target, args.RPCHeader, args.Term)
	}
	t.installs.begin()
	defer t.installs.end()
	return t.NetworkTransport.InstallSnapshot(id, target, args, resp, data)
}

// installs knows whether a follower is being brought up to date with a
// snapshot. A new one would shorten the log to behind that, and under load the
// follower would be sent one after the other and never catch up.
type installs struct {
	underWay atomic.Int32
	ended    atomic.Int64 // unix nanoseconds
}

// afterInstall is for how long a follower may take to fetch what was written
// while it was brought up to date.
const afterInstall = 5 * time.Second

// duringInstall is how much longer than otherwise the log may become meanwhile.
const duringInstall = 4

func (i *installs) begin() { i.underWay.Add(1) }

func (i *installs) end() {
	i.ended.Store(time.Now().UnixNano())
	i.underWay.Add(-1)
}

// stretch is by how much the log may be longer before the next snapshot.
func (i *installs) stretch() int64 {
	if i.underWay.Load() > 0 || time.Now().UnixNano()-i.ended.Load() < int64(afterInstall) {
		return duringInstall
	}
	return 1
}

// await returns true once the peer answers, false when there is no point in
// waiting for it any longer.
func (t *patientTransport) await(id raft.ServerID, target raft.ServerAddress, header raft.RPCHeader, term uint64) bool {
	for pause := firstProbe; t.worth(term, id); pause = min(lastProbe, pause*3/2) {
		<-time.After(pause)
		if t.probe(id, target, header, term) {
			return t.worth(term, id)
		}
	}
	return false
}

func (t *patientTransport) probe(id raft.ServerID, target raft.ServerAddress, header raft.RPCHeader, term uint64) bool {
	req := &raft.AppendEntriesRequest{RPCHeader: header, Term: term, Leader: header.Addr}
	var resp raft.AppendEntriesResponse
	return t.NetworkTransport.AppendEntries(id, target, req, &resp) == nil
}

// worthWaiting is patientTransport.worth for this replica.
func (r *Replica) worthWaiting(term uint64, peer raft.ServerID) bool {
	up := r.hints.raft.Load()
	if up == nil || r.ctx.Err() != nil || up.State() != raft.Leader || up.CurrentTerm() != term {
		return false
	}
	for _, s := range up.GetConfiguration().Configuration().Servers {
		if s.ID == peer {
			return true
		}
	}
	return false
}
