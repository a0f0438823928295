// Package memtest measures memory in tests.
package memtest

import "runtime"

// LiveHeap returns the bytes of the heap in use after two collections. The second frees objects
// with finalizers.
func LiveHeap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
