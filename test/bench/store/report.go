package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"keelson.dev/keelson/test/bench/figures"
)

// shown says which values of a measure stand in the table, and how.
type shown struct{ value, label, unit string }

// The measures that have special rows or places.
const (
	measureTransfer   = "transfer"
	measureShutdown   = "shutdown of the leader"
	measureKill       = "kill"
	measureFreeze     = "freeze"
	measureInstall    = "install on a follower"
	measureMemory     = "memory"
	measureSnapshot   = "snapshot by the leader"
	measureSnapshots  = "snapshot by all"
	measureRestart    = "restart of a follower"
	measureRestarts   = "restart of all"
	measureComparison = "comparison of states"
)

var (
	latency  = []shown{{"p50_ms", "p50", "ms"}, {"p99_ms", "p99", "ms"}}
	failures = shown{"failed_calls", "failed calls", ""}
	pauses   = []shown{{"p50_ms", "pause p50", "ms"}, {"max_ms", "pause max", "ms"}, {"quiet_max_ms", "longest pause just before", "ms"}, failures}
	// Of puts while something goes on, and before it.
	underLoad = []shown{
		{"pause_ms", "longest pause meanwhile", "ms"}, {"before_pause_ms", "longest pause before", "ms"},
		{"p50_ms", "p50 meanwhile", "ms"}, {"before_p50_ms", "p50 before", "ms"},
		{"p99_ms", "p99 meanwhile", "ms"}, {"before_p99_ms", "p99 before", "ms"}, {"after_p99_ms", "p99 after", "ms"},
		{"rate", "rate meanwhile", "/s"}, {"before_rate", "rate before", "/s"}, failures,
	}
	snapshots = []shown{
		{"pause_ms", "longest pause meanwhile", "ms"}, {"quiet_ms", "longest pause in as much time", "ms"}, {"took_s", "took", "s"},
		{"memory_percent", "resident memory, of the state", "%"}, {"heap_percent", "heap, of the state", "%"},
	}
)

var columns = map[string][]shown{
	"fsync":                       latency,
	"put":                         {{"rate", "rate", "/s"}, latency[0], latency[1], {"cpu_us", "CPU of all processes per call", "µs"}},
	"get":                         {{"rate", "rate", "/s"}, latency[0], latency[1], {"cpu_us", "CPU of all processes per call", "µs"}},
	"list":                        {latency[0], latency[1], {"mb_s", "rate", "MB/s"}},
	"watch":                       {latency[0], latency[1], {"cores", "CPU of all processes", "cores"}},
	"seen on followers after ack": latency,
	"idle":                        {{"cores", "CPU of all processes", "cores"}},
	"busy":                        {{"elections", "elections", ""}, failures, {"rate", "rate", "/s"}, latency[1]},
	measureTransfer:               pauses,
	measureShutdown:               append(pauses, shown{"took_p50_ms", "until the process has ended, p50", "ms"}),
	measureKill:                   {{"p50_ms", "no write p50", "ms"}, {"p99_ms", "no write p99", "ms"}, {"max_ms", "no write max", "ms"}, failures},
	measureFreeze:                 {{"p50_ms", "no write p50", "ms"}, {"p99_ms", "no write p99", "ms"}, {"max_ms", "no write max", "ms"}, failures},
	measureInstall:                append([]shown{{"took_s", "start until caught up", "s"}}, underLoad...),
	measureMemory:                 {{"kib_per_kib", "per stored KiB", "KiB"}, {"anonymous_per_kib", "of it anonymous", "KiB"}},
	measureSnapshot:               snapshots,
	measureSnapshots:              snapshots,
	measureRestart:                {{"took_s", "until it reads", "s"}, {"cpu_s", "CPU", "s"}},
	measureRestarts:               {{"took_s", "until all read", "s"}, {"cpu_s", "CPU of all", "s"}},
	measureComparison:             append([]shown{{"took_s", "took", "s"}}, underLoad...),
}

// measureSetup is the name of the record that tells what was compared.
const measureSetup = "setup"

// setup tells what is compared with what.
func (b *bench) setup() figures.Record {
	p := map[string]any{
		"ours": fmt.Sprintf("%d replicas in processes of their own on loopback, TLS between them, clients in their processes or in another over gRPC without TLS", membersOfGroup),
		"both": fmt.Sprintf("fsync, %d connections to each member where clients are in a process of their own, values are medians of %d rounds by turns", b.conns, b.rounds),
	}
	if b.etcdName != "" {
		p["reference"] = fmt.Sprintf("%s, %d members in processes of their own on loopback, TLS between them, etcd's own client in another process without TLS, defaults but for a quota of 8 GiB", b.etcdName, membersOfGroup)
	}
	return figures.Record{Measure: measureSetup, Params: p, Values: map[string]float64{}}
}

// rows makes the table's rows of a record.
func rows(r figures.Record) []figures.Row {
	var out []figures.Row
	for _, c := range columns[r.Measure] {
		v, ok := r.Values[c.value]
		if !ok {
			continue
		}
		row := figures.Row{Measure: c.label, Params: r.Measure + brackets(r.Params) + disturbance(r), Key: targetKey(r, c.value), Figure: v, Unit: c.unit}
		if r.Reference != nil {
			if other, ok := r.Reference.Values[c.value]; ok {
				row.Reference = &figures.Reference{Name: r.Reference.Name, Figure: other}
			}
		}
		out = append(out, row)
	}
	return out
}

// disturbance says that a measure did not have the machine to itself, unless it was not meant to.
func disturbance(r figures.Record) string {
	if r.Others < 0.1 || r.Measure == "busy" {
		return ""
	}
	return fmt.Sprintf(", beside other work on %.0f%% of the machine", 100*r.Others)
}

// targetKey is the key of the figure to beat, of figures.Targets.
func targetKey(r figures.Record, value string) string {
	switch {
	case r.Measure != "put":
		return "store " + r.Measure + " " + value
	case r.Params["clients"] == 1:
		return fmt.Sprintf("store put 1 %s %v", value, r.Params["log"])
	default:
		return fmt.Sprintf("store put %v %s", r.Params["clients"], value)
	}
}

// params writes parameters as "a=1 b=2", in order.
func params(p map[string]any) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(p)) {
		out = append(out, fmt.Sprintf("%s=%v", strings.ReplaceAll(k, " ", "-"), strings.ReplaceAll(fmt.Sprint(p[k]), " ", "-")))
	}
	return strings.Join(out, " ")
}

// brackets writes parameters for a line of progress.
func brackets(p map[string]any) string {
	if len(p) == 0 {
		return ""
	}
	return " (" + params(p) + ")"
}

// histograms have the measures with single samples, and the width of a bar in milliseconds.
var histograms = map[string]float64{measureKill: 50, measureFreeze: 50, measureTransfer: 10, measureShutdown: 10}

// print writes the table, and a histogram of what has few samples.
func print(out io.Writer, records []figures.Record, reference string) error {
	var all []figures.Row
	for _, r := range records {
		if r.Measure == measureSetup {
			for _, k := range slices.Sorted(maps.Keys(r.Params)) {
				fmt.Fprintf(out, "%s: %v\n", k, r.Params[k])
			}
			fmt.Fprintln(out)
		}
		all = append(all, rows(r)...)
	}
	if err := figures.Compare(out, all, reference); err != nil {
		return err
	}
	fmt.Fprintf(out, "\n%s\n", verdict(all))
	for _, r := range records {
		width, ok := histograms[r.Measure]
		if !ok {
			continue
		}
		named := []figures.Named{{Name: params(map[string]any{"log": r.Params["log"], "clients are": r.Params["clients are"]}), Samples: r.Samples}}
		if r.Reference != nil {
			named = append(named, figures.Named{Name: r.Reference.Name, Samples: r.Reference.Samples})
		}
		fmt.Fprintf(out, "\n%s: ms without an acknowledged write\n", r.Measure)
		if err := figures.Histogram(out, width, named...); err != nil {
			return err
		}
	}
	return nil
}

// verdict sums the verdicts up and names what is beyond its bound.
func verdict(all []figures.Row) string {
	met, bounds := 0, 0
	var beyond strings.Builder
	for _, r := range all {
		switch r.Verdict() {
		case "ok":
			met, bounds = met+1, bounds+1
		case "not yet":
			bounds++
			fmt.Fprintf(&beyond, "\n  not yet: %s, %s", r.Params, r.Measure)
		}
	}
	return fmt.Sprintf("%d of %d bounds are met.%s", met, bounds, beyond.String())
}

func writeLines(path string, records []figures.Record) error {
	if path == "" {
		return nil
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("-json: %w", err)
	}
	defer f.Close()
	if err := figures.WriteLines(f, records); err != nil {
		return err
	}
	return f.Close()
}
