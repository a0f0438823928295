package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"keelson.dev/keelson/test/bench/figures"
)

// runProgram runs another benchmark program and returns its records, with a prefix before their
// names. The program's own table is discarded.
func (b *benchmarks) runProgram(ctx context.Context, name, prefix string, args ...string) ([]figures.Record, error) {
	dir, err := os.MkdirTemp("", "keelson-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	lines := filepath.Join(dir, "records.json")
	cmd := exec.CommandContext(ctx, filepath.Join(b.options.programs, name), append(args, "-json", lines)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // so that it can clean up
	var errs bytes.Buffer
	cmd.Stderr = &errs
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("program %s: %w: %s", name, err, strings.TrimSpace(errs.String()))
	}
	f, err := os.Open(lines)
	if err != nil {
		return nil, fmt.Errorf("program %s: %w", name, err)
	}
	defer f.Close()
	records, err := figures.ReadLines(f)
	if err != nil {
		return nil, fmt.Errorf("program %s: %w", name, err)
	}
	for i := range records {
		records[i].Measure = prefix + records[i].Measure
	}
	b.tally.Records = append(b.tally.Records, records...)
	return records, nil
}

// measureStore measures the replicated store alone, without API and lab, compared with etcd.
func (b *benchmarks) measureStore(ctx context.Context) error {
	b.tally.LogProgress("store: three replicas and three members of etcd, commits of 1 KiB by 1, 64 and 256 clients")
	records, err := b.runProgram(ctx, "store", "store: ", "-short", "-etcd", b.options.etcd)
	if err != nil {
		return err
	}
	for _, m := range []struct {
		clients        int
		through, label string
	}{
		{1, "leader", "commit 1 KiB, 1 client at the leader"},
		{1, "follower", "commit 1 KiB, 1 client at a follower"},
		{64, "all", "commit 1 KiB, 64 clients"},
		{256, "all", "commit 1 KiB, 256 clients"},
	} {
		r, ok := figures.FindRecord(records, "store: put", map[string]any{"clients": m.clients, "through": m.through})
		if !ok {
			return fmt.Errorf("program store has written no record of %d clients through %s", m.clients, m.through)
		}
		key := fmt.Sprintf("store put %d ", m.clients)
		b.tally.AddRow(figures.Row{Measure: m.label, Key: key + "rate", Figure: r.Values["rate"], Unit: "/s",
			Note:      formatStoreCost(r),
			Reference: referenceValue(r, "rate")})
		p50 := key + "p50_ms"
		if m.clients == 1 {
			p50 = fmt.Sprintf("%s %v", p50, r.Params["log"])
		}
		b.tally.AddRow(figures.Row{Measure: m.label + ", p50", Key: p50, Figure: r.Values["p50_ms"], Unit: "ms",
			Reference: referenceValue(r, "p50_ms")})
		b.tally.AddRow(figures.Row{Measure: m.label + ", p99", Key: key + "p99_ms", Figure: r.Values["p99_ms"],
			Unit:      "ms",
			Reference: referenceValue(r, "p99_ms")})
	}
	r, ok := figures.FindRecord(records, "store: seen on followers after ack", nil)
	if !ok {
		return fmt.Errorf("program store has written no record of the visibility of commits on followers")
	}
	b.tally.AddRow(figures.Row{Measure: "commit seen on followers after ack, p99",
		Key: "store seen on followers after ack p99_ms", Figure: r.Values["p99_ms"], Unit: "ms",
		Reference: referenceValue(r, "p99_ms")})
	return nil
}

// referenceValue returns the value of this name from the record's reference, or nil if r has no
// reference.
func referenceValue(r figures.Record, value string) *figures.Reference {
	if r.Reference == nil {
		return nil
	}
	return &figures.Reference{Name: r.Reference.Name, Figure: r.Reference.Values[value]}
}

func formatStoreCost(r figures.Record) string {
	all := 0.0
	for _, s := range r.CPU {
		all += s
	}
	return fmt.Sprintf("cpu s: replicas with clients %.1f; busy %.0f%%", all, 100*r.Busy)
}
