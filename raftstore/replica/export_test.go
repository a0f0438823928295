package replica

import (
	"context"
	"crypto/tls"
	"net"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore/replica/forwarding"
	"keelson.dev/keelson/raftstore/replica/peernet"
	"keelson.dev/keelson/raftstore/replica/proposals"
)

// What tests need to do to a replica that nobody else may.

// CompareNow makes a leader compare the replicas' states at once.
func (r *Replica) CompareNow() { r.comparer.compareNow.Send() }

// FlipBit changes a value in this replica's memory, as a failing one would.
func (r *Replica) FlipBit(key string) bool {
	it, ok := r.node.fsm.View().Get(key)
	if ok {
		it.Value[0] ^= 1
	}
	return ok
}

// StoreTime is this replica's idea of the store's time, unix milliseconds.
func (r *Replica) StoreTime() int64 { return r.node.clock.CurrentTime() }

// Inject proposes as it is what another replica might have proposed.
func (r *Replica) Inject(p ...*storev1.Proposal) error {
	future, err :=
		r.node.proposeCommand(&storev1.Command{Kind: &storev1.Command_Batch{Batch: &storev1.Batch{Proposals: p}}})
	if err != nil {
		return err
	}
	return r.node.awaitFuture(future)
}

// Forwarded answers a batch as it does when another replica forwards it.
func (r *Replica) Forwarded(ctx context.Context, req *storev1.ForwardRequest) (*storev1.ForwardResponse, error) {
	return (&peerServer{r: r}).Forward(ctx, req)
}

// GroupID is the identity of the group.
func (r *Replica) GroupID() string { return r.net.group.ID() }

// The bounds of what replicas say to each other, and what an outcome is counted as.
const (
	MessageLimit = peernet.MaxMessage
	MaxForward   = maxForward
)

// OutcomeBytes is what an outcome is counted as.
func OutcomeBytes(o *storev1.Outcome) int { return boundOutcome(o) }

// Waiting is how many calls wait for this replica to apply what others have.
func (r *Replica) Waiting() int {
	r.node.fsm.Line.Mu.Lock()
	defer r.node.fsm.Line.Mu.Unlock()
	return len(r.node.fsm.Line.Marks)
}

// ErrBatchNotProposed is what a batch has met with that is certainly not in the log.
var ErrBatchNotProposed = proposals.ErrNotProposed

// ForwardingClient is how a follower forwards, without the follower.
type ForwardingClient struct {
	peers peernet.Clients
	f     forwarding.Client
}

// NewForwardingClient forwards over connections with TLS.
func NewForwardingClient(client *tls.Config) *ForwardingClient {
	f := new(ForwardingClient)
	f.peers.Initialize(client, func(ctx context.Context, address string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", address)
	})
	f.f.Peers = &f.peers
	return f
}

// Call forwards a batch to the leader at an address, who leads until moved is closed.
func (f *ForwardingClient) Call(
	ctx context.Context, address string, moved <-chan struct{}, req *storev1.ForwardRequest,
) (*storev1.ForwardResponse, error) {
	return f.f.ForwardBatch(ctx, forwarding.Leader{Address: address, Moved: moved}, req)
}

// Close ends it.
func (f *ForwardingClient) Close() {
	f.f.Close()
	f.peers.Close()
}

// OnLeader does something on this replica, which leads, as a call about members does.
func (r *Replica) OnLeader(ctx context.Context, do func() error) error {
	return r.members.callLeader(ctx, r.node.cfg.Name, do, nil)
}
