package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/test/bench/figures"
)

// stageFigure is the summary of one stage in the timelines of many pods.
type stageFigure struct {
	name, actor  string
	starts, took float64 // medians in milliseconds; starts is relative to the timeline's first stage
	pods         int     // number of timelines with this stage
}

// summarizeStages returns the medians of every stage over the timelines, in order of start. A
// repeated stage of a timeline counts as several numbered stages, for example the writes that
// create and bind a pod.
func summarizeStages(timelines [][]api.Stage) []stageFigure {
	type samples struct {
		stageFigure
		starts, took []time.Duration
	}
	byKey := map[string]*samples{}
	for _, stages := range timelines {
		slices.SortStableFunc(stages, func(a, b api.Stage) int { return a.Start.Compare(b.Start) })
		occurred := map[string]int{}
		for _, s := range stages {
			actor, _, _ := strings.Cut(s.Actor, "/")
			key := actor + " " + s.Name
			occurred[key]++
			name := s.Name
			if n := occurred[key]; n > 1 {
				name = fmt.Sprintf("%s (%d)", name, n)
				key = actor + " " + name
			}
			if byKey[key] == nil {
				byKey[key] = &samples{stageFigure: stageFigure{name: name, actor: actor}}
			}
			k := byKey[key]
			k.starts = append(k.starts, s.Start.Sub(stages[0].Start))
			k.took = append(k.took, s.Duration)
		}
	}
	var out []stageFigure
	for _, k := range byKey {
		f := k.stageFigure
		f.pods = len(k.took)
		f.starts = figures.Quantile(k.starts, 0.5) / float64(time.Millisecond)
		f.took = figures.Quantile(k.took, 0.5) / float64(time.Millisecond)
		out = append(out, f)
	}
	slices.SortFunc(out, func(a, b stageFigure) int {
		switch {
		case a.starts < b.starts:
			return -1
		case a.starts > b.starts:
			return 1
		}
		return strings.Compare(a.actor+a.name, b.actor+b.name)
	})
	return out
}

// stagesUntilReady removes the stages after the agent's stage "ready", such as the request that
// deleted the pod. It returns the start of that stage.
func stagesUntilReady(stages []api.Stage) (kept []api.Stage, ready time.Time) {
	for _, s := range stages {
		if s.Name == "ready" {
			ready = s.Start
		}
	}
	return slices.DeleteFunc(slices.Clone(stages), func(s api.Stage) bool {
		return !ready.IsZero() && s.Start.After(ready)
	}), ready
}

// recordStages adds rows with the stages of the pods' timelines.
func (n *podLoad) recordStages(ctx context.Context, pods []podView) error {
	var timelines [][]api.Stage
	var reported []time.Duration
	for _, p := range pods {
		if p.traceID == "" {
			return fmt.Errorf("pod %s has no annotation %s", p.last.Name, api.TraceParentAnnotation)
		}
		raw, err := n.cluster.client.CoreV1().RESTClient().Get().AbsPath("/timeline", p.traceID).DoRaw(ctx)
		if err != nil {
			return fmt.Errorf("timeline %s: %w", p.traceID, err)
		}
		var stages []api.Stage
		if err := json.Unmarshal(raw, &stages); err != nil {
			return fmt.Errorf("timeline %s: %w", p.traceID, err)
		}
		if len(stages) == 0 {
			continue
		}
		stages, ready := stagesUntilReady(stages)
		timelines = append(timelines, stages)
		if !ready.IsZero() { // a lab's hosts share this machine's clock
			reported = append(reported, p.ready.Sub(ready))
		}
	}
	values := map[string]float64{"timelines": float64(len(timelines))}
	for _, s := range summarizeStages(timelines) {
		values[s.actor+" "+s.name+" start_ms"], values[s.actor+" "+s.name+" p50_ms"] = s.starts, s.took
		if s.took < minShownMillis && s.name != "ready" {
			continue
		}
		n.run.tally.AddRow(figures.Row{
			Measure: "  stage " + s.name, Figure: s.took, Unit: "ms",
			Note: fmt.Sprintf("%s, starts at %.1f ms, in %d of %d pods", s.actor, s.starts, s.pods, len(pods)),
		})
	}
	values["reported p50_ms"] = figures.Latencies(reported)["p50_ms"]
	n.run.tally.AddRow(figures.Row{Measure: "  from the agent's stage ready to the client's event",
		Figure: values["reported p50_ms"], Unit: "ms"})
	n.run.tally.Records = append(n.run.tally.Records, figures.Record{Measure: "stages of pod create to Ready",
		Params: map[string]any{"pods": len(pods)}, Values: values})
	return nil
}

// minShownMillis is the least duration in milliseconds of a stage with its own row. The records
// have all stages.
const minShownMillis = 0.25
