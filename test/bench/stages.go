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

// stageFigure is one stage over the timelines of many pods.
type stageFigure struct {
	name, actor  string
	starts, took float64 // medians in milliseconds; starts is after the first stage of all
	pods         int     // how many timelines have it
}

// summarise takes the median of every stage over timelines. A stage that occurs
// more than once in a timeline (a pod is written twice: made and bound) counts
// as several, told apart by number.
func summarise(timelines [][]api.Stage) []stageFigure {
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

// stages adds where the time of the pods went, from their timelines.
func (n *nodeLoad) stages(ctx context.Context, traces []string) error {
	var timelines [][]api.Stage
	for _, id := range traces {
		if id == "" {
			return fmt.Errorf("a pod has no annotation %s", api.TraceParentAnnotation)
		}
		raw, err := n.client.CoreV1().RESTClient().Get().AbsPath("/timeline", id).DoRaw(ctx)
		if err != nil {
			return fmt.Errorf("timeline %s: %w", id, err)
		}
		var stages []api.Stage
		if err := json.Unmarshal(raw, &stages); err != nil {
			return fmt.Errorf("timeline %s: %w", id, err)
		}
		if len(stages) > 0 {
			timelines = append(timelines, stages)
		}
	}
	values := map[string]float64{"timelines": float64(len(timelines))}
	for _, s := range summarise(timelines) {
		values[s.actor+" "+s.name+" start_ms"], values[s.actor+" "+s.name+" p50_ms"] = s.starts, s.took
		n.row(figures.Row{
			Measure: "  stage " + s.name + ", p50", Figure: s.took, Unit: "ms",
			Note: fmt.Sprintf("%s, starts at %.1f ms, in %d of %d pods", s.actor, s.starts, s.pods, len(traces)),
		})
	}
	n.records = append(n.records, figures.Record{Measure: "stages of pod create to Ready", Params: map[string]any{"pods": len(traces)}, Values: values})
	return nil
}
