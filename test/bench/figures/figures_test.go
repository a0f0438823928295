package figures

import (
	"bytes"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestQuantile(t *testing.T) {
	hundred := make([]int64, 100) // 100, 99 ... 1: quantiles must not depend on the order
	for i := range hundred {
		hundred[i] = int64(100 - i)
	}
	for _, c := range []struct {
		samples []int64
		q, want float64
	}{
		{hundred, 0.5, 50}, {hundred, 0.99, 99}, {hundred, 1, 100}, {hundred, 0, 1},
		{[]int64{7}, 0.5, 7}, {[]int64{7}, 0.99, 7},
		{[]int64{1, 2}, 0.5, 1}, {[]int64{1, 2}, 0.51, 2},
		// Of 20 samples the 99th percentile is the largest.
		{[]int64{20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19}, 0.99, 20},
		{[]int64{20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19}, 0.5, 10},
	} {
		if got := Quantile(c.samples, c.q); got != c.want {
			t.Errorf("Quantile(%d samples, %v) = %v, want %v", len(c.samples), c.q, got, c.want)
		}
	}
	if got := Quantile([]float64(nil), 0.5); !math.IsNaN(got) {
		t.Errorf("without samples: %v, want NaN", got)
	}
}

func TestLatencies(t *testing.T) {
	got := Latencies([]time.Duration{3 * time.Millisecond, time.Millisecond, 2500 * time.Microsecond})
	want := map[string]float64{"n": 3, "p50_ms": 2.5, "p99_ms": 3, "max_ms": 3}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := Latencies(nil); !reflect.DeepEqual(got, map[string]float64{"n": 0}) {
		t.Errorf("without samples: %v", got)
	}
}

func TestVerdictAndRatio(t *testing.T) {
	for _, c := range []struct {
		row     Row
		verdict string
		ratio   float64
	}{
		{Row{Key: "ready p50", Figure: 80}, "ok", math.NaN()},
		{Row{Key: "ready p50", Figure: 80.1, Reference: &Reference{Name: "floor", Figure: 40.05}}, "not yet", 2},
		{Row{Key: "burst", Figure: 20}, "ok", math.NaN()},
		{Row{Key: "burst", Figure: 19.9}, "not yet", math.NaN()},
		{Row{Key: "ready p50", Figure: math.NaN()}, "not yet", math.NaN()},
		{Row{Key: "burst", Figure: math.NaN()}, "not yet", math.NaN()},
		{Row{Figure: 1, Reference: &Reference{Name: "nothing", Figure: 0}}, "-", math.NaN()},
	} {
		if got := c.row.Verdict(); got != c.verdict {
			t.Errorf("%+v: verdict %q, want %q", c.row, got, c.verdict)
		}
		if got := c.row.Ratio(); got != c.ratio && !(math.IsNaN(got) && math.IsNaN(c.ratio)) {
			t.Errorf("%+v: ratio %v, want %v", c.row, got, c.ratio)
		}
	}
}

func TestPrint(t *testing.T) {
	var out bytes.Buffer
	err := Print(&out, []Row{
		{Measure: "apply to Ready, p50", Key: "ready p50", Figure: 123.4, Unit: "ms",
			Reference: &Reference{Name: "floor", Figure: 61.7}},
		{Measure: "creates", Figure: 1.234, Unit: "/s"},
	})
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 3 {
		t.Fatalf("want a heading and two rows:\n%s", out.String())
	}
	for _, want := range []string{"123 ms", "≤ 80.0 ms", "not yet", "floor 61.7 ms", "2.00", "178 ms"} {
		if !strings.Contains(lines[1], want) {
			t.Errorf("%q is not in %q", want, lines[1])
		}
	}
	if !strings.Contains(lines[2], "1.23/s") {
		t.Errorf("second row: %q", lines[2])
	}
	if a, b := strings.Index(lines[0], "FIGURE"), strings.Index(lines[1], "123 ms"); a != b {
		t.Errorf("columns are not aligned: %d and %d", a, b)
	}
}

func TestLinesRoundTripAndFind(t *testing.T) {
	in := []Record{
		{Measure: "put", Params: map[string]any{"clients": 1.0, "through": "leader"},
			Values: map[string]float64{"p50_ms": 1}},
		{Measure: "put", Params: map[string]any{"clients": 64.0, "through": "all"},
			Values: map[string]float64{"p50_ms": 2}, CPU: map[string]float64{"r1": 3}, Busy: 0.5},
	}
	var out bytes.Buffer
	if err := WriteLines(&out, in); err != nil {
		t.Fatal(err)
	}
	back, err := ReadLines(&out)
	if err != nil || !reflect.DeepEqual(back, in) {
		t.Fatalf("got %v, %v", back, err)
	}
	if r, ok := FindRecord(back, "put", map[string]any{"clients": 64}); !ok || r.Values["p50_ms"] != 2 {
		t.Errorf("found %v, %v", r, ok)
	}
	if _, ok := FindRecord(back, "put", map[string]any{"clients": 2}); ok {
		t.Error("found a record that does not exist")
	}
	if _, err := ReadLines(strings.NewReader("{\"measure\":\"a\"}\n{broken")); err == nil {
		t.Error("a broken line causes no error")
	}
}

// A relative target bounds the ratio. Without the reference there is no verdict.
func TestRelativeVerdict(t *testing.T) {
	etcd := func(v float64) *Reference { return &Reference{Name: "etcd", Figure: v} }
	for _, c := range []struct {
		row  Row
		want string
	}{
		{Row{Key: "store put 64 rate", Figure: 2000, Reference: etcd(1000)}, "ok"},
		{Row{Key: "store put 64 rate", Figure: 1999, Reference: etcd(1000)}, "not yet"},
		{Row{Key: "store put 64 p99_ms", Figure: 7, Reference: etcd(10)}, "ok"},
		{Row{Key: "store put 64 p99_ms", Figure: 7.1, Reference: etcd(10)}, "not yet"},
		{Row{Key: "store put 64 p99_ms", Figure: 7}, "-"},
		{Row{Key: "store put 64 p99_ms", Figure: 7, Reference: etcd(0)}, "not yet"},
		// the ratio of paired rounds has precedence
		{Row{Key: "services stream", Figure: 92, Reference: &Reference{Figure: 100, Paired: 0.99}}, "ok"},
		{Row{Key: "services stream", Figure: 99, Reference: &Reference{Figure: 100, Paired: 0.92}}, "not yet"},
		// absolute, independent of etcd's figure
		{Row{Key: "store kill p50_ms", Figure: 701, Reference: etcd(1400)}, "not yet"},
	} {
		if got := c.row.Verdict(); got != c.want {
			t.Errorf("%s %v beside %v: %q, want %q", c.row.Key, c.row.Figure, c.row.Reference, got, c.want)
		}
	}
}

func TestCompare(t *testing.T) {
	var out bytes.Buffer
	err := Compare(&out, []Row{
		{Measure: "rate", Params: "put (clients=64), a line that is longer than any cell of the first column",
			Key: "store put 64 rate", Figure: 11938, Unit: "/s", Reference: &Reference{Name: "etcd 3.6", Figure: 4871}},
		{Measure: "CPU", Params: "put (clients=64), a line that is longer than any cell of the first column",
			Figure: 51, Unit: "µs"},
		{Measure: "busy, elections", Key: "store busy elections", Figure: 0, Reference: &Reference{Name: "etcd 3.6"}},
		{Measure: "list, p50", Figure: math.NaN(), Unit: "ms"},
	}, "etcd 3.6")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimRight(out.String(), "\n"), "\n")
	var got []string
	for _, l := range lines {
		got = append(got, strings.Join(strings.Fields(l), " "))
	}
	want := []string{
		"MEASURE OURS ETCD 3.6 RATIO BOUND VERDICT",
		"put (clients=64), a line that is longer than any cell of the first column",
		"rate 11938/s 4871/s 2.45 ≥ 2 times ok",
		"CPU 51.0 µs - - - -",
		"busy, elections 0 0 - ≤ 0 ok",
		"list, p50 none - - - -",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if a, b := strings.Index(lines[0], "OURS"), strings.Index(lines[2], "11938"); a != b || a > 20 {
		t.Errorf("columns are not aligned: %d and %d", a, b)
	}
}

func TestBuckets(t *testing.T) {
	got := Buckets([]float64{0, 99.9, 100, 250, 299, 300, 1e9, -1}, 100, 4)
	if want := []int{3, 1, 2, 2}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestHistogram(t *testing.T) {
	var out bytes.Buffer
	err := Histogram(&out, 100, Named{"ours", []float64{520, 530, 540, 710}}, Named{"etcd", []float64{620}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for l := range strings.Lines(out.String()) {
		got = append(got, strings.Join(strings.Fields(l), " "))
	}
	want := []string{
		"ours (4) etcd (1)",
		"500 to 600 " + strings.Repeat("#", 30) + " 3 .",
		"600 to 700 . " + strings.Repeat("#", 40) + " 1",
		"700 to 800 " + strings.Repeat("#", 10) + " 1 .",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	out.Reset() // successive empty intervals are one line
	if err := Histogram(&out, 10, Named{"ours", []float64{5, 105}}); err != nil ||
		strings.Count(out.String(), "\n") != 6 || strings.Count(out.String(), "...") != 1 {
		t.Errorf("%v:\n%s", err, out.String())
	}
	out.Reset()
	if err := Histogram(&out, 100, Named{"ours", []float64{1e9}}); err != nil ||
		!strings.Contains(out.String(), "3900 and more") {
		t.Errorf("%v: %q", err, out.String())
	}
	out.Reset()
	if err := Histogram(&out, 100); err != nil || strings.Count(out.String(), "\n") != 1 {
		t.Errorf("without sets: %v: %q", err, out.String())
	}
}
