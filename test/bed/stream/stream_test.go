package stream

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	l.acked(at("7"), 0)
	l.answered(at("9"), l.known("a"))
	if l.seen.Stale != 0 {
		t.Fatalf("%v", l.failed)
	}
	l.answered(at("7"), l.known("a"))
	l.acked(at("8"), l.known("a"))
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
