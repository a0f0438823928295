// Package diskmeter measures the writes of a replica to its log, its votes and its snapshots.
package diskmeter

import (
	"io"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"
)

// Meter measures the disk of a replica: the age of its pending writes, the duration of finished
// writes, and their size. It is safe for concurrent use.
type Meter struct {
	LogWrite prometheus.Histogram // duration of writing and syncing entries in the log store

	Writing PendingWrite // write of the log
	Voting  PendingWrite // write of the term or the vote

	LogBytes     atomic.Uint64
	Snapshots    atomic.Uint64
	SnapshotTime atomic.Int64 // duration of the last snapshot, in nanoseconds
	SnapshotSize atomic.Int64 // size of the last snapshot, in bytes
}

// New returns a Meter that observes the duration of writes to the log in a histogram.
func New(logWrite prometheus.Histogram) *Meter {
	m := &Meter{LogWrite: logWrite}
	m.Writing.from = time.Now()
	m.Voting.from = m.Writing.from
	return m
}

// MeterLogs returns a log store that writes to store and measures the entries that it stores.
func (m *Meter) MeterLogs(store raft.LogStore) raft.LogStore { return &meteredLogs{store, m} }

// MeterVotes returns a stable store that writes to store and measures how long raft waits for its
// writes.
func (m *Meter) MeterVotes(store raft.StableStore) raft.StableStore {
	return &meteredVotes{store, m}
}

// MeterSnapshots returns a snapshot store that writes to store. It measures the duration and size
// of each snapshot that this replica takes or receives from the leader.
func (m *Meter) MeterSnapshots(store raft.SnapshotStore) raft.SnapshotStore {
	return &meteredSnapshots{store, m}
}

// PendingWrite records when the write that is in progress in one file has started.
type PendingWrite struct {
	from    time.Time    // origin of Since, on the monotonic clock
	Since   atomic.Int64 // start of the write in progress, as nanoseconds since from; 0 = no write is in progress
	Noticed atomic.Int64 // the value of Since of the last write that was logged as stalled
}

func (w *PendingWrite) startWrite() { w.Since.Store(max(1, int64(time.Since(w.from)))) }
func (w *PendingWrite) endWrite()   { w.Since.Store(0) }

// Age returns how long the write in progress has taken, or 0 if no write is in progress.
func (w *PendingWrite) Age() time.Duration {
	since := w.Since.Load()
	if since == 0 {
		return 0
	}
	return time.Since(w.from) - time.Duration(since)
}

// OldestWriteAge returns how long the oldest write in progress, of the log or of a vote, has taken.
// It returns 0 if no such write is in progress.
func (m *Meter) OldestWriteAge() time.Duration {
	return max(m.Writing.Age(), m.Voting.Age())
}

// meteredLogs is a raft.LogStore that measures the duration and size of writes to the log.
type meteredLogs struct {
	raft.LogStore
	meters *Meter
}

// StoreLog implements raft.LogStore.
func (s *meteredLogs) StoreLog(l *raft.Log) error { return s.StoreLogs([]*raft.Log{l}) }

// StoreLogs implements raft.LogStore.
func (s *meteredLogs) StoreLogs(logs []*raft.Log) error {
	began := time.Now()
	s.meters.Writing.startWrite()
	defer s.meters.Writing.endWrite()
	if err := s.LogStore.StoreLogs(logs); err != nil {
		return err
	}
	s.meters.LogWrite.Observe(time.Since(began).Seconds())
	n := 0
	for _, l := range logs {
		n += len(l.Data)
	}
	s.meters.LogBytes.Add(uint64(n))
	return nil
}

// IsMonotonic implements raft.MonotonicLogStore. It returns the value of the underlying store.
func (s *meteredLogs) IsMonotonic() bool {
	m, ok := s.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// meteredVotes is a raft.StableStore that measures how long raft waits until a term or vote is on
// the disk.
type meteredVotes struct {
	raft.StableStore
	meters *Meter
}

// Set implements raft.StableStore.
func (s *meteredVotes) Set(key, value []byte) error {
	s.meters.Voting.startWrite()
	defer s.meters.Voting.endWrite()
	return s.StableStore.Set(key, value)
}

// SetUint64 implements raft.StableStore.
func (s *meteredVotes) SetUint64(key []byte, value uint64) error {
	s.meters.Voting.startWrite()
	defer s.meters.Voting.endWrite()
	return s.StableStore.SetUint64(key, value)
}

// meteredSnapshots is a raft.SnapshotStore that measures the duration and size of each written
// snapshot: those that this replica takes, and those that it receives from the leader.
type meteredSnapshots struct {
	raft.SnapshotStore
	meters *Meter
}

// Create implements raft.SnapshotStore.
func (s *meteredSnapshots) Create(version raft.SnapshotVersion, index, term uint64, c raft.Configuration, at uint64,
	trans raft.Transport) (raft.SnapshotSink, error) {
	sink, err := s.SnapshotStore.Create(version, index, term, c, at, trans)
	if err != nil {
		return nil, err
	}
	return &meteredSink{SnapshotSink: sink, meters: s.meters, began: time.Now()}, nil
}

type meteredSink struct {
	raft.SnapshotSink
	meters *Meter
	began  time.Time
	bytes  int64
	over   bool
}

func (s *meteredSink) Write(b []byte) (int, error) {
	n, err := s.SnapshotSink.Write(b)
	s.bytes += int64(n)
	return n, err
}

// ReadFrom implements io.ReaderFrom, so that the underlying sink can choose the size of its
// buffers.
func (s *meteredSink) ReadFrom(from io.Reader) (int64, error) {
	n, err := io.Copy(s.SnapshotSink, from)
	s.bytes += n
	return n, err
}

// Cancel implements raft.SnapshotSink. A canceled snapshot is not measured.
func (s *meteredSink) Cancel() error {
	s.over = true
	return s.SnapshotSink.Cancel()
}

func (s *meteredSink) Close() error {
	err := s.SnapshotSink.Close()
	if err == nil && !s.over {
		s.over = true
		s.meters.Snapshots.Add(1)
		s.meters.SnapshotTime.Store(int64(time.Since(s.began)))
		s.meters.SnapshotSize.Store(s.bytes)
	}
	return err
}
