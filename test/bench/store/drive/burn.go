package drive

import (
	"io"
	"sync/atomic"
)

// Burn keeps one processor busy until in ends.
func Burn(in io.Reader) {
	var ended atomic.Bool
	go func() {
		_, _ = io.Copy(io.Discard, in)
		ended.Store(true)
	}()
	for !ended.Load() {
	}
}
