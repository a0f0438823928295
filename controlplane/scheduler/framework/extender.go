package framework

import (
	"context"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// Verb is an operation that a scheduler extender may implement.
type Verb uint8

const (
	VerbFilter Verb = iota
	VerbPrioritize
	VerbPreempt
	VerbBind
)

// Extender is an external service that takes part in scheduling. The implementation of this
// interface must check the responses of the service: a result contains only nodes and pods that
// were in the request.
type Extender interface {
	Name() string
	Does(v Verb) bool
	// Interested reports whether the extender takes part in the scheduling of the pod. If it does
	// not, it is not called for the pod.
	Interested(pod *PodInfo) bool
	// Ignorable reports whether scheduling continues without the extender when a call of the
	// extender fails. If it returns false, such a failure fails the attempt.
	Ignorable() bool
	// Filter returns the nodes that the extender refuses, by name.
	Filter(ctx context.Context, pod *v1.Pod, nodes []*NodeInfo) (refused map[string]*Status, err error)
	// Prioritize returns the extender's weighted score of each node.
	Prioritize(ctx context.Context, pod *v1.Pod, nodes []*NodeInfo) ([]int64, error)
	// Preempt returns the nodes on which the extender accepts preemption, by name. The extender may
	// have replaced the victims, the pods to evict from the node.
	Preempt(ctx context.Context, pod *v1.Pod, nodes map[string]Victims) (map[string]Victims, error)
	Bind(ctx context.Context, pod *v1.Pod, node string) error
}

// Victims are the pods that preemption evicts from one node.
type Victims struct {
	Pods []*PodInfo
	// Violations is how many of these evictions violate a PodDisruptionBudget.
	Violations int
}

// InterestedExtenders returns the extenders in the list that implement the operation v and take
// part in the scheduling of the pod.
func InterestedExtenders(list []Extender, v Verb, pod *PodInfo) []Extender {
	var out []Extender
	for _, e := range list {
		if e.Does(v) && e.Interested(pod) {
			out = append(out, e)
		}
	}
	return out
}

// runExtenderFilters calls Filter of each extender, and removes the nodes that it refuses from the
// feasible nodes r.fit. If all nodes are removed, the reasons are added to why. It returns the
// error of an extender that fails, unless the extender is ignorable.
func runExtenderFilters(ctx context.Context, extenders []Extender, c *Cycle, r *scratch, why *FitError) error {
	for _, e := range extenders {
		if len(r.fit) == 0 {
			break
		}
		refused, err := e.Filter(ctx, c.Pod.Pod, r.fit)
		switch {
		case err != nil && e.Ignorable():
			continue
		case err != nil:
			return fmt.Errorf("%s: filter: %w", e.Name(), err)
		}
		r.fit = slices.DeleteFunc(r.fit, func(n *NodeInfo) bool {
			s := refused[n.Node.Name]
			if s != nil {
				r.addRefusal(s, e.Name(), n, why)
			}
			return s != nil
		})
	}
	if len(r.fit) == 0 {
		r.explainRefusals(why)
	}
	return nil
}

// addExtenderScores adds the scores of the extenders to the nodes' total scores in r. An extender
// whose call fails adds nothing, as in kube-scheduler.
func addExtenderScores(ctx context.Context, extenders []Extender, c *Cycle, r *scratch) {
	for _, e := range extenders {
		scores, err := e.Prioritize(ctx, c.Pod.Pod, r.fit)
		if err != nil {
			continue
		}
		for i, s := range scores {
			r.totals[i] += s
		}
	}
}

// bindWithExtender lets an extender bind the pod to the node: the first one that implements Bind
// and takes part in the scheduling of the pod. It returns false if no such extender exists.
func (p *Profile) bindWithExtender(ctx context.Context, c *Cycle, node string) (*Status, bool) {
	extenders := InterestedExtenders(p.Extenders, VerbBind, c.Pod)
	if len(extenders) == 0 {
		return nil, false
	}
	if err := extenders[0].Bind(ctx, c.Pod.Pod, node); err != nil {
		return Fail(extenders[0].Name(), fmt.Errorf("bind: %w", err)), true
	}
	return nil, true
}

// Brief returns the first part of a text from an external service, for messages: a single line of
// valid UTF-8 of at most about 256 bytes.
func Brief(text string) string {
	const most = 256
	if len(text) > 4*most {
		text = text[:4*most]
	}
	text = strings.ToValidUTF8(strings.Join(strings.Fields(text), " "), "?")
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "..."
	}
	return text
}
