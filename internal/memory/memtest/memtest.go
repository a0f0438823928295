// Package memtest measures memory in tests.
package memtest

import "runtime"

// LiveHeap is how many bytes of the heap are in use after the collector has been through, twice: what has a finalizer goes
// with the second time only.
func LiveHeap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
