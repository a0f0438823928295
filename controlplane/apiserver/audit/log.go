package audit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/wakeup"
)

// Log is a Sink that writes lines to the audit log in order. By default, callers do not wait for
// the disk: Put queues lines up to queueBytes. Lines that exceed the queue are dropped and counted;
// the number is reported in the daemon's log and in a line of the audit log. A strict log writes
// the line before Put returns, and Put returns the error.
type Log struct {
	out    io.Writer // each Write call gets whole lines
	strict bool
	log    *slog.Logger

	mu          sync.Mutex
	queue       []byte
	spareBuffer []byte // previous queue buffer, for reuse
	dropped     int    // lines dropped since the last line that reported dropped lines
	direct      bool   // Run has ended, so Put writes directly

	wake           wakeup.Signal // signals Run that the queue has lines
	writing        sync.Mutex    // serializes writes
	events, errors prometheus.Counter
}

// queueBytes is the maximum size of the queue in bytes.
const queueBytes = 16 << 20

// ErrDropped is the error for a line that did not fit into the queue and was dropped.
var ErrDropped = errors.New("the queue of the audit log is full")

// NewLog returns a log that writes to writer. Lines are written only while Run runs or after it has
// ended, except by a strict log.
func NewLog(writer io.Writer, strict bool, log *slog.Logger) *Log {
	return &Log{
		out: writer, strict: strict, log: log, wake: wakeup.New(),
		events: prometheus.NewCounter(prometheus.CounterOpts{Name: "apiserver_audit_event_total",
			Help: "Audit events made."}),
		errors: prometheus.NewCounter(prometheus.CounterOpts{Name: "apiserver_audit_error_total",
			Help: "Audit events that were lost."}),
	}
}

// Collectors returns the log's metrics, with the names of Kubernetes.
func (l *Log) Collectors() []prometheus.Collector { return []prometheus.Collector{l.events, l.errors} }

// Put writes the line if the log is strict or Run has ended. Otherwise it queues the line. A line
// that does not fit into the queue is dropped and counted, without an error.
func (l *Log) Put(line []byte) error {
	l.events.Inc()
	l.mu.Lock()
	if l.strict || l.direct {
		l.mu.Unlock()
		return l.writeLines(line, 1)
	}
	if len(l.queue)+len(line) > queueBytes {
		l.dropped++
		l.mu.Unlock()
		l.errors.Inc()
		return nil
	}
	l.queue = append(l.queue, line...)
	l.mu.Unlock()
	l.wake.Send()
	return nil
}

// Run writes queued lines until ctx is done. Put itself writes the lines that it receives later.
func (l *Log) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			l.mu.Lock()
			l.direct = true
			l.mu.Unlock()
			l.flushQueue()
			return ctx.Err()
		case <-l.wake:
			l.flushQueue()
		}
	}
}

// batchBytes is the approximate size of one write. It must be less than the size at which the file
// is rotated.
const batchBytes = 256 << 10

// flushQueue writes all queued lines. If lines were dropped, a line with their number precedes
// them.
func (l *Log) flushQueue() {
	l.mu.Lock()
	batch, dropped := l.queue, l.dropped
	l.queue, l.spareBuffer, l.dropped = l.spareBuffer[:0], nil, 0
	l.mu.Unlock()
	if dropped > 0 {
		l.log.Warn("audit records were lost: the disk is too slow", "records", dropped)
		_ = l.writeLines(lostLine(dropped, time.Now()), 0)
	}
	for rest := batch; len(rest) > 0; {
		n := wholeLines(rest, batchBytes)
		_ = l.writeLines(rest[:n], countLines(rest[:n]))
		rest = rest[n:]
	}
	l.mu.Lock()
	if cap(batch) <= 1<<20 { // do not keep the large buffer of a burst
		l.spareBuffer = batch
	}
	l.mu.Unlock()
}

// wholeLines returns the total length of the lines that start within the first n bytes of data.
func wholeLines(data []byte, n int) int {
	if len(data) <= n {
		return len(data)
	}
	for i := n; i < len(data); i++ {
		if data[i] == '\n' {
			return i + 1
		}
	}
	return len(data)
}

func countLines(data []byte) (n int) {
	for _, c := range data {
		if c == '\n' {
			n++
		}
	}
	return n
}

func (l *Log) writeLines(lines []byte, records int) error {
	l.writing.Lock()
	_, err := l.out.Write(lines)
	l.writing.Unlock()
	if err != nil {
		l.errors.Add(float64(records))
		l.log.Error("audit records were lost", "records", records, "err", err)
		return fmt.Errorf("writing the audit log: %w", err)
	}
	return nil
}

// lostLine returns an audit event that reports the number of records that were dropped.
func lostLine(records int, currentTime time.Time) []byte {
	data, err := json.Marshal(&Event{
		Kind: "Event", APIVersion: groupVersion, Level: LevelMetadata, Stage: StageResponseComplete, Verb: "lose",
		User:     authenticationv1.UserInfo{Username: api.UserAPIServer},
		Received: metav1.NewMicroTime(currentTime), Stamp: metav1.NewMicroTime(currentTime),
		Annotations: map[string]string{"audit.keelson.dev/lost-records": strconv.Itoa(records)},
	})
	if err != nil {
		return nil // cannot happen: the type can always be encoded
	}
	return append(data, '\n')
}
