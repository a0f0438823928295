package watch_test

import (
	"testing"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/watch"
)

// All watchers of a prefix share one copy of a revision.
func TestWatchersShareARevision(t *testing.T) {
	const watchers = 1000
	h := new(tape)
	hub := watch.New(h, h.recordPuts("/a/0").Revision, watch.Options{})
	defer hub.Close()
	var all []*watch.Watcher
	for range watchers {
		w, err := hub.Watch(t.Context(), "/a/", 0)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, w)
	}
	hub.Publish([]raftstore.Events{h.recordPuts("/a/1", "/a/2")})
	made := make(map[*raftstore.Event]bool)
	for _, w := range all {
		ev := <-w.C()
		made[&ev.Events[0]] = true
	}
	if len(made) != 1 {
		t.Errorf("%d watchers got %d copies of a revision", watchers, len(made))
	}
}
