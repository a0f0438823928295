package replica_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// A backup that nobody takes off the replica's hands holds up no commit, and
// shows the state of when it began.
func TestSlowBackup(t *testing.T) {
	c := storetest.NewCluster(t, 1, nil)
	r := c.Replica("r1")
	for i := range 50 {
		commit(t, r, raftstore.Put(fmt.Sprint("/k/", i), make([]byte, 64<<10)))
	}
	at := r.Applied()
	read, write := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := r.Backup(within(t, patience), write)
		write.Close()
		done <- err
	}()
	begin := make([]byte, 1000)
	if _, err := io.ReadFull(read, begin); err != nil {
		t.Fatal(err)
	}
	for i := range 20 { // while it stands still
		commit(t, r, raftstore.Put(fmt.Sprint("/k/", i), []byte("new")))
	}
	info, err := disk.VerifyBackup(io.MultiReader(bytes.NewReader(begin), read), nil)
	if err != nil || info.Revision != at || info.Keys != 50 {
		t.Errorf("%+v, want revision %d, error %v", info, at, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A group that seals its data seals its backups; keys are changed while it
// serves, a replica without the key cannot start, and what travels is in clear.
func TestSealedGroup(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "keys")
	if err := disk.CreateKeyFile(path, "k1"); err != nil {
		t.Fatal(err)
	}
	k1, err := disk.LoadKeyring(path)
	if err != nil {
		t.Fatal(err)
	}
	keys := k1
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.Cluster = "ours"
		if cfg.Storage.Keys = keys; cfg.Name == "r2" {
			cfg.Storage.Keys = nil // each replica has keys of its own, or none
		}
	})
	commit(t, c.Replica("r1"), raftstore.Put("/a", []byte("one")))
	if err := disk.AddKey(path, "k2"); err != nil {
		t.Fatal(err)
	}
	k2, err := disk.LoadKeyring(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"r1", "r3"} {
		if err := c.Replica(name).ReloadKeys(k2); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Replica("r1").ReloadKeys(nil); !errors.Is(err, disk.ErrKeyFile) {
		t.Errorf("no keys: %v", err)
	}
	commit(t, c.Replica("r1"), raftstore.Put("/a", []byte("two")))
	for _, name := range c.Names() {
		if err := c.Replica(name).Snapshot(within(t, patience)); err != nil {
			t.Fatal(err)
		}
	}
	var backup bytes.Buffer
	if err := c.Replica("r1").Backup(within(t, patience), &backup); err != nil {
		t.Fatal(err)
	}
	if info, err := disk.VerifyBackup(bytes.NewReader(backup.Bytes()), k1); !errors.Is(err, disk.ErrSealed) ||
		info.KeyID != "k2" {
		t.Errorf("backup without its key: %+v, error %v", info, err)
	}
	if info, err := disk.VerifyBackup(bytes.NewReader(backup.Bytes()), k2); err != nil || !info.Sealed ||
		info.Cluster != "ours" || info.Keys != 1 {
		t.Errorf("backup: %+v, error %v", info, err)
	}
	// A replica that lags far gets the snapshot of one with other keys.
	keys = k2
	c.AddHost("r4", false)
	c.Start("r4")
	c.Join("r4")
	sameHistory(t, c)
}

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
	to := disk.RestoreOptions{Advertise: cfg.Network.Advertise, Cluster: cfg.Cluster}
	damaged := bytes.Clone(backup.Bytes())
	damaged[len(damaged)/2] ^= 4
	if _, err := disk.Restore(cfg.Disk(), bytes.NewReader(damaged), to); !errors.Is(err, disk.ErrCorruptBackup) {
		t.Errorf("restore of a damaged backup: %v", err)
	}
	if _, err := os.Stat(cfg.Storage.DataDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a refused restore left something behind: %v", err)
	}
	if _, err := disk.Restore(cfg.Disk(), bytes.NewReader(backup.Bytes()), to); err != nil {
		t.Fatal(err)
	}
	if _, err := disk.Restore(cfg.Disk(), bytes.NewReader(backup.Bytes()), to); !errors.Is(err, disk.ErrNotEmpty) {
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
