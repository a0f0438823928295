package report

import (
	"slices"
	"sync"
	"time"

	"keelson.dev/keelson/controlplane/api"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// RecordStages adds the stages that the agent measured to the timeline. Their times are converted
// to this replica's clock.
func (r *Reporter) RecordStages(st *fleetv1.StageTimes) {
	id := api.TraceID(st.TraceParent)
	if id == "" {
		return
	}
	shift := r.clock.estimateOffset()
	stages := make([]api.Stage, 0, len(st.Stages))
	for _, t := range st.Stages {
		stages = append(stages, api.Stage{
			TraceID: id, Name: t.Name, Actor: "agent/" + r.node, Object: st.Object, Detail: t.Detail,
			Start: time.Unix(0, t.StartUnixNano+shift), Duration: time.Duration(t.DurationNano),
		})
	}
	r.cfg.Timeline.Record(stages...)
}

// AddClockSample records a difference in nanoseconds: this replica's time at the receipt of a
// heartbeat minus the agent's time at which it was sent.
func (r *Reporter) AddClockSample(nanos int64) { r.clock.addSample(nanos) }

// clockOffset estimates by how much this replica's clock is ahead of the agent's clock. A sample is
// this difference plus the transit time of a heartbeat, so the smallest recent sample is the best
// estimate. The zero value is ready to use.
type clockOffset struct {
	mu      sync.Mutex
	samples [16]int64
	n       int
}

func (o *clockOffset) addSample(nanos int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.samples[o.n%len(o.samples)] = nanos
	o.n++
}

// estimateOffset returns by how many nanoseconds this replica's clock is ahead of the agent's
// clock, or 0 without samples.
func (o *clockOffset) estimateOffset() int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.n == 0 {
		return 0
	}
	return slices.Min(o.samples[:min(o.n, len(o.samples))])
}
