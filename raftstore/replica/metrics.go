package replica

import (
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/raftstore/replica/diskmeter"
	"keelson.dev/keelson/raftstore/replica/rolelog"
)

// meters counts events when they occur. Values that exist anyway are read by the collector instead.
// Each count is one atomic addition, or a histogram without labels.
type meters struct {
	commit prometheus.Histogram // calls of Commit on this replica
	apply  prometheus.Histogram // batches of entries applied by the state machine
	disk   *diskmeter.Meter
	batch  prometheus.Histogram // proposals in one entry

	entries     atomic.Uint64 // raft entries applied
	leaders     atomic.Uint64 // observed changes of the leader
	elections   atomic.Uint64 // elections started by this replica
	leaderships atomic.Uint64 // leaderships established by this replica
	forwarded   atomic.Uint64 // proposals sent to the leader
	readRounds  atomic.Uint64
	compares    atomic.Uint64
	compareTime atomic.Int64  // duration of the last comparison, in nanoseconds
	refusedPuts atomic.Uint64 // commits through this replica that were refused for lack of space
}

func (m *meters) initialize() {
	// from a tenth of a millisecond, which memory alone takes, to the duration of a failover
	seconds := prometheus.ExponentialBuckets(0.0001, 2, 16)
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "keelson", Subsystem: "store", Name: name,
			Help: help, Buckets: buckets})
	}
	m.commit = histogram("commit_seconds", "Time from the call of a commit to its result.", seconds)
	m.apply = histogram("apply_seconds", "Time to apply one batch of raft entries.",
		prometheus.ExponentialBuckets(0.00001, 2, 16))
	m.batch = histogram("batch_proposals", "Proposals in one raft entry.", prometheus.ExponentialBuckets(1, 2, 10))
	m.disk = diskmeter.New(histogram("log_write_seconds", "Time to write and sync raft entries to disk.", seconds))
}

// observeSince records the time since began in a histogram. Deferred, it measures the duration of a
// function:
//
//	defer observeSince(histogram, time.Now())
func observeSince(h prometheus.Histogram, began time.Time) { h.Observe(time.Since(began).Seconds()) }

// Collector returns the replica's metrics. The names of the metrics start with keelson_store_. The
// caller registers the collector. Collecting requests nothing from other replicas.
func (r *Replica) Collector() prometheus.Collector { return (*collector)(r) }

// collector is a Replica as a prometheus.Collector.
type collector Replica

// gauge is a metric with a value that is read when metrics are collected.
type gauge struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

func newMetric(name, help string, kind prometheus.ValueType, labels ...string) gauge {
	return gauge{prometheus.NewDesc("keelson_store_"+name, help, labels, nil), kind}
}

// The metrics that are read when they are collected.
var (
	metricEntries       = newMetric("entries_applied_total", "Raft entries applied.", prometheus.CounterValue)
	metricLeaderChanges = newMetric("leader_changes_total", "Changes of the leader that this replica observed.",
		prometheus.CounterValue)
	metricElections = newMetric("elections_started_total", "Elections that this replica started.",
		prometheus.CounterValue)
	metricLeaderships = newMetric("leaderships_total", "Leaderships that this replica established.",
		prometheus.CounterValue)
	metricForwarded = newMetric("forwarded_proposals_total", "Proposals sent to the leader.",
		prometheus.CounterValue)
	metricReadRounds = newMetric("read_index_rounds_total", "Rounds that confirmed the index of a linearizable read.",
		prometheus.CounterValue)
	metricLogBytes     = newMetric("log_written_bytes_total", "Bytes of raft entries written.", prometheus.CounterValue)
	metricWritePending = newMetric("disk_write_pending_seconds",
		"How long the oldest write of the log or of a vote has been waiting for the disk; 0 if no write is pending.",
		prometheus.GaugeValue)
	metricRole         = newMetric("role", "1 for the role of this replica.", prometheus.GaugeValue, "role")
	metricLeaderKnown  = newMetric("leader_known", "1 if this replica knows the leader.", prometheus.GaugeValue)
	metricTerm         = newMetric("term", "Raft term.", prometheus.GaugeValue)
	metricCommitIndex  = newMetric("commit_index", "Last raft index known to be committed.", prometheus.GaugeValue)
	metricAppliedIndex = newMetric("applied_index", "Last raft index applied.", prometheus.GaugeValue)
	metricLag          = newMetric("member_lag_entries",
		"Entries that a member has not applied, by its last report to the leader.", prometheus.GaugeValue, "member")
	metricContact = newMetric("member_contact_seconds", "Seconds since the last report of a member to the leader.",
		prometheus.GaugeValue, "member")
	metricRevision = newMetric("revision", "Revision of the state.", prometheus.GaugeValue)
	metricHistory  = newMetric("history_revisions", "Revisions retained for watches and reads of past revisions.",
		prometheus.GaugeValue)
	metricHistoryBytes = newMetric("history_bytes", "Bytes of previous versions in history.", prometheus.GaugeValue)
	metricKeys         = newMetric("keys", "Keys in the state.", prometheus.GaugeValue)
	metricBytes        = newMetric("bytes", "Bytes of keys and values in the state.", prometheus.GaugeValue)
	metricQuota        = newMetric("quota_bytes", "Bytes of state and history at which the store becomes read-only.",
		prometheus.GaugeValue)
	metricAlarm       = newMetric("alarm", "1 for each raised alarm.", prometheus.GaugeValue, "kind", "member")
	metricRefusedPuts = newMetric("no_space_refusals_total",
		"Commits through this replica that were refused for lack of space.", prometheus.CounterValue)
	metricWatchers = newMetric("watchers", "Running watchers.", prometheus.GaugeValue)
	metricBehind   = newMetric("watchers_behind", "Watchers that are catching up.", prometheus.GaugeValue)
	metricCut      = newMetric("slow_watchers_cut_total",
		"Watchers closed because the history that they had not received was compacted.", prometheus.CounterValue)
	metricSnapshots = newMetric("snapshots_total", "Snapshots written, taken here or sent by the leader.",
		prometheus.CounterValue)
	metricSnapshotTime = newMetric("snapshot_seconds", "Time that the last snapshot took to write.",
		prometheus.GaugeValue)
	metricSnapshotSize = newMetric("snapshot_bytes", "Size of the last snapshot.", prometheus.GaugeValue)
	metricReplicated   = newMetric("replications_total",
		"Requests with entries to one peer, by when they were sent: "+
			"early, while this leader wrote the entries, or late, after that.", prometheus.CounterValue, "sent")
	metricCompares = newMetric("comparisons_total",
		"Comparisons of the states of all replicas by this replica as leader.", prometheus.CounterValue)
	metricCompareTime = newMetric("comparison_seconds", "Time that the last comparison took.", prometheus.GaugeValue)
)

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	c.node.meters.commit.Describe(out)
	c.node.meters.apply.Describe(out)
	c.node.meters.batch.Describe(out)
	c.node.meters.disk.LogWrite.Describe(out)
	for _, g := range []gauge{metricEntries, metricLeaderChanges, metricElections, metricLeaderships, metricForwarded,
		metricReadRounds, metricLogBytes, metricWritePending, metricRole, metricLeaderKnown, metricTerm,
		metricCommitIndex, metricAppliedIndex, metricLag, metricContact, metricRevision, metricHistory,
		metricHistoryBytes, metricKeys, metricBytes, metricQuota, metricAlarm, metricRefusedPuts, metricWatchers,
		metricBehind, metricCut, metricSnapshots, metricSnapshotTime, metricSnapshotSize, metricReplicated,
		metricCompares, metricCompareTime} {
		out <- g.desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	m := &c.node.meters
	m.commit.Collect(out)
	m.apply.Collect(out)
	m.batch.Collect(out)
	m.disk.LogWrite.Collect(out)
	put := func(g gauge, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(g.desc, g.kind, v, labels...)
	}
	put(metricEntries, float64(m.entries.Load()))
	put(metricLeaderChanges, float64(m.leaders.Load()))
	put(metricElections, float64(m.elections.Load()))
	put(metricLeaderships, float64(m.leaderships.Load()))
	put(metricForwarded, float64(m.forwarded.Load()))
	put(metricReadRounds, float64(m.readRounds.Load()))
	put(metricLogBytes, float64(m.disk.LogBytes.Load()))
	put(metricWritePending, m.disk.OldestWriteAge().Seconds())
	put(metricSnapshots, float64(m.disk.Snapshots.Load()))
	put(metricSnapshotTime, time.Duration(m.disk.SnapshotTime.Load()).Seconds())
	put(metricSnapshotSize, float64(m.disk.SnapshotSize.Load()))
	put(metricReplicated, float64(c.net.early.Answered.Load()), "early")
	put(metricReplicated, float64(c.net.early.Sent.Load()), "late")
	put(metricCompares, float64(m.compares.Load()))
	put(metricCompareTime, time.Duration(m.compareTime.Load()).Seconds())
	put(metricRefusedPuts, float64(m.refusedPuts.Load()))
	c.collectState(put)
	c.collectRaft(put)
}

func (c *collector) collectState(put func(gauge, float64, ...string)) {
	r := (*Replica)(c)
	v := r.node.fsm.View()
	put(metricRevision, float64(v.Revision()))
	put(metricHistory, float64(v.Revision()-v.Compacted()))
	put(metricHistoryBytes, float64(v.HistoryBytes()))
	put(metricKeys, float64(v.Keys()))
	put(metricBytes, float64(v.Bytes()))
	put(metricQuota, float64(max(0, r.node.cfg.Quota)))
	for _, a := range v.Alarms() {
		put(metricAlarm, 1, a.Kind.String(), a.Member)
	}
	watchers, behind := r.node.fsm.Hub.Watchers()
	put(metricWatchers, float64(watchers))
	put(metricBehind, float64(behind))
	put(metricCut, float64(r.node.fsm.Hub.SlowWatchers()))
	put(metricAppliedIndex, float64(r.node.fsm.Line.CurrentIndex()))
}

func (c *collector) collectRaft(put func(gauge, float64, ...string)) {
	r := (*Replica)(c)
	select {
	case <-r.node.running:
	default:
		return
	}
	state := r.node.raft.State()
	for _, role := range []raft.RaftState{raft.Follower, raft.Candidate, raft.Leader} {
		is := 0.0
		if role == state {
			is = 1
		}
		put(metricRole, is, rolelog.RoleName(role))
	}
	leader, known := r.node.role.currentID()
	is := 0.0
	if known {
		is = 1
	}
	put(metricLeaderKnown, is)
	put(metricTerm, float64(r.node.raft.CurrentTerm()))
	commit := r.node.raft.CommitIndex()
	put(metricCommitIndex, float64(commit))
	if leader != r.node.cfg.Name {
		return
	}
	now := r.node.cfg.Now().UnixMilli()
	for _, m := range r.members.listCached(raft.ServerID(leader)) {
		if m.ID == r.node.cfg.Name || m.Contact == 0 {
			continue
		}
		put(metricLag, float64(commit-min(commit, m.Applied)), m.ID)
		put(metricContact, float64(now-m.Contact)/1000, m.ID)
	}
}

// observeApplied counts a batch of entries that the state machine has applied.
func (n *node) observeApplied(entries int, began time.Time) {
	n.meters.entries.Add(uint64(entries))
	observeSince(n.meters.apply, began)
}
