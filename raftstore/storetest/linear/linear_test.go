package linear_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
	"keelson.dev/keelson/raftstore/storetest/linear"
)

// A store that keeps its word has settled by patience on any machine; one that does not may never settle, and briefly is
// waited for that.
const patience, briefly = time.Minute, 3 * time.Second

// work runs a workload on a store of one door until it is enough.
func work(t *testing.T, d linear.Door, seed uint64, until func(r *linear.Workload) bool) *linear.Report {
	t.Helper()
	return workAt(t, 1, d, linear.Options{Seed: seed, Followers: 2, Pace: time.Millisecond}, briefly, until)
}

// workAt is work at many places that have the same door.
func workAt(
	t *testing.T, places int, d linear.Door, o linear.Options, settling time.Duration,
	until func(r *linear.Workload) bool,
) *linear.Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	o.TTL = 40 * time.Millisecond
	w, err := linear.Start(ctx, o, slices.Repeat([]linear.Place{func() (linear.Door, bool) {
		return d, true
	}}, places)...)
	if err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !until(w) && ctx.Err() == nil {
		<-tick.C
	}
	return settle(w, d, settling)
}

// settle ends a workload and says what it found.
func settle(w *linear.Workload, d linear.Door, limit time.Duration) *linear.Report {
	w.Stop()
	settling, cancel := context.WithTimeout(context.Background(), limit)
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
	o := linear.Options{Seed: 1, Followers: 2, Pace: time.Millisecond}
	rep := workAt(t, 1, linear.Door{Name: "memory", Store: m}, o, patience, func(w *linear.Workload) bool {
		return w.Calls() > 2000
	})
	t.Log(rep)
	if err := rep.Err(); err != nil {
		t.Error(err)
	}
	if rep.Acknowledged < 200 || rep.Refused == 0 || rep.Fenced == 0 || rep.Expired == 0 || rep.Deliveries < 200 ||
		rep.Sessions < 4 {
		t.Errorf("hardly anything was checked: %v", rep)
	}
}

// So is one whose leadership goes from hand to hand, and whose history is
// forgotten while it is being watched.
func TestGoodStorePassesInUnrest(t *testing.T) {
	m := storetest.NewMemory()
	defer m.Close()
	n := 0
	rep := workAt(t, 6, linear.Door{Name: "memory", Store: m}, linear.Options{Seed: 1, Clients: 1}, patience,
		func(w *linear.Workload) bool {
			switch n++; {
			case n%10 == 0:
				m.Depose()
			case n%4 == 0:
				// What followers who read have not seen yet is still there.
				m.Compact(max(m.Applied(), 200) - 200)
			}
			return n >= 600 && w.Calls() > 1000 // three seconds
		})
	t.Log(rep)
	if err := rep.Err(); err != nil {
		t.Error(err)
	}
	if rep.Fenced == 0 || rep.Failures[raftstore.ErrFenced.Error()] == 0 || rep.Sessions < 4 {
		t.Errorf("there was hardly any unrest: %v", rep)
	}
}
