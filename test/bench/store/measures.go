package main

import (
	"context"
	"fmt"
	"sort"
	"sync"
	"time"
)

// measureLoad commits in a closed loop through the leader, a follower or all.
func (g *group) measureLoad(ctx context.Context, place string, clients, size int, d time.Duration) (record, error) {
	r := record{Measure: "put", Params: map[string]any{"clients": clients, "through": place}}
	return r, g.spread(ctx, &r, place, order{Do: "load", Clients: clients, Size: size, Duration: d})
}

// measureReads does linearizable gets through all replicas.
func (g *group) measureReads(ctx context.Context, d time.Duration) (record, error) {
	r := record{Measure: "linearizable get", Params: map[string]any{"clients": 64, "through": "all"}}
	return r, g.spread(ctx, &r, "all", order{Do: "reads", Clients: 64, Duration: d})
}

// spread gives each chosen replica its share of the clients.
func (g *group) spread(ctx context.Context, r *record, place string, o order) error {
	if err := g.awaitReady(ctx); err != nil {
		return err
	}
	leader, err := g.leader()
	if err != nil {
		return err
	}
	var chosen []*member
	for _, m := range g.members {
		if place == "all" || (place == "leader") == (m == leader) {
			chosen = append(chosen, m)
		}
	}
	if o.Clients < len(chosen) {
		chosen = chosen[:o.Clients]
	}
	var (
		mu    sync.Mutex
		all   []uint32
		first error
		took  float64
		wg    sync.WaitGroup
	)
	err = g.metered(r, func() error {
		for i, m := range chosen {
			part := o
			part.Clients = (o.Clients + len(chosen) - 1 - i) / len(chosen)
			part.Prefix = m.setup.Name
			wg.Add(1)
			go func() {
				defer wg.Done()
				got, err := m.order(part)
				mu.Lock()
				defer mu.Unlock()
				if err != nil && first == nil {
					first = err
				}
				all = append(all, got.Micros...)
				took = max(took, got.Took)
			}()
		}
		wg.Wait()
		return first
	})
	if err != nil {
		return fmt.Errorf("%s: %w", r.Measure, err)
	}
	r.Values = quantiles(all)
	r.Values["rate"] = float64(len(all)) / took
	return nil
}

// measureVisibility compares when an isolated commit is acknowledged by the
// leader with when watchers on the followers see it.
func (g *group) measureVisibility(ctx context.Context) (record, error) {
	r := record{Measure: "seen on followers after ack", Params: map[string]any{"commits": 100}}
	if err := g.awaitReady(ctx); err != nil {
		return r, err
	}
	leader, err := g.leader()
	if err != nil {
		return r, err
	}
	const count = 100
	var (
		mu    sync.Mutex
		seen  [][]uint32
		first error
		wg    sync.WaitGroup
	)
	for _, m := range g.members {
		if m == leader {
			continue
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			got, err := m.order(order{Do: "times", Prefix: "/visible/", Count: count})
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				first = err
			}
			seen = append(seen, got.Micros)
		}()
	}
	// The watchers are set long before the first commit, one pace from now.
	acked, err := leader.order(order{Do: "paced", Prefix: "/visible/", Count: count, Duration: 20 * time.Millisecond})
	if err != nil {
		return r, err
	}
	wg.Wait()
	if first != nil {
		return r, first
	}
	var late []uint32
	for _, times := range seen {
		for i, at := range times {
			late = append(late, uint32(max(0, int32(at-acked.Micros[i]))))
		}
	}
	r.Values = quantiles(late)
	return r, nil
}

// measureIdle shows what doing nothing costs.
func (g *group) measureIdle(ctx context.Context, d time.Duration) (record, error) {
	r := record{Measure: "idle", Params: map[string]any{"for": d.String()}, Values: map[string]float64{}}
	return r, g.metered(&r, func() error {
		select {
		case <-time.After(d):
		case <-ctx.Done():
		}
		return ctx.Err()
	})
}

// measureKills kills -9 the leader under load and measures for how long nothing
// is acknowledged to the clients of the others.
func (g *group) measureKills(ctx context.Context, kills, size int) (record, error) {
	r := record{Measure: "no write after kill -9 of the leader", Params: map[string]any{"kills": kills, "clients": 16}}
	var gaps []float64
	failed := 0
	for range kills {
		if err := g.awaitReady(ctx); err != nil {
			return r, err
		}
		leader, err := g.leader()
		if err != nil {
			return r, err
		}
		gap, lost, err := g.killOnce(ctx, leader, size)
		if err != nil {
			return r, err
		}
		gaps = append(gaps, gap)
		failed += lost
		if err := leader.start(); err != nil {
			return r, err
		}
	}
	sort.Float64s(gaps)
	r.Values = map[string]float64{
		"p50_ms": 1000 * gaps[len(gaps)/2], "p99_ms": 1000 * gaps[min(len(gaps)-1, len(gaps)*99/100)],
		"max_ms": 1000 * gaps[len(gaps)-1], "failed_calls": float64(failed),
	}
	if failed > 0 {
		return r, fmt.Errorf("%d calls failed during %d kills", failed, kills)
	}
	return r, nil
}

func (g *group) killOnce(ctx context.Context, leader *member, size int) (gap float64, failed int, err error) {
	var (
		mu sync.Mutex
		wg sync.WaitGroup
	)
	for _, m := range g.members {
		if m == leader {
			continue
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			got, orderErr := m.order(order{Do: "load", Clients: 8, Size: size, Duration: 3 * time.Second, Prefix: m.setup.Name})
			mu.Lock()
			defer mu.Unlock()
			if orderErr != nil && got.Failed == 0 {
				err = orderErr
			}
			failed += got.Failed
			gap = max(gap, got.Gap)
		}()
	}
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
		return 0, 0, ctx.Err()
	}
	leader.cmd.Process.Kill()
	leader.cmd.Wait()
	wg.Wait()
	return gap, failed, err
}
