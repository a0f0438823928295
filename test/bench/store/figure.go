package main

import (
	"math"
	"slices"
	"time"

	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/store/drive"
)

// The pure part: what is computed from what the processes have seen.

// loadValues are the figures of a load.
func loadValues(r drive.Reply) map[string]float64 {
	out := latencies(r.Micros)
	out["rate"] = float64(len(r.Micros)) / r.Took
	return out
}

// latencies summarises microseconds in milliseconds.
func latencies(micros []uint32) map[string]float64 {
	ds := make([]time.Duration, len(micros))
	for i, us := range micros {
		ds[i] = time.Duration(us) * time.Microsecond
	}
	return figures.Latencies(ds)
}

// medians is the median of each value over rounds. Of n it is the sum.
func medians(rounds []map[string]float64) map[string]float64 {
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
		out[k] = median(vs)
	}
	return out
}

// median is the middle sample, or the mean of the two in the middle.
func median(vs []float64) float64 {
	slices.Sort(vs)
	if n := len(vs); n%2 == 0 && n > 0 {
		return (vs[n/2-1] + vs[n/2]) / 2
	}
	return figures.Quantile(vs, 0.5)
}

// longestGap is the longest time, in milliseconds, within which nothing was
// acknowledged and which ended after from and began before to (unix
// microseconds). It is infinite when nothing was acknowledged after from.
func longestGap(acks []int64, from, to int64) float64 {
	acks = slices.Sorted(slices.Values(acks)) // as they are, they belong to latencies
	longest := math.Inf(1)
	for i, at := range acks {
		if at <= from {
			continue
		}
		before := from
		if i > 0 {
			before = acks[i-1]
		}
		if before >= to {
			break
		}
		if gap := float64(at-before) / 1000; math.IsInf(longest, 1) || gap > longest {
			longest = gap
		}
	}
	return longest
}

// window is a stretch of time, in unix microseconds.
type window struct{ from, to int64 }

func between(from, to time.Time) window { return window{from.UnixMicro(), to.UnixMicro()} }

// calls summarises those that were acknowledged within a window.
func (w window) calls(r drive.Reply) map[string]float64 {
	var micros []uint32
	for i, at := range r.Acks {
		if at > w.from && at <= w.to {
			micros = append(micros, r.Micros[i])
		}
	}
	out := latencies(micros)
	out["rate"] = float64(len(micros)) / (float64(w.to-w.from) / 1e6)
	out["pause_ms"] = longestGap(r.Acks, w.from, w.to)
	if math.IsInf(out["pause_ms"], 1) { // nothing from then on
		out["pause_ms"] = float64(w.to-w.from) / 1000
	}
	return out
}

// beside are the values of a window while something was going on, with those of
// a window without it under names with a prefix.
func beside(during map[string]float64, prefix string, without map[string]float64) {
	for k, v := range without {
		if k != "n" {
			during[prefix+k] = v
		}
	}
}

// delays are the times from an acknowledgement to each watcher's sight of it, in
// microseconds; a watcher that was earlier than the acknowledgement waited for nothing.
func delays(acks []int64, arrivals [][]int64) []uint32 {
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
