// Package stream is a load on every replica of a control plane while its leaders are killed.
// Clients apply, read and watch ConfigMaps and switch to the next replica when theirs is lost. At
// the end, their results are compared with the single history that the resource versions define.
package stream

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1apply "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/internal/wait"
)

const (
	// Writers is the number of clients that apply, spread over the replicas. Each has its own
	// ConfigMap names.
	Writers   = 9
	readers   = 3
	pace      = 10 * time.Millisecond
	eachNames = 10
	// patience is the time limit for every replica to serve at the start, and for all events to
	// arrive at the end.
	patience = 3 * time.Minute
)

// Load is a load on every replica of a control plane. The exported fields must be set before Start.
type Load struct {
	Names     []string // of the replicas
	Clients   map[string]kubernetes.Interface
	Namespace string
	Call      time.Duration // timeout of a call; a failure at a replica without an expected loss counts

	parts        sync.WaitGroup // watches
	callers      sync.WaitGroup
	expectedLoss atomic.Pointer[string]
	watches      []*watcher
	stop         context.CancelFunc

	history history
}

// history contains the acknowledged writes and the versions that the clients of a load have
// observed.
type history struct {
	mu        sync.Mutex
	acks      map[string]string // name=value of each acknowledged write by resource version
	times     []time.Time       // of acknowledged writes
	begun     time.Time         // latest start of an acknowledged write
	newest    map[string]uint64 // highest resource version that any client has received, by name
	latencies []time.Duration   // of calls at replicas without an expected loss
	result    Result
	failed    []error
}

// Result counts the calls, watches and events of a load, and the violations of consistency.
type Result struct {
	Calls, Failed   int // at replicas without an expected loss
	Acked, Lost     int // writes
	Watches, Broken int // watches, and how many ended without an expected loss of their replica
	Events, Wrong   int // events, and how many a watch missed, had twice or out of order
	Reads, Stale    int // reads, and how many reads and writes returned an older version than was known at their start
	Errors          []error
}

// Err returns an error with all violations. It also fails if there were no writes, no reads or too
// few events.
func (s Result) Err() error {
	if s.Failed+s.Lost+s.Broken+s.Wrong+s.Stale > 0 || s.Acked == 0 || s.Reads == 0 || s.Events < s.Acked {
		return fmt.Errorf("%d of %d calls at live replicas failed; %d of %d acknowledged writes are lost; %d watches "+
			"of live replicas ended; "+
			"%d of %d events were missed, came twice or out of order; %d reads or writes of %d were stale: %w",
			s.Failed, s.Calls, s.Lost, s.Acked, s.Broken, s.Wrong, s.Events, s.Stale, s.Reads+s.Acked,
			errors.Join(s.Errors...))
	}
	return nil
}

// Start waits until every replica allows its client to list ConfigMaps, because a replica may apply
// new permissions late. Then it starts the load. The load ends with ctx; Finish stops the calls
// earlier.
func (l *Load) Start(ctx context.Context) error {
	l.history.acks, l.history.newest = map[string]string{}, map[string]uint64{}
	l.ExpectLoss("")
	for _, name := range l.Names {
		if err := l.awaitAccess(ctx, name); err != nil {
			return fmt.Errorf("replica %s: %w", name, err)
		}
	}
	list, err := l.Clients[l.Names[0]].CoreV1().ConfigMaps(l.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("listing ConfigMaps of %s: %w", l.Namespace, err)
	}
	for i := range l.Names {
		w := &watcher{load: l, home: i, from: list.ResourceVersion}
		l.watches = append(l.watches, w)
		l.parts.Go(func() { w.watchReplicas(ctx) })
	}
	calls, stop := context.WithCancel(ctx)
	l.stop = stop
	for i := range Writers {
		l.callers.Go(func() { l.runWriter(calls, i) })
	}
	for i := range readers {
		l.callers.Go(func() { l.runReader(calls, i) })
	}
	return nil
}

// awaitAccess waits until a replica allows its client to list ConfigMaps.
func (l *Load) awaitAccess(ctx context.Context, replica string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return wait.For(ctx, 20*time.Millisecond, func() error {
		_, err := l.Clients[replica].CoreV1().ConfigMaps(l.Namespace).List(ctx, metav1.ListOptions{Limit: 1})
		return err
	})
}

// Wait returns when all calls and watches have ended.
func (l *Load) Wait() {
	l.callers.Wait()
	l.parts.Wait()
}

// ExpectLoss declares which replica is about to be lost: its calls may fail and its watches may
// end. "" = no replica.
func (l *Load) ExpectLoss(replica string) { l.expectedLoss.Store(&replica) }

func (l *Load) isHealthy(replica string) bool { return *l.expectedLoss.Load() != replica }

func (l *Load) nextReplica(at int) int { return (at + 1) % len(l.Names) }

func configMapName(writer, n int) string { return fmt.Sprintf("c%d-%d", writer, n%eachNames) }

// runWriter applies ConfigMaps at one replica, and at the next replica while its own is being lost.
func (l *Load) runWriter(ctx context.Context, id int) {
	home := id % len(l.Names)
	for n, at := 0, home; wait.Delay(ctx, pace) == nil; n++ {
		cm := corev1apply.ConfigMap(configMapName(id, n), l.Namespace).WithData(map[string]string{"n": strconv.Itoa(n)})
		for ctx.Err() == nil {
			known, began := l.knownVersion(configMapName(id, n)), time.Now()
			err := l.callReplica(ctx, l.Names[at], func(ctx context.Context, cs kubernetes.Interface) error {
				got, err := cs.CoreV1().ConfigMaps(l.Namespace).Apply(ctx, cm,
					metav1.ApplyOptions{FieldManager: "stream", Force: true})
				if err == nil {
					l.recordWrite(got, known, began)
				}
				return err
			})
			if err == nil {
				break
			}
			at = l.nextReplica(at)
		}
		if l.isHealthy("") && at != home { // stay at the other replica while any replica is being lost
			continue
		}
		at = home
	}
}

// runReader gets ConfigMaps of all writers at one replica, and at the next replica if a call fails.
func (l *Load) runReader(ctx context.Context, id int) {
	for at := id; wait.Delay(ctx, pace) == nil; {
		key := configMapName(rand.IntN(Writers), rand.IntN(eachNames))
		known := l.knownVersion(key)
		err := l.callReplica(ctx, l.Names[at%len(l.Names)], func(ctx context.Context, cs kubernetes.Interface) error {
			got, err := cs.CoreV1().ConfigMaps(l.Namespace).Get(ctx, key, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				got, err = &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: key, ResourceVersion: "0"}}, nil
			}
			if err == nil {
				l.recordRead(got, known)
			}
			return err
		})
		if err != nil || l.isHealthy("") && at >= len(l.Names) {
			at++
		}
	}
}

func (l *Load) callReplica(
	ctx context.Context, replica string, do func(context.Context, kubernetes.Interface) error,
) error {
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.Call)
	defer cancel()
	lived, began := l.isHealthy(replica), time.Now()
	err := do(limited, l.Clients[replica])
	l.history.mu.Lock()
	defer l.history.mu.Unlock()
	if lived = lived && l.isHealthy(replica); !lived {
		return err
	}
	l.history.result.Calls++
	l.history.latencies = append(l.history.latencies, time.Since(began))
	if err != nil {
		l.history.result.Failed++
		l.history.failed = append(l.history.failed, fmt.Errorf("a call at %s after %s: %w", replica,
			time.Since(began).Round(time.Millisecond), err))
	}
	return err
}

// knownVersion returns the highest resource version of an object that any client has received.
func (l *Load) knownVersion(key string) uint64 {
	l.history.mu.Lock()
	defer l.history.mu.Unlock()
	return l.history.newest[key]
}

// recordWrite records an acknowledged write, which was started at began. Its version must not be
// below known, the version that was known at its start.
func (l *Load) recordWrite(c *v1.ConfigMap, known uint64, began time.Time) {
	l.history.mu.Lock()
	defer l.history.mu.Unlock()
	l.history.acks[c.ResourceVersion] = c.Name + "=" + c.Data["n"]
	l.history.times = append(l.history.times, time.Now())
	if began.After(l.history.begun) {
		l.history.begun = began
	}
	l.recordVersion(c, known)
}

// recordRead records a read. Its version must not be below known, the version that was known at its
// start.
func (l *Load) recordRead(c *v1.ConfigMap, known uint64) {
	l.history.mu.Lock()
	defer l.history.mu.Unlock()
	l.history.result.Reads++
	l.recordVersion(c, known)
}

// recordVersion counts the version of c as stale if it is below known, and updates the newest known
// version. The caller holds mu.
func (l *Load) recordVersion(c *v1.ConfigMap, known uint64) {
	v := resourceVersion(c)
	if v < known {
		l.history.result.Stale++
		l.history.failed = append(l.history.failed,
			fmt.Errorf("%s was at version %d before the call, which returned version %d",
				c.Name, known, v))
	}
	l.history.newest[c.Name] = max(l.history.newest[c.Name], v)
}

func resourceVersion(c *v1.ConfigMap) uint64 {
	v, _ := strconv.ParseUint(c.ResourceVersion, 10, 64)
	return v
}

// HasWrittenSince reports whether a write that was started after start has been acknowledged. A
// leader has then accepted a write since start.
func (l *Load) HasWrittenSince(start time.Time) bool {
	l.history.mu.Lock()
	defer l.history.mu.Unlock()
	return l.history.begun.After(start)
}

// LongestPause returns the longest time without an acknowledged write from start until now,
// including a pause in progress.
func (l *Load) LongestPause(start time.Time) (longest time.Duration) {
	l.history.mu.Lock()
	defer l.history.mu.Unlock()
	slices.SortFunc(l.history.times, time.Time.Compare)
	last := start
	for _, t := range l.history.times {
		if t.After(start) {
			longest, last = max(longest, t.Sub(last)), t
		}
	}
	return max(longest, time.Since(last))
}

// Latencies returns the durations of all calls at replicas without an expected loss.
func (l *Load) Latencies() []time.Duration {
	l.history.mu.Lock()
	defer l.history.mu.Unlock()
	return slices.Clone(l.history.latencies)
}

// LastResumption returns the time of the last watch's first event after it was resumed at another
// replica. waits is true if a watch has not resumed yet.
func (l *Load) LastResumption() (last time.Time, waits bool) {
	for _, w := range l.watches {
		w.mu.Lock()
		waits = waits || !w.ended.IsZero()
		if w.resumed.After(last) {
			last = w.resumed
		}
		w.mu.Unlock()
	}
	return last, waits
}

// Finish ends the calls, waits until every watch has received the last write, and compares the
// results.
func (l *Load) Finish(ctx context.Context) (Result, error) {
	l.stop()
	l.callers.Wait() // calls in progress complete: their writes count, and come before the last write
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var last uint64
	err := wait.For(ctx, 50*time.Millisecond, func() error {
		end := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "end-"}}
		end, err := l.Clients[l.Names[0]].CoreV1().ConfigMaps(l.Namespace).Create(ctx, end, metav1.CreateOptions{})
		if err == nil {
			last = resourceVersion(end)
		}
		return err
	})
	if err != nil {
		return Result{}, fmt.Errorf("make the last write: %w", err)
	}
	for _, w := range l.watches {
		if err := w.awaitVersion(ctx, last); err != nil {
			return Result{}, err
		}
	}
	l.history.mu.Lock()
	defer l.history.mu.Unlock()
	out, have := l.history.result, map[string]bool{}
	out.Acked, out.Watches, out.Errors = len(l.history.acks), len(l.watches), l.history.failed
	var first []string
	for i, w := range l.watches {
		w.mu.Lock()
		events, versions := w.eventsUpTo(last)
		if i == 0 {
			first = events
		}
		out.Events += len(events)
		out.Broken += len(w.broken)
		out.Errors = append(out.Errors, w.broken...)
		out.Wrong += countDifferences(first, events) + countDisorder(versions)
		for _, e := range events {
			have[e] = true
		}
		w.mu.Unlock()
	}
	for at, what := range l.history.acks {
		if !have[at+" "+what] {
			out.Lost++
			out.Errors = append(out.Errors,
				fmt.Errorf("write %s was acknowledged at version %s, but no watch has received it",
					what, at))
		}
	}
	out.Errors = out.Errors[:min(len(out.Errors), 10)]
	return out, nil
}
