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

// The store as a follower shows it: every call crosses to the leader. The store has no quota: TestFollowerQuotaConforms has.
func TestFollowerConforms(t *testing.T) { // F53
	storetest.Run(t, func(t *testing.T) storetest.Subject {
		c := storetest.NewCluster(t, 3, nil)
		return storetest.Subject{Store: c.Replica(c.Followers()[0]), Compact: c.Compact}
	})
}

// The quota as a client of a follower meets it. What fills the quota goes over two networks to three logs: with the race
// detector the copies of these bytes take more CPU time than all other parts of the suite.
func TestFollowerQuotaConforms(t *testing.T) { // F53
	storetest.RunQuota(t, func(t *testing.T) storetest.Subject {
		c := storetest.NewCluster(t, 3, withQuota)
		return storetest.Subject{Store: c.Replica(c.Followers()[0]), Compact: c.Compact, Quota: quota}
	})
}
