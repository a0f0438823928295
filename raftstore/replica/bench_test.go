package replica_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// BenchmarkCommit shows where time and memory go, three replicas in one
// process with fsync; for figures see test/bench/store.
func BenchmarkCommit(b *testing.B) {
	c := storetest.NewCluster(b, 3, func(cfg *replica.Config) { cfg.Storage.NoSync = false })
	value := make([]byte, 1024)
	for _, clients := range []int{1, 64, 256} {
		b.Run(fmt.Sprint(clients), func(b *testing.B) {
			var n atomic.Int64
			replicas := c.Replicas()
			b.SetParallelism(clients / 2)
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				id := n.Add(1)
				s := replicas[int(id)%len(replicas)]
				for pb.Next() {
					key := fmt.Sprintf("/bench/%d/%d", id, n.Add(1)%500)
					if _, err := s.Commit(context.Background(),
						raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(key, value)}}); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}

// BenchmarkVisible is the time from a commit's start on the leader until a
// follower has applied it, each commit alone.
func BenchmarkVisible(b *testing.B) {
	c := storetest.NewCluster(b, 3, nil)
	leader, follower := c.Replica(c.Leader()), c.Replica(c.Followers()[0])
	w, err := follower.Watch(context.Background(), "/v/", 0)
	if err != nil {
		b.Fatal(err)
	}
	defer w.Stop()
	for b.Loop() {
		if _, err := leader.Commit(context.Background(),
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/v/k", nil)}}); err != nil {
			b.Fatal(err)
		}
		for len((<-w.C()).Events) == 0 {
		}
	}
}
