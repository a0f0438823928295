package watchcache

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"
	"weak"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/await"
)

// Watches that are not read, each from another version of a large object, do not keep these
// versions in memory after the history has dropped them. A later read returns Expired.
func TestWatchesThatDoNotReadKeepNothing(t *testing.T) {
	const history, versions = 8, 120
	e := newEnv(t, withHistory(history, 1<<40))
	cm := e.create(configMap("default", "large", "k", strings.Repeat("x", 300<<10))).(*corev1.ConfigMap)
	var seen []weak.Pointer[Entry]
	var stuck []*Watcher
	var ends [versions]chan watch.Event
	kc := e.ByKind(e.kinds.ByType(cm))
	for i := range versions {
		w := e.watch(cm, metav1.ListOptions{ResourceVersion: "0"}) // the present state first
		ends[i] = make(chan watch.Event, 1)
		taken := e.next(w)
		lost := make(chan struct{})
		w.WhenExpired(func() { close(lost) })
		go func() { // simulates the writer for a client that does not read
			select {
			case <-lost:
			case <-e.ctx.Done():
				return
			}
			runtime.KeepAlive(taken)
			last, _ := w.Next(context.Background())
			ends[i] <- last
		}()
		stuck = append(stuck, w)
		seen = append(seen, weak.Make(kc.Current("default/large")))
		next := cm.DeepCopy()
		next.Annotations = map[string]string{"n": fmt.Sprint(i)}
		cm = e.update(next, "").(*corev1.ConfigMap)
		// The read waits until the cache has the update. A cache that is behind could drop the
		// history of the next watch before its first event is read.
		if _, err := e.get(cm); err != nil {
			t.Fatal(err)
		}
	}
	live := func() (n int) {
		for _, p := range seen {
			if p.Value() != nil {
				n++
			}
		}
		return n
	}
	const most = 2 * history
	await.Until(t.Context(), t, await.Patience, 20*time.Millisecond, "the release of old versions", func() error {
		runtime.GC()
		if n := live(); n > most {
			return fmt.Errorf("%d versions live", n)
		}
		return nil
	})
	for i, end := range ends[:versions-2*history] {
		if last := <-end; show(last) != "ERROR 410 Expired" {
			t.Errorf("watch %d ends with %s", i, show(last))
		}
	}
	runtime.KeepAlive(stuck)
}

// A change that removes an object from many selections uses one object for all of them.
func TestLeavingObjectsAreShared(t *testing.T) {
	e := newEnv(t)
	cm := configMap("default", "a")
	cm.Labels = map[string]string{"x": "1"}
	made := e.create(cm).(*corev1.ConfigMap)
	var all []*Watcher
	for range 3 {
		all = append(all, e.watch(cm, metav1.ListOptions{LabelSelector: "x=1", ResourceVersion: made.ResourceVersion}))
	}
	made = made.DeepCopy()
	made.Labels["x"] = "2"
	e.update(made, "")
	var first api.Object
	for _, w := range all {
		ev := e.next(w)
		if ev.Type != watch.Deleted {
			t.Fatalf("%s", show(ev))
		}
		if o := ev.Object.(api.Object); first == nil {
			first = o
		} else if o != first {
			t.Error("each watch has a copy of its own")
		}
	}
}
