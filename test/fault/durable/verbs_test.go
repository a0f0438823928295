package durable

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
	"keelson.dev/keelson/test/testenv/lossy"
	"keelson.dev/keelson/test/testenv/storeproc"
)

// verb is something that is done to the data of a replica that does not run,
// by a process of its own: one must not map files of a disk that it serves.
type verb struct {
	Do       string // "convert" or "restore"
	DataDir  string
	LogStore string // to have afterwards
	Backup   string // file to restore
}

const verbEnvironment = "KEELSON_DURABLE_VERB"

// verbMain does nothing in an ordinary process. In one made by run it does the
// verb and does not return.
func verbMain() {
	text := os.Getenv(verbEnvironment)
	if text == "" {
		return
	}
	var v verb
	err := json.Unmarshal([]byte(text), &v)
	if err == nil {
		err = v.act()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func (v verb) act() error {
	c := replica.Config{Name: "r1", DataDir: v.DataDir, Advertise: "127.0.0.1:1", LogStore: disk.LogStoreKind(v.LogStore)}
	if v.Do == "convert" {
		return disk.Convert(context.Background(), c.Disk(), c.LogStore, nil)
	}
	f, err := os.Open(v.Backup)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = disk.Restore(c.Disk(), f, disk.RestoreOptions{Advertise: c.Advertise, AnyCluster: true})
	return err
}

// run does the verb, and tells what it said when it failed.
func (v verb) run() error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), verbEnvironment+"="+string(text))
	if said, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", v.Do, err, said)
	}
	return nil
}

func (s *solo) dataDir() string { return filepath.Join(s.disk.Path(), "data") }

// A conversion of the log that is cut short by a power cut, at any change of
// the disk, is done when it is run again, and has lost nothing.
func TestConvertThroughPowerCuts(t *testing.T) {
	for i, from := range logStores {
		to := logStores[1-i]
		t.Run(from+" to "+to, func(t *testing.T) {
			everyChange(t, 4, func(t *testing.T, cutAt uint64) uint64 {
				s := newSolo(t, from)
				if err := s.live(s.work); err != nil {
					t.Fatal(err)
				}
				changes := s.again(verb{Do: "convert", DataDir: s.dataDir(), LogStore: to}, cutAt)
				s.store = to
				if err := s.live(s.check); err != nil {
					t.Errorf("after converting: %v", err)
				}
				return changes
			})
		})
	}
}

// A restore that is cut short is called again, at whatever change of the disk
// the power went; one that has said that it is done outlives a power cut.
func TestRestoreThroughPowerCuts(t *testing.T) {
	needDisks(t)
	backup := filepath.Join(t.TempDir(), "backup")
	want := makeBackup(t, backup)
	for _, store := range logStores {
		t.Run(store, func(t *testing.T) {
			everyChange(t, 4, func(t *testing.T, cutAt uint64) uint64 {
				s := newSolo(t, store)
				changes := s.again(verb{Do: "restore", DataDir: s.dataDir(), LogStore: store, Backup: backup}, cutAt)
				if err := s.disk.Crash(lossy.Loss{}); err != nil {
					t.Fatal(err)
				}
				err := s.live(func(ctx context.Context, m *storeproc.Member) error {
					list, err := m.Store().List(ctx, "/backup/", raftstore.ListOptions{})
					if err == nil && len(list.Items) != want {
						err = fmt.Errorf("%d keys are restored, want %d", len(list.Items), want)
					}
					return err
				})
				if err != nil {
					t.Errorf("after restoring: %v", err)
				}
				return changes
			})
		})
	}
}

// everyChange does something once, and then again with the power cut at some of
// the changes that it makes; at about so many when it is not said. do is told at
// which (0 = none), and returns how many there were.
func everyChange(t *testing.T, about int, do func(t *testing.T, cutAt uint64) uint64) {
	all := do(t, 0)
	step := max(1, all/uint64(times(about)))
	for n := 1 + *seed%step; n <= all; n += step {
		t.Run(fmt.Sprintf("%d of %d", n, all), func(t *testing.T) { do(t, n) })
	}
}

// again does a verb, the first time with the power cut at one of its changes,
// until it is done, and returns how many changes that took.
func (s *solo) again(v verb, cutAt uint64) (changes uint64) {
	s.t.Helper()
	from := s.disk.Changes()
	s.disk.CutAt(cutAt)
	for n := *seed; ; n++ {
		err := v.run()
		done := err == nil
		if n > *seed && err != nil && strings.Contains(err.Error(), disk.ErrNotEmpty.Error()) {
			done = true // the restore before the power cut was complete but for its answer
		}
		if done {
			s.disk.CutAt(0)
			return s.disk.Changes() - from
		}
		if !s.powerless() {
			s.t.Fatalf("without a power cut: %v", err)
		}
		ways := lossy.Losses(n)
		if err := s.disk.Crash(ways[n%uint64(len(ways))]); err != nil {
			s.t.Fatal(err)
		}
	}
}

// makeBackup writes a backup and returns how many keys below /backup/ it has.
func makeBackup(t *testing.T, path string) int {
	t.Helper()
	const keys = 30
	ctx := within(t, patience)
	c := storetest.NewCluster(t, 1, nil)
	r := c.Replica(c.Leader())
	for n := range keys {
		if _, err := r.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/backup/%d", n), make([]byte, 2000))}}); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Backup(ctx, f), f.Close()); err != nil {
		t.Fatal(err)
	}
	return keys
}
