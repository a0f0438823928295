package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/scheduler"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// delayed marks the context of a request whose commit lateStore holds back.
type delayed struct{}

// lateStore answers a marked commit with "outcome unknown" and keeps it for deliver, like a raft entry whose followers
// have slow disks.
type lateStore struct {
	*storetest.Memory

	mu   sync.Mutex
	held []raftstore.Commit
}

// Commit implements raftstore.Store.
func (l *lateStore) Commit(ctx context.Context, c raftstore.Commit) (raftstore.Revision, error) {
	if ctx.Value(delayed{}) == nil {
		return l.Memory.Commit(ctx, c)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	kept := c
	kept.Ops = nil
	for _, op := range c.Ops {
		op.Value = append([]byte(nil), op.Value...)
		kept.Ops = append(kept.Ops, op)
	}
	l.held = append(l.held, kept)
	return 0, raftstore.ErrOutcomeUnknown
}

// deliver applies the oldest commit that was held back.
func (l *lateStore) deliver(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.held) == 0 {
		return errors.New("no commit was held back")
	}
	c := l.held[0]
	l.held = l.held[1:]
	_, err := l.Memory.Commit(ctx, c)
	return err
}

// stuckPod makes a bed on whose node one of two pods has room. The binding of pod a is held back. Writes of a's status,
// and further bindings of a, have no known outcome and are not applied until release is called.
func stuckPod(t *testing.T, fence uint64) (b *bed, depose, release func()) {
	b = newBedOf(t, scheduler.Config{})
	var stuck, sent atomic.Bool
	stuck.Store(true)
	b.mark = func(ctx context.Context, r *api.Request) (context.Context, error) {
		if r.Kind.Resource != "pods" || r.Name != "a" || r.Subresource == "" || !stuck.Load() {
			return ctx, nil
		}
		if r.Subresource == "binding" && sent.CompareAndSwap(false, true) {
			return context.WithValue(ctx, delayed{}, true), nil
		}
		return ctx, apierrors.NewTimeoutError("whether the change was made is unknown", 1)
	}
	b.node("n1", "1")
	depose = b.leadIn(fence)
	b.pod("a", "600m")
	b.eventually("the binding of a", func() error {
		b.commits.mu.Lock()
		defer b.commits.mu.Unlock()
		if len(b.commits.held) != 1 {
			return fmt.Errorf("%d commits were held back", len(b.commits.held))
		}
		return nil
	})
	b.pod("b", "600m")
	b.awaitReason("b", noRoom(1))
	return b, depose, func() { stuck.Store(false) }
}

// F107: a pod whose binding has an unknown outcome keeps its room, and a late binding does not overcommit the node.
func TestLateBindingKeepsItsRoom(t *testing.T) {
	b, _, release := stuckPod(t, 0)
	if err := b.commits.deliver(b.ctx); err != nil {
		t.Fatal(err)
	}
	release()
	b.awaitNode("a", "n1")
	b.eventually("the end of the binding", func() error {
		if _, placed, queued := b.scheduler.Knows("n1", b.get("a").UID); !placed || queued {
			return fmt.Errorf("placed %v, queued %v", placed, queued)
		}
		return nil
	})
	if n := b.get("b").Spec.NodeName; n != "" {
		t.Errorf("b is on %s beside a", n)
	}
}

// F107: after a confirmed write of the pod, its earlier binding is never applied, and the pod is scheduled again.
func TestLateBindingIsRefusedAfterAConfirmedWrite(t *testing.T) {
	b, _, release := stuckPod(t, 0)
	release()
	placed := func() (on []string) {
		for _, name := range []string{"a", "b"} {
			if p := b.get(name); p.Spec.NodeName != "" {
				on = append(on, name)
			}
		}
		return on
	}
	b.eventually("one of the pods has the node", func() error {
		if n := len(placed()); n != 1 {
			return fmt.Errorf("%d pods", n)
		}
		return nil
	})
	var conflict *raftstore.ConflictError
	if err := b.commits.deliver(b.ctx); !errors.As(err, &conflict) {
		t.Errorf("the late binding: %v, want a conflict", err)
	}
	if on := placed(); len(on) != 1 {
		t.Errorf("pods %v are on a node with room for one", on)
	}
}

// F107: the room is also kept when the scheduler runs again in the same term.
func TestLateBindingKeepsItsRoomInALaterRun(t *testing.T) {
	const term = 1 // of storetest.Memory
	b, depose, release := stuckPod(t, term)
	depose()
	b.leadIn(term)
	b.pod("c", "600m")
	b.awaitReason("c", noRoom(1))
	if err := b.commits.deliver(b.ctx); err != nil {
		t.Fatal(err)
	}
	release()
	b.awaitNode("a", "n1")
	for _, name := range []string{"b", "c"} {
		if n := b.get(name).Spec.NodeName; n != "" {
			t.Errorf("%s is on %s beside a", name, n)
		}
	}
}
