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

// shownValue is a value of a measurement that the table shows, with its label and unit.
type shownValue struct{ value, label, unit string }

// Names of the measurements that have special rows or a special place in the table.
const (
	nameTransfer   = "transfer"
	nameShutdown   = "shutdown of the leader"
	nameKill       = "kill"
	nameFreeze     = "freeze"
	nameInstall    = "install on a follower"
	nameMemory     = "memory"
	nameSnapshot   = "snapshot by the leader"
	nameSnapshots  = "snapshot by all"
	nameRestart    = "restart of a follower"
	nameRestarts   = "restart of all"
	nameComparison = "comparison of states"
)

var (
	latencyColumns = []shownValue{{"p50_ms", "p50", "ms"}, {"p99_ms", "p99", "ms"}}
	failureColumn  = shownValue{"failed_calls", "failed calls", ""}
	pauseColumns   = []shownValue{{"p50_ms", "pause p50", "ms"}, {"max_ms", "pause max", "ms"},
		{"quiet_max_ms", "longest pause just before", "ms"}, failureColumn}
	// Values of puts during an event and before it.
	underLoadColumns = []shownValue{
		{"pause_ms", "longest pause during the event", "ms"}, {"before_pause_ms", "longest pause before", "ms"},
		{"p50_ms", "p50 during the event", "ms"}, {"before_p50_ms", "p50 before", "ms"},
		{"p99_ms", "p99 during the event", "ms"}, {"before_p99_ms", "p99 before", "ms"},
		{"after_p99_ms", "p99 after", "ms"},
		{"rate", "rate during the event", "/s"}, {"before_rate", "rate before", "/s"}, failureColumn,
	}
	snapshots = []shownValue{
		{"pause_ms", "longest pause during the event", "ms"},
		{"quiet_ms", "longest pause in an equal time without it", "ms"},
		{"took_s", "took", "s"},
		{"memory_percent", "resident memory, of the state", "%"}, {"heap_percent", "heap, of the state", "%"},
	}
)

var columns = map[string][]shownValue{
	"fsync": latencyColumns,
	"put": {{"rate", "rate", "/s"}, latencyColumns[0], latencyColumns[1],
		{"cpu_us", "CPU of all processes per call", "µs"}},
	"get": {{"rate", "rate", "/s"}, latencyColumns[0], latencyColumns[1],
		{"cpu_us", "CPU of all processes per call", "µs"}},
	"list":                        {latencyColumns[0], latencyColumns[1], {"mb_s", "rate", "MB/s"}},
	"watch":                       {latencyColumns[0], latencyColumns[1], {"cores", "CPU of all processes", "cores"}},
	"seen on followers after ack": latencyColumns,
	"idle":                        {{"cores", "CPU of all processes", "cores"}},
	"busy": {{"elections", "elections", ""}, failureColumn, {"rate", "rate", "/s"},
		latencyColumns[1]},
	nameTransfer: pauseColumns,
	nameShutdown: append(pauseColumns,
		shownValue{"took_p50_ms", "until the process has exited, p50", "ms"}),
	nameKill: {{"p50_ms", "time without writes, p50", "ms"}, {"p99_ms", "time without writes, p99", "ms"},
		{"max_ms", "time without writes, max", "ms"}, failureColumn},
	nameFreeze: {{"p50_ms", "time without writes, p50", "ms"}, {"p99_ms", "time without writes, p99", "ms"},
		{"max_ms", "time without writes, max", "ms"}, failureColumn},
	nameInstall: append([]shownValue{{"took_s", "start until caught up", "s"}}, underLoadColumns...),
	nameMemory: {{"kib_per_kib", "per stored KiB", "KiB"},
		{"anonymous_per_kib", "anonymous memory of it", "KiB"}},
	nameSnapshot:   snapshots,
	nameSnapshots:  snapshots,
	nameRestart:    {{"took_s", "until it serves reads", "s"}, {"cpu_s", "CPU", "s"}},
	nameRestarts:   {{"took_s", "until all serve reads", "s"}, {"cpu_s", "CPU of all", "s"}},
	nameComparison: append([]shownValue{{"took_s", "took", "s"}}, underLoadColumns...),
}

// nameSetup is the name of the record that describes the compared systems.
const nameSetup = "setup"

// newSetupRecord returns the record that describes the compared systems.
func (b *benchmarks) newSetupRecord() figures.Record {
	p := map[string]any{
		"ours": fmt.Sprintf("%d replicas in processes of their own on loopback, TLS between them, clients in their "+
			"processes or in another over gRPC without TLS", membersOfGroup),
		"both": fmt.Sprintf("fsync, %d connections to each member where clients are in a process of their own, values "+
			"are medians of %d rounds by turns", b.options.load.conns, b.options.load.rounds),
	}
	if b.options.etcdName != "" {
		p["reference"] = fmt.Sprintf("%s, %d members in processes of their own on loopback, TLS between them, etcd's "+
			"own client in another process without TLS, defaults but for a quota of 8 GiB", b.options.etcdName,
			membersOfGroup)
	}
	return figures.Record{Measure: nameSetup, Params: p, Values: map[string]float64{}}
}

// tableRows returns the rows of the table for a record.
func tableRows(r figures.Record) []figures.Row {
	var out []figures.Row
	for _, c := range columns[r.Measure] {
		v, ok := r.Values[c.value]
		if !ok {
			continue
		}
		row := figures.Row{Measure: c.label, Params: r.Measure + bracketParams(r.Params) + disturbanceNote(r),
			Key: targetKey(r, c.value), Figure: v, Unit: c.unit}
		if r.Reference != nil {
			if other, ok := r.Reference.Values[c.value]; ok {
				row.Reference = &figures.Reference{Name: r.Reference.Name, Figure: other}
			}
		}
		out = append(out, row)
	}
	return out
}

// disturbanceNote returns a note if other work used at least a tenth of the machine, except for the
// measurement "busy".
func disturbanceNote(r figures.Record) string {
	if r.Others < 0.1 || r.Measure == "busy" {
		return ""
	}
	return fmt.Sprintf(", with other work on %.0f%% of the machine", 100*r.Others)
}

// targetKey returns the key in figures.Targets for a value of a record.
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

// formatParams formats parameters as "a=1 b=2", sorted by name.
func formatParams(p map[string]any) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(p)) {
		out = append(out, fmt.Sprintf("%s=%v", strings.ReplaceAll(k, " ", "-"),
			strings.ReplaceAll(fmt.Sprint(p[k]), " ", "-")))
	}
	return strings.Join(out, " ")
}

// bracketParams formats parameters in parentheses for the progress output.
func bracketParams(p map[string]any) string {
	if len(p) == 0 {
		return ""
	}
	return " (" + formatParams(p) + ")"
}

// histograms maps the measurements with single samples to the width of a bucket in milliseconds.
var histograms = map[string]float64{nameKill: 50, nameFreeze: 50, nameTransfer: 10, nameShutdown: 10}

// printRecords writes the table, and a histogram for measurements with few samples.
func printRecords(out io.Writer, records []figures.Record, reference string) error {
	var all []figures.Row
	for _, r := range records {
		if r.Measure == nameSetup {
			for _, k := range slices.Sorted(maps.Keys(r.Params)) {
				fmt.Fprintf(out, "%s: %v\n", k, r.Params[k])
			}
			fmt.Fprintln(out)
		}
		all = append(all, tableRows(r)...)
	}
	if err := figures.Compare(out, all, reference); err != nil {
		return err
	}
	fmt.Fprintf(out, "\n%s\n", summarizeVerdicts(all))
	for _, r := range records {
		width, ok := histograms[r.Measure]
		if !ok {
			continue
		}
		named := []figures.Named{{Name: formatParams(map[string]any{"log": r.Params["log"],
			"clients are": r.Params["clients are"]}), Samples: r.Samples}}
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

// summarizeVerdicts returns the number of targets that are met, and names the others.
func summarizeVerdicts(all []figures.Row) string {
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

func writeRecords(path string, records []figures.Record) error {
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
