package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	v1 "k8s.io/api/core/v1"
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

// awaitHeld returns when a commit is held back.
func (b *bed) awaitHeld() {
	b.t.Helper()
	b.eventually("a commit is held back", func() error {
		b.commits.mu.Lock()
		defer b.commits.mu.Unlock()
		if len(b.commits.held) != 1 {
			return fmt.Errorf("%d commits are held back", len(b.commits.held))
		}
		return nil
	})
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
	b.awaitHeld()
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
			if pod := b.get(name); pod.Spec.NodeName != "" {
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

// stuckClaim makes a bed with one device. The write that gives the device to claim one of pod a is held back, and other
// writes of the claim, and reads of it by the scheduler, fail until release is called. Pod b asks for the device too.
func stuckClaim(t *testing.T) (b *bed, release func()) {
	b = newBedOf(t, scheduler.Config{})
	var stuck, sent atomic.Bool
	stuck.Store(true)
	b.mark = func(ctx context.Context, r *api.Request) (context.Context, error) {
		if r.Kind.Resource != "resourceclaims" || r.Name != "one" || r.Verb == api.VerbCreate || !stuck.Load() {
			return ctx, nil
		}
		if r.Subresource == "status" && sent.CompareAndSwap(false, true) {
			return context.WithValue(ctx, delayed{}, true), nil
		}
		if sent.Load() {
			return ctx, apierrors.NewTimeoutError("whether the change was made is unknown", 1)
		}
		return ctx, nil
	}
	b.gpuClass()
	b.node("w1", "8")
	b.slice("w1", gpus(1)...)
	b.deviceClaim("one", 1)
	b.deviceClaim("two", 1)
	b.lead()
	b.pod("a", "100m", claiming("one"))
	b.awaitHeld()
	b.pod("b", "100m", claiming("two"))
	b.eventually("b waits for the device", func() error {
		for _, c := range b.get("b").Status.Conditions {
			if c.Type == v1.PodScheduled && strings.Contains(c.Message, "0 of 1 devices of class") {
				return nil
			}
		}
		return fmt.Errorf("b is on node %q: %v", b.get("b").Spec.NodeName, b.get("b").Status.Conditions)
	})
	return b, func() { stuck.Store(false) }
}

// F107: a device stays promised while the outcome of the write that gives it away is unknown.
func TestLateAllocationKeepsItsDevice(t *testing.T) {
	b, release := stuckClaim(t)
	if err := b.commits.deliver(b.ctx); err != nil {
		t.Fatal(err)
	}
	release()
	b.awaitNode("a", "w1")
	if a := b.deviceClaimNow("two").Status.Allocation; a != nil {
		t.Errorf("claim two has %v, which claim one has", a.Devices.Results)
	}
}

// F107: a device is free after a write of the claim that refuses the earlier allocation.
func TestLateAllocationIsRefusedAfterAConfirmedWrite(t *testing.T) {
	b, release := stuckClaim(t)
	release()
	given := func() (n int) {
		for _, name := range []string{"one", "two"} {
			if b.deviceClaimNow(name).Status.Allocation != nil {
				n++
			}
		}
		return n
	}
	b.eventually("a claim has the device", func() error {
		if n := given(); n != 1 {
			return fmt.Errorf("%d claims have it", n)
		}
		return nil
	})
	var conflict *raftstore.ConflictError
	if err := b.commits.deliver(b.ctx); !errors.As(err, &conflict) {
		t.Errorf("the late allocation: %v, want a conflict", err)
	}
	if n := given(); n != 1 {
		t.Errorf("%d claims have one device", n)
	}
}
