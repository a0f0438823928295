package main

import (
	"math"
	"slices"
	"time"

	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/store/drive"
)

// Pure functions that compute results from the processes' replies.

// loadValues returns the results of a load by name: its rate and the quantiles of its latencies.
func loadValues(r drive.Reply) map[string]float64 {
	out := latencyValues(r.Micros)
	out["rate"] = float64(len(r.Micros)) / r.Took
	return out
}

// latencyValues returns quantiles in milliseconds of durations in microseconds.
func latencyValues(micros []uint32) map[string]float64 {
	ds := make([]time.Duration, len(micros))
	for i, us := range micros {
		ds[i] = time.Duration(us) * time.Microsecond
	}
	return figures.Latencies(ds)
}

// medianValues returns the median of each value over the rounds, except the sum of n.
func medianValues(rounds []map[string]float64) map[string]float64 {
	out := make(map[string]float64)
	by := make(map[string][]float64)
	for _, r := range rounds {
		for k, v := range r {
			by[k] = append(by[k], v)
		}
	}
	for k, vs := range by {
		if k == "n" {
			for _, v := range vs {
				out[k] += v
			}
			continue
		}
		out[k] = medianOf(vs)
	}
	return out
}

// medianOf returns the middle sample, or the mean of the two middle samples. It sorts vs.
func medianOf(vs []float64) float64 {
	slices.Sort(vs)
	if n := len(vs); n%2 == 0 && n > 0 {
		return (vs[n/2-1] + vs[n/2]) / 2
	}
	return figures.Quantile(vs, 0.5)
}

// longestGap returns the longest time in milliseconds without an acknowledgement. The gap must end
// after start and begin before end. start, end and acks are in Unix microseconds. The gap is
// infinite if there is no acknowledgement after start.
func longestGap(acks []int64, start, end int64) float64 {
	acks = slices.Sorted(slices.Values(acks)) // copied, because their order corresponds to the latencies
	longest := math.Inf(1)
	for i, at := range acks {
		if at <= start {
			continue
		}
		before := start
		if i > 0 {
			before = acks[i-1]
		}
		if before >= end {
			break
		}
		if gap := float64(at-before) / 1000; math.IsInf(longest, 1) || gap > longest {
			longest = gap
		}
	}
	return longest
}

// window is a time window in Unix microseconds.
type window struct{ from, to int64 }

func windowBetween(from, to time.Time) window { return window{from.UnixMicro(), to.UnixMicro()} }

// callValues returns the results of the calls that were acknowledged within the window.
func (w window) callValues(r drive.Reply) map[string]float64 {
	var micros []uint32
	for i, at := range r.Acks {
		if at > w.from && at <= w.to {
			micros = append(micros, r.Micros[i])
		}
	}
	out := latencyValues(micros)
	out["rate"] = float64(len(micros)) / (float64(w.to-w.from) / 1e6)
	out["pause_ms"] = longestGap(r.Acks, w.from, w.to)
	if math.IsInf(out["pause_ms"], 1) { // no acknowledgement after w.from
		out["pause_ms"] = float64(w.to-w.from) / 1000
	}
	return out
}

// addPrefixedValues adds the values in without to during, under names with a prefix. during are the
// values of a time window with an event, and without are those of a time window without the event.
func addPrefixedValues(during map[string]float64, prefix string, without map[string]float64) {
	for k, v := range without {
		if k != "n" {
			during[prefix+k] = v
		}
	}
}

// arrivalDelays returns the times from the acknowledgement of a put to its arrival at each watcher,
// in microseconds. A watcher that received it earlier has 0.
func arrivalDelays(acks []int64, arrivals [][]int64) []uint32 {
	var out []uint32
	for _, seen := range arrivals {
		for i, at := range seen {
			if i < len(acks) {
				out = append(out, uint32(max(0, at-acks[i])))
			}
		}
	}
	return out
}
