package replica_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"testing"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

func TestBackupAndRestore(t *testing.T) {
	old := storetest.NewCluster(t, 3, nil)
	w := write(t, old, old.Names(), 4)
	w.await(old, 100)
	var backup bytes.Buffer
	if err := old.Replica(old.Followers()[0]).Backup(within(t, patience), &backup); err != nil {
		t.Fatal(err)
	}
	w.await(old, 50)
	close(w.stop)
	w.wg.Wait()
	last := old.Replica(old.Leader()).Applied()

	fresh := storetest.NewCluster(t, 0, nil)
	fresh.AddHost("n1", false)
	cfg := fresh.Config("n1")
	damaged := bytes.Clone(backup.Bytes())
	damaged[len(damaged)/2] ^= 4
	if _, err := replica.Restore(cfg, bytes.NewReader(damaged), replica.RestoreOptions{}); !errors.Is(err, replica.ErrCorruptBackup) {
		t.Errorf("restore of a damaged backup: %v", err)
	}
	if _, err := os.Stat(cfg.DataDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a refused restore left something behind: %v", err)
	}
	if _, err := replica.Restore(cfg, bytes.NewReader(backup.Bytes()), replica.RestoreOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := replica.Restore(cfg, bytes.NewReader(backup.Bytes()), replica.RestoreOptions{}); !errors.Is(err, replica.ErrNotEmpty) {
		t.Errorf("restore over existing data: %v", err)
	}

	fresh.Start("n1")
	fresh.AddHost("n2", false)
	fresh.Start("n2")
	fresh.AwaitReadyOf("n1")
	fresh.Join("n2")
	sameHistory(t, fresh)
	n2 := fresh.Replica("n2")
	l, err := n2.List(within(t, patience), "/writer/", raftstore.ListOptions{})
	if err != nil || len(l.Items) != 4 {
		t.Fatalf("restored items: %v, error %v", l, err)
	}
	if l.Revision <= last {
		t.Errorf("restored store is at revision %d, the old one reached %d", l.Revision, last)
	}
	if _, err := n2.Watch(within(t, patience), "/", last); !errors.Is(err, raftstore.ErrCompacted) {
		t.Errorf("watch from a revision of the old store: %v", err)
	}
	commit(t, n2, raftstore.Update(l.Items[0].Key, []byte(fmt.Sprint("new")), l.Items[0].Modified))
}
