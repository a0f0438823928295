package replica_test

import (
	"testing"

	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

const quota = 24 << 20

func withQuota(cfg *replica.Config) { cfg.Quota = quota }

func TestOneReplicaConforms(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Subject {
		c := storetest.NewCluster(t, 1, withQuota)
		return storetest.Subject{Store: c.Replica("r1"), Compact: c.Compact, Quota: quota}
	})
}

// The store as a follower shows it: every call crosses to the leader. Its quota is a quarter of that of one replica: what
// fills it goes over two networks, with the race detector.
func TestFollowerConforms(t *testing.T) { // F53
	storetest.Run(t, func(t *testing.T) storetest.Subject {
		c := storetest.NewCluster(t, 3, func(cfg *replica.Config) { cfg.Quota = quota / 4 })
		return storetest.Subject{Store: c.Replica(c.Followers()[0]), Compact: c.Compact, Quota: quota / 4}
	})
}
