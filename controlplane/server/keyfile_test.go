package server

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/raftstore/disk"
)

// A key file that could not be taken over is looked at until it can be, also when its mode alone is mended, and one
// complaint is enough.
func TestKeyFileIsLookedAtAgain(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "keys")
	keep := func(t *testing.T, id string, mode os.FileMode) {
		t.Helper()
		text, err := disk.NewKeys(id)
		if err == nil {
			err = os.WriteFile(file+".new", text, mode)
		}
		if err == nil {
			err = os.Rename(file+".new", file)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	keep(t, "first", 0o600)
	if _, err := pki.Init(filepath.Join(dir, "pki"), "test", time.Now()); err != nil {
		t.Fatal(err)
	}
	peers, err := pki.NewPeers(filepath.Join(dir, "pki"), pki.ReplicaPeer("cp1"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	virtual.Test(t, func(t *testing.T) {
		log := &lines{}
		var taken atomic.Pointer[string]
		s := &secrets{options: datadir.StoreOptions{Keys: file}, authorities: peers, log: slog.New(slog.NewTextHandler(log, nil)),
			rekey: func(k *disk.Keyring) error { id := k.Current(); taken.Store(&id); return nil }}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.follow(ctx, nil) }()
		defer func() { cancel(); <-ended }()
		pass := func(d time.Duration) {
			time.Sleep(d) // in a bubble
			virtual.Wait()
		}
		pass(time.Minute)
		keep(t, "second", 0o644)
		pass(time.Minute)
		if n := strings.Count(log.String(), "not taken over"); taken.Load() != nil || n != 1 {
			t.Fatalf("of a file that others may read it complains %d times, and has taken %v", n, taken.Load())
		}
		if err := os.Chmod(file, 0o600); err != nil {
			t.Fatal(err)
		}
		pass(2 * secretsEvery)
		if id := taken.Load(); id == nil || *id != "second" {
			t.Fatalf("a file whose mode was mended is not taken over:\n%s", log)
		}
		taken.Store(nil)
		pass(time.Minute)
		if taken.Load() != nil {
			t.Error("a file that does not change is taken over again")
		}
	})
}
