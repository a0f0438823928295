package replica_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

var (
	linearFor  = flag.Duration("linear.for", 4*time.Second, "how long the linearizability test disturbs the cluster")
	linearSeed = flag.Uint64("linear.seed", 1, "seed of its schedule")
)

// call is one operation on one key: a read, a blind write, or a write on
// condition of the revision last seen.
type call struct {
	key, value string // value "" reads
	ifAt       raftstore.Revision
	create     bool
}

type reply struct {
	value    string
	at       raftstore.Revision // of the item; 0 when absent
	conflict bool
	unknown  bool // perhaps done, perhaps not, perhaps later
}

type register struct {
	value string
	at    raftstore.Revision
}

// unseen is the revision of a write whose reply was lost.
const unseen = raftstore.Revision(math.MaxUint64)

// newModel is one key of the store. Revisions are global, so the model only
// asks that they grow; what a read or a conditional write sees must fit exactly.
func newModel() porcupine.Model {
	m := porcupine.NondeterministicModel{
		Init: func() []any { return []any{register{}} },
		Step: func(state, input, output any) []any {
			s, in, out := state.(register), input.(call), output.(reply)
			if in.value == "" {
				return afterRead(s, out)
			}
			return afterWrite(s, in, out)
		},
		Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
			byKey := make(map[string][]porcupine.Operation)
			for _, op := range history {
				key := op.Input.(call).key
				byKey[key] = append(byKey[key], op)
			}
			var out [][]porcupine.Operation
			for _, ops := range byKey {
				out = append(out, ops)
			}
			return out
		},
	}
	return m.ToModel()
}

func afterRead(s register, out reply) []any {
	switch {
	case out.value != s.value, s.at != unseen && out.at != s.at:
		return nil
	case s.at == unseen:
		s.at = out.at // now it has been seen
	}
	return []any{s}
}

func afterWrite(s register, in call, out reply) []any {
	must := in.create && s.value != "" || in.ifAt != 0 && s.at != unseen && in.ifAt != s.at // it must conflict
	may := must || in.ifAt != 0 && s.at == unseen                                           // it may
	switch {
	case out.unknown && must:
		return []any{s}
	case out.unknown:
		return []any{s, register{in.value, unseen}}
	case out.conflict && may:
		return []any{s}
	case !out.conflict && !must && (s.at == unseen || out.at > s.at):
		return []any{register{in.value, out.at}}
	}
	return nil
}

// recorder collects the history of random clients.
type recorder struct {
	mu      sync.Mutex
	history []porcupine.Operation
	began   time.Time
}

func (r *recorder) do(ctx context.Context, client int, s raftstore.Store, in call, o raftstore.ReadOptions) reply {
	op := porcupine.Operation{ClientId: client, Input: in, Call: time.Since(r.began).Nanoseconds()}
	out := perform(ctx, s, in, o)
	op.Output, op.Return = out, time.Since(r.began).Nanoseconds()
	if out.unknown {
		if in.value == "" {
			return out // a read that failed says nothing
		}
		op.Return = math.MaxInt64
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.history = append(r.history, op)
	return out
}

func perform(ctx context.Context, s raftstore.Store, in call, o raftstore.ReadOptions) reply {
	if in.value == "" {
		it, _, err := s.Get(ctx, in.key, o)
		switch {
		case errors.Is(err, raftstore.ErrNotFound):
			return reply{}
		case err != nil:
			return reply{unknown: true}
		}
		return reply{value: string(it.Value), at: it.Modified}
	}
	op := raftstore.Put(in.key, []byte(in.value))
	op.If = raftstore.Precondition{Absent: in.create, Revision: in.ifAt}
	rev, err := s.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{op}})
	var conflict *raftstore.ConflictError
	switch {
	case errors.As(err, &conflict):
		return reply{conflict: true}
	case err != nil:
		return reply{unknown: true}
	}
	return reply{at: rev}
}

// Random clients on all replicas see one linear history while leaders die,
// cables are cut, leadership moves and replicas restart from disk. F53
func TestLinearizable(t *testing.T) {
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.SnapshotBytes, cfg.TrailingBytes = 64<<10, 1
	})
	rec := &recorder{began: time.Now()}
	stop := make(chan struct{})
	var clients sync.WaitGroup
	for n := range 9 {
		rng := rand.New(rand.NewPCG(*linearSeed, uint64(n)))
		home := c.Names()[n%3]
		clients.Add(1)
		go func() {
			defer clients.Done()
			client(t, c, rec, stop, rng, n, home)
		}()
	}
	disturb(t, c, rand.New(rand.NewPCG(*linearSeed, 99)), *linearFor)
	close(stop)
	clients.Wait()
	sameHistory(t, c)
	result := porcupine.CheckOperationsTimeout(newModel(), rec.history, 60*time.Second)
	unknown := 0
	for _, op := range rec.history {
		if op.Output.(reply).unknown {
			unknown++
		}
	}
	t.Logf("%d operations, %d of unknown outcome: %v", len(rec.history), unknown, result)
	if result != porcupine.Ok {
		t.Errorf("history is not linearizable (seed %d)", *linearSeed)
	}
}

// client works on few keys through one replica, as long as that is up.
func client(t *testing.T, c *storetest.Cluster, rec *recorder, stop <-chan struct{}, rng *rand.Rand, id int, home string) {
	last := make(map[string]raftstore.Revision)
	pace := time.NewTicker(4 * time.Millisecond)
	defer pace.Stop()
	for n := 0; ; n++ {
		select {
		case <-stop:
			return
		case <-pace.C:
		}
		s := c.Replica(home)
		if s == nil {
			continue
		}
		in := call{key: fmt.Sprintf("/l/%d", rng.IntN(6))}
		switch rng.IntN(4) {
		case 0:
			in.value = fmt.Sprintf("%d-%d", id, n)
		case 1:
			in.value, in.ifAt = fmt.Sprintf("%d-%d", id, n), last[in.key]
			in.create = in.ifAt == 0
		}
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		out := rec.do(ctx, id, s, in, raftstore.ReadOptions{})
		cancel()
		if out.at != 0 {
			last[in.key] = out.at
		}
	}
}

// disturb is the nemesis.
func disturb(t *testing.T, c *storetest.Cluster, rng *rand.Rand, d time.Duration) {
	until := time.After(d)
	step := time.NewTicker(350 * time.Millisecond)
	defer step.Stop()
	undo := func() {}
	defer func() { undo() }()
	for {
		select {
		case <-until:
			return
		case <-step.C:
		}
		undo()
		undo = func() {}
		name := c.Names()[rng.IntN(3)]
		what := rng.IntN(6)
		if what < 3 {
			name = c.Leader()
		}
		switch what {
		case 0, 3:
			t.Logf("kill %s", name)
			c.Kill(name)
			undo = func() { c.Start(name) }
		case 1, 4:
			t.Logf("isolate %s", name)
			c.Isolate(name)
			undo = func() { c.Rejoin(name) }
		case 2:
			t.Logf("transfer from %s", name)
			if err := c.Replica(name).TransferLeadership(within(t, 5*time.Second)); err != nil {
				t.Logf("transfer: %v", err)
			}
		case 5:
			t.Logf("snapshot on %s", name)
			if err := c.Replica(name).Snapshot(within(t, 5*time.Second)); err != nil {
				t.Logf("snapshot: %v", err)
			}
		}
	}
}

// The checker is worth something only if it finds what is wrong: local reads
// on a replica that is cut off are stale, and it must say so.
func TestCheckerFindsStaleReads(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	rec := &recorder{began: time.Now()}
	ctx := within(t, 20*time.Second)
	cutOff := c.Followers()[0]
	leader := c.Replica(c.Leader())
	rec.do(ctx, 1, leader, call{key: "/l/1", value: "old"}, raftstore.ReadOptions{})
	c.AwaitRevision(leader.Applied())
	c.Isolate(cutOff)
	rec.do(ctx, 1, leader, call{key: "/l/1", value: "new"}, raftstore.ReadOptions{})
	rec.do(ctx, 2, leader, call{key: "/l/1"}, raftstore.ReadOptions{})
	if porcupine.CheckOperationsTimeout(newModel(), rec.history, time.Minute) != porcupine.Ok {
		t.Fatal("checker refuses a good history")
	}
	rec.do(ctx, 3, c.Replica(cutOff), call{key: "/l/1"}, raftstore.ReadOptions{Local: true})
	if porcupine.CheckOperationsTimeout(newModel(), rec.history, time.Minute) != porcupine.Illegal {
		t.Error("checker accepts a stale read")
	}
}
