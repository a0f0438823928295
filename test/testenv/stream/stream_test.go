package stream

import (
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/internal/virtual"
)

// Violations in a history are counted.
func TestHistoriesAreCompared(t *testing.T) {
	if n := countDifferences([]string{"1 a=1", "2 a=2", "3 a=3"}, []string{"1 a=1", "3 a=3", "3 a=3"}); n != 2 {
		t.Errorf("one event was missed and one was delivered twice: %d", n)
	}
	if n := countDisorder([]uint64{1, 3, 2, 2, 4}); n != 2 {
		t.Errorf("two events were out of order: %d", n)
	}
}

// A read of an older version than was known at its start, and such a write, are stale; a newer
// version is not.
func TestStaleAnswersAreCounted(t *testing.T) {
	at := func(v string) *v1.ConfigMap {
		return &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a", ResourceVersion: v}}
	}
	l := &Load{history: history{acks: map[string]string{}, newest: map[string]uint64{}}}
	l.recordWrite(at("7"), 0, time.Time{})
	l.recordRead(at("9"), l.knownVersion("a"))
	if l.history.result.Stale != 0 {
		t.Fatalf("%v", l.history.failed)
	}
	l.recordRead(at("7"), l.knownVersion("a"))
	l.recordWrite(at("8"), l.knownVersion("a"), time.Time{})
	if l.history.result.Stale != 2 || l.history.result.Reads != 2 {
		t.Errorf("%+v", l.history.result)
	}
}

func TestWhatMustNotBe(t *testing.T) {
	good := Result{Calls: 4, Acked: 2, Reads: 2, Events: 6, Watches: 3}
	if err := good.Err(); err != nil {
		t.Error(err)
	}
	for _, wrong := range []Result{{}, {Acked: 1, Reads: 1, Events: 1, Failed: 1},
		{Acked: 1, Reads: 1, Events: 1, Lost: 1}, {Acked: 1, Reads: 1, Events: 1, Broken: 1},
		{Acked: 1, Reads: 1, Events: 1, Wrong: 1}, {Acked: 1, Reads: 1, Events: 1, Stale: 1},
		{Acked: 2, Reads: 1, Events: 1}} {
		if wrong.Err() == nil {
			t.Errorf("%+v passes", wrong)
		}
	}
}

// The longest pause counts although it has not ended yet, and a write that was in progress does not
// show that there is a leader.
func TestPausesAreCounted(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		l := &Load{history: history{acks: map[string]string{}, newest: map[string]uint64{}}}
		write := func(lasts time.Duration) {
			began := time.Now()
			time.Sleep(lasts)
			l.recordWrite(&v1.ConfigMap{}, 0, began)
		}
		go write(10 * time.Millisecond)
		time.Sleep(5 * time.Millisecond)
		from := time.Now()
		time.Sleep(time.Second)
		if got := l.LongestPause(from); got != 995*time.Millisecond || l.HasWrittenSince(from) {
			t.Errorf("a pause of %s; there is a leader: %t", got, l.HasWrittenSince(from))
		}
		write(2 * time.Second)
		write(time.Millisecond)
		if got := l.LongestPause(from); got != 2995*time.Millisecond || !l.HasWrittenSince(from) {
			t.Errorf("a pause of %s; there is a leader: %t", got, l.HasWrittenSince(from))
		}
	})
}
