package session

import (
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// maxPendingReports bounds the events, and the stage times, that wait for a session. The oldest are
// dropped first.
const maxPendingReports = 512

// reporter holds the reports to the control plane. Reporting never blocks. For each pod only the
// newest status is kept, and at most one message is unacknowledged. An unacknowledged message is
// sent again in the next session.
type reporter struct {
	wake          chan struct{}
	factsReplaced chan struct{} // capacity 1; signals that facts were replaced

	mu           sync.Mutex
	pods         map[types.UID]*podReport
	facts        *v1.Node
	factsPending bool // facts have not been sent in this session
	events       []*v1.Event
	stages       []*fleetv1.StageTimes
}

// podReport is the pending report of one pod.
type podReport struct {
	namespace, name string

	status   *v1.Pod // newest status that was not sent; nil = none
	gone     bool    // the pod is removed from the node: PodGone is sent after the last status
	goneSent bool
	sent     *v1.Pod // status in the unacknowledged message
	inFlight bool
}

func newReporter(facts *v1.Node) *reporter {
	return &reporter{wake: make(chan struct{}, 1), factsReplaced: make(chan struct{}, 1), pods: make(map[types.UID]*podReport), facts: facts}
}

func (r *reporter) wakeSender() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *reporter) reportFor(namespace, name string, uid types.UID) *podReport {
	p := r.pods[uid]
	if p == nil {
		p = &podReport{namespace: namespace, name: name}
		r.pods[uid] = p
	}
	return p
}

// resetForSession makes all unacknowledged reports pending again, and returns the facts to be sent
// in the Hello of a new session.
func (r *reporter) resetForSession() *v1.Node {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.pods {
		if !p.inFlight {
			continue
		}
		p.inFlight, p.goneSent = false, false
		if p.status == nil {
			p.status = p.sent
		}
		p.sent = nil
	}
	r.factsPending = false
	return r.facts
}

// handleStatusAck handles the acknowledgment of a pod's report.
func (r *reporter) handleStatusAck(uid types.UID) {
	r.mu.Lock()
	p := r.pods[uid]
	if p != nil && p.inFlight {
		p.inFlight, p.sent = false, nil
		if p.status == nil && (!p.gone || p.goneSent) {
			delete(r.pods, uid)
		}
	}
	r.mu.Unlock()
	r.wakeSender()
}

// pendingMessages returns all pending messages and marks them as sent. An object that cannot be
// encoded is dropped and returned as an error.
func (r *reporter) pendingMessages() (out []*fleetv1.AgentMessage, errs []error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.factsPending {
		r.factsPending = false
		if raw, err := encodeObject("Node", r.facts); err != nil {
			errs = append(errs, err)
		} else {
			out = append(out, &fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_Facts{Facts: &fleetv1.NodeFacts{Node: raw}}})
		}
	}
	for uid, p := range r.pods {
		m, err := p.nextMessage(uid)
		if err != nil {
			errs = append(errs, err)
		}
		if m != nil {
			out = append(out, m)
		}
	}
	for _, e := range r.events {
		if raw, err := encodeObject("Event", e); err != nil {
			errs = append(errs, err)
		} else {
			out = append(out, &fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_Event{Event: raw}})
		}
	}
	for _, st := range r.stages {
		out = append(out, &fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_Stages{Stages: st}})
	}
	r.events, r.stages = nil, nil
	return out, errs
}

// nextMessage returns the next message of a pod, or nil if there is nothing to send or an
// acknowledgment is missing.
func (p *podReport) nextMessage(uid types.UID) (*fleetv1.AgentMessage, error) {
	switch {
	case p.inFlight:
		return nil, nil
	case p.status != nil:
		status := p.status
		p.status = nil
		raw, err := encodeObject("Pod", status)
		if err != nil {
			return nil, err
		}
		p.sent, p.inFlight = status, true
		return &fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_PodStatus{PodStatus: &fleetv1.PodStatus{
			Namespace: p.namespace, Name: p.name, Uid: string(uid), Pod: raw}}}, nil
	case p.gone && !p.goneSent:
		p.goneSent, p.inFlight = true, true
		return &fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_PodGone{PodGone: &fleetv1.PodGone{
			Namespace: p.namespace, Name: p.name, Uid: string(uid)}}}, nil
	}
	return nil, nil
}

// PodStatus implements agent.Reporter.
func (s *Session) PodStatus(pod *v1.Pod) {
	// Only the fields that the control plane reads are sent. The copy allows the caller to change
	// its own pod.
	report := &v1.Pod{Status: *pod.Status.DeepCopy()}
	report.Namespace, report.Name, report.UID = pod.Namespace, pod.Name, pod.UID
	r := s.reporter
	r.mu.Lock()
	r.reportFor(pod.Namespace, pod.Name, pod.UID).status = report
	r.mu.Unlock()
	s.statuses.setStatus(report)
	r.wakeSender()
}

// PodGone implements agent.Reporter.
func (s *Session) PodGone(namespace, name string, uid types.UID) {
	r := s.reporter
	r.mu.Lock()
	p := r.reportFor(namespace, name, uid)
	p.gone, p.goneSent = true, false
	r.mu.Unlock()
	r.wakeSender()
}

// Event implements agent.Reporter.
func (s *Session) Event(e *v1.Event) {
	r := s.reporter
	r.mu.Lock()
	r.events = appendBounded(r.events, e.DeepCopy())
	r.mu.Unlock()
	r.wakeSender()
}

// Stages implements agent.Reporter.
func (s *Session) Stages(traceParent, object string, stages []agent.StageTime) {
	if traceParent == "" || len(stages) == 0 {
		return
	}
	m := &fleetv1.StageTimes{TraceParent: traceParent, Object: object}
	for _, st := range stages {
		m.Stages = append(m.Stages, &fleetv1.StageTime{
			Name: st.Name, StartUnixNano: st.Start.UnixNano(), DurationNano: int64(st.Duration), Detail: st.Detail})
	}
	r := s.reporter
	r.mu.Lock()
	r.stages = appendBounded(r.stages, m)
	r.mu.Unlock()
	r.wakeSender()
}

func appendBounded[T any](list []T, v T) []T {
	if len(list) >= maxPendingReports {
		list = slices.Delete(list, 0, len(list)-maxPendingReports+1)
	}
	return append(list, v)
}

// Facts implements agent.Reporter.
func (s *Session) Facts(node *v1.Node) {
	r := s.reporter
	r.mu.Lock()
	r.facts, r.factsPending = node.DeepCopy(), true
	r.mu.Unlock()
	select {
	case r.factsReplaced <- struct{}{}:
	default:
	}
	r.wakeSender()
}

// reportsNotReady reports whether the facts have a Ready condition that is not true.
func (r *reporter) reportsNotReady() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.facts == nil {
		return false
	}
	for _, c := range r.facts.Status.Conditions {
		if c.Type == v1.NodeReady {
			return c.Status != v1.ConditionTrue
		}
	}
	return false
}

// ProxyApplied implements agent.Reporter.
func (s *Session) ProxyApplied(revision uint64) { s.proxy.advanceTo(revision) }

// stopGates are the permissions to stop pods, by UID.
type stopGates struct {
	mu    sync.Mutex
	byPod map[types.UID]*stopGate
}

type stopGate struct {
	open chan struct{}
	once sync.Once
}

func (g *stopGates) gateFor(uid types.UID) *stopGate {
	g.mu.Lock()
	defer g.mu.Unlock()
	x := g.byPod[uid]
	if x == nil {
		x = &stopGate{open: make(chan struct{})}
		g.byPod[uid] = x
	}
	return x
}

// retainGates drops the gates of all pods except the given ones.
func (g *stopGates) retainGates(pods map[types.UID]struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for uid := range g.byPod {
		if _, ok := pods[uid]; !ok {
			delete(g.byPod, uid)
		}
	}
}

// StopGate implements agent.Reporter.
func (s *Session) StopGate(pod types.UID) <-chan struct{} { return s.gates.gateFor(pod).open }
