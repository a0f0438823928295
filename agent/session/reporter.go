package session

import (
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// maxNotes bounds the events and the stage times that wait for a session; the oldest go first.
const maxNotes = 512

// reporter holds what is to be told upward. It never blocks who reports. Of a pod only the newest status is kept, at
// most one message per pod is on its way, and it is sent again with the next session until acknowledged.
type reporter struct {
	wake chan struct{}
	told chan struct{} // capacity 1: facts were replaced

	mu     sync.Mutex
	pods   map[types.UID]*podReport
	facts  *v1.Node
	tell   bool // facts have not been sent in this session
	events []*v1.Event
	stages []*fleetv1.StageTimes
}

// podReport is what is to be told of one pod.
type podReport struct {
	namespace, name string

	status   *v1.Pod // newest status not yet sent; nil = none
	gone     bool    // nothing is left of the pod: to be said after its last status
	goneSent bool
	sent     *v1.Pod // on its way
	inFlight bool
}

func newReporter(facts *v1.Node) *reporter {
	return &reporter{wake: make(chan struct{}, 1), told: make(chan struct{}, 1), pods: make(map[types.UID]*podReport), facts: facts}
}

func (r *reporter) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *reporter) pod(namespace, name string, uid types.UID) *podReport {
	p := r.pods[uid]
	if p == nil {
		p = &podReport{namespace: namespace, name: name}
		r.pods[uid] = p
	}
	return p
}

// begin makes everything unacknowledged due again, for a new session that knows the facts already.
func (r *reporter) begin() *v1.Node {
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
	r.tell = false
	return r.facts
}

// acknowledged takes a StatusAck.
func (r *reporter) acknowledged(uid types.UID) {
	r.mu.Lock()
	p := r.pods[uid]
	if p != nil && p.inFlight {
		p.inFlight, p.sent = false, nil
		if p.status == nil && (!p.gone || p.goneSent) {
			delete(r.pods, uid)
		}
	}
	r.mu.Unlock()
	r.poke()
}

// next takes everything that is due. What cannot be encoded is dropped and returned as an error.
func (r *reporter) next() (out []*fleetv1.AgentMessage, errs []error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tell {
		r.tell = false
		if raw, err := encode("Node", r.facts); err != nil {
			errs = append(errs, err)
		} else {
			out = append(out, &fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_Facts{Facts: &fleetv1.NodeFacts{Node: raw}}})
		}
	}
	for uid, p := range r.pods {
		m, err := p.message(uid)
		if err != nil {
			errs = append(errs, err)
		}
		if m != nil {
			out = append(out, m)
		}
	}
	for _, e := range r.events {
		if raw, err := encode("Event", e); err != nil {
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

// message is what is due of one pod; nil when it must wait for an acknowledgement or there is nothing.
func (p *podReport) message(uid types.UID) (*fleetv1.AgentMessage, error) {
	switch {
	case p.inFlight:
		return nil, nil
	case p.status != nil:
		status := p.status
		p.status = nil
		raw, err := encode("Pod", status)
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
	// Only what the control plane reads travels, and the caller may go on changing its own.
	report := &v1.Pod{Status: *pod.Status.DeepCopy()}
	report.Namespace, report.Name, report.UID = pod.Namespace, pod.Name, pod.UID
	r := s.reporter
	r.mu.Lock()
	r.pod(pod.Namespace, pod.Name, pod.UID).status = report
	r.mu.Unlock()
	s.said.put(report)
	r.poke()
}

// PodGone implements agent.Reporter.
func (s *Session) PodGone(namespace, name string, uid types.UID) {
	r := s.reporter
	r.mu.Lock()
	p := r.pod(namespace, name, uid)
	p.gone, p.goneSent = true, false
	r.mu.Unlock()
	r.poke()
}

// Event implements agent.Reporter.
func (s *Session) Event(e *v1.Event) {
	r := s.reporter
	r.mu.Lock()
	r.events = appendBounded(r.events, e.DeepCopy())
	r.mu.Unlock()
	r.poke()
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
	r.poke()
}

func appendBounded[T any](list []T, v T) []T {
	if len(list) >= maxNotes {
		list = slices.Delete(list, 0, len(list)-maxNotes+1)
	}
	return append(list, v)
}

// Facts implements agent.Reporter.
func (s *Session) Facts(node *v1.Node) {
	r := s.reporter
	r.mu.Lock()
	r.facts, r.tell = node.DeepCopy(), true
	r.mu.Unlock()
	select {
	case r.told <- struct{}{}:
	default:
	}
	r.poke()
}

// unready says that the facts say in words that the node cannot run pods.
func (r *reporter) unready() bool {
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
func (s *Session) ProxyApplied(revision uint64) { s.proxy.set(revision) }

// gates are the pods' permissions to be stopped.
type gates struct {
	mu    sync.Mutex
	byPod map[types.UID]*gate
}

type gate struct {
	open chan struct{}
	once sync.Once
}

func (g *gates) of(uid types.UID) *gate {
	g.mu.Lock()
	defer g.mu.Unlock()
	x := g.byPod[uid]
	if x == nil {
		x = &gate{open: make(chan struct{})}
		g.byPod[uid] = x
	}
	return x
}

// keep forgets the gates of all pods but those.
func (g *gates) keep(pods map[types.UID]struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for uid := range g.byPod {
		if _, ok := pods[uid]; !ok {
			delete(g.byPod, uid)
		}
	}
}

// StopGate implements agent.Reporter.
func (s *Session) StopGate(pod types.UID) <-chan struct{} { return s.gates.of(pod).open }
