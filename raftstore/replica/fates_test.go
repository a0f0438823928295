package replica

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/await"
	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/replica/proposals"
)

// The leader splits a forwarded batch (batchOps, batchBytes): it commits the first half, and refuses the second because a
// leadership transfer has begun. The follower reports the outcome of the first half, and not that it was not proposed. // F53
func TestSplitBatchKeepsItsOutcomes(t *testing.T) {
	leader := offline(t, "leader", nil)
	follower := following(t, &peerServer{r: leader})
	ctx, end := context.WithCancel(t.Context())
	defer end()
	go follower.commits.runQueue(ctx)
	commit := func(ctx context.Context, key string) chan error {
		done := make(chan error, 1)
		go func() {
			_, err := follower.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Create(key, []byte("v"))}})
			done <- err
		}()
		return done
	}
	first := commit(ctx, "/first")
	awaitQueued(t, leader, 1)
	held := leader.commits.queue.TakeBatch(0)
	caller, gaveUp := context.WithCancel(ctx)
	a, b := commit(caller, "/a"), commit(caller, "/b")
	awaitQueued(t, follower, 2)
	held[0].SetResult(proposals.Result{Outcome: mvcc.Outcome{Code: mvcc.OK, Revision: 1}, Index: 0})
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	awaitQueued(t, leader, 2)
	batch := leader.commits.queue.TakeBatch(0)
	applied := batch[0].Proposal.GetOps()[0].GetKey()
	// committed and applied
	batch[0].SetResult(proposals.Result{Outcome: mvcc.Outcome{Code: mvcc.OK, Revision: 2}, Index: 0})
	// raft.ErrLeadershipTransferInProgress
	batch[1].SetResult(proposals.Result{Err: proposals.ErrNotProposed})
	// The transfer takes as long as an election timeout: every retry is refused in the same way.
	awaitQueued(t, leader, 1)
	for _, it := range leader.commits.queue.TakeBatch(0) {
		it.SetResult(proposals.Result{Err: proposals.ErrNotProposed})
	}
	gaveUp() // the callers' deadline
	for key, done := range map[string]chan error{"/a": a, "/b": b} {
		err := <-done
		if key == applied && !errors.Is(err, raftstore.ErrOutcomeUnknown) && err != nil {
			t.Errorf("%s was applied, and its caller receives %v: that says that it was not", key, err)
		}
	}
}

// A follower of a previous release takes the answer for that of the whole batch: "not proposed" only when no part may be in the
// log. The current release receives the outcome of each proposal. // F53
func TestFatesOfAForwardedBatch(t *testing.T) {
	ok, no, maybe := proposals.Result{Outcome: mvcc.Outcome{Code: mvcc.OK, Revision: 3}, Index: 7},
		proposals.Result{Err: proposals.ErrNotProposed}, proposals.Result{Err: proposals.ErrMaybe}
	for name, of := range map[string]struct {
		results []proposals.Result
		old     codes.Code // the error for a follower of a previous release
	}{
		"all decided":              {[]proposals.Result{ok, ok}, codes.OK},
		"none proposed":            {[]proposals.Result{no, no}, codes.FailedPrecondition},
		"one decided, one not":     {[]proposals.Result{ok, no}, codes.Unavailable},
		"one not, one decided":     {[]proposals.Result{no, ok}, codes.Unavailable},
		"one not, one unknown":     {[]proposals.Result{no, maybe}, codes.Unavailable},
		"one unknown, one not":     {[]proposals.Result{maybe, no}, codes.Unavailable},
		"one of each kind":         {[]proposals.Result{ok, no, maybe}, codes.Unavailable},
		"one decided, one unknown": {[]proposals.Result{ok, maybe}, codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := forwardResponse(of.results, false); status.Code(err) != of.old {
				t.Errorf("a follower of a previous release receives %v, want %v", err, of.old)
			}
			resp, err := forwardResponse(of.results, true)
			if err != nil {
				t.Fatal(err)
			}
			for i, want := range of.results {
				got := forwardResult(resp, i, len(of.results))
				if !errors.Is(got.Err, want.Err) || got.Outcome.Code != want.Outcome.Code ||
					want.Err == nil && got.Index != want.Index {
					t.Errorf("proposal %d has %+v, want %+v", i, got, want)
				}
			}
		})
	}
	for _, wrong := range []*storev1.ForwardResponse{
		{},
		{Outcomes: make([]*storev1.Outcome, 1)},
		{Outcomes: make([]*storev1.Outcome, 2), Fates: make([]storev1.ForwardResponse_Fate, 1)},
		{Outcomes: make([]*storev1.Outcome, 2), Fates: []storev1.ForwardResponse_Fate{9, 9}},
	} {
		if got := forwardResult(wrong, 0, 2); !errors.Is(got.Err, proposals.ErrMaybe) {
			t.Errorf("an answer that fits no batch of two, %v, gives %+v", wrong, got)
		}
	}
}

// A leader of a previous release refuses a batch as a whole although it may have split it: only a single proposal is then
// certainly not in the log. // F53
func TestRefusalOfALeaderOfAPreviousRelease(t *testing.T) {
	follower := following(t, oldRefusal{})
	ctx, end := context.WithCancel(t.Context())
	defer end()
	for sent, want := range map[int]error{1: proposals.ErrNotProposed, 2: proposals.ErrMaybe} {
		var batch []*proposals.Item
		for i := range sent {
			batch = append(batch,
				proposals.NewItem(&storev1.Proposal{Ops: []*storev1.Op{{Key: fmt.Sprintf("/%d", i)}}}))
		}
		_, address, moved := follower.node.role.currentLeader()
		follower.commits.forwardBatch(ctx, batch, address, moved)
		for i, it := range batch {
			if got := <-it.Done; !errors.Is(got.Err, want) ||
				want != proposals.ErrNotProposed && errors.Is(got.Err, proposals.ErrNotProposed) {
				t.Errorf("proposal %d of %d: %v, want %v", i+1, sent, got.Err, want)
			}
		}
	}
}

// oldRefusal is a leader of a previous release that is handing leadership over.
type oldRefusal struct {
	storev1.UnimplementedPeerServer
}

func (oldRefusal) Forward(context.Context, *storev1.ForwardRequest) (*storev1.ForwardResponse, error) {
	return nil, errorToStatus(proposals.ErrNotProposed)
}

// A follower does not ask a leader again that may have made its attempt to transfer leadership and could not say so. // F53
func TestTransferWithoutAnAnswerIsNotRepeated(t *testing.T) {
	leader := new(silentLeader)
	follower := following(t, leader)
	ctx, end := context.WithTimeout(t.Context(), time.Minute)
	defer end()
	if _, err := follower.StepDown(ctx, ""); !errors.Is(err, raftstore.ErrTransferFailed) || leader.asked.Load() != 1 {
		t.Errorf("the leader was asked %d times: %v", leader.asked.Load(), err)
	}
}

// silentLeader fails every transfer of leadership as a previous release does.
type silentLeader struct {
	storev1.UnimplementedPeerServer
	asked atomic.Int32
}

func (l *silentLeader) TransferLeadership(
	context.Context, *storev1.TransferLeadershipRequest,
) (*storev1.TransferLeadershipResponse, error) {
	l.asked.Add(1)
	return nil, status.Error(codes.Unavailable, "leadership transfer timeout")
}

// awaitQueued waits until at least n proposals are in the queue of a replica.
func awaitQueued(t *testing.T, r *Replica, n int) {
	t.Helper()
	await.Until(t.Context(), t, await.Patience, time.Millisecond, "the queue of "+r.node.cfg.Name, func() error {
		r.commits.queue.Mu.Lock()
		have := len(r.commits.queue.Items)
		r.commits.queue.Mu.Unlock()
		if have < n {
			return fmt.Errorf("%d proposals, want %d", have, n)
		}
		return nil
	})
}

// offline returns a replica that takes calls and has no raft.
func offline(t *testing.T, name string, client *tls.Config) *Replica {
	t.Helper()
	if client == nil {
		client = new(tls.Config)
	}
	r, err := New(Config{Name: name, Storage: Storage{DataDir: t.TempDir()}, Network: Network{
		ListenAddr: "127.0.0.1:0", ServerTLS: &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert},
		ClientTLS: client}})
	if err != nil {
		t.Fatal(err)
	}
	close(r.node.running)
	return r
}

// following returns a replica that takes a server for its leader.
func following(t *testing.T, leader storev1.PeerServer) *Replica {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{"leader"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s :=
		grpc.NewServer(grpc.Creds(credentials.NewTLS(
			&tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}})))
	storev1.RegisterPeerServer(s, leader)
	go s.Serve(l)
	t.Cleanup(s.Stop)
	r := offline(t, "follower", &tls.Config{InsecureSkipVerify: true})
	t.Cleanup(r.net.peers.Close)
	r.node.role.setLeader("leader", l.Addr().String())
	return r
}
