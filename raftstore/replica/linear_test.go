package replica_test

import (
	"context"
	"flag"
	"fmt"
	"regexp"
	"slices"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
	"keelson.dev/keelson/raftstore/storetest/linear"
	"keelson.dev/keelson/raftstore/storetest/nemesis"
)

var (
	linearFor  = flag.Duration("linear.for", 10*time.Second, "how long the linearizability test disturbs the cluster")
	linearSeed = flag.Uint64("linear.seed", 1, "seed of its plan and of its clients")
	linearSize = flag.Int("linear.replicas", 0,
		"how many replicas it has; 0 = three, and then five, each for half of the time")
	linearOnly = flag.String("linear.only", "", "only faults whose name this expression finds")
	linearTTL  = flag.Duration("linear.ttl", 0, "how long keys that expire live, about; 0 = what is usual")
	linearLog  = flag.String("linear.log", "", "their log store; none = bolt for three, raft-wal for more")
)

// Random clients on all replicas see one linear history, and watchers see
// exactly that history, while replicas die, pause, are cut off in every way,
// come and go as members, get snapshots, and their clocks jump. F53
func TestLinearizable(t *testing.T) {
	sizes := []int{3, 5}
	if *linearSize != 0 {
		sizes = []int{*linearSize}
	}
	for _, size := range sizes {
		kind := disk.LogStoreKind(*linearLog)
		if kind == "" {
			kind = disk.LogBolt
			if size > 3 {
				kind = disk.LogWAL
			}
		}
		t.Run(fmt.Sprintf("%d-%s", size, kind), func(t *testing.T) {
			linearizable(t, size, kind, *linearFor/time.Duration(len(sizes)))
		})
	}
}

// wide are the faults that only a group of five shows whole: with three a
// bridge is one cable cut, and a minority is the leader alone.
var wide = []nemesis.Fault{nemesis.LeaderMinority, nemesis.BridgeLeader, nemesis.BridgeFollower}

func linearizable(t *testing.T, size int, kind disk.LogStoreKind, lasting time.Duration) {
	var plan nemesis.Plan
	if size > 3 && *linearOnly == "" {
		plan = nemesis.New(*linearSeed, lasting/3, wide)
		lasting -= lasting / 3
	}
	plan = append(plan, nemesis.New(*linearSeed, lasting, allowed(t))...)
	t.Logf("plan of seed %d:\n%v", *linearSeed, plan)
	c := storetest.NewCluster(t, size, func(cfg *replica.Config) {
		cfg.Storage.LogStore = kind
		cfg.Snapshots.SnapshotBytes, cfg.Snapshots.TrailingBytes = 64<<10, 1
		// Short enough for the faults to cost leaderships.
		cfg.Timeouts.HeartbeatTimeout, cfg.Timeouts.ElectionTimeout = 250*time.Millisecond, 250*time.Millisecond
		if cfg.Name == "r1" {
			// It is slow to notice that it leads no more, as one that was paused.
			cfg.Timeouts.HeartbeatTimeout, cfg.Timeouts.ElectionTimeout = time.Second, time.Second
		}
	})
	rep := disturbed(t, c, c.Favour("r1"), linear.Options{Seed: *linearSeed, TTL: *linearTTL}, plan)
	if rep.Acknowledged < 100 || rep.Deliveries < 100 {
		t.Errorf("hardly anything was checked: %v", rep)
	}
	sameHistory(t, c)
}

// allowed are the faults that the flags leave.
func allowed(t *testing.T) []nemesis.Fault {
	only, err := regexp.Compile(*linearOnly)
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(slices.Clone(nemesis.All), func(f nemesis.Fault) bool {
		return !only.MatchString(string(f))
	})
}

// disturbed runs a workload on all replicas while a plan is carried out, and
// fails the test when the store breaks its word.
func disturbed(
	t *testing.T, c *storetest.Cluster, g nemesis.Group, o linear.Options, plan nemesis.Plan,
) *linear.Report {
	t.Helper()
	var places []linear.Place
	for _, name := range c.Names() {
		places = append(places, func() (linear.Door, bool) { return c.Door(name) })
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	w, err := linear.Start(ctx, o, places...)
	if err != nil {
		t.Fatal(err)
	}
	plan.Run(ctx, g, t.Logf)
	w.Stop()
	c.AwaitReady()
	d, _ := c.Door(c.Leader())
	settling, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	settled := w.Settle(settling, d)
	rep := w.Check(linear.CheckOptions{Skew: 2 * nemesis.Skew})
	rep.Violations = append(rep.Violations, settled.Violations...)
	t.Log(rep)
	if err := rep.Err(); err != nil {
		t.Errorf("seed %d: %v", o.Seed, err)
	}
	return rep
}
