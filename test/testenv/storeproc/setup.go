// Package storeproc runs replicas of the store as child processes of the same binary. They can be
// killed, paused, partitioned and slowed down. Clients reach each replica over a socket that no
// fault affects.
//
// A program that uses the package must call Main first, in main or TestMain.
package storeproc

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"time"

	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// environment is the variable with the path of a replica process's setup file.
const environment = "KEELSON_STORE_REPLICA"

// Main returns at once in an ordinary process. In a process that Start has launched, it runs a
// replica until it is stopped, and never returns.
func Main() {
	if path := os.Getenv(environment); path != "" {
		os.Exit(runChild(path))
	}
}

// Settings are the fields of replica.Config that a test can set. Zero values mean the defaults.
type Settings struct {
	LogStore string // "bolt" (default) or "wal"
	Cluster  string
	NoSync   bool // no fsync: data survives a killed process, but not a power cut

	HeartbeatTimeout time.Duration
	ElectionTimeout  time.Duration
	SnapshotBytes    int64
	SnapshotEntries  uint64
	TrailingBytes    int64
	HistoryRevisions int
	HistoryAge       time.Duration
	MinHistory       int
	Quota            int64
	CompareEvery     time.Duration

	LogLevel slog.Level // of the replica's log file
}

func (s Settings) applyTo(c *replica.Config) {
	c.Storage.LogStore, c.Cluster, c.Storage.NoSync = disk.LogStoreKind(s.LogStore), s.Cluster, s.NoSync
	c.Timeouts.HeartbeatTimeout, c.Timeouts.ElectionTimeout = s.HeartbeatTimeout, s.ElectionTimeout
	c.Snapshots.SnapshotBytes, c.Snapshots.SnapshotEntries, c.Snapshots.TrailingBytes = s.SnapshotBytes,
		s.SnapshotEntries, s.TrailingBytes
	c.History.HistoryRevisions, c.History.HistoryAge, c.History.MinHistory = s.HistoryRevisions,
		s.HistoryAge, s.MinHistory
	c.Quota, c.CompareEvery = s.Quota, s.CompareEvery
}

// setup is the configuration of a replica process.
type setup struct {
	Name      string
	DataDir   string
	Address   string // of the peer port
	Socket    string // for clients and the parent process
	Bootstrap bool
	Authority []byte
	Settings  Settings
	Links     map[string]Link
	Clock     time.Duration // ahead of the machine's clock
}

func (s *setup) writeFile(path string) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o600)
}

func readSetup(path string) (*setup, *storetest.Authority, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, err
	}
	s := new(setup)
	if err := json.Unmarshal(b, s); err != nil {
		return nil, nil, fmt.Errorf("setup %s: %w", path, err)
	}
	a, err := storetest.ParseAuthority(s.Authority)
	if err != nil {
		return nil, nil, fmt.Errorf("setup %s: %w", path, err)
	}
	return s, a, nil
}
