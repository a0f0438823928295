package replica_test

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// Two of three replicas are lost. The third recovers with all its data, alone,
// and takes new members. The lost ones come back after all and do no harm.
func TestLostMajorityIsRecovered(t *testing.T) {
	for _, kind := range []disk.LogStoreKind{disk.LogBolt, disk.LogWAL} {
		t.Run(string(kind), func(t *testing.T) { loseMajority(t, kind) })
	}
}

func loseMajority(t *testing.T, kind disk.LogStoreKind) {
	var recovered atomic.Bool
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.Storage.LogStore = kind
		if recovered.Load() && cfg.Name != "r1" && cfg.Name != "r2" {
			slowToMiss(cfg) // that its term stays is not for the machine to decide
		}
	})
	var last raftstore.Revision
	for i := range 200 {
		last = commit(t, c.Replica("r1"), raftstore.Put(fmt.Sprintf("/k/%d", i%40), []byte(fmt.Sprint(i))))
	}
	c.AwaitRevision(last)
	if err := c.Replica("r3").Snapshot(within(t, patience)); err != nil { // a snapshot and a log after it
		t.Fatal(err)
	}
	last = commit(t, c.Replica("r1"), raftstore.Put("/last", []byte("one")))
	c.AwaitRevision(last)
	before, err := c.Replica("r3").List(within(t, patience), "/", raftstore.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c.Kill("r1")
	c.Kill("r2")
	c.Kill("r3")

	cfg := c.Config("r3")
	for range 2 { // again, as when it was interrupted
		if err := replica.Recover(cfg, nil); err != nil {
			t.Fatal(err)
		}
	}
	recovered.Store(true)
	c.Start("r3")
	c.AwaitReadyOf("r3")
	r3 := c.Replica("r3")
	after, err := r3.List(within(t, patience), "/", raftstore.ListOptions{})
	if err != nil || fmt.Sprint(after.Items) != fmt.Sprint(before.Items) {
		t.Errorf("after recovery: %v, error %v; before: %v", after.Items, err, before.Items)
	}
	// No watcher can take the new history for the old one.
	if after.Revision <= last+1<<31 {
		t.Errorf("revision %d after recovery, was %d", after.Revision, last)
	}
	if _, err := r3.Watch(within(t, patience), "/", last); !errors.Is(err, raftstore.ErrCompacted) {
		t.Errorf("watch from before the recovery: %v", err)
	}
	commit(t, r3, raftstore.Update("/last", []byte("two"), last))
	for _, name := range []string{"n1", "n2"} {
		c.AddHost(name, false)
		c.Start(name)
		if err := r3.AddMember(within(t, patience), name, c.Replica(name).Address()); err != nil {
			t.Fatal(err)
		}
	}

	// Together the lost ones are a majority of the group that they remember, and
	// elect a leader whose term is later. They are not heard.
	c.Start("r1")
	c.Start("r2")
	c.Await("the old group to have a leader", func() bool {
		return c.Replica("r1").Status().Leader != "" && c.Replica("r2").Status().Leader != ""
	})
	w := write(t, c, []string{"r3", "n1", "n2"}, 3)
	calm := time.After(2 * time.Second)
	term := r3.Status().Term
	<-calm
	close(w.stop)
	w.wg.Wait()
	if s := r3.Status(); s.Term != term || s.Leader == "r1" || s.Leader == "r2" || len(s.Members) != 3 {
		t.Errorf("after the lost ones came back: %+v, term was %d", s, term)
	}
	if err := r3.AddMember(within(t, patience), "r1", c.Replica("r1").Address()); !errors.Is(err,
		raftstore.ErrInvalid) {
		t.Errorf("a member of the old group was taken in with its data: %v", err)
	}
	c.Stop("r1")
	c.Stop("r2")
	c.Wipe("r1")
	c.Start("r1")
	if err := r3.AddMember(within(t, patience), "r1", c.Replica("r1").Address()); err != nil {
		t.Errorf("a lost replica with an empty disk: %v", err)
	}
	sameHistory(t, c)
}

// Recovery makes nothing out of nothing, and leaves alone what is not its own.
func TestRecoverRefuses(t *testing.T) {
	c := storetest.NewCluster(t, 1, nil)
	commit(t, c.Replica("r1"), raftstore.Put("/k", nil))
	cfg := c.Config("r1")
	if err := replica.Recover(cfg, nil); err == nil {
		t.Error("a replica that runs was recovered")
	}
	commit(t, c.Replica("r1"), raftstore.Put("/k", nil))
	c.Stop("r1")
	other := cfg
	other.Name = "r2"
	if err := replica.Recover(other, nil); !errors.Is(err, disk.ErrForeignData) {
		t.Errorf("recovering the data of another: %v", err)
	}
	empty := cfg
	empty.Storage.DataDir = t.TempDir()
	if err := replica.Recover(empty, nil); !errors.Is(err, replica.ErrNothingToRecover) {
		t.Errorf("recovering an empty folder: %v", err)
	}
	missing := cfg
	missing.Storage.DataDir += "-missing"
	if err := replica.Recover(missing, nil); !errors.Is(err, replica.ErrNothingToRecover) {
		t.Errorf("recovering a folder that is not there: %v", err)
	}
	for _, dir := range []string{empty.Storage.DataDir, missing.Storage.DataDir} {
		if list, err := os.ReadDir(dir); err == nil && len(list) > 0 {
			t.Errorf("a refused recovery left %v in %s", list, dir)
		}
	}
	cfg.Network.Advertise = ""
	if err := replica.Recover(cfg, nil); err == nil {
		t.Error("recovering without an address")
	}
	c.Start("r1")
	c.AwaitReadyOf("r1")
	if rev := c.Replica("r1").Applied(); rev != 2 {
		t.Errorf("revision %d after refusals", rev)
	}
}
