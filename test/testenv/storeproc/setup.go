// Package storeproc runs replicas of the store as processes of their own: the
// running binary, executed again. They can be killed, paused, cut off from
// each other and slowed down, while clients reach each over a socket that no
// fault touches.
//
// A program that uses it calls Main first, in main or TestMain.
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

// environment names the file with the setup of the replica that this process is to be.
const environment = "KEELSON_STORE_REPLICA"

// Main does nothing in an ordinary process. In one that Start has made, it is
// a replica until it is told to stop, and never returns.
func Main() {
	if path := os.Getenv(environment); path != "" {
		os.Exit(child(path))
	}
}

// Settings are what may be chosen of replica.Config. Zero values mean its defaults.
type Settings struct {
	LogStore string // "bolt" (default) or "wal"
	Cluster  string
	NoSync   bool // no fsync: a killed process loses nothing by it, a machine without power does

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

func (s Settings) apply(c *replica.Config) {
	c.LogStore, c.Cluster, c.NoSync = disk.LogStoreKind(s.LogStore), s.Cluster, s.NoSync
	c.HeartbeatTimeout, c.ElectionTimeout = s.HeartbeatTimeout, s.ElectionTimeout
	c.SnapshotBytes, c.SnapshotEntries, c.TrailingBytes = s.SnapshotBytes, s.SnapshotEntries, s.TrailingBytes
	c.HistoryRevisions, c.HistoryAge, c.MinHistory = s.HistoryRevisions, s.HistoryAge, s.MinHistory
	c.Quota, c.CompareEvery = s.Quota, s.CompareEvery
}

// setup is all that a replica process is told at its start.
type setup struct {
	Name      string
	DataDir   string
	Address   string // of the peer port
	Socket    string // where clients and the harness reach it
	Bootstrap bool
	Authority []byte
	Settings  Settings
	Links     map[string]Link
	Clock     time.Duration // ahead of the machine's
}

func (s *setup) write(path string) error {
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
