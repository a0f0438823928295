package replica

import (
	"context"
	"crypto/tls"
	"net"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// What tests need to do to a replica that nobody else may.

// CompareNow makes a leader compare the replicas' states at once.
func (r *Replica) CompareNow() { nudge(r.compareNow) }

// FlipBit changes a value in this replica's memory, as a failing one would.
func (r *Replica) FlipBit(key string) bool {
	it, ok := r.fsm.view().Get(key)
	if ok {
		it.Value[0] ^= 1
	}
	return ok
}

// StoreTime is this replica's idea of the store's time, unix milliseconds.
func (r *Replica) StoreTime() int64 { return r.clock.read() }

// Inject proposes as it is what another replica might have proposed.
func (r *Replica) Inject(p ...*storev1.Proposal) error {
	future, err := r.proposeCommand(&storev1.Command{Kind: &storev1.Command_Batch{Batch: &storev1.Batch{Proposals: p}}})
	if err != nil {
		return err
	}
	return r.outcome(future)
}

// Forwarded answers a batch as it does when another replica forwards it.
func (r *Replica) Forwarded(ctx context.Context, req *storev1.ForwardRequest) (*storev1.ForwardResponse, error) {
	return (&peerServer{r: r}).Forward(ctx, req)
}

// GroupID is the identity of the group.
func (r *Replica) GroupID() string { return r.group.id() }

// The bounds of what replicas say to each other, and what an outcome is counted as.
const (
	MaxMessage = maxMessage
	MaxForward = maxForward
)

// OutcomeBytes is what an outcome is counted as.
func OutcomeBytes(o *storev1.Outcome) int { return outcomeBytes(o) }

// Waiting is how many calls wait for this replica to apply what others have.
func (r *Replica) Waiting() int {
	r.fsm.line.mu.Lock()
	defer r.fsm.line.mu.Unlock()
	return len(r.fsm.line.marks)
}

// ErrNotProposed is what a batch has met with that is certainly not in the log.
var ErrNotProposed = errNotProposed

// Forwards is how a follower forwards, without the follower.
type Forwards struct {
	peers peers
	f     forwards
}

// NewForwards forwards over connections with TLS.
func NewForwards(client *tls.Config) *Forwards {
	f := new(Forwards)
	f.peers.init(Config{ClientTLS: client, Dial: func(ctx context.Context, address string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", address)
	}})
	f.f.peers = &f.peers
	return f
}

// Call forwards a batch to the leader at an address, who leads until moved is closed.
func (f *Forwards) Call(ctx context.Context, address string, moved <-chan struct{}, req *storev1.ForwardRequest) (*storev1.ForwardResponse, error) {
	return f.f.call(ctx, leaderLine{address, moved}, req)
}

// Close ends it.
func (f *Forwards) Close() {
	f.f.close()
	f.peers.close()
}

// OnLeader does something on this replica, which leads, as a call about members does.
func (r *Replica) OnLeader(ctx context.Context, do func() error) error {
	return r.onLeader(ctx, r.cfg.Name, do, nil)
}
