package keyrotation

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/raftstore/disk"
)

// logBuffer collects log messages.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// A key file that cannot be applied is read again until it can be applied, even if only its mode is
// corrected. The problem is logged once.
func TestKeyFileIsReadAgain(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "keys")
	writeKeyFile := func(t *testing.T, id string, mode os.FileMode) {
		t.Helper()
		text, err := disk.GenerateKeyFile(id)
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
	writeKeyFile(t, "first", 0o600)
	if _, err := pki.Init(filepath.Join(dir, "pki"), "test", time.Now()); err != nil {
		t.Fatal(err)
	}
	peers, err := pki.NewPeers(filepath.Join(dir, "pki"), pki.ReplicaPeer("cp1"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	virtual.Test(t, func(t *testing.T) {
		log := &logBuffer{}
		var applied atomic.Pointer[string]
		s := &SecretFiles{options: datadir.StoreOptions{Keys: file}, authorities: peers,
			log:    slog.New(slog.NewTextHandler(log, nil)),
			reload: func(k *disk.Keyring) error { id := k.Current(); applied.Store(&id); return nil }}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.watchFiles(ctx, nil) }()
		defer func() { cancel(); <-ended }()
		advanceTime := func(d time.Duration) {
			time.Sleep(d) // in a bubble
			virtual.Wait()
		}
		advanceTime(time.Minute)
		writeKeyFile(t, "second", 0o644)
		advanceTime(time.Minute)
		if n := strings.Count(log.String(), "are not applied"); applied.Load() != nil || n != 1 {
			t.Fatalf("a file that others can read: %d log messages, applied %v", n, applied.Load())
		}
		if err := os.Chmod(file, 0o600); err != nil {
			t.Fatal(err)
		}
		advanceTime(2 * secretFilesInterval)
		if id := applied.Load(); id == nil || *id != "second" {
			t.Fatalf("a file whose mode was corrected is not applied:\n%s", log)
		}
		applied.Store(nil)
		advanceTime(time.Minute)
		if applied.Load() != nil {
			t.Error("an unchanged file is applied again")
		}
	})
}
