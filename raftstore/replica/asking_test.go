package replica_test

import (
	"testing"

	"keelson.dev/keelson/raftstore/storetest"
)

// All are asked at once, whichever of them asks: the race detector has to find
// nothing here.
func TestEveryReplicaAsksTheOthers(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	for _, name := range c.Names() {
		members, err := c.Replica(name).Members(within(t, patience))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range members {
			if m.Contact == 0 || m.Applied == 0 {
				t.Errorf("%s lists %s as one it has heard nothing of: %+v", name, m.ID, m)
			}
		}
	}
}
