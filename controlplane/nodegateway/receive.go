package nodegateway

import (
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// receive reads the agent's messages until the stream ends. It queues work and never waits for its
// completion.
func (x *session) receive(stream fleetv1.Fleet_SessionServer) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if m.Epoch != x.epoch {
			x.log.Debug("message of another epoch dropped", "epoch", x.epoch, "got", m.Epoch)
			continue
		}
		x.mu.Lock()
		x.heard = time.Now()
		x.mu.Unlock()
		if err := x.handle(m); err != nil {
			// A message that cannot be parsed does not end the session.
			x.log.Warn("message from agent", "err", err)
		}
	}
}

func (x *session) handle(m *fleetv1.AgentMessage) error {
	switch k := m.Kind.(type) {
	case *fleetv1.AgentMessage_Heartbeat:
		x.heartbeat(k.Heartbeat, time.Now())
	case *fleetv1.AgentMessage_Facts:
		if err := x.setFacts(k.Facts); err != nil {
			return err
		}
		x.syncNode()
	case *fleetv1.AgentMessage_PodStatus:
		return x.podStatus(k.PodStatus)
	case *fleetv1.AgentMessage_PodGone:
		return x.podGone(k.PodGone)
	case *fleetv1.AgentMessage_Event:
		return x.event(k.Event)
	case *fleetv1.AgentMessage_Stages:
		x.stages(k.Stages)
	case *fleetv1.AgentMessage_TokenRequest:
		x.tokenRequest(k.TokenRequest)
	case *fleetv1.AgentMessage_Authorities:
		return x.setAuthorities(k.Authorities)
	default:
		return fmt.Errorf("node %s: unknown message %T", x.node, m.Kind)
	}
	return nil
}

// heartbeat acknowledges a heartbeat immediately, on the reading goroutine. It does not if this
// replica cannot commit writes; the agent then moves to another replica.
func (x *session) heartbeat(h *fleetv1.Heartbeat, now time.Time) {
	x.clock.sample(now.UnixNano() - h.SentUnixNano)
	x.srv.gate.progress(x.node, h.ProxyRevision)
	x.srv.heard.note(x.node, now)
	if !x.srv.cfg.Connected() {
		return
	}
	every, _ := x.srv.pace()
	if err := x.tell(&fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_HeartbeatAck{HeartbeatAck: &fleetv1.HeartbeatAck{
		SentUnixNano: h.SentUnixNano, ReplicaUnixNano: now.UnixNano(), HeartbeatMillis: every.Milliseconds()}}}); err != nil {
		x.end(err)
	}
}

func (x *session) setFacts(f *fleetv1.NodeFacts) error {
	n := &v1.Node{}
	if len(f.GetNode()) > 0 {
		if err := decode(f.Node, "Node", n); err != nil {
			return fmt.Errorf("facts of node %s: %w", x.node, err)
		}
	}
	n.Name = x.node
	x.mu.Lock()
	x.facts = n
	x.mu.Unlock()
	return nil
}

// stages records the durations that the agent measured, converted to this replica's clock.
func (x *session) stages(st *fleetv1.StageTimes) {
	id := api.TraceID(st.TraceParent)
	if id == "" {
		return
	}
	shift := x.clock.estimate()
	out := make([]api.Stage, 0, len(st.Stages))
	for _, t := range st.Stages {
		out = append(out, api.Stage{
			TraceID: id, Name: t.Name, Actor: "agent/" + x.node, Object: st.Object, Detail: t.Detail,
			Start: time.Unix(0, t.StartUnixNano+shift), Duration: time.Duration(t.DurationNano),
		})
	}
	x.srv.cfg.Timeline.Record(out...)
}

// offset estimates the difference between the replica's clock and the agent's. A sample is the true
// difference plus the heartbeat's transit time, so the smallest recent sample is the best estimate.
// The zero value is ready to use.
type offset struct {
	mu      sync.Mutex
	samples [16]int64
	n       int
}

func (o *offset) sample(nanos int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.samples[o.n%len(o.samples)] = nanos
	o.n++
}

// estimate returns the estimated difference in nanoseconds, or 0 without samples.
func (o *offset) estimate() int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.n == 0 {
		return 0
	}
	held := o.samples[:min(o.n, len(o.samples))]
	least := held[0]
	for _, s := range held[1:] {
		least = min(least, s)
	}
	return least
}
