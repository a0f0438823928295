package replica

import (
	"io"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"
)

// meters are what the replica counts as it goes. What can be asked for when
// somebody looks is not counted here but read by the collector. Each is one
// atomic addition, or a histogram without labels.
type meters struct {
	commit   prometheus.Histogram // a call of Commit, on any replica
	apply    prometheus.Histogram // one batch of entries in the state machine
	batch    prometheus.Histogram // proposals in one entry
	logWrite prometheus.Histogram // entries written and synced by the log store

	writing writing // of the log
	voting  writing // of the vote

	entries      atomic.Uint64 // applied
	leaders      atomic.Uint64 // changes of the leader seen
	elections    atomic.Uint64 // started by this replica
	leaderships  atomic.Uint64 // established by this replica
	forwarded    atomic.Uint64 // proposals sent to the leader
	readRounds   atomic.Uint64
	logBytes     atomic.Uint64
	snapshots    atomic.Uint64
	snapshotTime atomic.Int64 // nanoseconds of the last one
	snapshotSize atomic.Int64 // bytes of the last one
	compares     atomic.Uint64
	early        atomic.Uint64 // calls of raft answered with what was sent while the leader wrote
	late         atomic.Uint64 // and those that were sent after that
	compareTime  atomic.Int64  // nanoseconds of the last one
	refusedPuts  atomic.Uint64 // for want of space, seen by callers here
}

func (m *meters) init() {
	m.writing.from = time.Now()
	m.voting.from = m.writing.from
	// From a tenth of a millisecond, which memory alone takes, to what a
	// failover takes.
	seconds := prometheus.ExponentialBuckets(0.0001, 2, 16)
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "keelson", Subsystem: "store", Name: name, Help: help, Buckets: buckets})
	}
	m.commit = histogram("commit_seconds", "Time from a commit's call to its answer.", seconds)
	m.apply = histogram("apply_seconds", "Time to apply one batch of raft entries.", prometheus.ExponentialBuckets(0.00001, 2, 16))
	m.batch = histogram("batch_proposals", "Proposals in one raft entry.", prometheus.ExponentialBuckets(1, 2, 10))
	m.logWrite = histogram("log_write_seconds", "Time to write and sync raft entries to disk.", seconds)
}

// since is a time to be observed when a function returns:
//
//	defer since(histogram, time.Now())
func since(h prometheus.Histogram, began time.Time) { h.Observe(time.Since(began).Seconds()) }

// meteredLogs measures what raft writes to its log.
type meteredLogs struct {
	raft.LogStore
	meters *meters
}

// StoreLog implements raft.LogStore.
func (s *meteredLogs) StoreLog(l *raft.Log) error { return s.StoreLogs([]*raft.Log{l}) }

// StoreLogs implements raft.LogStore.
func (s *meteredLogs) StoreLogs(logs []*raft.Log) error {
	began := time.Now()
	s.meters.writing.begin()
	defer s.meters.writing.end()
	if err := s.LogStore.StoreLogs(logs); err != nil {
		return err
	}
	since(s.meters.logWrite, began)
	n := 0
	for _, l := range logs {
		n += len(l.Data)
	}
	s.meters.logBytes.Add(uint64(n))
	return nil
}

// IsMonotonic implements raft.MonotonicLogStore: as the store below.
func (s *meteredLogs) IsMonotonic() bool {
	m, ok := s.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// meteredVotes measures how long raft waits for the disk with a vote.
type meteredVotes struct {
	raft.StableStore
	meters *meters
}

// Set implements raft.StableStore.
func (s *meteredVotes) Set(key, value []byte) error {
	s.meters.voting.begin()
	defer s.meters.voting.end()
	return s.StableStore.Set(key, value)
}

// SetUint64 implements raft.StableStore.
func (s *meteredVotes) SetUint64(key []byte, value uint64) error {
	s.meters.voting.begin()
	defer s.meters.voting.end()
	return s.StableStore.SetUint64(key, value)
}

// meteredSnapshots measures the snapshots that are written, here or by a leader.
type meteredSnapshots struct {
	raft.SnapshotStore
	meters *meters
}

// Create implements raft.SnapshotStore.
func (s *meteredSnapshots) Create(version raft.SnapshotVersion, index, term uint64, c raft.Configuration, at uint64, trans raft.Transport) (raft.SnapshotSink, error) {
	sink, err := s.SnapshotStore.Create(version, index, term, c, at, trans)
	if err != nil {
		return nil, err
	}
	return &meteredSink{SnapshotSink: sink, meters: s.meters, began: time.Now()}, nil
}

type meteredSink struct {
	raft.SnapshotSink
	meters *meters
	began  time.Time
	bytes  int64
	over   bool
}

func (s *meteredSink) Write(b []byte) (int, error) {
	n, err := s.SnapshotSink.Write(b)
	s.bytes += int64(n)
	return n, err
}

// ReadFrom leaves the choice of buffers to the sink below.
func (s *meteredSink) ReadFrom(from io.Reader) (int64, error) {
	n, err := io.Copy(s.SnapshotSink, from)
	s.bytes += n
	return n, err
}

// Cancel implements raft.SnapshotSink.
func (s *meteredSink) Cancel() error {
	s.over = true
	return s.SnapshotSink.Cancel()
}

func (s *meteredSink) Close() error {
	err := s.SnapshotSink.Close()
	if err == nil && !s.over {
		s.over = true
		s.meters.snapshots.Add(1)
		s.meters.snapshotTime.Store(int64(time.Since(s.began)))
		s.meters.snapshotSize.Store(s.bytes)
	}
	return err
}

// Collector returns the replica's metrics, named keelson_store_*, for a
// prometheus registry of the caller's. It asks no other replica.
func (r *Replica) Collector() prometheus.Collector { return (*collector)(r) }

// collector is the replica as prometheus sees it.
type collector Replica

// gauge is a metric that is read when somebody looks.
type gauge struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

func metric(name, help string, kind prometheus.ValueType, labels ...string) gauge {
	return gauge{prometheus.NewDesc("keelson_store_"+name, help, labels, nil), kind}
}

// The metrics that are read when somebody looks.
var (
	metricEntries       = metric("entries_applied_total", "Raft entries applied.", prometheus.CounterValue)
	metricLeaderChanges = metric("leader_changes_total", "Changes of the leader that this replica saw.", prometheus.CounterValue)
	metricElections     = metric("elections_started_total", "Elections that this replica started.", prometheus.CounterValue)
	metricLeaderships   = metric("leaderships_total", "Times that this replica began to lead.", prometheus.CounterValue)
	metricForwarded     = metric("forwarded_proposals_total", "Proposals sent to the leader.", prometheus.CounterValue)
	metricReadRounds    = metric("read_index_rounds_total", "Rounds that confirmed how far a linearizable read must see.", prometheus.CounterValue)
	metricLogBytes      = metric("log_written_bytes_total", "Bytes of raft entries written.", prometheus.CounterValue)
	metricWritePending  = metric("disk_write_pending_seconds", "How long the oldest write of the log or of a vote that is under way has been waiting for the disk; 0 when there is none.", prometheus.GaugeValue)
	metricRole          = metric("role", "1 for the role that this replica has.", prometheus.GaugeValue, "role")
	metricLeaderKnown   = metric("leader_known", "1 when this replica knows who leads.", prometheus.GaugeValue)
	metricTerm          = metric("term", "Raft term.", prometheus.GaugeValue)
	metricCommitIndex   = metric("commit_index", "Last raft index known to be committed.", prometheus.GaugeValue)
	metricAppliedIndex  = metric("applied_index", "Last raft index applied.", prometheus.GaugeValue)
	metricLag           = metric("member_lag_entries", "Entries that a member has still to apply, as the leader last heard.", prometheus.GaugeValue, "member")
	metricContact       = metric("member_contact_seconds", "Seconds since the leader last heard of a member.", prometheus.GaugeValue, "member")
	metricRevision      = metric("revision", "Revision of the state.", prometheus.GaugeValue)
	metricHistory       = metric("history_revisions", "Revisions retained for watches and reads of the past.", prometheus.GaugeValue)
	metricHistoryBytes  = metric("history_bytes", "Bytes of old versions that history retains.", prometheus.GaugeValue)
	metricKeys          = metric("keys", "Keys in the state.", prometheus.GaugeValue)
	metricBytes         = metric("bytes", "Bytes of keys and values in the state.", prometheus.GaugeValue)
	metricQuota         = metric("quota_bytes", "Bytes of state and history at which the store turns read-only.", prometheus.GaugeValue)
	metricAlarm         = metric("alarm", "1 for each alarm that is up.", prometheus.GaugeValue, "kind", "member")
	metricRefusedPuts   = metric("no_space_refusals_total", "Commits through this replica that were refused for want of space.", prometheus.CounterValue)
	metricWatchers      = metric("watchers", "Running watchers.", prometheus.GaugeValue)
	metricBehind        = metric("watchers_behind", "Watchers that are catching up.", prometheus.GaugeValue)
	metricCut           = metric("slow_watchers_cut_total", "Watchers ended because history was compacted under them.", prometheus.CounterValue)
	metricSnapshots     = metric("snapshots_total", "Snapshots written, taken here or sent by the leader.", prometheus.CounterValue)
	metricSnapshotTime  = metric("snapshot_seconds", "Time that the last snapshot took to write.", prometheus.GaugeValue)
	metricSnapshotSize  = metric("snapshot_bytes", "Size of the last snapshot.", prometheus.GaugeValue)
	metricReplicated    = metric("replications_total", "Rounds of entries to one peer, by whether they were sent while this replica, as leader, still wrote them or after that.", prometheus.CounterValue, "sent")
	metricCompares      = metric("comparisons_total", "Comparisons of the replicas' states made by this replica as leader.", prometheus.CounterValue)
	metricCompareTime   = metric("comparison_seconds", "Time that the last comparison took.", prometheus.GaugeValue)
)

// Describe implements prometheus.Collector. Only the histograms are described:
// the rest checks itself when it is collected.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	c.meters.commit.Describe(out)
	c.meters.apply.Describe(out)
	c.meters.batch.Describe(out)
	c.meters.logWrite.Describe(out)
	for _, g := range []gauge{metricEntries, metricLeaderChanges, metricElections, metricLeaderships, metricForwarded, metricReadRounds,
		metricLogBytes, metricWritePending, metricRole, metricLeaderKnown, metricTerm, metricCommitIndex, metricAppliedIndex, metricLag, metricContact, metricRevision,
		metricHistory, metricHistoryBytes, metricKeys, metricBytes, metricQuota, metricAlarm, metricRefusedPuts, metricWatchers, metricBehind,
		metricCut, metricSnapshots, metricSnapshotTime, metricSnapshotSize, metricReplicated, metricCompares, metricCompareTime} {
		out <- g.desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	m := &c.meters
	m.commit.Collect(out)
	m.apply.Collect(out)
	m.batch.Collect(out)
	m.logWrite.Collect(out)
	put := func(g gauge, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(g.desc, g.kind, v, labels...)
	}
	put(metricEntries, float64(m.entries.Load()))
	put(metricLeaderChanges, float64(m.leaders.Load()))
	put(metricElections, float64(m.elections.Load()))
	put(metricLeaderships, float64(m.leaderships.Load()))
	put(metricForwarded, float64(m.forwarded.Load()))
	put(metricReadRounds, float64(m.readRounds.Load()))
	put(metricLogBytes, float64(m.logBytes.Load()))
	put(metricWritePending, m.pendingWrite().Seconds())
	put(metricSnapshots, float64(m.snapshots.Load()))
	put(metricSnapshotTime, time.Duration(m.snapshotTime.Load()).Seconds())
	put(metricSnapshotSize, float64(m.snapshotSize.Load()))
	put(metricReplicated, float64(m.early.Load()), "early")
	put(metricReplicated, float64(m.late.Load()), "late")
	put(metricCompares, float64(m.compares.Load()))
	put(metricCompareTime, time.Duration(m.compareTime.Load()).Seconds())
	put(metricRefusedPuts, float64(m.refusedPuts.Load()))
	c.collectState(put)
	c.collectRaft(put)
}

func (c *collector) collectState(put func(gauge, float64, ...string)) {
	r := (*Replica)(c)
	v := r.fsm.view()
	put(metricRevision, float64(v.Revision()))
	put(metricHistory, float64(v.Revision()-v.Compacted()))
	put(metricHistoryBytes, float64(v.HistoryBytes()))
	put(metricKeys, float64(v.Keys()))
	put(metricBytes, float64(v.Bytes()))
	put(metricQuota, float64(max(0, r.cfg.Quota)))
	for _, a := range v.Alarms() {
		put(metricAlarm, 1, a.Kind.String(), a.Member)
	}
	watchers, behind := r.fsm.hub.Watchers()
	put(metricWatchers, float64(watchers))
	put(metricBehind, float64(behind))
	put(metricCut, float64(r.fsm.hub.SlowWatchers()))
	put(metricAppliedIndex, float64(r.fsm.line.get()))
}

func (c *collector) collectRaft(put func(gauge, float64, ...string)) {
	r := (*Replica)(c)
	select {
	case <-r.running:
	default:
		return
	}
	state := r.raft.State()
	for _, role := range []raft.RaftState{raft.Follower, raft.Candidate, raft.Leader} {
		is := 0.0
		if role == state {
			is = 1
		}
		put(metricRole, is, roleName(role))
	}
	leader, known := r.role.leader()
	is := 0.0
	if known {
		is = 1
	}
	put(metricLeaderKnown, is)
	put(metricTerm, float64(r.raft.CurrentTerm()))
	commit := r.raft.CommitIndex()
	put(metricCommitIndex, float64(commit))
	if leader != r.cfg.Name {
		return
	}
	now := r.cfg.Now().UnixMilli()
	for _, m := range r.known(raft.ServerID(leader)) {
		if m.ID == r.cfg.Name || m.Contact == 0 {
			continue
		}
		put(metricLag, float64(commit-min(commit, m.Applied)), m.ID)
		put(metricContact, float64(now-m.Contact)/1000, m.ID)
	}
}

// noteApplied is told by the state machine of a batch that it has applied.
func (r *Replica) noteApplied(entries int, began time.Time) {
	r.meters.entries.Add(uint64(entries))
	since(r.meters.apply, began)
}
