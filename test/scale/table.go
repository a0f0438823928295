package main

import (
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/test/bench/figures"
)

func ignoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// addFleetRows adds the rows of a measurement to the table.
func (b *benchmarks) addFleetRows(r figures.Record) {
	row := func(what, key string, value, unit string, note string) {
		b.tally.AddRow(figures.Row{Measure: fmt.Sprintf("%d nodes, %d pods, %s: %s", b.options.nodes, b.options.pods,
			r.Measure, what), Key: key,
			Figure: r.Values[value], Unit: unit, Note: note})
	}
	switch r.Measure {
	case "nodes join", "pods run":
		row("all within", "", "seconds", "s", fmt.Sprintf("%.0f/s; %s", r.Values["rate"], formatCPU(r, 0)))
	case "rest":
		row("writes", "scale rest writes", "writes", "",
			fmt.Sprintf("in %s; %s", b.options.rest, formatCPU(r, b.options.rest.Seconds())))
	case "churn":
		row("writes", "", "writes", "", fmt.Sprintf("in %s, of %.0f pods deleted; %s", b.options.churn,
			r.Values["delete pod calls"], formatCPU(r, b.options.churn.Seconds())))
		for _, sort := range []string{"delete pod", "get pod", "list pods of a node", "create", "watch"} {
			what := sort
			if sort == "watch" {
				what = "event after the response to its write"
			}
			row(what+", p99", "scale call p99_ms", sort+" p99_ms", "ms",
				fmt.Sprintf("p50 %.1f ms, %.0f calls", r.Values[sort+" p50_ms"], r.Values[sort+" calls"]))
		}
	case "leader killed":
		row("heartbeats of all nodes again", "", "seconds", "s",
			fmt.Sprintf("%.0f nodes were lost; %s", r.Values["lost"], formatCPU(r, 0)))
		row("first write", "", "write_ms", "ms", "")
	}
	for name := range r.Values {
		if replica, ok := strings.CutPrefix(name, "rss_mib cp"); ok && r.Measure == "rest" {
			role := "follower"
			if "cp"+replica == r.Params["leader"] {
				role = "leader"
			}
			row("memory of a "+role, "", name, "MiB", "cp"+replica)
		}
	}
}

// formatCPU returns the processor time of the leader, both followers and all agents. It is a share
// of one processor if seconds is not 0, and in seconds otherwise.
func formatCPU(r figures.Record, seconds float64) string {
	leader, followers, agents := 0.0, 0.0, 0.0
	for name, s := range r.CPU {
		switch {
		case name == r.Params["leader"]:
			leader += s
		case strings.HasPrefix(name, "agents"):
			agents += s
		case strings.HasPrefix(name, "cp"):
			followers += s
		}
	}
	if seconds == 0 {
		return fmt.Sprintf("cpu s: leader %.1f, both followers %.1f, agents %.1f", leader, followers, agents)
	}
	return fmt.Sprintf("share of a core: leader %.0f%%, both followers %.0f%%, agents %.0f%%", 100*leader/seconds,
		100*followers/seconds, 100*agents/seconds)
}
