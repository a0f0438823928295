package raftfsm

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"
)

func TestWaterline(t *testing.T) {
	var w indexWaiter
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for at := range uint64(20) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := w.AwaitIndex(ctx, at); err != nil {
				t.Errorf("waiting for %d: %v", at, err)
			}
			if got := w.CurrentIndex(); got < at {
				t.Errorf("woken for %d at %d", at, got)
			}
		}()
	}
	for i := range uint64(20) {
		w.raiseIndex(i)
	}
	w.raiseIndex(3) // never falls
	wg.Wait()
	gone, leave := context.WithCancel(ctx)
	leave()
	if err := w.AwaitIndex(gone, 99); !errors.Is(err, context.Canceled) || w.CurrentIndex() != 19 {
		t.Errorf("wait: %v at %d", err, w.CurrentIndex())
	}
}
