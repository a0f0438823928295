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
	hundred := make([]int64, 100) // 100, 99 ... 1: quantiles must not need order
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
		{Row{Key: "ready p50", Figure: 80.1, Reference: &Reference{"floor", 40.05}}, "not yet", 2},
		{Row{Key: "burst", Figure: 20}, "ok", math.NaN()},
		{Row{Key: "burst", Figure: 19.9}, "not yet", math.NaN()},
		{Row{Key: "ready p50", Figure: math.NaN()}, "not yet", math.NaN()},
		{Row{Key: "burst", Figure: math.NaN()}, "not yet", math.NaN()},
		{Row{Figure: 1, Reference: &Reference{"nothing", 0}}, "-", math.NaN()},
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
		{Measure: "apply to Ready, p50", Key: "ready p50", Figure: 123.4, Unit: "ms", Reference: &Reference{"floor", 61.7}},
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
		{Measure: "put", Params: map[string]any{"clients": 1.0, "through": "leader"}, Values: map[string]float64{"p50_ms": 1}},
		{Measure: "put", Params: map[string]any{"clients": 64.0, "through": "all"}, Values: map[string]float64{"p50_ms": 2}, CPU: map[string]float64{"r1": 3}, Busy: 0.5},
	}
	var out bytes.Buffer
	if err := WriteLines(&out, in); err != nil {
		t.Fatal(err)
	}
	back, err := ReadLines(&out)
	if err != nil || !reflect.DeepEqual(back, in) {
		t.Fatalf("got %v, %v", back, err)
	}
	if r, ok := Find(back, "put", map[string]any{"clients": 64}); !ok || r.Values["p50_ms"] != 2 {
		t.Errorf("found %v, %v", r, ok)
	}
	if _, ok := Find(back, "put", map[string]any{"clients": 2}); ok {
		t.Error("found what is not there")
	}
	if _, err := ReadLines(strings.NewReader("{\"measure\":\"a\"}\n{broken")); err == nil {
		t.Error("a broken line is no error")
	}
}
