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
)

// Log is a Sink that writes lines in order. By default no caller waits for the
// disk: lines wait in a queue of bounded size, and what does not fit is counted,
// said in the daemon's log and in a line of its own. A strict log writes before
// Put returns and says when it could not.
type Log struct {
	out    io.Writer // one call writes whole lines
	strict bool
	log    *slog.Logger

	mu      sync.Mutex
	queue   []byte
	spare   []byte // the buffer that the writer is done with
	dropped int    // since the last line that said so
	direct  bool   // nobody empties the queue any more

	wake           chan struct{} // of room for one
	writing        sync.Mutex    // orders writes
	events, errors prometheus.Counter
}

// queueBytes bounds what waits for the disk.
const queueBytes = 16 << 20

// ErrDropped says that a line found no room.
var ErrDropped = errors.New("the audit log's queue is full")

// NewLog returns a log onto out; nothing is written before Run, unless it is strict.
func NewLog(out io.Writer, strict bool, log *slog.Logger) *Log {
	return &Log{
		out: out, strict: strict, log: log, wake: make(chan struct{}, 1),
		events: prometheus.NewCounter(prometheus.CounterOpts{Name: "apiserver_audit_event_total",
			Help: "Audit events made."}),
		errors: prometheus.NewCounter(prometheus.CounterOpts{Name: "apiserver_audit_error_total",
			Help: "Audit events that were lost."}),
	}
}

// Collectors are the log's metrics, under Kubernetes' names.
func (l *Log) Collectors() []prometheus.Collector { return []prometheus.Collector{l.events, l.errors} }

// Put is Sink.
func (l *Log) Put(line []byte) error {
	l.events.Inc()
	l.mu.Lock()
	if l.strict || l.direct {
		l.mu.Unlock()
		return l.write(line, 1)
	}
	if len(l.queue)+len(line) > queueBytes {
		l.dropped++
		l.mu.Unlock()
		l.errors.Inc()
		return nil
	}
	l.queue = append(l.queue, line...)
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
	return nil
}

// Run writes what is queued until ctx ends; what comes later is written at once.
func (l *Log) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			l.mu.Lock()
			l.direct = true
			l.mu.Unlock()
			l.flush()
			return ctx.Err()
		case <-l.wake:
			l.flush()
		}
	}
}

// batchBytes is about how much is written at once; the file's rotation wants writes smaller than a file.
const batchBytes = 256 << 10

// flush writes what is queued now.
func (l *Log) flush() {
	l.mu.Lock()
	batch, dropped := l.queue, l.dropped
	l.queue, l.spare, l.dropped = l.spare[:0], nil, 0
	l.mu.Unlock()
	if dropped > 0 {
		l.log.Warn("audit records were lost: the disk is slower than the requests", "records", dropped)
		_ = l.write(gap(dropped, time.Now()), 0)
	}
	for rest := batch; len(rest) > 0; {
		n := wholeLines(rest, batchBytes)
		_ = l.write(rest[:n], countLines(rest[:n]))
		rest = rest[n:]
	}
	l.mu.Lock()
	if cap(batch) <= 1<<20 { // a burst's buffer is not kept
		l.spare = batch
	}
	l.mu.Unlock()
}

// wholeLines is the length of the lines that begin within the first n bytes.
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

func (l *Log) write(lines []byte, records int) error {
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

// gap is the line that stands for lost ones.
func gap(records int, now time.Time) []byte {
	data, err := json.Marshal(&Event{
		Kind: "Event", APIVersion: groupVersion, Level: LevelMetadata, Stage: StageResponseComplete, Verb: "lose",
		User:     authenticationv1.UserInfo{Username: api.UserAPIServer},
		Received: metav1.NewMicroTime(now), Stamp: metav1.NewMicroTime(now),
		Annotations: map[string]string{"audit.keelson.dev/lost-records": strconv.Itoa(records)},
	})
	if err != nil {
		return nil // a constant shape
	}
	return append(data, '\n')
}
