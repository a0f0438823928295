package replica

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

func TestIdentitiesSettleInOrder(t *testing.T) {
	d := identities{incarnation: 7, waiting: make(map[uint64]struct{})}
	a, b, c := d.next(), d.next(), d.next()
	d.settle(b)
	if id := d.next(); id.Settled != 0 || id.Sequence != 4 {
		t.Errorf("with the first open: %v", id)
	}
	d.settle(a)
	if id := d.next(); id.Settled != 2 {
		t.Errorf("with the third open: %v", id)
	}
	d.settle(c)
	if id := d.next(); id.Settled != 3 || id.Incarnation != 7 {
		t.Errorf("with the fourth open: %v", id)
	}
}

func TestWaterline(t *testing.T) {
	var w waterline
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for at := range uint64(20) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := w.wait(ctx, at); err != nil {
				t.Errorf("waiting for %d: %v", at, err)
			}
			if got := w.get(); got < at {
				t.Errorf("woken for %d at %d", at, got)
			}
		}()
	}
	for i := range uint64(20) {
		w.rise(i)
	}
	w.rise(3) // never falls
	wg.Wait()
	gone, leave := context.WithCancel(ctx)
	leave()
	if err := w.wait(gone, 99); !errors.Is(err, context.Canceled) || w.get() != 19 {
		t.Errorf("wait: %v at %d", err, w.get())
	}
}

func TestAges(t *testing.T) {
	var a ages
	at := func(s int) time.Time { return time.Unix(int64(s), 0) }
	if got := a.note(at(0), 5, time.Minute); got != 0 {
		t.Errorf("first sample: %d", got)
	}
	a.note(at(30), 9, time.Minute)
	if got := a.note(at(60), 9, time.Minute); got != 5 {
		t.Errorf("after a minute: %d, want 5", got)
	}
	if got := a.note(at(90), 9, time.Minute); got != 9 {
		t.Errorf("after a quiet minute: %d, want 9", got)
	}
	if len(a) != 0 {
		t.Errorf("%d samples remain", len(a))
	}
}

// While a follower takes in a snapshot, and until it can have fetched the rest,
// the log may become longer: else it would be sent one snapshot after the other.
func TestInstallsStretchTheLog(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		var i installs
		want := func(when string, n int64) {
			t.Helper()
			if got := i.stretch(); got != n {
				t.Errorf("%s: %d times as long, want %d", when, got, n)
			}
		}
		want("before", 1)
		i.begin()
		i.begin()
		i.end()
		time.Sleep(2 * afterInstall)
		want("while one of two is under way", duringInstall)
		i.end()
		want("just after", duringInstall)
		time.Sleep(afterInstall)
		want("later", 1)
	})
}
