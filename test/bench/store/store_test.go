package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/store/drive"
)

// The child processes of the smoke test run this test binary.
func TestMain(m *testing.M) {
	if err := asRole(context.Background(), os.Getenv(drive.RoleEnv)); !errors.Is(err, errNoRole) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// Every measurement, as short as possible and without the reference: the figures mean nothing, but
// every measurement must produce some.
func TestEveryMeasure(t *testing.T) {
	o, err := parseFlags([]string{
		"-rounds", "1", "-duration", "20ms", "-size", "4096", "-clients", "1,4", "-logs", "bolt", "-list-keys", "40",
		"-list-times", "2",
		"-watchers", "6", "-watch-for", "100ms", "-commits", "3", "-idle-for", "10ms", "-busy-for", "50ms",
		"-transfers", "1", "-shutdowns", "1", "-kills", "1", "-freezes", "1", "-install", "4", "-memory", "1", "-state",
		"2", "-compare-every", "500ms", "-dir", t.TempDir(), "-json", t.TempDir() + "/lines",
	}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	// more than is written while a follower installs a snapshot, also under the race detector
	o.state.snapshotBytes = 1 << 20
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	var table, progress bytes.Buffer
	if err := runBenchmarks(ctx, o, self, &table, &progress); err != nil {
		t.Fatalf("%v\n%s", err, progress.String())
	}
	f, err := os.Open(o.jsonPath)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	records, err := figures.ReadLines(f)
	if err != nil {
		t.Fatal(err)
	}
	measured := make(map[string]int)
	for _, r := range records {
		measured[r.Measure]++
		for k, v := range r.Values {
			if math.IsNaN(v) || math.IsInf(v, 0) {
				t.Errorf("%s: %s is %v", r.Measure, k, v)
			}
		}
	}
	for measure := range columns {
		if measured[measure] == 0 {
			t.Errorf("nothing was measured of %q: %v", measure, measured)
		}
		if !strings.Contains(table.String(), "\n"+measure+" (") {
			t.Errorf("the table has no row of %q", measure)
		}
	}
	if put := measured["put"]; put != 6 { // 1 client through leader and follower, 4 clients; in two places
		t.Errorf("%d records of puts, want 6", put)
	}
	if !strings.Contains(table.String(), "ms without an acknowledged write") {
		t.Error("there is no histogram")
	}
}

// A caller that waits for a reply gets an error when the process exits.
func TestProcessThatEnds(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p, err := program{self, drive.RoleBurn}.startProcess("a busy loop", drive.Setup{})
	if err != nil {
		t.Fatal(err)
	}
	w, err := p.sendRequest(drive.Request{Do: drive.DoStatus})
	if err != nil {
		t.Fatal(err)
	}
	p.killProcess()
	if _, err := w.awaitReply(t.Context()); err == nil || !strings.Contains(err.Error(),
		"status: a busy loop has exited") {
		t.Errorf("got %v", err)
	}
	if _, err := p.callProcess(t.Context(), drive.Request{Do: drive.DoStatus}); err == nil {
		t.Error("an order to an exited process succeeded")
	}
}

// The sender of a request counts failed calls of a load. Other errors are returned.
func TestRepliesWithErrors(t *testing.T) {
	for _, c := range []struct {
		reply drive.Reply
		fails bool
	}{
		{drive.Reply{}, false},
		{drive.Reply{Error: "broken"}, true},
		{drive.Reply{Error: "one of many", Failed: 1}, false},
	} {
		w := &pendingRequest{on: &process{name: "r1", exited: make(chan struct{})}, reply: make(chan drive.Reply, 1)}
		w.reply <- c.reply
		if _, err := w.awaitReply(t.Context()); (err != nil) != c.fails {
			t.Errorf("%+v: %v", c.reply, err)
		}
	}
}

func TestLongestGap(t *testing.T) {
	ms := func(v ...int64) []int64 {
		out := make([]int64, len(v))
		for i := range v {
			out[i] = v[i] * 1000
		}
		return out
	}
	for _, c := range []struct {
		name     string
		acks     []int64
		from, to int64
		want     float64
	}{
		{"a gap across the kill starts at the last ack before it", ms(10, 20, 720, 725), 25_000, math.MaxInt64, 700},
		{"acks out of order", ms(725, 10, 720, 20), 25_000, math.MaxInt64, 700},
		{"gaps that ended before the window do not count", ms(0, 500, 510, 520, 530), 505_000, math.MaxInt64, 10},
		{"gaps that start after the window do not count", ms(0, 10, 20, 900), 5_000, 15_000, 10},
		{"without an ack before, the gap starts at the kill", ms(40), 30_000, math.MaxInt64, 10},
		{"no ack after the kill", ms(10, 20), 25_000, math.MaxInt64, math.Inf(1)},
		{"no acks", nil, 0, math.MaxInt64, math.Inf(1)},
	} {
		if got := longestGap(c.acks, c.from, c.to); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// The values of a window are from the calls acknowledged within it, with their own latencies.
func TestWindow(t *testing.T) {
	r := drive.Reply{Acks: []int64{300_000, 100_000, 200_000, 400_000}, Micros: []uint32{3000, 1000, 2000, 4000}}
	got := window{100_000, 300_000}.callValues(r)
	want := map[string]float64{"n": 2, "p50_ms": 2, "p99_ms": 3, "max_ms": 3, "rate": 10, "pause_ms": 100}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if !slices.Equal(r.Acks, []int64{300_000, 100_000, 200_000, 400_000}) {
		t.Errorf("the acknowledgements are in another order than the latencies: %v", r.Acks)
	}
	if late := (window{500_000, 600_000}).callValues(r); late["pause_ms"] != 100 || late["n"] != 0 {
		t.Errorf("a window without calls: %v", late)
	}
	addPrefixedValues(got, "before_", map[string]float64{"p99_ms": 1, "n": 9})
	if want["before_p99_ms"] = 1; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// The memory of an operation is its growth minus the growth at the same number of commits without
// it. The member with the largest growth counts.
func TestCosts(t *testing.T) {
	l := largeState{run: &benchmarks{options: options{state: stateOptions{stateMiB: 100}}}}
	during := memoryWindow{memoryUses: map[string]memoryUse{"r1": {30 * mebi, 20 * mebi, 50 * mebi},
		"r2": {5 * mebi, 5 * mebi, 5 * mebi}}}
	without := memoryWindow{memoryUses: map[string]memoryUse{"r1": {26 * mebi, 21 * mebi, 10 * mebi},
		"r2": {0, 3 * mebi, 5 * mebi}}}
	want := map[string]float64{
		"memory_percent": 5, "heap_percent": 2, "allocated_percent": 40,
		"all_memory_percent": 30, "all_heap_percent": 20, "all_allocated_percent": 50,
	}
	if got := l.memoryCosts(during, without); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestDelays(t *testing.T) {
	got := arrivalDelays([]int64{1000, 2000}, [][]int64{{1300, 1900}, {1001}, {1000, 2000, 3000}})
	if want := []uint32{300, 0, 1, 0, 0}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v: an early watcher has no delay, and a put without an acknowledgement does not "+
			"count", got, want)
	}
}

func TestMedians(t *testing.T) {
	got := medianValues([]map[string]float64{{"rate": 30, "n": 3, "x": 1}, {"rate": 10, "n": 4, "x": 4},
		{"rate": 20, "n": 5}})
	if want := map[string]float64{"rate": 20, "n": 12, "x": 2.5}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := medianValues(nil); len(got) != 0 {
		t.Errorf("without rounds: %v", got)
	}
}

func TestLoadValues(t *testing.T) {
	got := loadValues(drive.Reply{Micros: []uint32{3000, 1000, 2500}, Took: 2})
	if want := map[string]float64{"n": 3, "rate": 1.5, "p50_ms": 2.5, "p99_ms": 3,
		"max_ms": 3}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestShare(t *testing.T) {
	for _, c := range []struct{ n, parts int }{{64, 3}, {1, 3}, {256, 3}, {7, 1}, {3, 3}} {
		sum, most, least := 0, 0, c.n
		for i := range c.parts {
			s := splitEvenly(c.n, c.parts, i)
			sum, most, least = sum+s, max(most, s), min(least, s)
		}
		if sum != c.n || most-least > 1 {
			t.Errorf("%d in %d parts: sum %d, from %d to %d", c.n, c.parts, sum, least, most)
		}
	}
}

func TestMerge(t *testing.T) {
	got := mergeReplies(
		drive.Reply{Micros: []uint32{1}, Acks: []int64{5}, Failed: 1, Took: 2, Error: "first"},
		drive.Reply{Micros: []uint32{2}, Acks: []int64{6}, Failed: 2, Took: 1, Error: "second",
			Arrivals: [][]int64{{1}}},
	)
	want := drive.Reply{Micros: []uint32{1, 2}, Acks: []int64{5, 6}, Failed: 3, Took: 2, Error: "first",
		Arrivals: [][]int64{{1}}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v", got)
	}
}

// Rows of puts are compared with the target of their number of clients and log store.
func TestRowsOfPuts(t *testing.T) {
	put := func(clients int, log string) figures.Record {
		return figures.Record{
			Measure: "put", Params: map[string]any{"clients": clients, "log": log, "clients are": inProcess},
			Values: map[string]float64{"rate": 1990, "p50_ms": 1.4, "p99_ms": 6},
			Reference: &figures.Measured{Name: "etcd 3.6",
				Values: map[string]float64{"rate": 1000, "p50_ms": 1, "p99_ms": 10}},
		}
	}
	for _, c := range []struct {
		newRecord figures.Record
		want      map[string]string // verdict by unit and label
	}{
		{put(1, "bolt"), map[string]string{"rate": "-", "p50": "ok", "p99": "-"}},
		{put(1, "wal"), map[string]string{"rate": "-", "p50": "not yet", "p99": "-"}},
		{put(64, "bolt"), map[string]string{"rate": "not yet", "p50": "-", "p99": "ok"}},
		{put(256, "wal"), map[string]string{"rate": "not yet", "p50": "-", "p99": "ok"}},
	} {
		got := make(map[string]string)
		for _, row := range tableRows(c.newRecord) {
			got[row.Measure] = row.Verdict()
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%v: %v, want %v", c.newRecord.Params, got, c.want)
		}
	}
}

func TestVerdict(t *testing.T) {
	got := summarizeVerdicts([]figures.Row{
		{Measure: "pause max", Params: "transfer (times=1)", Key: "store transfer max_ms", Figure: 50},
		{Measure: "p50", Params: "kill (kills=1)", Key: "store kill p50_ms", Figure: 701},
		// without the reference there is no verdict
		{Measure: "rate", Params: "put (clients=64)", Key: "store put 64 rate", Figure: 1},
		{Measure: "p50", Params: "fsync (bytes=1)", Figure: 1},
	})
	if want := "1 of 2 bounds are met.\n  not yet: kill (kills=1), p50"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// The table marks figures of measurements with much other work.
func TestDisturbed(t *testing.T) {
	r := figures.Record{Measure: "idle", Params: map[string]any{"for": "4s"}, Values: map[string]float64{"cores": 1}}
	for others, want := range map[float64]string{0.09: "idle (for=4s)",
		0.456: "idle (for=4s), with other work on 46% of the machine"} {
		if r.Others = others; tableRows(r)[0].Params != want {
			t.Errorf("%v: %q", others, tableRows(r)[0].Params)
		}
	}
}

// Every target of the store belongs to a value that the table shows.
func TestTargetsAreOfRows(t *testing.T) {
	keys := make(map[string]bool)
	for measure, values := range columns {
		for _, v := range values {
			for _, clients := range []int{1, 64, 256} {
				for _, log := range []string{"bolt", "wal"} {
					keys[targetKey(figures.Record{Measure: measure,
						Params: map[string]any{"clients": clients, "log": log}}, v.value)] = true
				}
			}
		}
	}
	for key := range figures.Targets {
		if strings.HasPrefix(key, "store ") && !keys[key] {
			t.Errorf("no row has the target %q", key)
		}
	}
}

func TestFlags(t *testing.T) {
	o, err := parseFlags([]string{"-only", "puts,kills", "-at", "grpc", "-clients", "1,9", "-kills", "100"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if !o.includesPart(partKills) || o.includesPart(partState) || !slices.Equal(o.load.at, []string{overGRPC}) ||
		!slices.Equal(o.load.clients, []int{1, 9}) || o.faults.killCount != 100 {
		t.Errorf("%+v", o)
	}
	short, err := parseFlags([]string{"-short"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if short.includesPart(partKills) || len(short.load.logs) != 1 || !slices.Equal(short.load.at, []string{inProcess}) {
		t.Errorf("the short form: %+v", short)
	}
	for flag, args := range map[string][]string{
		"-only":    {"-only", "everything"},
		"-at":      {"-at", "moon"},
		"-logs":    {"-logs", "paper"},
		"-of":      {"-of", "matter"},
		"-clients": {"-clients", "1,many"},
		"-rounds":  {"-rounds", "0"},
		"-state":   {"-state", "10", "-memory", "20"},
		"puts":     {"puts"},
	} {
		if _, err := parseFlags(args, io.Discard); err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%v: got %v, which must name %s", args, err, flag)
		}
	}
}

// Progress lines have the current step and the estimated time left.
func TestProgress(t *testing.T) {
	var out strings.Builder
	p := progress{to: &out, began: time.Now().Add(-7 * time.Second), step: time.Now(), lasts: 10 * time.Second,
		left: 20 * time.Second}
	p.printProgress("round %d", 2)
	if got := out.String(); !strings.Contains(got, "7s, about  30s left: round 2") {
		t.Errorf("got %q", got)
	}
}
