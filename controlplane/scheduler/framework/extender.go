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

// Extender is an external service that takes part in scheduling. An implementation must check the
// responses of the service: the results contain only nodes and pods of the request.
type Extender interface {
	Name() string
	Does(v Verb) bool
	// Interested reports whether the extender must be called for the pod.
	Interested(pod *PodInfo) bool
	// Ignorable reports whether scheduling continues without the extender if it fails. Otherwise
	// the attempt fails.
	Ignorable() bool
	// Filter returns the nodes that the extender refuses, by name.
	Filter(ctx context.Context, pod *v1.Pod, nodes []*NodeInfo) (refused map[string]*Status, err error)
	// Prioritize returns the extender's weighted score of each node.
	Prioritize(ctx context.Context, pod *v1.Pod, nodes []*NodeInfo) ([]int64, error)
	// Preempt returns the nodes on which the extender accepts preemption, with the victims, which
	// it may have changed.
	Preempt(ctx context.Context, pod *v1.Pod, nodes map[string]Victims) (map[string]Victims, error)
	Bind(ctx context.Context, pod *v1.Pod, node string) error
}

// Victims are the pods on one node that preemption evicts.
type Victims struct {
	Pods []*PodInfo
	// Violations is how many of these evictions violate a PodDisruptionBudget.
	Violations int
}

// Asked returns the extenders of the list that implement the verb and are interested in the pod.
func Asked(list []Extender, v Verb, pod *PodInfo) []Extender {
	var out []Extender
	for _, e := range list {
		if e.Does(v) && e.Interested(pod) {
			out = append(out, e)
		}
	}
	return out
}

// runExtenderFilters calls the Filter of each extender in asked, and removes the refused nodes from
// the feasible nodes r.fit. An error of an extender that is not ignorable is returned. If no node
// is left, the reasons are added to why.
func runExtenderFilters(ctx context.Context, asked []Extender, c *Cycle, r *scratch, why *FitError) error {
	for _, e := range asked {
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

// addExtenderScores adds the scores of the extenders in asked to the totals of the feasible nodes.
// An extender that fails adds nothing, as in kube-scheduler.
func addExtenderScores(ctx context.Context, asked []Extender, c *Cycle, r *scratch) {
	for _, e := range asked {
		scores, err := e.Prioritize(ctx, c.Pod.Pod, r.fit)
		if err != nil {
			continue
		}
		for i, s := range scores {
			r.totals[i] += s
		}
	}
}

// bindBy binds the pod with the first extender that implements Bind and is interested in the pod.
// It returns false if none exists.
func (p *Profile) bindBy(ctx context.Context, c *Cycle, node string) (*Status, bool) {
	asked := Asked(p.Extenders, VerbBind, c.Pod)
	if len(asked) == 0 {
		return nil, false
	}
	if err := asked[0].Bind(ctx, c.Pod.Pod, node); err != nil {
		return Fail(asked[0].Name(), fmt.Errorf("bind: %w", err)), true
	}
	return nil, true
}

// Brief returns a text from an external source as a single line of at most about 256 bytes of valid
// UTF-8.
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
