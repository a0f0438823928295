package linear_test

import (
	"context"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore/storetest"
	"keelson.dev/keelson/raftstore/storetest/linear"
)

// work runs a workload on a store of one door for a number of calls' time.
func work(t *testing.T, d linear.Door, seed uint64, until func(r *linear.Workload) bool) *linear.Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	w, err := linear.Start(ctx, linear.Options{Seed: seed, Followers: 2, Pace: time.Millisecond, TTL: 40 * time.Millisecond}, func() (linear.Door, bool) { return d, true })
	if err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !until(w) && ctx.Err() == nil {
		<-tick.C
	}
	w.Stop()
	settling, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	settled := w.Settle(settling, d)
	rep := w.Check(linear.CheckOptions{})
	rep.Violations = append(rep.Violations, settled.Violations...)
	return rep
}

// A store that keeps its word is not accused.
func TestGoodStorePasses(t *testing.T) {
	m := storetest.NewMemory()
	defer m.Close()
	rep := work(t, linear.Door{Name: "memory", Store: m}, 1, func(w *linear.Workload) bool { return w.Calls() > 2000 })
	t.Log(rep)
	if err := rep.Err(); err != nil {
		t.Error(err)
	}
	if rep.Acknowledged < 200 || rep.Refused == 0 || rep.Fenced == 0 || rep.Expired == 0 || rep.Deliveries < 200 || rep.Sessions < 4 {
		t.Errorf("hardly anything was checked: %v", rep)
	}
}
