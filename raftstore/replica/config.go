package replica

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica/failover"
	"keelson.dev/keelson/raftstore/replica/hclogger"
)

// Config is the configuration of a replica. Zero values of optional fields mean their defaults,
// which suit a local network.
type Config struct {
	// Name is the ID of the replica in the raft cluster. It must never change for a DataDir.
	Name      string
	Network   Network
	Timeouts  Timeouts
	History   History
	Snapshots Snapshots
	Storage   Storage
	Program   Program

	// Bootstrap makes a replica without state the only member of a new raft cluster. All other
	// replicas start without it and are added by AddMember.
	Bootstrap bool

	Logger *slog.Logger

	// Cluster is the identity of the cluster in snapshots and backups. A backup of another cluster
	// is refused unless the caller requests it.
	Cluster string
	// Quota is the number of bytes of state and history at which the store becomes read-only
	// (default 8 GiB; negative = never). History is compacted first while the state alone is below
	// nine tenths of the quota.
	Quota int64
	// CompareEvery is the interval at which the leader compares the states of the replicas (default
	// 10 min; negative = never).
	CompareEvery time.Duration
	// Now is the clock (default time.Now). Package storeclock bounds the effect of its jumps.
	Now func() time.Time
}

// Network contains the addresses of a replica and the credentials of its connections.
type Network struct {
	// Listener accepts the connections of other replicas. The replica closes it. If it is nil, Run
	// listens on ListenAddr.
	Listener   net.Listener
	ListenAddr string
	// Advertise is the host:port at which other replicas connect to the listener. The default is
	// the address of the listener.
	Advertise string

	// ServerTLS must require and verify client certificates. ClientTLS must present one. Both may
	// get their certificates from callbacks, so that certificates change without a restart.
	// ClientCAs, RootCAs and VerifyConnection decide which peers are accepted. The replica sets
	// ALPN.
	ServerTLS *tls.Config
	ClientTLS *tls.Config

	// Dial replaces the TCP dialer below TLS. Tests interrupt connections with it.
	Dial func(ctx context.Context, address string) (net.Conn, error)
}

// Timeouts contains the durations after which a replica reacts to a peer or a disk that does not
// respond.
type Timeouts struct {
	// HeartbeatTimeout is the time without a message of the leader after which a follower starts an
	// election (default 600 ms). ElectionTimeout is how long an election may take (default 600 ms).
	// LeaseTimeout is how long a leader continues without contact to a quorum (default 5 ms less
	// than HeartbeatTimeout). It must be shorter than HeartbeatTimeout. Reads do not depend on
	// LeaseTimeout. A short lease ends leaderships unnecessarily on a busy machine.
	HeartbeatTimeout time.Duration
	ElectionTimeout  time.Duration
	LeaseTimeout     time.Duration
	// DiskPatience is how long a leader continues while a write of its log is pending. After that
	// it stops sending heartbeats, so that another leader is elected (default 5 s, or four times
	// HeartbeatTimeout if that is more).
	DiskPatience time.Duration
	// CommitTimeout is the time after which raft itself notifies followers of a commit (default 1
	// s). Normally the leader notifies them immediately (package replication).
	CommitTimeout time.Duration
}

// History configures how many revisions are retained for watches and past reads.
type History struct {
	// HistoryRevisions is how many revisions are retained for watches and reads of past revisions
	// (default 20,000). HistoryAge is how long they are retained (default 5 min). MinHistory
	// revisions are retained at any age (default 1,000).
	HistoryRevisions int
	HistoryAge       time.Duration
	MinHistory       int
	// HistoryBytes is how much memory the previous versions in history may use (default 256 MiB).
	// When it is exceeded, history is compacted to half of this size, regardless of its age.
	HistoryBytes int64
}

// Snapshots configures when snapshots are taken and how much of the log before a snapshot is
// retained.
type Snapshots struct {
	// A snapshot is taken after SnapshotEntries raft entries (default 50,000) or SnapshotBytes of
	// entries. The default of SnapshotBytes is 64 MiB or half of the state, whichever is more. It
	// is four times as much while a follower installs a snapshot. Up to TrailingBytes of the log
	// before the snapshot (default 32 MiB) are retained for followers that lag.
	SnapshotEntries uint64
	SnapshotBytes   int64
	TrailingBytes   int64
}

// Storage configures the data directory of a replica.
type Storage struct {
	// DataDir contains the log, the votes and the snapshots. It belongs to this replica alone and
	// is created if it does not exist.
	DataDir string

	// LogStore is the store of the log: LogBolt (default) or LogWAL. A data directory that was
	// created with the other store is refused. Convert changes the store.
	LogStore disk.LogStoreKind
	// Keys are the key-encryption keys of the data on the disk: log, snapshots and backups. With
	// nil, new data is not encrypted, and encrypted data cannot be opened.
	Keys *disk.Keyring

	// NoSync omits fsync, for tests only: a power failure loses acknowledged commits.
	NoSync       bool
	layer        durable.FS                              // opens files; set by tests of the disk
	votes        func(disk.RecordStore) disk.RecordStore // wraps the store of votes; set by tests of the disk
	journalBytes int64                                   // size of a journal file; set by tests of the disk
	segmentBytes int                                     // size of a log file with LogWAL; set by tests of the disk
}

// Program describes the program that embeds a replica. It contains what other replicas request.
type Program struct {
	// FeatureLevel is the highest level of stored formats that the program around this replica
	// supports. It is reported to the other replicas. StoredLevel returns the stored level from the
	// applied state (nil = 0). A replica that does not support the stored level cannot join.
	FeatureLevel uint32
	StoredLevel  func(context.Context) (uint32, error)

	// Standby reports whether this replica, while it is a learner, waits for the program to promote
	// it. The result is reported to the leader (see RequestReports). nil means that it does not
	// wait.
	Standby func() bool
}

// Disk returns the part of the configuration that package disk needs to open the data directory.
func (c Config) Disk() disk.Config {
	return disk.Config{
		Name: c.Name, Dir: c.Storage.DataDir, LogStore: c.Storage.LogStore, Keys: c.Storage.Keys,
		NoSync: c.Storage.NoSync, Now: c.Now, Files: c.Storage.layer, Votes: c.Storage.votes,
		JournalBytes: c.Storage.journalBytes, SegmentBytes: c.Storage.segmentBytes,
	}
}

func (c Config) withDefaults() Config {
	orElse := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	orElse(&c.Timeouts.HeartbeatTimeout, 600*time.Millisecond)
	orElse(&c.Timeouts.ElectionTimeout, max(600*time.Millisecond, c.Timeouts.HeartbeatTimeout))
	orElse(&c.Timeouts.LeaseTimeout, c.Timeouts.HeartbeatTimeout-5*time.Millisecond)
	orElse(&c.Timeouts.DiskPatience, max(5*time.Second, 4*c.Timeouts.HeartbeatTimeout))
	orElse(&c.Timeouts.CommitTimeout, time.Second)
	orElse(&c.History.HistoryAge, 5*time.Minute)
	if c.History.HistoryRevisions == 0 {
		c.History.HistoryRevisions = 20_000
	}
	if c.History.MinHistory == 0 {
		c.History.MinHistory = 1_000
	}
	if c.History.HistoryBytes == 0 {
		c.History.HistoryBytes = 256 << 20
	}
	if c.Snapshots.SnapshotEntries == 0 {
		c.Snapshots.SnapshotEntries = 50_000
	}
	if c.Snapshots.SnapshotBytes == 0 {
		c.Snapshots.SnapshotBytes = 64 << 20
	}
	if c.Snapshots.TrailingBytes == 0 {
		c.Snapshots.TrailingBytes = 32 << 20
	}
	if c.Quota == 0 {
		c.Quota = 8 << 30
	}
	orElse(&c.CompareEvery, 10*time.Minute)
	if c.Storage.LogStore == "" {
		c.Storage.LogStore = disk.LogBolt
	}
	if c.Program.StoredLevel == nil {
		c.Program.StoredLevel = func(context.Context) (uint32, error) { return 0, nil }
	}
	if c.Program.Standby == nil {
		c.Program.Standby = func() bool { return false }
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Network.Dial == nil {
		dialer := &net.Dialer{KeepAlive: 5 * time.Second}
		c.Network.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", address)
		}
	}
	return c
}

func (c Config) validate() error {
	if err := checkName(c.Name); err != nil {
		return err
	}
	if c.Network.Advertise != "" {
		if err := checkAddress(c.Network.Advertise); err != nil {
			return fmt.Errorf("advertised address of replica %s: %w", c.Name, err)
		}
	}
	for _, least := range []struct {
		what  string
		value int64
	}{
		{"heartbeat timeout", int64(c.Timeouts.HeartbeatTimeout)},
		{"election timeout", int64(c.Timeouts.ElectionTimeout)}, {"lease timeout", int64(c.Timeouts.LeaseTimeout)},
		{"disk patience", int64(c.Timeouts.DiskPatience)}, {"commit timeout", int64(c.Timeouts.CommitTimeout)},
		{"number of revisions of history", int64(c.History.HistoryRevisions)},
		{"age of history", int64(c.History.HistoryAge)}, {"least history", int64(c.History.MinHistory)},
		{"number of bytes of history", c.History.HistoryBytes}, {"bytes between snapshots",
			c.Snapshots.SnapshotBytes}, {"bytes of the trailing log", c.Snapshots.TrailingBytes},
	} {
		if least.value < 0 {
			return fmt.Errorf("%w: replica %s: the %s is negative: %d", raftstore.ErrInvalid, c.Name, least.what,
				least.value)
		}
	}
	switch {
	case c.Storage.DataDir == "":
		return fmt.Errorf("%w: replica %s has no data directory", raftstore.ErrInvalid, c.Name)
	case c.Storage.LogStore != "" && c.Storage.LogStore != disk.LogBolt && c.Storage.LogStore != disk.LogWAL:
		return fmt.Errorf("%w: replica %s: unknown log store %q, want %q or %q", raftstore.ErrInvalid, c.Name,
			c.Storage.LogStore, disk.LogBolt, disk.LogWAL)
	case c.Network.Listener == nil && c.Network.ListenAddr == "":
		return fmt.Errorf("%w: replica %s has neither a listener nor an address to listen on",
			raftstore.ErrInvalid, c.Name)
	case c.Network.ServerTLS == nil || c.Network.ClientTLS == nil:
		return fmt.Errorf("%w: replica %s has no TLS configuration: connections between replicas must be encrypted",
			raftstore.ErrInvalid, c.Name)
	case c.Network.ServerTLS.ClientAuth != tls.RequireAndVerifyClientCert &&
		c.Network.ServerTLS.GetConfigForClient == nil:
		return fmt.Errorf("%w: replica %s would accept peers without a verified certificate",
			raftstore.ErrInvalid, c.Name)
	}
	return nil
}

// raftConfig returns the configuration of hashicorp/raft.
func (c Config) raftConfig(notify chan<- bool) *raft.Config {
	rc := raft.DefaultConfig()
	rc.LocalID = raft.ServerID(c.Name)
	// failover.Watch makes raft check its leader after the configured timeouts
	rc.HeartbeatTimeout = failover.RaftTimeout(c.Timeouts.HeartbeatTimeout)
	rc.ElectionTimeout = max(c.Timeouts.ElectionTimeout, rc.HeartbeatTimeout)
	// checkLeaderNow shortens HeartbeatTimeout a little
	rc.LeaderLeaseTimeout = min(c.Timeouts.LeaseTimeout, c.Timeouts.HeartbeatTimeout-time.Millisecond)
	rc.CommitTimeout = c.Timeouts.CommitTimeout
	rc.SnapshotThreshold = c.Snapshots.SnapshotEntries
	rc.BatchApplyCh = true
	rc.MaxAppendEntries = 32 // each may be a batch of a megabyte
	rc.ShutdownOnRemove = false
	rc.NoLegacyTelemetry = true
	rc.NotifyCh = notify
	rc.Logger = hclogger.New(c.Logger.With("component", "raft"))
	return rc
}

// maxName is the maximum length of a replica's name in bytes. Alarms about a replica contain its
// name.
const maxName = 256

// checkName returns an error if a name is not valid for a replica.
func checkName(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: a replica needs a name", raftstore.ErrInvalid)
	case len(name) > maxName:
		return fmt.Errorf("%w: name of a replica has %d bytes, at most %d: %.64q...", raftstore.ErrInvalid, len(name),
			maxName, name)
	case !utf8.ValidString(name):
		return fmt.Errorf("%w: name of a replica %q is not valid UTF-8", raftstore.ErrInvalid, name)
	}
	for _, c := range name {
		if !unicode.IsPrint(c) {
			return fmt.Errorf("%w: name of a replica %q contains %q, which is not printable",
				raftstore.ErrInvalid, name, c)
		}
	}
	return nil
}

// checkAddress returns an error if an address is not a host:port with a numeric port. It does not
// dial.
func checkAddress(address string) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil || host == "" || !utf8.ValidString(host) {
		return fmt.Errorf("%w: address %q of a replica: want host:port", raftstore.ErrInvalid, address)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return fmt.Errorf("%w: address %q of a replica: want a port from 1 to 65535", raftstore.ErrInvalid, address)
	}
	return nil
}

// withReplyMargin returns a copy of ctx with an earlier deadline. The margin is enough to reply
// with the cause of a failure. Otherwise a caller that is connected to another replica would only
// receive a deadline error.
func withReplyMargin(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, bounded := ctx.Deadline()
	if !bounded {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-min(time.Second, time.Until(deadline)/4)))
}
