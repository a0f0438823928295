package replica

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/disk/platter"
)

// Config is all that a replica needs. Zero values of the optional fields mean
// the defaults, which are meant for a local network.
type Config struct {
	// Name is the replica's id in the group; it must never change for a DataDir.
	Name string
	// DataDir holds the log, the votes and the snapshots. It belongs to this
	// replica alone and is created when absent.
	DataDir string

	// Listener accepts the other replicas; the replica closes it. When nil,
	// Run listens on ListenAddr.
	Listener   net.Listener
	ListenAddr string
	// Advertise is the host:port under which the others reach the listener.
	// Defaults to the listener's own address.
	Advertise string

	// ServerTLS must require and verify client certificates; ClientTLS must
	// present one. Both may take certificates from callbacks, so that they can
	// change without a restart. Who may speak is decided here, by ClientCAs,
	// RootCAs and VerifyConnection. ALPN is set by the replica.
	ServerTLS *tls.Config
	ClientTLS *tls.Config

	// Bootstrap makes a replica without state the single member of a new
	// group. All others start without it and are added by AddMember.
	Bootstrap bool

	Logger *slog.Logger

	// HeartbeatTimeout is how long a follower hears nothing before it calls an
	// election (default 600 ms); ElectionTimeout how long an election may take
	// (default 600 ms); LeaseTimeout how long a leader goes on without a
	// quorum (default 5 ms less than HeartbeatTimeout, which it must stay below: reads
	// do not rely on it, and on a busy machine a short one loses leaders for nothing).
	HeartbeatTimeout time.Duration
	ElectionTimeout  time.Duration
	LeaseTimeout     time.Duration
	// DiskPatience is how long a leader goes on although a write of its log has not
	// come back (default 5 s, and not less than four times HeartbeatTimeout). Then it
	// lets another be elected.
	DiskPatience time.Duration
	// CommitTimeout is raft's own fallback for telling followers of a commit
	// (default 1 s). Normally the leader tells them at once.
	CommitTimeout time.Duration

	// HistoryRevisions is how many revisions are kept for watches and reads of
	// the past (default 20,000), HistoryAge for how long (default 5 min).
	// MinHistory revisions are kept whatever their age (default 1,000).
	HistoryRevisions int
	HistoryAge       time.Duration
	MinHistory       int
	// HistoryBytes is how much of memory the old versions in history may take
	// (default 256 MiB): beyond it they go, however new they are, down to half of that.
	HistoryBytes int64

	// A snapshot is taken after SnapshotEntries raft entries (default 50,000) or
	// SnapshotBytes of them (default 64 MiB, or half the state if that is more;
	// four times that while a follower takes one in).
	// Of the log before it up to TrailingBytes (default 32 MiB) stay for
	// followers that lag.
	SnapshotEntries uint64
	SnapshotBytes   int64
	TrailingBytes   int64

	// Cluster is the identity of the cluster, written into snapshots and
	// backups: a backup of another cluster is refused unless asked for.
	Cluster string
	// Quota is how many bytes of state and history make the store read-only
	// (default 8 GiB; negative = never). History gives way first, as long as the
	// state alone is below nine tenths of it.
	Quota int64
	// CompareEvery is how often the leader compares the replicas' states
	// (default 10 min; negative = never).
	CompareEvery time.Duration
	// Now is the clock (default time.Now). Tests jump it; see clock.go for how
	// little that does.
	Now func() time.Time

	// FeatureLevel is the highest level of stored forms that the program around this
	// replica understands; the others are told. StoredLevel says from the applied state
	// which level is stored (nil = 0): who understands less is not taken in.
	FeatureLevel uint32
	StoredLevel  func(context.Context) (uint32, error)

	// Standby says whether this replica, while it has no vote, waits for one to be given to it by a program around the
	// replicas; the leader is told (LookAround). nil = it does not.
	Standby func() bool

	// LogStore is what keeps the log: LogBolt (default) or LogWAL. A data
	// directory made with the other one is refused; Convert changes it.
	LogStore disk.LogStoreKind
	// Keys seal what is on the disk: log, snapshots and backups. nil writes in
	// clear and opens nothing that is sealed.
	Keys *disk.Keyring

	// NoSync skips fsync. For tests only: a power cut loses acknowledged writes.
	NoSync       bool
	layer        platter.Layer                             // how files are opened; tests of the disk set it
	votes        func(disk.RecordKeeper) disk.RecordKeeper // likewise
	journalBytes int64                                     // of a file of the journal; likewise
	segmentBytes int                                       // of a file of the log with LogWAL; likewise
	// Dial replaces the TCP dialer, under TLS. Tests cut cables with it.
	Dial func(ctx context.Context, address string) (net.Conn, error)
}

// Disk is the part of the configuration that says where the data lies, and how.
func (c Config) Disk() disk.Config {
	return disk.Config{
		Name: c.Name, Dir: c.DataDir, LogStore: c.LogStore, Keys: c.Keys, NoSync: c.NoSync, Now: c.Now,
		Files: c.layer, Votes: c.votes, JournalBytes: c.journalBytes, SegmentBytes: c.segmentBytes,
	}
}

func (c Config) withDefaults() Config {
	orElse := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	orElse(&c.HeartbeatTimeout, 600*time.Millisecond)
	orElse(&c.ElectionTimeout, max(600*time.Millisecond, c.HeartbeatTimeout))
	orElse(&c.LeaseTimeout, c.HeartbeatTimeout-5*time.Millisecond)
	orElse(&c.DiskPatience, max(5*time.Second, 4*c.HeartbeatTimeout))
	orElse(&c.CommitTimeout, time.Second)
	orElse(&c.HistoryAge, 5*time.Minute)
	if c.HistoryRevisions == 0 {
		c.HistoryRevisions = 20_000
	}
	if c.MinHistory == 0 {
		c.MinHistory = 1_000
	}
	if c.HistoryBytes == 0 {
		c.HistoryBytes = 256 << 20
	}
	if c.SnapshotEntries == 0 {
		c.SnapshotEntries = 50_000
	}
	if c.SnapshotBytes == 0 {
		c.SnapshotBytes = 64 << 20
	}
	if c.TrailingBytes == 0 {
		c.TrailingBytes = 32 << 20
	}
	if c.Quota == 0 {
		c.Quota = 8 << 30
	}
	orElse(&c.CompareEvery, 10*time.Minute)
	if c.LogStore == "" {
		c.LogStore = disk.LogBolt
	}
	if c.StoredLevel == nil {
		c.StoredLevel = func(context.Context) (uint32, error) { return 0, nil }
	}
	if c.Standby == nil {
		c.Standby = func() bool { return false }
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Dial == nil {
		dialer := &net.Dialer{KeepAlive: 5 * time.Second}
		c.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", address)
		}
	}
	return c
}

func (c Config) check() error {
	if err := checkName(c.Name); err != nil {
		return err
	}
	if c.Advertise != "" {
		if err := checkAddress(c.Advertise); err != nil {
			return fmt.Errorf("replica %s would tell the others: %w", c.Name, err)
		}
	}
	for _, least := range []struct {
		what  string
		value int64
	}{
		{"heartbeat timeout", int64(c.HeartbeatTimeout)}, {"election timeout", int64(c.ElectionTimeout)}, {"lease timeout", int64(c.LeaseTimeout)},
		{"patience with the disk", int64(c.DiskPatience)}, {"commit timeout", int64(c.CommitTimeout)}, {"number of revisions of history", int64(c.HistoryRevisions)}, {"age of history", int64(c.HistoryAge)},
		{"least history", int64(c.MinHistory)}, {"number of bytes of history", c.HistoryBytes}, {"bytes between snapshots",
			c.SnapshotBytes}, {"bytes of the trailing log", c.TrailingBytes},
	} {
		if least.value < 0 {
			return fmt.Errorf("%w: replica %s: the %s is negative: %d", raftstore.ErrInvalid, c.Name, least.what, least.value)
		}
	}
	switch {
	case c.DataDir == "":
		return fmt.Errorf("%w: replica %s has no data directory", raftstore.ErrInvalid, c.Name)
	case c.LogStore != "" && c.LogStore != disk.LogBolt && c.LogStore != disk.LogWAL:
		return fmt.Errorf("%w: replica %s: log store %q is not known, want %q or %q", raftstore.ErrInvalid, c.Name, c.LogStore, disk.LogBolt, disk.LogWAL)
	case c.Listener == nil && c.ListenAddr == "":
		return fmt.Errorf("%w: replica %s has neither a listener nor an address to listen on", raftstore.ErrInvalid, c.Name)
	case c.ServerTLS == nil || c.ClientTLS == nil:
		return fmt.Errorf("%w: replica %s has no TLS configuration: replicas do not speak in clear", raftstore.ErrInvalid, c.Name)
	case c.ServerTLS.ClientAuth != tls.RequireAndVerifyClientCert && c.ServerTLS.GetConfigForClient == nil:
		return fmt.Errorf("%w: replica %s would accept peers without a verified certificate", raftstore.ErrInvalid, c.Name)
	}
	return nil
}

// raft translates the configuration for hashicorp/raft.
func (c Config) raft(notify chan<- bool) *raft.Config {
	rc := raft.DefaultConfig()
	rc.LocalID = raft.ServerID(c.Name)
	// The watchdog of election.go looks when the configured timeouts are over.
	rc.HeartbeatTimeout = slack(c.HeartbeatTimeout)
	rc.ElectionTimeout = max(c.ElectionTimeout, rc.HeartbeatTimeout)
	rc.LeaderLeaseTimeout = min(c.LeaseTimeout, c.HeartbeatTimeout-time.Millisecond) // the watchdog shortens the other a little
	rc.CommitTimeout = c.CommitTimeout
	rc.SnapshotThreshold = c.SnapshotEntries
	rc.BatchApplyCh = true
	rc.MaxAppendEntries = 32 // each may be a batch of a megabyte
	rc.ShutdownOnRemove = false
	rc.NoLegacyTelemetry = true
	rc.NotifyCh = notify
	rc.Logger = newLogger(c.Logger.With("component", "raft"))
	return rc
}
