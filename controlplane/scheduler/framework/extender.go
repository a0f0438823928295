package framework

import (
	"context"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// Verb is something that an extender may be asked to do.
type Verb uint8

const (
	VerbFilter Verb = iota
	VerbPrioritize
	VerbPreempt
	VerbBind
)

// Extender is a service outside that has a say in where pods go. Its answers are judged by whoever implements this: what
// they name is something that was asked about.
type Extender interface {
	Name() string
	Does(v Verb) bool
	// Interested says whether it is to be asked about the pod.
	Interested(pod *PodInfo) bool
	// Ignorable extenders that fail are passed over; without that, the attempt fails.
	Ignorable() bool
	// Filter says which of the nodes it refuses, by name.
	Filter(ctx context.Context, pod *v1.Pod, nodes []*NodeInfo) (refused map[string]*Status, err error)
	// Prioritize is what it adds to the score of each node, its weight included.
	Prioritize(ctx context.Context, pod *v1.Pod, nodes []*NodeInfo) ([]int64, error)
	// Preempt leaves of the nodes where room could be made those that it agrees with, and may change whom that costs.
	Preempt(ctx context.Context, pod *v1.Pod, nodes map[string]Victims) (map[string]Victims, error)
	Bind(ctx context.Context, pod *v1.Pod, node string) error
}

// Victims are the pods of a node that would have to go.
type Victims struct {
	Pods []*PodInfo
	// Violations is how many of them a PodDisruptionBudget protects.
	Violations int
}

// Asked are the extenders that do the verb for the pod.
func Asked(list []Extender, v Verb, pod *PodInfo) []Extender {
	var out []Extender
	for _, e := range list {
		if e.Does(v) && e.Interested(pod) {
			out = append(out, e)
		}
	}
	return out
}

// runExtenderFilters narrows the nodes that fit to those that the extenders leave, one extender after the other.
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

// addExtenderScores adds what the extenders say. One that fails adds nothing, as with kube-scheduler.
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

// bindBy has the extender that binds do so; false when none does for this pod.
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

// Brief is somebody else's text in one line of bounded length.
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
