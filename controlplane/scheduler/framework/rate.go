package framework

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"keelson.dev/keelson/internal/saturate"
)

// Rating is the result of Profile.Rate: the scores of all nodes that fit a pod, and whether its
// node fits.
type Rating struct {
	// Scores are the total scores of the feasible nodes.
	Scores map[string]int64
	// Refusal is the reason why the node that was passed to Rate does not fit; nil if it fits.
	Refusal *Status
}

// Best returns the names of the nodes with the highest score, sorted.
func (r Rating) Best() []string {
	if len(r.Scores) == 0 {
		return nil
	}
	most := slices.Max(slices.Collect(maps.Values(r.Scores)))
	var out []string
	for name, score := range r.Scores {
		if score == most {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// Rate runs the Filter and Score plugins for all nodes. It returns the scores of the nodes that fit
// the cycle's pod, and the reason if the given node does not fit. Extenders are not called.
func (p *Profile) Rate(ctx context.Context, c *Cycle, node string) (Rating, error) {
	out := Rating{Scores: map[string]int64{}}
	nodes, refused, err := p.nodesToRate(ctx, c)
	if refused != nil || err != nil {
		out.Refusal = refused
		return out, err
	}
	r := p.getScratch()
	defer p.putScratch(r)
	why := &FitError{Total: len(nodes), Reasons: make(map[string]int), Plugins: make(map[string]bool)}
	if _, err = p.filterNodes(ctx, c, nodes, Options{}, why, r); err != nil {
		return out, err
	}
	if len(r.fit) > 0 {
		totals, err := p.scoreNodes(ctx, c, r)
		if err != nil {
			return out, err
		}
		for i, n := range r.fit {
			out.Scores[n.Node.Name] = totals[i]
		}
	}
	out.Refusal, err = p.fitsOn(ctx, c, nodes, node)
	return out, err
}

// RefusalBy returns the reason why the given node does not fit the cycle's pod, or nil if it fits.
// Extenders are not called.
func (p *Profile) RefusalBy(ctx context.Context, c *Cycle, node string) (refusal *Status, err error) {
	nodes, refusal, err := p.nodesToRate(ctx, c)
	if refusal != nil || err != nil {
		return refusal, err
	}
	return p.fitsOn(ctx, c, nodes, node)
}

// nodesToRate runs the PreFilter plugins and returns the nodes to which they restrict the pod. If
// one of them refuses the pod, it returns that refusal, which applies to all nodes.
func (p *Profile) nodesToRate(ctx context.Context, c *Cycle) ([]*NodeInfo, *Status, error) {
	why := &FitError{Total: len(c.Snapshot.Nodes), Reasons: make(map[string]int), Plugins: make(map[string]bool)}
	only, err := p.preFilter(ctx, c, why)
	if refused := (*FitError)(nil); errors.As(err, &refused) {
		return nil, Refuse("PreFilter", refused.PreFilter), nil
	}
	if err != nil || only == nil {
		return c.Snapshot.Nodes, nil, err
	}
	return nodesNamed(c.Snapshot, only), nil, nil
}

func (p *Profile) fitsOn(ctx context.Context, c *Cycle, nodes []*NodeInfo, node string) (*Status, error) {
	n := c.Snapshot.ByName[node]
	if n == nil || !slices.Contains(nodes, n) {
		return Refuse("PreFilter", "node(s) didn't match what the pod asks of nodes"), nil
	}
	switch s, name := fitsNode(ctx, p.activeFilters(c, nil), c, n); {
	case s.OK():
		return nil, nil
	case s.Refused():
		return withPlugin(s, name), nil
	default:
		return nil, fmt.Errorf("filter node %s: %w", node, s.AsError())
	}
}

// Fullness returns the percentage of the node's allocatable CPU or memory that its pods request,
// whichever is higher. If added is not nil, this pod is included. Containers without requests count
// with defaults, as in Score plugins.
func (n *NodeInfo) Fullness(added *PodInfo) float64 {
	cpu, memory := n.CountedCPU, n.CountedMem
	if added != nil {
		cpu, memory = saturate.Add(cpu, added.CountedCPU), saturate.Add(memory, added.CountedMemory)
	}
	part := func(used, of int64) float64 {
		if of <= 0 {
			return 100
		}
		return 100 * float64(used) / float64(of)
	}
	return max(part(cpu, n.Allocatable.MilliCPU), part(memory, n.Allocatable.Memory))
}
