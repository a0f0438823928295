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
