package disk

import (
	"testing"

	"pgregory.net/rapid"
)

// TestExtent: the estimate never exceeds the given size, and is lower by at most an interval and an
// entry at either end, after any additions and deletions.
func TestExtent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var e logSizes
		sizes := make(map[uint64]int64)
		first, last, cuts := uint64(1), uint64(0), int64(0)
		largest := int64(0)
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			switch rapid.IntRange(0, 15).Draw(t, "step") {
			case 0:
				if last >= first {
					from := rapid.Uint64Range(first, last).Draw(t, "from")
					e.truncateFrom(from)
					for i := from; i <= last; i++ {
						delete(sizes, i)
					}
					last = from - 1
					cuts++
				}
			case 1:
				if last >= first {
					to := rapid.Uint64Range(first, last).Draw(t, "to")
					e.dropThrough(to)
					first = to + 1
				}
			default:
				last++
				size := rapid.SampledFrom([]int64{1, 5000, 100_000, 1 << 20}).Draw(t, "size")
				e.addEntry(last, size)
				sizes[last], largest = size, max(largest, size)
			}
			want := rapid.Int64Range(0, 8<<20).Draw(t, "bytes")
			n := e.countWithin(want)
			if n > last {
				t.Fatalf("%d of %d entries", n, last)
			}
			real, more := int64(0), int64(0)
			for i := last; i > last-n; i-- {
				real += sizes[i]
			}
			for i := last - n; i >= first && i > 0; i-- {
				more += sizes[i]
			}
			// Entries before a truncation and behind the last mark are not counted.
			slack := cuts * (markInterval + largest)
			if real > want+slack {
				t.Fatalf("%d entries of %d bytes for %d", n, real, want)
			}
			if short := min(want, real+more) - real; short > 2*(markInterval+largest)+slack {
				t.Fatalf("only %d entries of %d bytes for %d, %d more are there", n, real, want, more)
			}
		}
	})
}
