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
	starts, took float64 // medians in milliseconds; starts is after the timeline's first stage
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

// untilReady leaves out what came after the agent found the pod Ready, such as
// the request that deleted it, and returns that moment.
func untilReady(stages []api.Stage) (kept []api.Stage, ready time.Time) {
	for _, s := range stages {
		if s.Name == "ready" {
			ready = s.Start
		}
	}
	return slices.DeleteFunc(slices.Clone(stages), func(s api.Stage) bool { return !ready.IsZero() && s.Start.After(ready) }), ready
}

// stages adds where the time of the pods went, from their timelines.
func (n *nodeLoad) stages(ctx context.Context, pods []seen) error {
	var timelines [][]api.Stage
	var reported []time.Duration
	for _, p := range pods {
		if p.trace == "" {
			return fmt.Errorf("pod %s has no annotation %s", p.last.Name, api.TraceParentAnnotation)
		}
		raw, err := n.client.CoreV1().RESTClient().Get().AbsPath("/timeline", p.trace).DoRaw(ctx)
		if err != nil {
			return fmt.Errorf("timeline %s: %w", p.trace, err)
		}
		var stages []api.Stage
		if err := json.Unmarshal(raw, &stages); err != nil {
			return fmt.Errorf("timeline %s: %w", p.trace, err)
		}
		if len(stages) == 0 {
			continue
		}
		stages, ready := untilReady(stages)
		timelines = append(timelines, stages)
		if !ready.IsZero() { // a lab's hosts share this machine's clock
			reported = append(reported, p.ready.Sub(ready))
		}
	}
	values := map[string]float64{"timelines": float64(len(timelines))}
	for _, s := range summarise(timelines) {
		values[s.actor+" "+s.name+" start_ms"], values[s.actor+" "+s.name+" p50_ms"] = s.starts, s.took
		if s.took < shownFrom && s.name != "ready" {
			continue
		}
		n.Row(figures.Row{
			Measure: "  stage " + s.name, Figure: s.took, Unit: "ms",
			Note: fmt.Sprintf("%s, starts at %.1f ms, in %d of %d pods", s.actor, s.starts, s.pods, len(pods)),
		})
	}
	values["reported p50_ms"] = figures.Latencies(reported)["p50_ms"]
	n.Row(figures.Row{Measure: "  from the agent's ready to the client's", Figure: values["reported p50_ms"], Unit: "ms"})
	n.Records = append(n.Records, figures.Record{Measure: "stages of pod create to Ready", Params: map[string]any{"pods": len(pods)}, Values: values})
	return nil
}

// shownFrom is how many milliseconds a stage must take for a row of its own; the records have all.
const shownFrom = 0.25
