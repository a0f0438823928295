package promtext

import (
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"
)

// CounterSet is a family of counters by labels. It is safe for concurrent use. The caller limits
// the number of different labels.
type CounterSet struct {
	name, help string
	mu         sync.Mutex
	values     map[Labels]uint64
}

// NewCounterSet returns a family without counters.
func NewCounterSet(name, help string) *CounterSet {
	return &CounterSet{name: name, help: help, values: map[Labels]uint64{}}
}

// AddCount adds n to the counter with these labels. It creates a missing counter, also if n is 0.
func (c *CounterSet) AddCount(labels Labels, n uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.values[labels] += n
}

// DeleteSeries removes the counter with these labels.
func (c *CounterSet) DeleteSeries(labels Labels) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.values, labels)
}

// WriteSeries writes the counters, sorted by labels.
func (c *CounterSet) WriteSeries(w *Writer) {
	c.mu.Lock()
	values := maps.Clone(c.values)
	c.mu.Unlock()
	w.StartFamily(c.name, Counter, c.help)
	for _, labels := range slices.Sorted(maps.Keys(values)) {
		w.WriteSample(float64(values[labels]), time.Time{}, labels)
	}
}

// HistogramSet is a family of histograms of durations by labels. It is safe for concurrent use. The
// caller limits the number of different labels.
type HistogramSet struct {
	name, help string
	bounds     []float64
	mu         sync.Mutex
	values     map[Labels]*Buckets
}

// NewHistogramSet returns a family without histograms. bounds are the upper bounds of the buckets
// in seconds, in ascending order.
func NewHistogramSet(name, help string, bounds []float64) *HistogramSet {
	return &HistogramSet{name: name, help: help, bounds: bounds, values: map[Labels]*Buckets{}}
}

// ObserveDuration adds a duration to the histogram with these labels.
func (h *HistogramSet) ObserveDuration(labels Labels, d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := h.values[labels]
	if b == nil {
		b = NewBuckets(h.bounds)
		h.values[labels] = b
	}
	b.AddValue(d.Seconds())
}

// DeleteSeries removes the histogram with these labels.
func (h *HistogramSet) DeleteSeries(labels Labels) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.values, labels)
}

// WriteSeries writes the histograms, sorted by labels.
func (h *HistogramSet) WriteSeries(w *Writer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	w.StartFamily(h.name, Histogram, h.help)
	for _, labels := range slices.Sorted(maps.Keys(h.values)) {
		w.WriteBuckets(h.values[labels], labels)
	}
}

// Buckets is a histogram. It is not safe for concurrent use.
type Buckets struct {
	bounds []float64 // upper bounds of the buckets, ascending
	counts []uint64  // values of each bucket
	sum    float64
	total  uint64
}

// NewBuckets returns an empty histogram. bounds are the upper bounds of the buckets, in ascending
// order; they must not be modified.
func NewBuckets(bounds []float64) *Buckets {
	return &Buckets{bounds: bounds, counts: make([]uint64, len(bounds))}
}

// AddValue adds a value to the histogram.
func (b *Buckets) AddValue(v float64) {
	b.sum += v
	b.total++
	if i, _ := slices.BinarySearch(b.bounds, v); i < len(b.counts) {
		b.counts[i]++
	}
}

// WriteBuckets writes the lines of a histogram, as a sample of the current family.
func (w *Writer) WriteBuckets(b *Buckets, labels Labels) {
	sum := uint64(0)
	for i, bound := range b.bounds {
		sum += b.counts[i]
		w.writeLine("_bucket", float64(sum), time.Time{}, labels,
			[]string{"le", strconv.FormatFloat(bound, 'g', -1, 64)})
	}
	w.writeLine("_bucket", float64(b.total), time.Time{}, labels, []string{"le", "+Inf"})
	w.writeLine("_sum", b.sum, time.Time{}, labels, nil)
	w.writeLine("_count", float64(b.total), time.Time{}, labels, nil)
}

// DefaultBounds returns the default bucket bounds of Prometheus clients: 5 ms to 10 s.
func DefaultBounds() []float64 {
	return []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
}

// ExponentialBounds returns n bucket bounds. The first is start, and each following bound is the
// previous bound times factor.
func ExponentialBounds(start, factor float64, n int) []float64 {
	bounds := make([]float64, 0, n)
	for range n {
		bounds = append(bounds, start)
		start *= factor
	}
	return bounds
}

// LinearBounds returns n bucket bounds. The first is start, and each following bound is width
// larger.
func LinearBounds(start, width float64, n int) []float64 {
	bounds := make([]float64, 0, n)
	for i := range n {
		bounds = append(bounds, start+float64(i)*width)
	}
	return bounds
}
