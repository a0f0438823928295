package promtext

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"
)

// Families have their HELP and TYPE lines once, and only with samples. Label values are escaped.
func TestWriter(t *testing.T) {
	var out strings.Builder
	w := NewWriter(&out)
	at := time.UnixMilli(1700000000123)
	w.StartFamily("empty_total", Counter, "Has no sample.")
	w.StartFamily("a_total", Counter, "Has samples.")
	w.WriteSample(1.5, time.Time{}, "")
	w.WriteSample(3, at, FormatLabels("path", "a\\b\"c\nd", "empty", ""))
	w.WriteSample(1e21, time.Time{}, FormatLabels("x", "1"), "y", `"`)
	w.WriteSample(0, time.Time{}, "", "y", "2", "z", "3")
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	const want = "# HELP a_total Has samples.\n# TYPE a_total counter\na_total 1.5\n" +
		`a_total{path="a\\b\"c\nd",empty=""} 3 1700000000123` + "\n" +
		`a_total{x="1",y="\""} 1e+21` + "\n" + `a_total{y="2",z="3"} 0` + "\n"
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

// Buckets are cumulative, and a value at a bound is in the bucket of that bound.
func TestSets(t *testing.T) {
	counters := NewCounterSet("c_total", "Counts.")
	counters.AddCount(`k="b"`, 2)
	counters.AddCount(`k="a"`, 0)
	counters.AddCount(`k="b"`, 1)
	counters.AddCount(`k="gone"`, 1)
	counters.DeleteSeries(`k="gone"`)
	histograms := NewHistogramSet("h_seconds", "Lasts.", []float64{0.5, 1})
	for _, d := range []time.Duration{100 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second} {
		histograms.ObserveDuration("", d)
	}
	histograms.ObserveDuration(`k="gone"`, 1)
	histograms.DeleteSeries(`k="gone"`)
	var out strings.Builder
	w := NewWriter(&out)
	counters.WriteSeries(w)
	histograms.WriteSeries(w)
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	const want = `# HELP c_total Counts.
# TYPE c_total counter
c_total{k="a"} 0
c_total{k="b"} 3
# HELP h_seconds Lasts.
# TYPE h_seconds histogram
h_seconds_bucket{le="0.5"} 2
h_seconds_bucket{le="1"} 3
h_seconds_bucket{le="+Inf"} 4
h_seconds_sum 3.6
h_seconds_count 4
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

func TestBounds(t *testing.T) {
	if got := ExponentialBounds(1, 2, 3); len(got) != 3 || got[2] != 4 {
		t.Errorf("exponential: %v", got)
	}
	if got := LinearBounds(1, 2, 3); len(got) != 3 || got[2] != 5 {
		t.Errorf("linear: %v", got)
	}
}

type failingWriter struct{}

var errFull = errors.New("full")

func (failingWriter) Write([]byte) (int, error) { return 0, errFull }

func TestWriteErrorIsReturned(t *testing.T) {
	w := NewWriter(failingWriter{})
	w.StartFamily("a", Gauge, "A.")
	w.WriteSample(1, time.Time{}, "")
	if err := w.Flush(); !errors.Is(err, errFull) {
		t.Errorf("got %v", err)
	}
}

// A sample allocates no memory, because a scrape has tens of thousands of samples.
func TestSamplesAllocateNothing(t *testing.T) {
	w := NewWriter(io.Discard)
	labels, at := FormatLabels("pod", "a"), time.Now()
	w.StartFamily("a", Gauge, "A.")
	w.WriteSample(1, at, labels, "device", "/dev/sda")
	if n := testing.AllocsPerRun(100, func() { w.WriteSample(1234567.25, at, labels, "device", "/dev/sda") }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
