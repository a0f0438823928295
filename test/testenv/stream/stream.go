// Package stream is clients at work on every replica of a control plane while its leaders are lost: they apply ConfigMaps,
// read them and watch them, and turn to the next replica when theirs is gone. When all is over, what they did and saw is held
// against the one history that the resource versions tell.
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
	// Writers apply, a third of them at each of three replicas, each to names of its own.
	Writers   = 9
	readers   = 3
	pace      = 10 * time.Millisecond
	eachNames = 10
	// patience is for every replica to serve at the beginning, and for everything to be seen in the end.
	patience = 3 * time.Minute
)

// Load is the clients. Its first fields are set before Start.
type Load struct {
	Names     []string // of the replicas
	Clients   map[string]kubernetes.Interface
	Namespace string
	Call      time.Duration // how long a call may take; its failure at a replica that is not struck counts

	parts   sync.WaitGroup // watches
	callers sync.WaitGroup
	struck  atomic.Pointer[string]
	watches []*watcher
	stop    context.CancelFunc

	mu        sync.Mutex
	acks      map[string]string // by resource version: which write it was
	times     []time.Time       // of acknowledged writes
	begun     time.Time         // when the one that began last of them did
	newest    map[string]uint64 // by name: the resource version that somebody has seen or was told
	latencies []time.Duration   // of calls at replicas that were not struck
	seen      Seen
	failed    []error
}

// Seen is what came out.
type Seen struct {
	Calls, Failed   int // at replicas that were not struck
	Acked, Lost     int // writes
	Watches, Broken int // watches, and how often one ended although its replica was not struck
	Events, Wrong   int // events that a watch missed, had twice or out of order
	Reads, Stale    int // and reads and writes that contradict what was known before they began
	Errors          []error
}

// Err says what must not be.
func (s Seen) Err() error {
	if s.Failed+s.Lost+s.Broken+s.Wrong+s.Stale > 0 || s.Acked == 0 || s.Reads == 0 || s.Events < s.Acked {
		return fmt.Errorf("%d of %d calls at live replicas failed; %d of %d acknowledged writes are lost; %d watches of live replicas ended; "+
			"%d of %d events were missed, came twice or out of order; %d reads or writes of %d were stale: %w",
			s.Failed, s.Calls, s.Lost, s.Acked, s.Broken, s.Wrong, s.Events, s.Stale, s.Reads+s.Acked, errors.Join(s.Errors...))
	}
	return nil
}

// Start begins, once each client may do what it does: a replica may hear of its rights later than the one that gave them.
// Everything ends with ctx, and Verdict ends the calls before.
func (l *Load) Start(ctx context.Context) error {
	l.acks, l.newest = map[string]string{}, map[string]uint64{}
	l.Strike("")
	for _, name := range l.Names {
		if err := l.serves(ctx, name); err != nil {
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
		l.parts.Go(func() { w.run(ctx) })
	}
	calls, stop := context.WithCancel(ctx)
	l.stop = stop
	for i := range Writers {
		l.callers.Go(func() { l.write(calls, i) })
	}
	for i := range readers {
		l.callers.Go(func() { l.read(calls, i) })
	}
	return nil
}

// serves waits until a replica lets its client list ConfigMaps.
func (l *Load) serves(ctx context.Context, replica string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return wait.For(ctx, 20*time.Millisecond, func() error {
		_, err := l.Clients[replica].CoreV1().ConfigMaps(l.Namespace).List(ctx, metav1.ListOptions{Limit: 1})
		return err
	})
}

// Wait returns when all have ended.
func (l *Load) Wait() {
	l.callers.Wait()
	l.parts.Wait()
}

// Strike says which replica is about to be lost, so that calls to it may fail and watches at it end; "" = none any more.
func (l *Load) Strike(replica string) { l.struck.Store(&replica) }

func (l *Load) lives(replica string) bool { return *l.struck.Load() != replica }

func (l *Load) next(at int) int { return (at + 1) % len(l.Names) }

func name(writer, n int) string { return fmt.Sprintf("c%d-%d", writer, n%eachNames) }

// write applies again and again at one replica, and at the next one while its own is lost.
func (l *Load) write(ctx context.Context, id int) {
	home := id % len(l.Names)
	for n, at := 0, home; wait.Delay(ctx, pace) == nil; n++ {
		cm := corev1apply.ConfigMap(name(id, n), l.Namespace).WithData(map[string]string{"n": strconv.Itoa(n)})
		for ctx.Err() == nil {
			known, began := l.known(name(id, n)), time.Now()
			err := l.call(ctx, l.Names[at], func(ctx context.Context, cs kubernetes.Interface) error {
				got, err := cs.CoreV1().ConfigMaps(l.Namespace).Apply(ctx, cm, metav1.ApplyOptions{FieldManager: "stream", Force: true})
				if err == nil {
					l.acked(got, known, began)
				}
				return err
			})
			if err == nil {
				break
			}
			at = l.next(at)
		}
		if l.lives("") && at != home { // somebody is struck as long as that is not so
			continue
		}
		at = home
	}
}

// read gets names of all writers at one replica, and at the next one while that is lost.
func (l *Load) read(ctx context.Context, id int) {
	for at := id; wait.Delay(ctx, pace) == nil; {
		key := name(rand.IntN(Writers), rand.IntN(eachNames))
		known := l.known(key)
		err := l.call(ctx, l.Names[at%len(l.Names)], func(ctx context.Context, cs kubernetes.Interface) error {
			got, err := cs.CoreV1().ConfigMaps(l.Namespace).Get(ctx, key, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				got, err = &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: key, ResourceVersion: "0"}}, nil
			}
			if err == nil {
				l.answered(got, known)
			}
			return err
		})
		if err != nil || l.lives("") && at >= len(l.Names) {
			at++
		}
	}
}

func (l *Load) call(ctx context.Context, replica string, do func(context.Context, kubernetes.Interface) error) error {
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.Call)
	defer cancel()
	lived, began := l.lives(replica), time.Now()
	err := do(limited, l.Clients[replica])
	l.mu.Lock()
	defer l.mu.Unlock()
	if lived = lived && l.lives(replica); !lived {
		return err
	}
	l.seen.Calls++
	l.latencies = append(l.latencies, time.Since(began))
	if err != nil {
		l.seen.Failed++
		l.failed = append(l.failed, fmt.Errorf("a call at %s after %s: %w", replica, time.Since(began).Round(time.Millisecond), err))
	}
	return err
}

// known is the newest version of an object that anybody had been told before now.
func (l *Load) known(key string) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.newest[key]
}

// acked notes a write. It comes after whatever was known when it began.
func (l *Load) acked(c *v1.ConfigMap, known uint64, began time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.acks[c.ResourceVersion] = c.Name + "=" + c.Data["n"]
	l.times = append(l.times, time.Now())
	if began.After(l.begun) {
		l.begun = began
	}
	l.told(c, known)
}

// answered notes a read. It shows what was known when it began, or what came later.
func (l *Load) answered(c *v1.ConfigMap, known uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen.Reads++
	l.told(c, known)
}

// told is called under the lock.
func (l *Load) told(c *v1.ConfigMap, known uint64) {
	v := version(c)
	if v < known {
		l.seen.Stale++
		l.failed = append(l.failed, fmt.Errorf("%s was at version %d before the call, which shows %d", c.Name, known, v))
	}
	l.newest[c.Name] = max(l.newest[c.Name], v)
}

func version(c *v1.ConfigMap) uint64 {
	v, _ := strconv.ParseUint(c.ResourceVersion, 10, 64)
	return v
}

// Went says whether a write that began after a moment has been acknowledged: somebody leads who took it since then.
func (l *Load) Went(from time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.begun.After(from)
}

// Pause is the longest time without an acknowledged write from a moment until now: one that nothing has ended counts.
func (l *Load) Pause(from time.Time) (longest time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	slices.SortFunc(l.times, time.Time.Compare)
	last := from
	for _, t := range l.times {
		if t.After(from) {
			longest, last = max(longest, t.Sub(last)), t
		}
	}
	return max(longest, time.Since(last))
}

// Latencies are those of all calls at replicas that were not struck meanwhile.
func (l *Load) Latencies() []time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.latencies)
}

// Resumed is when the last watch that its replica ended has gone on at another; waits says that one has not yet.
func (l *Load) Resumed() (last time.Time, waits bool) {
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

// Verdict ends the calls, waits until every watch has seen the last write, and compares.
func (l *Load) Verdict(ctx context.Context) (Seen, error) {
	l.stop()
	l.callers.Wait() // calls that are under way come to their ends: what they write counts, and is no later than the last write
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var last uint64
	err := wait.For(ctx, 50*time.Millisecond, func() error {
		end := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "end-"}}
		end, err := l.Clients[l.Names[0]].CoreV1().ConfigMaps(l.Namespace).Create(ctx, end, metav1.CreateOptions{})
		if err == nil {
			last = version(end)
		}
		return err
	})
	if err != nil {
		return Seen{}, fmt.Errorf("making the last write: %w", err)
	}
	for _, w := range l.watches {
		if err := w.await(ctx, last); err != nil {
			return Seen{}, err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	out, have := l.seen, map[string]bool{}
	out.Acked, out.Watches, out.Errors = len(l.acks), len(l.watches), l.failed
	var first []string
	for i, w := range l.watches {
		w.mu.Lock()
		events, versions := w.until(last)
		if i == 0 {
			first = events
		}
		out.Events += len(events)
		out.Broken += len(w.broken)
		out.Errors = append(out.Errors, w.broken...)
		out.Wrong += differences(first, events) + disorder(versions)
		for _, e := range events {
			have[e] = true
		}
		w.mu.Unlock()
	}
	for at, what := range l.acks {
		if !have[at+" "+what] {
			out.Lost++
			out.Errors = append(out.Errors, fmt.Errorf("write %s was acknowledged at %s, and no watch has seen it", what, at))
		}
	}
	out.Errors = out.Errors[:min(len(out.Errors), 10)]
	return out, nil
}
