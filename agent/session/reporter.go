package session

import (
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/wakeup"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// maxPendingReports is the maximum number of pending events, and of pending stage times, while no
// session exists. The oldest are dropped first.
const maxPendingReports = 512

// nodeReports is the report side of a Session: it contains everything that this node reports to the
// replicas. It also contains the stop gates, with which the control plane permits stopping pods. It
// implements agent.Reporter.
type nodeReports struct {
	reporter *reporter         // reports that the session sends
	statuses *reportedStatuses // the last status of each pod, for the checkpoint
	gates    *stopGates
	proxy    *revisionProgress // revision of the Service rules; sent on every standby stream
	usage    *latestUsage      // sent on every standby stream
}

var _ agent.Reporter = (*nodeReports)(nil)

func newNodeReports(facts *v1.Node) *nodeReports {
	return &nodeReports{reporter: newReporter(facts), statuses: newReportedStatuses(),
		gates: &stopGates{byPod: make(map[types.UID]*stopGate)},
		proxy: newRevisionProgress(), usage: newLatestUsage()}
}

// reporter queues the reports of this node to the control plane. Adding a report never blocks. For
// each pod, only the newest status is kept, and at most one message is unacknowledged.
// Unacknowledged messages are sent again in the next session.
type reporter struct {
	wake          wakeup.Signal
	factsReplaced wakeup.Signal // signals that facts were replaced

	mu           sync.Mutex
	pods         map[types.UID]*podReport
	facts        *v1.Node
	factsPending bool // facts have not been sent in this session
	events       []*v1.Event
	stages       []*fleetv1.StageTimes
}

// podReport is the report about one pod that the control plane has not acknowledged yet.
type podReport struct {
	namespace, name string

	status   *v1.Pod // newest status that was not sent; nil = none
	gone     bool    // the pod is removed from the node: PodGone is sent after the last status
	goneSent bool
	sent     *v1.Pod // status in the unacknowledged message
	inFlight bool
}

func newReporter(facts *v1.Node) *reporter {
	return &reporter{wake: wakeup.New(), factsReplaced: wakeup.New(),
		pods: make(map[types.UID]*podReport), facts: facts}
}

func (r *reporter) wakeSender() {
	r.wake.Send()
}

func (r *reporter) reportFor(namespace, name string, uid types.UID) *podReport {
	p := r.pods[uid]
	if p == nil {
		p = &podReport{namespace: namespace, name: name}
		r.pods[uid] = p
	}
	return p
}

// resetForSession makes all unacknowledged reports pending again, for a new session. It returns the
// node's facts, which are part of the Hello message.
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

// handleStatusAck removes the acknowledged message of a pod from the queue: its sent status, or the
// report of its removal. A newer status remains queued.
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

// pendingMessages returns all pending messages and marks them as sent. It drops each object that
// cannot be encoded, and returns an error for it.
func (r *reporter) pendingMessages() (out []*fleetv1.AgentMessage, errs []error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.factsPending {
		r.factsPending = false
		if raw, err := encodeObject("Node", r.facts); err != nil {
			errs = append(errs, err)
		} else {
			out = append(out,
				&fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_Facts{Facts: &fleetv1.NodeFacts{Node: raw}}})
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

// nextMessage returns the next message of a pod and marks it as sent. It returns nil if nothing is
// pending, or if the previous message is not acknowledged.
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

// PodStatus queues the status of a pod for the control plane, and replaces a queued older status.
// It implements agent.Reporter.
func (n *nodeReports) PodStatus(pod *v1.Pod) {
	// Only the fields that the control plane reads are sent. The copy allows the caller to change
	// its own pod.
	report := &v1.Pod{Status: *pod.Status.DeepCopy()}
	report.Namespace, report.Name, report.UID = pod.Namespace, pod.Name, pod.UID
	r := n.reporter
	r.mu.Lock()
	r.reportFor(pod.Namespace, pod.Name, pod.UID).status = report
	r.mu.Unlock()
	n.statuses.setStatus(report)
	r.wakeSender()
}

// PodGone queues the report that nothing of a terminating pod remains on this node. It implements
// agent.Reporter.
func (n *nodeReports) PodGone(namespace, name string, uid types.UID) {
	r := n.reporter
	r.mu.Lock()
	p := r.reportFor(namespace, name, uid)
	p.gone, p.goneSent = true, false
	r.mu.Unlock()
	r.wakeSender()
}

// Event queues an event for the control plane. If maxPendingReports events are queued, the oldest
// is dropped. It implements agent.Reporter.
func (n *nodeReports) Event(e *v1.Event) {
	r := n.reporter
	r.mu.Lock()
	r.events = appendBounded(r.events, e.DeepCopy())
	r.mu.Unlock()
	r.wakeSender()
}

// Stages queues the measured stages of an operation on object for the control plane. If too many
// are queued, the oldest are dropped. It implements agent.Reporter.
func (n *nodeReports) Stages(traceParent, object string, stages []agent.StageTime) {
	if traceParent == "" || len(stages) == 0 {
		return
	}
	m := &fleetv1.StageTimes{TraceParent: traceParent, Object: object}
	for _, st := range stages {
		m.Stages = append(m.Stages, &fleetv1.StageTime{
			Name: st.Name, StartUnixNano: st.Start.UnixNano(), DurationNano: int64(st.Duration), Detail: st.Detail})
	}
	r := n.reporter
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

// Facts replaces the labels, addresses and status of this node that are reported to the control
// plane. It implements agent.Reporter.
func (n *nodeReports) Facts(node *v1.Node) {
	r := n.reporter
	r.mu.Lock()
	r.facts, r.factsPending = node.DeepCopy(), true
	r.mu.Unlock()
	r.factsReplaced.Send()
	r.wakeSender()
}

// reportsNotReady reports whether the node's facts have a Ready condition with a status other than
// True.
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

// ProxyApplied reports to the replicas that the Service rules of this node reflect the revision. It
// implements agent.Reporter.
func (n *nodeReports) ProxyApplied(revision uint64) { n.proxy.advanceTo(revision) }

// stopGates has one gate per pod UID. An open gate means that the control plane permits sending
// SIGTERM to the pod.
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

// retainGates drops the gates of all pods that are not in pods.
func (g *stopGates) retainGates(pods map[types.UID]struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for uid := range g.byPod {
		if _, ok := pods[uid]; !ok {
			delete(g.byPod, uid)
		}
	}
}

// StopGate returns a channel that is closed when the pod may receive SIGTERM, because no live node
// routes traffic to it any longer. It implements agent.Reporter.
func (n *nodeReports) StopGate(pod types.UID) <-chan struct{} { return n.gates.gateFor(pod).open }
