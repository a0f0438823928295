package drive

import (
	"runtime/debug"
	"runtime/metrics"
)

// Names of the metrics of a member, as in Reply.Meters. Not every member has all of them.
const (
	MeterHeap      = "heap"      // bytes of heap objects, including garbage that is not collected yet
	MeterAllocated = "allocated" // bytes allocated since the process started
	MeterCycles    = "cycles"    // garbage collections since the process started

	MeterInstalled      = "installed"       // snapshots received from another member and installed
	MeterCompared       = "compared"        // comparisons of the members' states made by this member as leader
	MeterCompareSeconds = "compare_seconds" // duration of the last comparison
)

// RuntimeMeters returns the metrics that every Go program has, by name.
func RuntimeMeters() map[string]float64 {
	samples := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/heap/allocs:bytes"},
		{Name: "/gc/cycles/total:gc-cycles"}}
	metrics.Read(samples)
	out := make(map[string]float64)
	for i, name := range []string{MeterHeap, MeterAllocated, MeterCycles} {
		out[name] = float64(samples[i].Value.Uint64())
	}
	return out
}

// CollectGarbage collects garbage and returns free memory to the operating system, so that later
// growth starts from the same state.
func CollectGarbage() Reply {
	debug.FreeOSMemory()
	return Reply{}
}
