package replica_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// A leader whose disk does not answer any more makes room for another, and what
// was under way applies once. When its disk answers again it follows.
func TestLeaderWhoseDiskHangsIsReplaced(t *testing.T) {
	for _, kind := range []disk.LogStoreKind{disk.LogBolt, disk.LogWAL} {
		t.Run(string(kind), func(t *testing.T) {
			disks := make(map[string]*replica.PowerCut)
			c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
				cfg.Storage.LogStore, cfg.Timeouts.DiskPatience = kind, time.Second
				disks[cfg.Name] = replica.NewPowerCut(1)
				disks[cfg.Name].Put(cfg)
			})
			rev := commit(t, c.Replica("r1"), raftstore.Put("/a", nil))
			old, through := c.Leader(), c.Followers()[0]
			hangs, goOn := disks[old].Hold()
			defer goOn()
			// would conflict if it applied twice
			commit(t, c.Replica(through), raftstore.Update("/a", []byte("once"), rev))
			<-hangs
			if now := c.Replica(through).Status().Leader; now == old {
				t.Errorf("%s still leads", now)
			}
			if c.Replica(old).Ready() {
				t.Errorf("%s says that it is ready", old)
			}
			const pending = "disk_write_pending_seconds"
			if took := scrape(t, c.Replica(old))[pending]; took < 1 {
				t.Errorf("the write of %s that hangs has taken %v s, it says", old, took)
			}
			goOn()
			c.AwaitReady()
			c.Await("the write to be over", func() bool {
				took, there := scrape(t, c.Replica(old))[pending]
				return there && took == 0
			})
			sameHistory(t, c)
			if it, _, err := c.Replica(old).Get(within(t, patience), "/a", raftstore.ReadOptions{}); err != nil ||
				string(it.Value) != "once" {
				t.Errorf("%s has %q, error %v", old, it.Value, err)
			}
		})
	}
}

// The context that Lead passes ends when the disk of the leader hangs, although raft's main loop is blocked and reports nothing. // F53
func TestLeadershipEndsWhenTheDiskHangs(t *testing.T) {
	disks := make(map[string]*replica.PowerCut)
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.Timeouts.DiskPatience = time.Second
		disks[cfg.Name] = replica.NewPowerCut(1)
		disks[cfg.Name].Put(cfg)
	})
	rev := commit(t, c.Replica("r1"), raftstore.Put("/a", nil))
	old, through := c.Leader(), c.Followers()[0]
	began, ended := make(chan struct{}), make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go c.Replica(old).Lead(ctx, func(ctx context.Context, _ raftstore.Fence) error {
		close(began)
		<-ctx.Done()
		close(ended)
		return nil
	})
	<-began
	hangs, goOn := disks[old].Hold()
	defer goOn()
	commit(t, c.Replica(through), raftstore.Update("/a", []byte("once"), rev))
	<-hangs
	if now := c.Replica(through).Status().Leader; now == old {
		t.Fatalf("%s still leads", now)
	}
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Errorf("10 s after %s was elected, the leadership context of %s, whose disk hangs, has not ended",
			c.Replica(through).Status().Leader, old)
	}
}

// A replica without peers leads again, in the same term, once its disk answers. Until then it confirms no leadership. // F53
func TestLeadershipResumesWhenTheDiskAnswers(t *testing.T) {
	var disk *replica.PowerCut
	c := storetest.NewCluster(t, 1, func(cfg *replica.Config) {
		cfg.Timeouts.DiskPatience = 200 * time.Millisecond
		disk = replica.NewPowerCut(1)
		disk.Put(cfg)
	})
	r := c.Replica("r1")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	led := make(chan raftstore.Fence)
	go r.Lead(ctx, func(ctx context.Context, f raftstore.Fence) error {
		led <- f
		<-ctx.Done()
		return nil
	})
	fence := <-led
	if err := r.ConfirmLeadership(within(t, patience), fence); err != nil {
		t.Fatalf("leadership before the disk hangs: %v", err)
	}
	hangs, goOn := disk.Hold()
	defer goOn()
	written := make(chan error, 1)
	go func() {
		_, err := r.Commit(within(t, patience), raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/a", nil)},
			Fence: fence})
		written <- err
	}()
	<-hangs
	c.Await("the leadership to end", func() bool {
		return errors.Is(r.ConfirmLeadership(ctx, fence), raftstore.ErrFenced)
	})
	goOn()
	if err := <-written; err != nil {
		t.Errorf("a commit that was under way when the disk hung: %v", err)
	}
	select {
	case again := <-led:
		if again != fence {
			t.Errorf("leads in term %d, want %d: nobody else could be elected", again, fence)
		}
		if err := r.ConfirmLeadership(within(t, patience), again); err != nil {
			t.Errorf("leadership after the disk answers: %v", err)
		}
	case <-time.After(patience):
		t.Error("the replica does not lead again")
	}
}
