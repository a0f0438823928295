package replica

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore/replica/diskmeter"
	"keelson.dev/keelson/raftstore/replica/peernet"
	"keelson.dev/keelson/raftstore/replica/replication"
	"keelson.dev/keelson/raftstore/replica/rolelog"
)

// network holds the connections to the other replicas: those of raft and of gRPC.
type network struct {
	node *node

	group    peernet.ClusterIdentity
	peers    peernet.Clients
	early    replication.EarlySender
	hints    replication.CommitNotifier
	installs replication.Installs

	// The following fields are set before node.running is closed.
	address  peernet.Advertised
	port     *peernet.PeerPort
	trans    *raft.NetworkTransport
	unpooled *raft.NetworkTransport // a transport that makes a new connection for each call and accepts none
}

func newNetwork(n *node) *network {
	net := &network{node: n}
	net.peers.Initialize(n.cfg.Network.ClientTLS, peernet.WithUserTimeout(n.cfg.Network.Dial))
	return net
}

// worthWaiting reports whether waiting for an absent peer is useful: this replica still leads in
// the term, and the peer is still a member.
func (n *network) worthWaiting(term uint64, peer raft.ServerID) bool {
	up := n.hints.Raft.Load()
	if up == nil || n.node.ctx.Err() != nil || up.State() != raft.Leader || up.CurrentTerm() != term {
		return false
	}
	for _, s := range up.GetConfiguration().Configuration().Servers {
		if s.ID == peer {
			return true
		}
	}
	return false
}

// sendHeartbeat sends a heartbeat to a voter, and reports whether the voter still follows this
// leader in the given term. The heartbeat is processed separately from entries and does not wait
// for the voter's disk.
func (n *network) sendHeartbeat(to raft.Server, term uint64) bool {
	if n.node.isDiskStalled() {
		return false
	}
	req := &raft.AppendEntriesRequest{RPCHeader: n.rpcHeader(), Term: term}
	req.Leader = req.RPCHeader.Addr
	var resp raft.AppendEntriesResponse
	err := n.trans.AppendEntries(to.ID, to.Address, req, &resp)
	return err == nil && resp.Success && resp.Term == term
}

// Heartbeats do not wait for the disk, so a slow disk does not end a leadership. But with a disk
// that does not respond at all, a leader would lead forever and commit nothing. When a write of its
// log has been pending for DiskPatience, the leader therefore sends nothing. Its followers elect
// another leader, to which its pending proposals are forwarded with their IDs. It becomes a
// follower when its disk responds, or stops when the disk reports an error.

// isDiskStalled reports whether a write of this replica's log or vote has been pending for at least
// DiskPatience.
func (n *node) isDiskStalled() bool {
	hangs := false
	for _, w := range []*diskmeter.PendingWrite{&n.meters.disk.Writing, &n.meters.disk.Voting} {
		since, took := w.Since.Load(), w.Age()
		if took < n.cfg.Timeouts.DiskPatience || took == 0 {
			continue
		}
		hangs = true
		if w.Noticed.Swap(since) != since {
			n.log.Error("the disk does not answer: as leader this replica sends nothing, so that another is elected",
				"log", n.cfg.Storage.DataDir, "after", took)
		}
	}
	return hangs
}

// timeUntilStall returns the time until the result of isDiskStalled can change, if no write
// finishes before.
func (n *node) timeUntilStall() time.Duration {
	if n.isDiskStalled() {
		return max(stallPoll, n.cfg.Timeouts.DiskPatience/50)
	}
	return max(time.Millisecond, n.cfg.Timeouts.DiskPatience-n.meters.disk.OldestWriteAge())
}

// stallPoll is the shortest interval between two checks whether a stalled disk responds again.
const stallPoll = 10 * time.Millisecond

var errStalledDisk = errors.New("not sent: the disk of this replica is stalled")

// stallGuard is a transport that sends no heartbeats and no entries while this replica's disk is
// stalled. Otherwise the followers would not elect another leader.
type stallGuard struct {
	*observedTransport
	isStalled func() bool
}

// AppendEntries implements raft.Transport. It returns an error while the disk is stalled.
func (t *stallGuard) AppendEntries(id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest,
	resp *raft.AppendEntriesResponse) error {
	if t.isStalled() {
		return fmt.Errorf("entries for %s: %w", id, errStalledDisk)
	}
	return t.observedTransport.AppendEntries(id, target, args, resp)
}

// observedTransport is a transport that passes the responses of the peers to rolelog.Log.
type observedTransport struct {
	*replication.PatientTransport
	roles *rolelog.Log
}

// AppendEntries implements raft.Transport.
func (o *observedTransport) AppendEntries(id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest,
	resp *raft.AppendEntriesResponse) error {
	err := o.PatientTransport.AppendEntries(id, target, args, resp)
	if err == nil {
		o.roles.RecordResponse(string(id), resp.Term)
	}
	return err
}

// InstallSnapshot implements raft.Transport.
func (o *observedTransport) InstallSnapshot(id raft.ServerID, target raft.ServerAddress,
	args *raft.InstallSnapshotRequest, resp *raft.InstallSnapshotResponse, data io.Reader) error {
	err := o.PatientTransport.InstallSnapshot(id, target, args, resp, data)
	if err == nil {
		o.roles.RecordResponse(string(id), resp.Term)
	}
	return err
}

// RequestVote implements raft.Transport.
func (o *observedTransport) RequestVote(id raft.ServerID, target raft.ServerAddress, args *raft.RequestVoteRequest,
	resp *raft.RequestVoteResponse) error {
	o.roles.RecordVoteRequest(string(id), false)
	err := o.PatientTransport.RequestVote(id, target, args, resp)
	o.roles.RecordVote(string(id), resp.Term, resp.Granted, err)
	return err
}

// RequestPreVote implements raft.WithPreVote.
func (o *observedTransport) RequestPreVote(id raft.ServerID, target raft.ServerAddress,
	args *raft.RequestPreVoteRequest, resp *raft.RequestPreVoteResponse) error {
	o.roles.RecordVoteRequest(string(id), true)
	err := o.PatientTransport.RequestPreVote(id, target, args, resp)
	o.roles.RecordVote(string(id), resp.Term, resp.Granted, err)
	return err
}
