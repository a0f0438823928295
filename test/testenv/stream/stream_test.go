package stream

import (
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/internal/virtual"
)

// What is wrong with a history is counted.
func TestHistoriesAreCompared(t *testing.T) {
	if n := differences([]string{"1 a=1", "2 a=2", "3 a=3"}, []string{"1 a=1", "3 a=3", "3 a=3"}); n != 2 {
		t.Errorf("one was missed and one came twice: %d", n)
	}
	if n := disorder([]uint64{1, 3, 2, 2, 4}); n != 2 {
		t.Errorf("two came out of order: %d", n)
	}
}

// A read that shows less than was known before it, and a write that comes before it, are stale; one that shows more is not.
func TestStaleAnswersAreCounted(t *testing.T) {
	at := func(v string) *v1.ConfigMap {
		return &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a", ResourceVersion: v}}
	}
	l := &Load{acks: map[string]string{}, newest: map[string]uint64{}}
	l.acked(at("7"), 0, time.Time{})
	l.answered(at("9"), l.known("a"))
	if l.seen.Stale != 0 {
		t.Fatalf("%v", l.failed)
	}
	l.answered(at("7"), l.known("a"))
	l.acked(at("8"), l.known("a"), time.Time{})
	if l.seen.Stale != 2 || l.seen.Reads != 2 {
		t.Errorf("%+v", l.seen)
	}
}

func TestWhatMustNotBe(t *testing.T) {
	good := Seen{Calls: 4, Acked: 2, Reads: 2, Events: 6, Watches: 3}
	if err := good.Err(); err != nil {
		t.Error(err)
	}
	for _, wrong := range []Seen{{}, {Acked: 1, Reads: 1, Events: 1, Failed: 1}, {Acked: 1, Reads: 1, Events: 1, Lost: 1}, {Acked: 1, Reads: 1, Events: 1, Broken: 1},
		{Acked: 1, Reads: 1, Events: 1, Wrong: 1}, {Acked: 1, Reads: 1, Events: 1, Stale: 1}, {Acked: 2, Reads: 1, Events: 1}} {
		if wrong.Err() == nil {
			t.Errorf("%+v passes", wrong)
		}
	}
}

// The longest pause counts although nothing has ended it yet, and a write that was under way shows nobody who leads.
func TestPausesAreCounted(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		l := &Load{acks: map[string]string{}, newest: map[string]uint64{}}
		write := func(lasts time.Duration) {
			began := time.Now()
			time.Sleep(lasts)
			l.acked(&v1.ConfigMap{}, 0, began)
		}
		go write(10 * time.Millisecond)
		time.Sleep(5 * time.Millisecond)
		from := time.Now()
		time.Sleep(time.Second)
		if got := l.Pause(from); got != 995*time.Millisecond || l.Went(from) {
			t.Errorf("a pause of %s, and somebody leads: %t", got, l.Went(from))
		}
		write(2 * time.Second)
		write(time.Millisecond)
		if got := l.Pause(from); got != 2995*time.Millisecond || !l.Went(from) {
			t.Errorf("a pause of %s, and somebody leads: %t", got, l.Went(from))
		}
	})
}
