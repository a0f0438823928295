package server

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
	"keelson.dev/keelson/raftstore/disk"
)

// A cluster as init makes it writes no value in clear, on any replica: not in the
// log, the journal, a snapshot or a backup. Told not to encrypt, it does, by which
// one sees that the search finds what is there.
func TestCanaryOfANewCluster(t *testing.T) {
	t.Run("as init makes it", func(t *testing.T) {
		p := newPlane(t, 2, smallSnapshots)
		if where := p.sing(t, "cp1", "cp2"); len(where) > 0 {
			t.Errorf("the canary is in clear in %v", where)
		}
		one, err := os.ReadFile(datadir.KeyFile(p.members["cp1"].cfg.DataDir))
		if err != nil {
			t.Fatal(err)
		}
		if two, err := os.ReadFile(datadir.KeyFile(p.members["cp2"].cfg.DataDir)); err != nil || !bytes.Equal(one, two) {
			t.Errorf("the replica that joined has another key file, or none: %v", err)
		}
		// Without the key file nothing is written in clear instead: the replica does not start.
		p.stop("cp2")
		cfg := p.members["cp2"].cfg
		if err := os.Remove(datadir.KeyFile(cfg.DataDir)); err != nil {
			t.Fatal(err)
		}
		if err := Run(context.Background(), cfg); !errors.Is(err, disk.ErrSealed) {
			t.Errorf("a start without the key file: %v", err)
		}
		if err := os.RemoveAll(filepath.Join(cfg.DataDir, datadir.RaftFolder)); err != nil {
			t.Fatal(err)
		}
		if _, err := recovery.Rebuild(cfg.Dir(), nil); !errors.Is(err, disk.ErrSealed) {
			t.Errorf("a rebuild without the key file: %v", err)
		}
	})
	t.Run("with none", func(t *testing.T) {
		p := newPlane(t, 1, func(c *Config) {
			smallSnapshots(c)
			c.Store.Keys = datadir.NoKeys
		})
		where := p.sing(t, "cp1")
		for _, kind := range []string{"raft.journal", "snapshots", "backup"} {
			if !slices.ContainsFunc(where, func(s string) bool { return strings.Contains(s, string(filepath.Separator)+kind) }) {
				t.Errorf("the canary was not found in %s, only in %v", kind, where)
			}
		}
	})
}

func smallSnapshots(c *Config) { c.Store.SnapshotBytes = datadir.MinSnapshotBytes }

// sing writes a Secret with a canary and enough besides for a snapshot, and
// returns the files on the replicas' disks, and of a backup, that hold the canary.
func (p *plane) sing(t *testing.T, replicas ...string) (where []string) {
	t.Helper()
	p.t = t
	canary := make([]byte, 24) // a multiple of three: its base64 is the same wherever it stands
	rand.Read(canary)
	text := "canary-" + hex.EncodeToString(canary) // 55 letters; the signs before it make 3n
	secrets := p.client("cp1").CoreV1().Secrets("default")
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
		eventually(t, func() error {
			made, err := filepath.Glob(filepath.Join(p.members[name].cfg.DataDir, datadir.RaftFolder, "snapshots", "*"))
			if err == nil && len(made) == 0 {
				write()
				err = errors.New("no snapshot on " + name)
			}
			return err
		})
	}
	signs := [][]byte{[]byte(text), canary, []byte(base64.StdEncoding.EncodeToString([]byte(text))[:72])}
	look := func(root string) {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			raw, err := os.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) { // the replica runs
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
		look(p.members[name].cfg.DataDir)
	}
	look(filepath.Dir(p.backup("cp1")))
	return where
}
