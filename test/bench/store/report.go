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

var latency = []shown{{"p50_ms", "p50", "ms"}, {"p99_ms", "p99", "ms"}}

var columns = map[string][]shown{
	"fsync":                       latency,
	"put":                         {{"rate", "rate", "/s"}, latency[0], latency[1], {"cpu_us", "CPU of all processes per call", "µs"}},
	"get":                         {{"rate", "rate", "/s"}, latency[0], latency[1], {"cpu_us", "CPU of all processes per call", "µs"}},
	"list":                        {latency[0], latency[1], {"mb_s", "rate", "MB/s"}},
	"watch":                       {latency[0], latency[1], {"cores", "CPU of all processes", "cores"}},
	"seen on followers after ack": latency,
	"idle":                        {{"cores", "CPU of all processes", "cores"}},
	"busy":                        {{"elections", "elections", ""}, {"rate", "rate", "/s"}, latency[1]},
	"transfer":                    {{"p50_ms", "pause p50", "ms"}, {"max_ms", "pause max", "ms"}, {"quiet_max_ms", "longest pause just before", "ms"}, {"failed_calls", "failed calls", ""}},
	"kill":                        {{"p50_ms", "no write p50", "ms"}, {"p99_ms", "no write p99", "ms"}, {"max_ms", "no write max", "ms"}, {"failed_calls", "failed calls", ""}},
	"memory":                      {{"kib_per_kib", "per stored KiB", "KiB"}, {"anonymous_per_kib", "of it anonymous", "KiB"}},
	"restart of a follower":       {{"took_s", "until it reads", "s"}, {"cpu_s", "CPU", "s"}},
	"restart of all":              {{"took_s", "until all read", "s"}, {"cpu_s", "CPU of all", "s"}},
	"snapshot by the leader":      {{"quiet_ms", "longest pause before and after", "ms"}, {"pause_ms", "longest pause during", "ms"}, {"took_s", "took", "s"}, {"memory_percent", "memory, of the state", "%"}},
	"snapshot by all":             {{"quiet_ms", "longest pause before and after", "ms"}, {"pause_ms", "longest pause during", "ms"}, {"took_s", "took", "s"}, {"memory_percent", "memory, of the state", "%"}},
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
		row := figures.Row{Measure: r.Measure + ", " + c.label, Params: params(r.Params), Key: targetKey(r, c.value), Figure: v, Unit: c.unit}
		if r.Reference != nil {
			if other, ok := r.Reference.Values[c.value]; ok {
				row.Reference = &figures.Reference{Name: r.Reference.Name, Figure: other}
			}
		}
		out = append(out, row)
	}
	return out
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
	for _, r := range records {
		if r.Measure != "kill" && r.Measure != "transfer" {
			continue
		}
		width := 50.0
		if r.Measure == "transfer" {
			width = 10
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
