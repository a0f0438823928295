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

// offlineVerb is an operation on the data of a stopped replica. It runs in its own process, because
// a process must not map files of a disk that it serves.
type offlineVerb struct {
	Do       string // "convert" or "restore"
	DataDir  string
	LogStore string // to have afterwards
	Backup   string // file to restore
}

const verbEnvironment = "KEELSON_DURABLE_VERB"

// verbMain returns at once in an ordinary process. In a process of runProcess it executes the verb
// and does not return.
func verbMain() {
	text := os.Getenv(verbEnvironment)
	if text == "" {
		return
	}
	var v offlineVerb
	err := json.Unmarshal([]byte(text), &v)
	if err == nil {
		err = v.doVerb()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func (v offlineVerb) doVerb() error {
	c := replica.Config{
		Name: "r1", Network: replica.Network{Advertise: "127.0.0.1:1"},
		Storage: replica.Storage{DataDir: v.DataDir, LogStore: disk.LogStoreKind(v.LogStore)},
	}
	if v.Do == "convert" {
		return disk.Convert(context.Background(), c.Disk(), c.Storage.LogStore, nil)
	}
	f, err := os.Open(v.Backup)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = disk.Restore(c.Disk(), f, disk.RestoreOptions{Advertise: c.Network.Advertise, AnyCluster: true})
	return err
}

// runProcess runs the verb in a child process. Its error contains the output.
func (v offlineVerb) runProcess() error {
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

func (s *soloReplica) dataDir() string { return filepath.Join(s.disk.Path(), "data") }

// A conversion of the log that is cut short by a power cut, at any change of
// the disk, is done when it is run again, and has lost nothing.
func TestConvertThroughPowerCuts(t *testing.T) {
	for i, from := range logStores {
		to := logStores[1-i]
		t.Run(from+" to "+to, func(t *testing.T) {
			cutAtEveryChange(t, 4, func(t *testing.T, cutAt uint64) uint64 {
				s := newSoloReplica(t, from)
				if err := s.runOnce(s.makeChanges); err != nil {
					t.Fatal(err)
				}
				changes := s.repeatVerb(offlineVerb{Do: "convert", DataDir: s.dataDir(), LogStore: to}, cutAt)
				s.logStore = to
				if err := s.runOnce(s.checkStore); err != nil {
					t.Errorf("after converting: %v", err)
				}
				return changes
			})
		})
	}
}

// An interrupted restore is repeated, at whatever change of the disk the power was cut. A restore
// that has reported success survives a power cut.
func TestRestoreThroughPowerCuts(t *testing.T) {
	needDisks(t)
	backup := filepath.Join(t.TempDir(), "backup")
	want := makeBackup(t, backup)
	for _, store := range logStores {
		t.Run(store, func(t *testing.T) {
			cutAtEveryChange(t, 4, func(t *testing.T, cutAt uint64) uint64 {
				s := newSoloReplica(t, store)
				changes := s.repeatVerb(offlineVerb{Do: "restore", DataDir: s.dataDir(), LogStore: store,
					Backup: backup}, cutAt)
				if err := s.disk.Crash(lossy.Loss{}); err != nil {
					t.Fatal(err)
				}
				err := s.runOnce(func(ctx context.Context, m *storeproc.Member) error {
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

// cutAtEveryChange calls do once without a power cut, and then with the power cut at some of the
// changes, about this many by default. do receives the number of the change (0 = none) and returns
// the number of changes.
func cutAtEveryChange(t *testing.T, about int, do func(t *testing.T, cutAt uint64) uint64) {
	all := do(t, 0)
	step := max(1, all/uint64(roundCount(about)))
	for n := 1 + *seed%step; n <= all; n += step {
		t.Run(fmt.Sprintf("%d of %d", n, all), func(t *testing.T) { do(t, n) })
	}
}

// repeatVerb executes a verb until it succeeds, the first time with the power cut at one of its
// changes. It returns the number of changes.
func (s *soloReplica) repeatVerb(v offlineVerb, cutAt uint64) (changes uint64) {
	s.t.Helper()
	from := s.disk.Changes()
	s.disk.CutAt(cutAt)
	for n := *seed; ; n++ {
		err := v.runProcess()
		done := err == nil
		if n > *seed && err != nil && strings.Contains(err.Error(), disk.ErrNotEmpty.Error()) {
			done = true // the restore before the power cut was complete but for its answer
		}
		if done {
			s.disk.CutAt(0)
			return s.disk.Changes() - from
		}
		if !s.powerIsCut() {
			s.t.Fatalf("without a power cut: %v", err)
		}
		ways := lossy.Losses(n)
		if err := s.disk.Crash(ways[n%uint64(len(ways))]); err != nil {
			s.t.Fatal(err)
		}
	}
}

// makeBackup writes a backup and returns the number of its keys below /backup/.
func makeBackup(t *testing.T, path string) int {
	t.Helper()
	const keys = 30
	ctx := testContext(t, patience)
	c := storetest.NewCluster(t, 1, nil)
	r := c.Replica(c.Leader())
	for n := range keys {
		if _, err := r.Commit(ctx,
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/backup/%d", n),
				make([]byte, 2000))}}); err != nil {
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
