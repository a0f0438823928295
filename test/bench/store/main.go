// Command store measures the replicated store: three replicas in three
// processes on loopback, with mTLS and fsync, and clients inside the replicas'
// processes as the apiserver is. It prints an aligned table and, with -json,
// JSON lines. As reference it measures the disk's fsync in the same run.
//
//	go run ./test/bench/store [-clients 1,64,256] [-duration 3s] [-kills 5] [-json FILE]
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

func main() {
	var (
		clients  = flag.String("clients", "1,64,256", "numbers of concurrent clients")
		duration = flag.Duration("duration", 3*time.Second, "time per measure")
		size     = flag.Int("size", 1024, "bytes per value")
		kills    = flag.Int("kills", 5, "how often to kill -9 the leader under load")
		jsonPath = flag.String("json", "", "write JSON lines to this file")
		dir      = flag.String("dir", "", "where to put the data (default: a temporary folder)")
		child    = flag.Bool("replica", false, "internal: be a replica, controlled by stdin")
	)
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	if *child {
		err = serveReplica(ctx, os.Stdin, os.Stdout)
	} else {
		err = run(ctx, options{*clients, *duration, *size, *kills, *jsonPath, *dir})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-store:", err)
		os.Exit(1)
	}
}

type options struct {
	clients  string
	duration time.Duration
	size     int
	kills    int
	jsonPath string
	dir      string
}

// record is one line of the result.
type record struct {
	Measure string             `json:"measure"`
	Params  map[string]any     `json:"params"`
	Values  map[string]float64 `json:"values"`
	CPU     map[string]float64 `json:"cpu_s,omitempty"`
	Busy    float64            `json:"host_busy,omitempty"`
}

func run(ctx context.Context, o options) error {
	dir := o.dir
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "bench-store-"); err != nil {
			return err
		}
		defer os.RemoveAll(dir)
	}
	g, err := startGroup(ctx, dir)
	if err != nil {
		return err
	}
	defer g.stop()

	var out []record
	fsync, err := measureFsync(filepath.Join(dir, "fsync"))
	if err != nil {
		return err
	}
	out = append(out, fsync)
	for _, n := range strings.Split(o.clients, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(n))
		if err != nil {
			return fmt.Errorf("-clients: %w", err)
		}
		places := []string{"all"}
		if n == 1 {
			places = []string{"leader", "follower"}
		}
		for _, place := range places {
			r, err := g.measureLoad(ctx, place, n, o.size, o.duration)
			if err != nil {
				return err
			}
			out = append(out, r)
		}
	}
	more := []func() (record, error){
		func() (record, error) { return g.measureVisibility(ctx) },
		func() (record, error) { return g.measureReads(ctx, o.duration) },
		func() (record, error) { return g.measureIdle(ctx, 2*o.duration) },
	}
	if o.kills > 0 {
		more = append(more, func() (record, error) { return g.measureKills(ctx, o.kills, o.size) })
	}
	for _, measure := range more {
		r, err := measure()
		if err != nil {
			return err
		}
		out = append(out, r)
	}
	printTable(os.Stdout, out)
	return writeJSON(o.jsonPath, out)
}

func writeJSON(path string, records []record) error {
	if path == "" {
		return nil
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	enc := json.NewEncoder(f)
	for _, r := range records {
		if err := enc.Encode(r); err != nil {
			return err
		}
	}
	return f.Close()
}

func printTable(w io.Writer, records []record) {
	tw := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(tw, "measure\tparams\trate/s\tp50 ms\tp99 ms\tmax ms\tcpu s (each)\tbusy")
	for _, r := range records {
		var params, cpu []string
		for k, v := range r.Params {
			params = append(params, fmt.Sprintf("%s=%v", k, v))
		}
		for k, v := range r.CPU {
			cpu = append(cpu, fmt.Sprintf("%s %.2f", k, v))
		}
		sort.Strings(params)
		sort.Strings(cpu)
		cell := func(key, format string) string {
			if v, ok := r.Values[key]; ok {
				return fmt.Sprintf(format, v)
			}
			return "-"
		}
		busy := "-"
		if r.Busy > 0 {
			busy = fmt.Sprintf("%.0f%%", 100*r.Busy)
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.Measure, strings.Join(params, " "),
			cell("rate", "%.0f"), cell("p50_ms", "%.2f"), cell("p99_ms", "%.2f"), cell("max_ms", "%.2f"), strings.Join(cpu, ", "), busy)
	}
	tw.Flush()
}

// quantiles summarises latencies in microseconds.
func quantiles(us []uint32) map[string]float64 {
	if len(us) == 0 {
		return map[string]float64{}
	}
	sort.Slice(us, func(i, j int) bool { return us[i] < us[j] })
	at := func(q float64) float64 { return float64(us[min(len(us)-1, int(q*float64(len(us))))]) / 1000 }
	return map[string]float64{"p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1)}
}

// measureFsync times appending 1 KiB and fsync, the floor of any commit.
func measureFsync(path string) (record, error) {
	f, err := os.Create(path)
	if err != nil {
		return record{}, err
	}
	defer os.Remove(path)
	defer f.Close()
	block := make([]byte, 1024)
	var us []uint32
	for range 300 {
		began := time.Now()
		if _, err := f.Write(block); err != nil {
			return record{}, err
		}
		if err := f.Sync(); err != nil {
			return record{}, err
		}
		us = append(us, uint32(time.Since(began).Microseconds()))
	}
	return record{Measure: "fsync (reference)", Params: map[string]any{"bytes": 1024}, Values: quantiles(us)}, nil
}
