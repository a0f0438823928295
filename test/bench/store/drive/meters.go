package drive

import (
	"runtime/debug"
	"runtime/metrics"
)

// Meters of a member. Not every member has all of them.
const (
	MeterHeap      = "heap"      // bytes of objects in the heap, garbage that is not collected yet included
	MeterAllocated = "allocated" // bytes allocated since the process began
	MeterCycles    = "cycles"    // collections of garbage since the process began

	MeterInstalled      = "installed"       // snapshots that another member sent and that were taken in
	MeterCompared       = "compared"        // comparisons of the members' states that this one has made as leader
	MeterCompareSeconds = "compare_seconds" // how long the last of them took
)

// RuntimeMeters are those that every Go program has.
func RuntimeMeters() map[string]float64 {
	samples := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/heap/allocs:bytes"}, {Name: "/gc/cycles/total:gc-cycles"}}
	metrics.Read(samples)
	out := make(map[string]float64)
	for i, name := range []string{MeterHeap, MeterAllocated, MeterCycles} {
		out[name] = float64(samples[i].Value.Uint64())
	}
	return out
}

// Collect collects garbage and gives memory that is free back to the system, so
// that what grows afterwards grows from the same point each time.
func Collect() Reply {
	debug.FreeOSMemory()
	return Reply{}
}
