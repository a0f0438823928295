package fake

import (
	"context"
	"fmt"
	"reflect"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

func (c *Cluster) signalReport() {
	close(c.cond)
	c.cond = make(chan struct{})
}

// PodStatus sets the status in a copy of the stored pod, as the control plane would do. It
// implements agent.Reporter.
func (c *Cluster) PodStatus(pod *v1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.history[pod.UID]
	if len(h) == 0 || !reflect.DeepEqual(h[len(h)-1], pod.Status) {
		c.history[pod.UID] = append(h, *pod.Status.DeepCopy())
	}
	c.store.setPodStatus(pod)
	c.signalReport()
}

// PodGone deletes the stored pod, as the control plane would do. It implements agent.Reporter.
func (c *Cluster) PodGone(namespace, name string, uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gone[uid] = true
	c.store.deletePod(namespace, name, uid)
	c.signalReport()
}

// Event stores an event. It replaces an older event with the same name. It implements
// agent.Reporter.
func (c *Cluster) Event(e *v1.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.events[e.Name]; !ok {
		c.order = append(c.order, e.Name)
	}
	c.events[e.Name] = e.DeepCopy()
	c.signalReport()
}

// Stages stores the reported stages for StageNames. It implements agent.Reporter.
func (c *Cluster) Stages(_, _ string, stages []agent.StageTime) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stages = append(c.stages, stages...)
	c.signalReport()
}

// ProxyApplied does nothing. It implements agent.Reporter.
func (c *Cluster) ProxyApplied(uint64) {}

// HoldGates makes StopGate return channels that stay open until OpenGate is called. Without it,
// these channels are closed from the start, and pods may be stopped at once.
func (c *Cluster) HoldGates() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gated = true
}

// OpenGate permits stopping the pod with this UID: it closes the channel that StopGate returns.
func (c *Cluster) OpenGate(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch := c.gates[uid]
	if ch == nil {
		ch = make(chan struct{})
		c.gates[uid] = ch
	}
	select {
	case <-ch:
	default:
		close(ch)
	}
}

// StopGate returns a channel that is closed when the pod may be stopped. It is closed from the
// start unless HoldGates was called. It implements agent.Reporter.
func (c *Cluster) StopGate(uid types.UID) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ch := c.gates[uid]; ch != nil {
		return ch
	}
	ch := make(chan struct{})
	if !c.gated {
		close(ch)
		return ch
	}
	c.gates[uid] = ch
	return ch
}

// Facts stores the reported Node for NodeFacts. It implements agent.Reporter.
func (c *Cluster) Facts(n *v1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.node = n.DeepCopy()
	c.signalReport()
}

// NodeFacts returns the Node that was reported last, or nil before the first report.
func (c *Cluster) NodeFacts() *v1.Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.node
}

// History returns the distinct statuses reported for a pod, in order.
func (c *Cluster) History(uid types.UID) []v1.PodStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.history[uid])
}

// Gone reports whether PodGone was called for the pod with this UID.
func (c *Cluster) Gone(uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.gone[uid]
}

// Events returns the events about a pod as "REASON message xCOUNT", in order of first appearance.
func (c *Cluster) Events(uid types.UID) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for _, n := range c.order {
		if e := c.events[n]; e.InvolvedObject.UID == uid {
			out = append(out, fmt.Sprintf("%s %s x%d", e.Reason, e.Message, e.Count))
		}
	}
	return out
}

// StageNames returns the names and details of all reported stages.
func (c *Cluster) StageNames() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for _, s := range c.stages {
		out = append(out, s.Name+" "+s.Detail)
	}
	return out
}

// Await waits until cond returns true. It evaluates cond at once and after each report. If ctx ends
// first, it returns an error that contains the description of the condition.
func (c *Cluster) Await(ctx context.Context, description string, cond func() bool) error {
	for {
		c.mu.Lock()
		ch := c.cond
		c.mu.Unlock()
		if cond() {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w", description, ctx.Err())
		case <-ch:
		}
	}
}

// Run blocks until ctx ends, as Run of a session does.
func (c *Cluster) Run(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}
