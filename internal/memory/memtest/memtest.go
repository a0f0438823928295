// Package memtest measures memory in tests.
package memtest

import "runtime"

// LiveHeap returns the number of heap bytes in use after two garbage collections. The second one
// frees objects that have finalizers.
func LiveHeap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
