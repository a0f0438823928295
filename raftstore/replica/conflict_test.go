package replica_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// The answer to a batch is small, whatever its conflicts are about: together the
// values are more than a message may have, and a stream that breaks takes all
// batches along.
func TestConflictsTravelWithoutValues(t *testing.T) { // F124
	c := storetest.NewCluster(t, 1, nil)
	r := c.Replica(c.Leader())
	rev := commit(t, r, raftstore.Put("/big", make([]byte, raftstore.MaxValueBytes)))
	req := &storev1.ForwardRequest{Group: r.GroupID()}
	for range 64 { // 96 MiB
		req.Proposals = append(req.Proposals, &storev1.Proposal{Ops: []*storev1.Op{{
			Kind: uint32(raftstore.OpPut), Key: "/big", If: &storev1.Precondition{Absent: true},
		}}})
	}
	resp, err := r.Forwarded(within(t, patience), req)
	if err != nil || len(resp.GetOutcomes()) != len(req.Proposals) {
		t.Fatalf("%d outcomes of %d proposals, error %v", len(resp.GetOutcomes()), len(req.Proposals), err)
	}
	for _, o := range resp.GetOutcomes() {
		if o.GetHave().GetModified() != uint64(rev) || o.GetRevision() != uint64(rev) {
			t.Fatalf("outcome: %.300v", o)
		}
	}
	if n := proto.Size(resp); n > 8<<10 {
		t.Errorf("the answer is %d bytes", n)
	}
}

// No batch and no answer to one can be larger than a message may be.
func TestMessagesAreBounded(t *testing.T) {
	key := strings.Repeat("k", raftstore.MaxKeyBytes)
	most := ^uint64(0)
	conflict := &storev1.Outcome{
		Code: storev1.Outcome_CONFLICT, Revision: most, Key: key,
		Want: &storev1.Precondition{Absent: true, Revision: most},
		Have: &storev1.Item{Key: key, Created: most, Modified: most, ExpiresUnixMs: -1},
	}
	// The longest that is said names a key that is not valid, each byte of it as four.
	refused := &storev1.Outcome{Code: storev1.Outcome_INVALID, Revision: most,
		Message: strings.Repeat(`\xff`, raftstore.MaxKeyBytes) + strings.Repeat("m", 256)}
	for _, o := range []*storev1.Outcome{conflict, refused, {}} {
		resp := &storev1.ForwardResponse{Index: most}
		for range replica.MaxForward {
			resp.Outcomes = append(resp.Outcomes, o)
		}
		n := proto.Size(&storev1.ForwardReply{Id: most, Response: resp})
		if counted := replica.MaxForward * replica.OutcomeBytes(o); n > replica.MessageLimit || n > counted+64 {
			t.Errorf("outcomes of %s are %d bytes, counted as %d", o.GetCode(), n, counted)
		}
	}
	call := &storev1.ForwardCall{Id: most, Request: &storev1.ForwardRequest{Group: key, Proposals: []*storev1.Proposal{{
		Id: &storev1.ProposalID{Incarnation: most, Sequence: most, Settled: most, IssuedUnixMs: -1}, Fence: most,
		ProposedUnixMs: -1,
	}}}}
	for range raftstore.MaxCommitOps {
		call.Request.Proposals[0].Ops = append(call.Request.Proposals[0].Ops, &storev1.Op{
			Kind: uint32(raftstore.OpPut), Key: key,
			Value: make([]byte, raftstore.MaxCommitBytes/raftstore.MaxCommitOps),
			If:    &storev1.Precondition{Revision: most}, TtlMs: -1,
		})
	}
	if n := proto.Size(call); n > replica.MessageLimit {
		t.Errorf("the largest commit is forwarded in %d bytes", n)
	}
}

// All callers through a follower are told of a large value that is in their way.
func TestManyConflictsAboutALargeValue(t *testing.T) { // F124
	c := storetest.NewCluster(t, 3, nil)
	follower := c.Replica(c.Followers()[0])
	big := bytes.Repeat([]byte("large"), raftstore.MaxValueBytes/5)
	rev := commit(t, follower, raftstore.Put("/big", big))
	ctx := within(t, patience)
	var wg sync.WaitGroup
	var mu sync.Mutex
	got := make(map[string]int)
	const n = 256
	for range n {
		wg.Go(func() {
			_, err := follower.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Create("/big", nil)}})
			var conflict *raftstore.ConflictError
			said := fmt.Sprintf("%.200v", err)
			if errors.As(err, &conflict) {
				said = fmt.Sprintf("conflict with revision %d, no value %t, the value %t",
					conflict.Have.Modified, conflict.NoValue, bytes.Equal(conflict.Have.Value, big))
			}
			mu.Lock()
			defer mu.Unlock()
			got[said]++
		})
	}
	wg.Wait()
	if want := fmt.Sprintf("conflict with revision %d, no value false, the value true", rev); got[want] != n {
		t.Errorf("answers: %v\nwant %d times: %s", got, n, want)
	}
}

// A conflicting value changes while the conflict errors are returned. Each error contains the value
// at the time of its conflict.
func TestConflictShowsTheValueOfItsMoment(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	ctx := t.Context() // however long a busy machine takes for two hundred commits beside all those in vain
	values := make(map[raftstore.Revision]string)
	var wg sync.WaitGroup
	value := func(i int) string { return fmt.Sprint("value ", i) }
	values[commit(t, c.Replica(c.Leader()), raftstore.Put("/a", []byte(value(0))))] = value(0)
	var conflicts [2][]*raftstore.ConflictError
	over := make(chan struct{})
	for i, name := range c.Followers() {
		wg.Go(func() {
			for {
				_, err := c.Replica(name).Commit(ctx,
					raftstore.Commit{Ops: []raftstore.Op{raftstore.Create("/a", nil)}})
				var conflict *raftstore.ConflictError
				if !errors.As(err, &conflict) {
					t.Errorf("create through %s: %v", name, err)
					return
				}
				conflicts[i] = append(conflicts[i], conflict)
				select {
				case <-over:
					return
				default:
				}
			}
		})
	}
	for i := range 200 {
		values[commit(t, c.Replica(c.Leader()), raftstore.Put("/a", []byte(value(i+1))))] = value(i + 1)
	}
	close(over)
	wg.Wait()
	for _, conflict := range append(conflicts[0], conflicts[1]...) {
		if have := conflict.Have; have.Modified != conflict.At || conflict.NoValue ||
			string(have.Value) != values[conflict.At] {
			t.Errorf("conflict at %d shows %q of revision %d, no value %t; want %q", conflict.At, have.Value,
				have.Modified, conflict.NoValue, values[conflict.At])
		}
	}
}
