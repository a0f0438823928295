package main

import (
	"context"
	"fmt"
	"time"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/store/drive"
)

// comparison tells what clients feel of a comparison of the members' states.
func (b *bench) comparison(ctx context.Context, a arm) (map[string]float64, error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return nil, err
	}
	b.progress.say("a comparison of the states under %d clients: %s", loadedClients, a)
	load, err := a.begin(drive.Order{Do: drive.DoPut, Clients: loadedClients, Size: b.size, Duration: longLoad, Times: true}, a.members)
	if err != nil {
		return nil, err
	}
	if err := wait.Delay(ctx, settle); err != nil {
		return nil, err
	}
	start := time.Now()
	during, err := compared(ctx, leader, start.Add(b.compareEvery/4))
	if err != nil {
		return nil, err
	}
	got, err := load.end(ctx)
	if err != nil {
		return nil, err
	}
	out := during.calls(got)
	beside(out, "before_", window{start.UnixMicro(), during.from}.calls(got))
	out["took_s"], out["failed_calls"] = float64(during.to-during.from)/1e6, float64(got.Failed)
	return out, nil
}

// compared waits for a comparison that begins after a moment, and tells when it was.
func compared(ctx context.Context, leader *member, after time.Time) (window, error) {
	ctx, cancel := context.WithTimeout(ctx, installLimit)
	defer cancel()
	for seen := -1.0; ; {
		r, err := leader.do(ctx, drive.Order{Do: drive.DoMeters})
		if err != nil {
			return window{}, err
		}
		now := time.Now()
		took := time.Duration(r.Meters[drive.MeterCompareSeconds] * float64(time.Second))
		if n := r.Meters[drive.MeterCompared]; n != seen {
			if from := now.Add(-took); seen >= 0 && from.After(after) {
				return between(from, now), nil
			}
			seen = n
		}
		if err := wait.Delay(ctx, lookEvery); err != nil {
			return window{}, fmt.Errorf("no comparison by %s: %w", leader.name, err)
		}
	}
}
