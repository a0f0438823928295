package stream

import (
	"context"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/internal/wait"
)

// watcher watches the ConfigMaps at one replica. When the watch ends, it resumes at the next
// replica from the last version.
type watcher struct {
	load *Load
	home int
	from string

	mu       sync.Mutex
	events   []string // "resource version name=value"
	versions []uint64
	broken   []error   // watches that ended without an expected loss of their replica
	ended    time.Time // when the watch ended that has not resumed yet; zero = no such watch
	resumed  time.Time // time of the first event after the last resumption
}

func (w *watcher) watchReplicas(ctx context.Context) {
	from := w.from
	for at := w.home; ctx.Err() == nil; at = w.load.nextReplica(at) {
		replica := w.load.Names[at]
		got, err := w.load.Clients[replica].CoreV1().ConfigMaps(w.load.Namespace).Watch(ctx,
			metav1.ListOptions{ResourceVersion: from})
		if err != nil {
			_ = wait.Delay(ctx, pace/2)
			continue
		}
		for e := range got.ResultChan() {
			c, ok := e.Object.(*v1.ConfigMap)
			if !ok { // the client reports a broken connection to a lost replica in this way
				w.withLock(func() {
					if w.load.isHealthy(replica) {
						w.broken = append(w.broken, fmt.Errorf("a watch at %s: %v", replica, e.Object))
					}
				})
				break
			}
			from = c.ResourceVersion
			w.withLock(func() { w.recordEvent(c) })
		}
		got.Stop()
		w.withLock(func() {
			if w.ended = time.Now(); w.load.isHealthy(replica) && ctx.Err() == nil {
				w.broken = append(w.broken, fmt.Errorf("a watch at %s ended, although the replica is healthy", replica))
			}
		})
	}
}

func (w *watcher) withLock(do func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	do()
}

// recordEvent records an event. The caller holds mu.
func (w *watcher) recordEvent(c *v1.ConfigMap) {
	if !w.ended.IsZero() {
		w.ended, w.resumed = time.Time{}, time.Now()
	}
	w.versions = append(w.versions, resourceVersion(c))
	w.events = append(w.events, c.ResourceVersion+" "+c.Name+"="+c.Data["n"])
}

// awaitVersion waits until the watch has received the resource version last.
func (w *watcher) awaitVersion(ctx context.Context, last uint64) error {
	return wait.For(ctx, 10*time.Millisecond, func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if n := len(w.versions); n == 0 || w.versions[n-1] < last {
			return fmt.Errorf("the watch that was started at %s has not received the last write, at version %d",
				w.load.Names[w.home], last)
		}
		return nil
	})
}

// countDisorder counts the versions that are not above their predecessor.
func countDisorder(versions []uint64) (n int) {
	for i := 1; i < len(versions); i++ {
		if versions[i] <= versions[i-1] {
			n++
		}
	}
	return n
}

// eventsUpTo returns the events up to the resource version last, and their versions. A write
// abandoned at the end of the load may be committed after the last write, and not every watch has
// received it yet. The caller holds mu.
func (w *watcher) eventsUpTo(last uint64) (events []string, versions []uint64) {
	for i, v := range w.versions {
		if v <= last {
			events, versions = append(events, w.events[i]), append(versions, v)
		}
	}
	return events, versions
}

// countDifferences counts the events that only one of the two lists has.
func countDifferences(a, b []string) (n int) {
	count := map[string]int{}
	for _, e := range a {
		count[e]++
	}
	for _, e := range b {
		count[e]--
	}
	for _, c := range count {
		n += max(c, -c)
	}
	return n
}
