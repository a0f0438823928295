package server_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
	"keelson.dev/keelson/raftstore/disk"
)

// A cluster with the defaults of init writes no value unencrypted, on any replica: not in the log,
// the journal, a snapshot or a backup. With encryption disabled, the test finds the value, so that
// the search is known to work.
func TestCanaryOfANewCluster(t *testing.T) {
	t.Run("defaults of init", func(t *testing.T) {
		p := newPlane(t, 2, smallSnapshots)
		if where := p.findPlaintext(t, "cp1", "cp2"); len(where) > 0 {
			t.Errorf("the value is unencrypted in %v", where)
		}
		one, err := os.ReadFile(datadir.KeyFile(p.Members["cp1"].Config.DataDir))
		if err != nil {
			t.Fatal(err)
		}
		if two, err := os.ReadFile(datadir.KeyFile(p.Members["cp2"].Config.DataDir)); err != nil ||
			!bytes.Equal(one, two) {
			t.Errorf("the joined replica has a different key file: %v", err)
		}
		// Without the key file, the replica does not start and writes nothing unencrypted.
		p.StopReplica("cp2")
		cfg := p.Members["cp2"].Config
		if err := os.Remove(datadir.KeyFile(cfg.DataDir)); err != nil {
			t.Fatal(err)
		}
		if err := server.Run(context.Background(), cfg); !errors.Is(err, disk.ErrSealed) {
			t.Errorf("starting without the key file: %v", err)
		}
		if err := os.RemoveAll(filepath.Join(cfg.DataDir, datadir.RaftFolder)); err != nil {
			t.Fatal(err)
		}
		if _, err := recovery.Rebuild(cfg.Dir(), nil); !errors.Is(err, disk.ErrSealed) {
			t.Errorf("rebuilding without the key file: %v", err)
		}
	})
	t.Run("encryption disabled", func(t *testing.T) {
		p := newPlane(t, 1, func(c *server.Config) {
			smallSnapshots(c)
			c.Store.Keys = datadir.NoKeys
		})
		where := p.findPlaintext(t, "cp1")
		for _, kind := range []string{"raft.journal", "snapshots", "backup"} {
			if !slices.ContainsFunc(where, func(s string) bool {
				return strings.Contains(s, string(filepath.Separator)+kind)
			}) {
				t.Errorf("the value was not found in %s, only in %v", kind, where)
			}
		}
	})
}

func smallSnapshots(c *server.Config) { c.Store.SnapshotBytes = datadir.MinSnapshotBytes }

// findPlaintext writes a Secret with a random value, and enough other data for a snapshot. It
// returns the files of the replicas and of a backup that contain the value.
func (p *plane) findPlaintext(t *testing.T, replicas ...string) (where []string) {
	t.Helper()
	p.T = t
	canary := make([]byte, 24) // a multiple of three, so that the base64 form has no padding
	rand.Read(canary)
	text := "canary-" + hex.EncodeToString(canary) // after a multiple of three characters
	secrets := p.Client("cp1").CoreV1().Secrets("default")
	filler := make([]byte, 600<<10)
	s := &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "one"}, Data: map[string][]byte{"value": []byte(text)}}
	if _, err := secrets.Create(context.Background(), s, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	write := func() {
		rand.Read(filler)
		s.Data["filler"] = filler
		if _, err := secrets.Update(context.Background(), s, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range replicas {
		servertest.Eventually(t, func() error {
			made, err := filepath.Glob(filepath.Join(p.Members[name].Config.DataDir, datadir.RaftFolder,
				"snapshots", "*"))
			if err == nil && len(made) == 0 {
				write()
				err = errors.New("no snapshot on " + name)
			}
			return err
		})
	}
	signs := [][]byte{[]byte(text), canary, []byte(base64.StdEncoding.EncodeToString([]byte(text))[:72])}
	searchFiles := func(root string) {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			raw, err := os.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) { // removed by the running replica
				return nil
			}
			for _, sign := range signs {
				if bytes.Contains(raw, sign) {
					where = append(where, path)
					break
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range replicas {
		searchFiles(p.Members[name].Config.DataDir)
	}
	searchFiles(filepath.Dir(p.Backup("cp1")))
	return where
}
