package keyrotation_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
	"keelson.dev/keelson/raftstore/disk"
)

// The peer CA is rotated with files while the replicas run. Both replicas serve at each step. In
// the end a client with the previous keys is rejected. F51
func TestPeerCARotatesByHand(t *testing.T) {
	p := newPlane(t, 2, nil)
	previous, err := pki.NewPeers(recovery.TrustFolder(p.Members["cp2"].Config.Dir()), pki.ReplicaPeer("cp2"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	previousClient := previous.Client()
	previousClient.VerifyConnection = nil // the client accepts any server
	file := filepath.Join(t.TempDir(), "authority")
	if _, err := pki.MakePeerCA(file, "test", time.Now()); err != nil {
		t.Fatal(err)
	}
	countReloads := func(name string) int {
		return strings.Count(p.Members[name].Log.String(), "CAs of the replicas reloaded")
	}
	for i, step := range []func(dir string) error{
		func(dir string) error { _, err := pki.TrustPeerCA(dir, file); return err },
		func(dir string) error { _, err := pki.UsePeerCA(dir, file); return err },
		pki.RemovePreviousPeerCAs,
	} {
		if err := p.DialPeer(t, "cp1", previousClient); err != nil {
			t.Fatalf("before step %d: %v", i, err)
		}
		for _, name := range []string{"cp1", "cp2"} {
			was := countReloads(name)
			if err := step(recovery.TrustFolder(p.Members[name].Config.Dir())); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
				t.Fatal(err)
			}
			servertest.Eventually(t, func() error {
				if countReloads(name) == was {
					return fmt.Errorf("%[2]s has not applied step %[1]d", i, name)
				}
				return nil
			})
		}
		p.StopReplica("cp2") // a restart forces new connections
		p.Restart("cp2")
		p.PutConfigMap("cp2", fmt.Sprintf("step-%d", i))
	}
	if err := p.DialPeer(t, "cp1", previousClient); err == nil {
		t.Error("a client with the previous keys was accepted")
	}
	p.CheckConfigMaps("cp1", "step-0", "step-1", "step-2")
}

// The store is encrypted with a key file. A key is added while the replica runs. Without the keys,
// neither the data nor a backup can be read.
func TestEncryptionAtRest(t *testing.T) {
	keys := filepath.Join(t.TempDir(), "keys")
	if err := disk.CreateKeyFile(keys, "first"); err != nil {
		t.Fatal(err)
	}
	p := newPlane(t, 1, func(c *server.Config) { c.Store.Keys = keys })
	const mark = "a-name-that-must-not-be-on-the-disk"
	p.PutConfigMap("cp1", mark)
	file := p.Backup("cp1")
	if err := disk.AddKey(keys, "second"); err != nil {
		t.Fatal(err)
	}
	servertest.Eventually(t, func() error {
		if log := p.Members["cp1"].Log.String(); !strings.Contains(log, "encryption keys reloaded") ||
			!strings.Contains(log, "current=second") {
			return errors.New("the new key is not in use")
		}
		return nil
	})
	// A damaged key file does not replace the current keys.
	good, err := os.ReadFile(keys)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(keys, []byte("second half-a-ke"), 0o600); err != nil {
		t.Fatal(err)
	}
	servertest.Eventually(t, func() error {
		if !strings.Contains(p.Members["cp1"].Log.String(), "the changed encryption keys are not applied") {
			return errors.New("the damaged key file is not logged")
		}
		return nil
	})
	p.PutConfigMap("cp1", mark+"-2")
	if err := os.WriteFile(keys, good, 0o600); err != nil {
		t.Fatal(err)
	}
	p.StopReplica("cp1")
	cfg := p.Members["cp1"].Config
	err = filepath.WalkDir(filepath.Join(cfg.DataDir, datadir.RaftFolder),
		func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			raw, err := os.ReadFile(path)
			if bytes.Contains(raw, []byte(mark)) {
				t.Errorf("%s contains the name of an object unencrypted", path)
			}
			return err
		})
	if err != nil {
		t.Fatal(err)
	}
	withoutKeys := cfg
	withoutKeys.Store.Keys, withoutKeys.Process.Log = "", slog.New(slog.DiscardHandler)
	if err := server.Run(context.Background(), withoutKeys); !errors.Is(err, disk.ErrSealed) {
		t.Errorf("starting without keys: %v", err)
	}
	if _, err := recovery.Verify(withoutKeys.Store, file); !errors.Is(err, disk.ErrSealed) {
		t.Errorf("verifying a backup without keys: %v", err)
	}
	if i, err := recovery.Verify(cfg.Store, file); err != nil || !i.Sealed || i.KeyID != "first" {
		t.Errorf("verifying a backup with keys: %v %+v", err, i)
	}
	p.Restart("cp1")
	p.CheckConfigMaps("cp1", mark, mark+"-2")
}
