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

// watcher follows the ConfigMaps at one replica, and from where it was at the next one when that ends its watch.
type watcher struct {
	load *Load
	home int
	from string

	mu       sync.Mutex
	events   []string // "resource version name=value"
	versions []uint64
	broken   []error   // watches that ended although their replica was not struck
	ended    time.Time // of the watch that waits to go on; zero = none does
	resumed  time.Time // the first event of the last one that went on
}

func (w *watcher) run(ctx context.Context) {
	from := w.from
	for at := w.home; ctx.Err() == nil; at = w.load.next(at) {
		replica := w.load.Names[at]
		got, err := w.load.Clients[replica].CoreV1().ConfigMaps(w.load.Namespace).Watch(ctx, metav1.ListOptions{ResourceVersion: from})
		if err != nil {
			_ = wait.Delay(ctx, pace/2)
			continue
		}
		for e := range got.ResultChan() {
			c, ok := e.Object.(*v1.ConfigMap)
			if !ok { // of a replica that is struck it is the client's word for a connection that broke
				w.note(func() {
					if w.load.lives(replica) {
						w.broken = append(w.broken, fmt.Errorf("a watch at %s: %v", replica, e.Object))
					}
				})
				break
			}
			from = c.ResourceVersion
			w.note(func() { w.take(c) })
		}
		got.Stop()
		w.note(func() {
			if w.ended = time.Now(); w.load.lives(replica) && ctx.Err() == nil {
				w.broken = append(w.broken, fmt.Errorf("a watch at %s ended, which lives", replica))
			}
		})
	}
}

func (w *watcher) note(do func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	do()
}

// take is called under the lock.
func (w *watcher) take(c *v1.ConfigMap) {
	if !w.ended.IsZero() {
		w.ended, w.resumed = time.Time{}, time.Now()
	}
	w.versions = append(w.versions, version(c))
	w.events = append(w.events, c.ResourceVersion+" "+c.Name+"="+c.Data["n"])
}

// await waits until it has seen a version.
func (w *watcher) await(ctx context.Context, last uint64) error {
	return wait.For(ctx, 10*time.Millisecond, func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if n := len(w.versions); n == 0 || w.versions[n-1] < last {
			return fmt.Errorf("the watch that began at %s has not seen the last write, at version %d", w.load.Names[w.home], last)
		}
		return nil
	})
}

// disorder counts what did not come after what is before it.
func disorder(versions []uint64) (n int) {
	for i := 1; i < len(versions); i++ {
		if versions[i] <= versions[i-1] {
			n++
		}
	}
	return n
}

// until is what was seen up to a version: a write that was given up when the load ended may be committed after the last one, and
// not every watch has seen it yet. It is called under the lock.
func (w *watcher) until(last uint64) (events []string, versions []uint64) {
	for i, v := range w.versions {
		if v <= last {
			events, versions = append(events, w.events[i]), append(versions, v)
		}
	}
	return events, versions
}

// differences counts events that one has and the other has not.
func differences(a, b []string) (n int) {
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
