package main

import (
	"context"
	"fmt"
	"time"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/store/drive"
)

// measureComparison measures client latencies while the leader compares the members' states.
func (b *benchmarks) measureComparison(ctx context.Context, a variant) (map[string]float64, error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return nil, err
	}
	b.progress.printProgress("a comparison of the states under %d clients: %s", loadedClients, a)
	load, err := a.sendRequest(drive.Request{Do: drive.DoPut, Clients: loadedClients, Size: b.options.load.size,
		Duration: longLoad,
		Times:    true}, a.members)
	if err != nil {
		return nil, err
	}
	if err := wait.Delay(ctx, settleTime); err != nil {
		return nil, err
	}
	start := time.Now()
	during, err := awaitComparison(ctx, leader, start.Add(b.options.state.compareEvery/4))
	if err != nil {
		return nil, err
	}
	got, err := load.stopLoad(ctx)
	if err != nil {
		return nil, err
	}
	out := during.callValues(got)
	addPrefixedValues(out, "before_", window{start.UnixMicro(), during.from}.callValues(got))
	out["took_s"], out["failed_calls"] = float64(during.to-during.from)/1e6, float64(got.Failed)
	return out, nil
}

// awaitComparison waits for a comparison of the members' states that starts after the time after,
// and returns its time window.
func awaitComparison(ctx context.Context, leader *member, after time.Time) (window, error) {
	ctx, cancel := context.WithTimeout(ctx, installLimit)
	defer cancel()
	for seen := -1.0; ; {
		r, err := leader.callProcess(ctx, drive.Request{Do: drive.DoMeters})
		if err != nil {
			return window{}, err
		}
		now := time.Now()
		took := time.Duration(r.Meters[drive.MeterCompareSeconds] * float64(time.Second))
		if n := r.Meters[drive.MeterCompared]; n != seen {
			if from := now.Add(-took); seen >= 0 && from.After(after) {
				return windowBetween(from, now), nil
			}
			seen = n
		}
		if err := wait.Delay(ctx, pollInterval); err != nil {
			return window{}, fmt.Errorf("waiting for a comparison by %s: %w", leader.name, err)
		}
	}
}
