package watchcache

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// P21: a change is encoded once per representation for a thousand watchers, whichever of them is
// first, also from the history.
func TestThousandWatchersShareOneEncoding(t *testing.T) {
	const watchers = 1000
	e := newEnv(t)
	all := make([]*Watcher, watchers)
	for i := range all {
		all[i] = e.watch(configMap("default", ""), metav1.ListOptions{})
	}
	e.create(configMap("default", "a", "k", "1"))
	e.update(configMap("default", "a", "k", "2"), "")
	e.delete(configMap("default", "a"), metav1.DeleteOptions{})
	for _, change := range []string{"creation", "update", "deletion"} {
		// A different backing array means a different encoding.
		made := make(map[*byte]bool)
		for _, w := range all {
			obj := e.next(w).Object
			for _, media := range []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf} {
				data, err := e.reader.Encoded(obj, media)
				if err != nil {
					t.Fatal(err)
				}
				made[&data[0]] = true
			}
		}
		if len(made) != 2 {
			t.Errorf("%d watchers had the %s encoded %d times, want 2", watchers, change, len(made))
		}
	}
}

// Stats counts each watch, also if many select the same objects and wait, and none after they ended.
func TestStatsCountWatches(t *testing.T) {
	const watchers = 5
	e := newEnv(t)
	var all [watchers]*Watcher
	for i := range all {
		all[i] = e.watch(configMap("default", ""), metav1.ListOptions{})
	}
	e.create(configMap("default", "a", "k", "1"))
	for _, w := range all {
		e.next(w)
	}
	if got := e.Stats().Watchers; got != watchers {
		t.Errorf("%d watches are counted after their first event, want %d", got, watchers)
	}
	storage := all[0].served.storage
	storage.mu.Lock()
	for _, w := range all {
		storage.markWaiting(w)
	}
	storage.mu.Unlock()
	if got := e.Stats().Watchers; got != watchers {
		t.Errorf("%d watches are counted while they wait, want %d", got, watchers)
	}
	for _, w := range all {
		w.Stop()
	}
	if got := e.Stats().Watchers; got != 0 {
		t.Errorf("%d watches are counted after all ended", got)
	}
}
