package replica_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// A replica whose memory has changed by itself is found by comparison, whoever
// it is, and every replica says which one; the alarm ends when it agrees again.
func TestDivergenceRaisesAlarm(t *testing.T) {
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) { cfg.CompareEvery = time.Hour })
	for i := range 50 {
		commit(t, c.Replica("r1"), raftstore.Put(fmt.Sprintf("/k/%d", i), []byte("value")))
	}
	w := write(t, c, c.Names(), 3) // the comparison is of one revision, whatever goes on
	defer func() { close(w.stop); w.wg.Wait() }()
	for _, bad := range []string{c.Followers()[0], c.Leader()} {
		c.AwaitRevision(c.Replica(c.Leader()).Applied())
		if !c.Replica(bad).FlipBit("/k/7") {
			t.Fatal("no such key")
		}
		at := c.Replica(c.Leader()).Applied()
		c.Replica(c.Leader()).CompareNow()
		alarmsEverywhere(c, "the alarm about "+bad, onlyAbout(raftstore.AlarmDiverged, bad))
		a := c.Replica("r2").Status().Alarms[0]
		var revision raftstore.Revision
		if i := strings.Index(a.Message, "at revision "); i >= 0 {
			_, _ = fmt.Sscanf(a.Message[i:], "at revision %d", &revision)
		}
		if revision < at || a.Since == 0 || !strings.Contains(a.Message, "rebuild "+bad) {
			t.Errorf("alarm after revision %d: %+v", at, a)
		}
		c.Replica(bad).FlipBit("/k/7")
		c.Replica(c.Leader()).CompareNow()
		alarmsEverywhere(c, "the end of the alarm", none)
	}
}

// An alarm about a replica that is no member any more ends.
func TestAlarmEndsWithMembership(t *testing.T) {
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) { cfg.CompareEvery = time.Hour })
	commit(t, c.Replica("r1"), raftstore.Put("/k", []byte("value")))
	c.AwaitRevision(1)
	bad := c.Followers()[0]
	c.Replica(bad).FlipBit("/k")
	leader := c.Replica(c.Leader())
	leader.CompareNow()
	alarmsEverywhere(c, "the alarm", onlyAbout(raftstore.AlarmDiverged, bad))
	c.Stop(bad)
	if err := leader.RemoveMember(within(t, patience), bad); err != nil {
		t.Fatal(err)
	}
	leader.CompareNow()
	alarmsEverywhere(c, "the end of the alarm", none)
}
