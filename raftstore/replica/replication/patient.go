package replication

import (
	"io"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

// PatientTransport is raft's transport, except that it waits for absent peers. raft waits up to ten
// seconds between its attempts to replicate to a peer that does not respond. After its return, the
// peer would be missing in majorities for that long. In a PatientTransport an attempt does not fail
// while the peer is absent. It sends heartbeats, and continues as soon as a heartbeat is answered.
// In addition, entries that were sent early are not sent again, and installations of snapshots are
// counted. All other calls, such as pre-votes and heartbeats, are unchanged.
type PatientTransport struct {
	*raft.NetworkTransport
	// Unpooled makes a new connection for each call.
	Unpooled *raft.NetworkTransport
	// Worth reports whether waiting for a peer is useful: this replica still leads in the term, and
	// the peer is still a member.
	Worth func(term uint64, peer raft.ServerID) bool
	// Early may already have the response to a call, because it sent the entries early.
	Early *EarlySender
	// Installs counts the snapshots that are sent.
	Installs *Installs
}

const (
	firstProbe = 20 * time.Millisecond
	lastProbe  = 200 * time.Millisecond
)

// AppendEntries implements raft.Transport.
func (t *PatientTransport) AppendEntries(id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest,
	resp *raft.AppendEntriesResponse) error {
	if args.PrevLogEntry == 0 && len(args.Entries) == 0 && args.LeaderCommitIndex == 0 {
		return t.NetworkTransport.AppendEntries(id, target, args, resp) // a heartbeat
	}
	return t.Early.replicateEntries(t.appendPatiently, id, target, args, resp)
}

// appendPatiently sends the request until the peer responds or waiting is no longer useful. It
// returns the error of the last attempt.
func (t *PatientTransport) appendPatiently(id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest,
	resp *raft.AppendEntriesResponse) error {
	err := t.NetworkTransport.AppendEntries(id, target, args, resp)
	for err != nil && t.awaitPeer(id, target, args.RPCHeader, args.Term) {
		*resp = raft.AppendEntriesResponse{}
		err = t.NetworkTransport.AppendEntries(id, target, args, resp)
	}
	return err
}

// InstallSnapshot implements raft.Transport. It waits for the peer before it sends, because the
// content of the snapshot can be read only once.
func (t *PatientTransport) InstallSnapshot(id raft.ServerID, target raft.ServerAddress,
	args *raft.InstallSnapshotRequest, resp *raft.InstallSnapshotResponse, data io.Reader) error {
	t.Early.endSessionWith(id)
	if !t.probePeer(id, target, args.RPCHeader, args.Term) {
		t.awaitPeer(id, target, args.RPCHeader, args.Term)
	}
	t.Installs.startInstall()
	defer t.Installs.endInstall()
	return t.NetworkTransport.InstallSnapshot(id, target, args, resp, data)
}

// Installs tracks whether a follower is installing a snapshot. During that time a new snapshot
// would shorten the log up to its own index. Under load, the follower would then need one snapshot
// after the other and never catch up.
type Installs struct {
	underWay atomic.Int32
	ended    atomic.Int64 // end of the last installation, in Unix nanoseconds
}

// afterInstall is how long a follower may take to receive the entries that were written during the
// installation.
const afterInstall = 5 * time.Second

// duringInstall is the factor by which the log may be longer while a follower installs a snapshot.
const duringInstall = 4

func (i *Installs) startInstall() { i.underWay.Add(1) }

func (i *Installs) endInstall() {
	i.ended.Store(time.Now().UnixNano())
	i.underWay.Add(-1)
}

// LogFactor returns the factor by which the log may be longer before the next snapshot. It is
// duringInstall until afterInstall has passed since the last installation, and otherwise 1.
func (i *Installs) LogFactor() int64 {
	if i.underWay.Load() > 0 || time.Now().UnixNano()-i.ended.Load() < int64(afterInstall) {
		return duringInstall
	}
	return 1
}

// awaitPeer waits for a peer. It returns true when the peer responds, and false when waiting is no
// longer useful.
func (t *PatientTransport) awaitPeer(id raft.ServerID, target raft.ServerAddress, header raft.RPCHeader,
	term uint64) bool {
	for pause := firstProbe; t.Worth(term, id); pause = min(lastProbe, pause*3/2) {
		<-time.After(pause)
		if t.probePeer(id, target, header, term) {
			return t.Worth(term, id)
		}
	}
	return false
}

func (t *PatientTransport) probePeer(id raft.ServerID, target raft.ServerAddress, header raft.RPCHeader,
	term uint64) bool {
	req := &raft.AppendEntriesRequest{RPCHeader: header, Term: term, Leader: header.Addr}
	var resp raft.AppendEntriesResponse
	return t.NetworkTransport.AppendEntries(id, target, req, &resp) == nil
}
