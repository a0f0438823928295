package framework

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	storagev1 "k8s.io/api/storage/v1"
)

// StorageClassLookup finds a StorageClass by name.
type StorageClassLookup func(name string) (*storagev1.StorageClass, bool)

// Weighted is a plugin with the weight of its score (0 counts as 1).
type Weighted struct {
	Plugin Plugin
	Weight int64
}

// Profile is a list of plugins sorted into extension points. It is immutable.
type Profile struct {
	QueueSort   QueueSort
	PreEnqueues []PreEnqueue
	PreFilters  []PreFilter
	Filters     []Filter
	PostFilters []PostFilter
	PreScores   []PreScore
	Scores      []Score
	Reserves    []Reserve
	Permits     []Permit
	PreBinds    []PreBind
	Binds       []Bind
	PostBinds   []PostBind
	Requeues    map[string]Requeue

	weights     []int64
	filterIndex map[string]int
	scoreIndex  map[string]int
}

// NewProfile sorts the plugins into the points that they implement, in order.
func NewProfile(plugins ...Weighted) (*Profile, error) {
	p := &Profile{Requeues: make(map[string]Requeue), filterIndex: make(map[string]int), scoreIndex: make(map[string]int)}
	seen := make(map[string]bool)
	for _, w := range plugins {
		name := w.Plugin.Name()
		if seen[name] {
			return nil, fmt.Errorf("scheduler: plugin %s is listed twice", name)
		}
		seen[name] = true
		if q, ok := w.Plugin.(QueueSort); ok {
			if p.QueueSort != nil {
				return nil, fmt.Errorf("scheduler: both %s and %s sort the queue", p.QueueSort.Name(), name)
			}
			p.QueueSort = q
		}
		p.place(w, name)
	}
	if p.QueueSort == nil {
		return nil, errors.New("scheduler: no plugin sorts the queue")
	}
	if len(p.Binds) == 0 {
		return nil, errors.New("scheduler: no plugin binds")
	}
	if len(p.Filters) > 64 || len(p.Scores) > 64 {
		return nil, errors.New("scheduler: more than 64 plugins at one point")
	}
	return p, nil
}

func (p *Profile) place(w Weighted, name string) {
	p.PreEnqueues = place(p.PreEnqueues, w.Plugin)
	p.PreFilters = place(p.PreFilters, w.Plugin)
	p.PostFilters = place(p.PostFilters, w.Plugin)
	p.PreScores = place(p.PreScores, w.Plugin)
	p.Reserves = place(p.Reserves, w.Plugin)
	p.Permits = place(p.Permits, w.Plugin)
	p.PreBinds = place(p.PreBinds, w.Plugin)
	p.Binds = place(p.Binds, w.Plugin)
	p.PostBinds = place(p.PostBinds, w.Plugin)
	if f, ok := w.Plugin.(Filter); ok {
		p.filterIndex[name] = len(p.Filters)
		p.Filters = append(p.Filters, f)
	}
	if s, ok := w.Plugin.(Score); ok {
		p.scoreIndex[name] = len(p.Scores)
		p.Scores = append(p.Scores, s)
		p.weights = append(p.weights, max(w.Weight, 1))
	}
	if r, ok := w.Plugin.(Requeue); ok {
		p.Requeues[name] = r
	}
}

func place[T any](list []T, p Plugin) []T {
	if t, ok := p.(T); ok {
		return append(list, t)
	}
	return list
}

// Options are the inputs of one attempt besides the snapshot and the pod.
type Options struct {
	// Sample is how many nodes that fit are enough; 0 = all.
	Sample int
	// Start is the index of the node to look at first.
	Start int
	// Rand breaks ties; nil takes the first.
	Rand *rand.Rand
}

// SampleSize is how many nodes that fit are enough in a cluster of n: all of them in a small one, and a falling share,
// never below 100, in a larger one.
func SampleSize(n int) int {
	const least = 100
	if n <= least {
		return n
	}
	percent := max(50-n/125, 5)
	return max(n*percent/100, least)
}

// Result is where the pod goes.
type Result struct {
	Node      string
	Score     int64
	Evaluated int // nodes looked at
	Feasible  int // of them, those that fit
	Total     int
}

// Explain is the result for a timeline.
func (r Result) Explain() string {
	return fmt.Sprintf("filtered %d of %d nodes, score %d on %s", r.Evaluated-r.Feasible, r.Total, r.Score, r.Node)
}

// FitError says why no node takes the pod.
type FitError struct {
	Total     int
	Reasons   map[string]int  // reason → nodes
	Plugins   map[string]bool // who refused
	PreFilter string          // the refusal that concerns all nodes; "" = none
	Post      string          // what PostFilter had to say
	// Unresolvable counts the nodes that removing pods would not help.
	Unresolvable int
}

// NoNodes is the explanation when the cluster has no node.
const NoNodes = "no nodes available to schedule pods"

// Error is the explanation in Kubernetes' form.
func (e *FitError) Error() string {
	if e.Total == 0 {
		return NoNodes
	}
	msg := fmt.Sprintf("0/%d nodes are available:", e.Total)
	if e.PreFilter != "" {
		msg += " " + e.PreFilter + "."
	} else if len(e.Reasons) > 0 {
		list := make([]string, 0, len(e.Reasons))
		for reason, n := range e.Reasons {
			list = append(list, fmt.Sprintf("%d %s", n, reason))
		}
		slices.Sort(list)
		msg += " " + strings.Join(list, ", ") + "."
	}
	if e.Post != "" {
		msg += " " + e.Post
	}
	return msg
}

func (e *FitError) refuse(s *Status, plugin string) {
	if s.Plugin != "" {
		plugin = s.Plugin
	}
	e.Plugins[plugin] = true
	for _, r := range s.Reasons {
		e.Reasons[r]++
	}
	if s.Is(Unresolvable) {
		e.Unresolvable++
	}
}

// Schedule finds the best node for the cycle's pod. It has no effects but on the cycle. The error is
// *FitError when no node fits, anything else when a plugin failed.
func (p *Profile) Schedule(ctx context.Context, c *Cycle, o Options) (Result, error) {
	nodes := c.Snapshot.Nodes
	why := &FitError{Total: len(nodes), Reasons: make(map[string]int), Plugins: make(map[string]bool)}
	if len(nodes) == 0 {
		return Result{}, why
	}
	only, err := p.preFilter(ctx, c, why)
	if err != nil {
		return Result{}, err
	}
	if only != nil {
		nodes = restrict(c.Snapshot, only)
	}
	fit, evaluated, err := p.filter(ctx, c, nodes, o, why)
	if err != nil {
		return Result{}, err
	}
	res := Result{Evaluated: evaluated, Feasible: len(fit), Total: len(c.Snapshot.Nodes)}
	switch len(fit) {
	case 0:
		return res, why
	case 1:
		res.Node = fit[0].Node.Name
		res.Score, err = p.scoreOne(ctx, c, fit)
		return res, err
	}
	totals, err := p.score(ctx, c, fit)
	if err != nil {
		return res, err
	}
	best := pick(totals, o.Rand)
	res.Node, res.Score = fit[best].Node.Name, totals[best]
	return res, nil
}

// restrict is the part of the snapshot that PreFilter left.
func restrict(s *Snapshot, only map[string]struct{}) []*NodeInfo {
	out := make([]*NodeInfo, 0, len(only))
	for name := range only {
		if n := s.ByName[name]; n != nil && n.Node != nil {
			out = append(out, n)
		}
	}
	slices.SortFunc(out, func(a, b *NodeInfo) int { return strings.Compare(a.Node.Name, b.Node.Name) })
	return out
}

func (p *Profile) preFilter(ctx context.Context, c *Cycle, why *FitError) (map[string]struct{}, error) {
	var only map[string]struct{}
	for _, f := range p.PreFilters {
		nodes, s := f.PreFilter(ctx, c)
		switch {
		case s.Is(Skip):
			if i, ok := p.filterIndex[f.Name()]; ok {
				c.skip |= 1 << i
			}
			continue
		case s.Refused():
			why.PreFilter = s.Message()
			why.refuse(s, f.Name())
			return nil, why
		case !s.OK():
			return nil, s.AsError()
		}
		if nodes == nil {
			continue
		}
		if only == nil {
			only = nodes
			continue
		}
		both := make(map[string]struct{})
		for n := range nodes {
			if _, ok := only[n]; ok {
				both[n] = struct{}{}
			}
		}
		only = both
	}
	return only, nil
}

// filter looks at nodes from o.Start on, round, until enough fit.
func (p *Profile) filter(ctx context.Context, c *Cycle, nodes []*NodeInfo, o Options, why *FitError) ([]*NodeInfo, int, error) {
	enough := o.Sample
	if enough <= 0 || enough > len(nodes) {
		enough = len(nodes)
	}
	active := make([]Filter, 0, len(p.Filters))
	for i, f := range p.Filters {
		if c.skip&(1<<i) == 0 {
			active = append(active, f)
		}
	}
	fit := make([]*NodeInfo, 0, enough)
	evaluated := 0
	for i := range nodes {
		n := nodes[(o.Start+i)%len(nodes)]
		evaluated++
		s, name := runFilters(ctx, active, c, n)
		switch {
		case s.OK():
			if fit = append(fit, n); len(fit) == enough {
				return fit, evaluated, nil
			}
		case s.Refused():
			why.refuse(s, name)
		default:
			return nil, evaluated, fmt.Errorf("filter node %s: %w", n.Node.Name, s.AsError())
		}
	}
	return fit, evaluated, nil
}

// Fits runs all filters for one node, as in an attempt whose PreFilter has run.
func (p *Profile) Fits(ctx context.Context, c *Cycle, n *NodeInfo) *Status {
	for i, f := range p.Filters {
		if c.skip&(1<<i) == 0 {
			if s := f.Filter(ctx, c, n); !s.OK() {
				return s
			}
		}
	}
	return nil
}

func runFilters(ctx context.Context, active []Filter, c *Cycle, n *NodeInfo) (*Status, string) {
	for _, f := range active {
		if s := f.Filter(ctx, c, n); !s.OK() {
			return s, f.Name()
		}
	}
	return nil, ""
}

// scoreOne is the score of the only node that fits: it is chosen whatever the score, which is told for the timeline.
func (p *Profile) scoreOne(ctx context.Context, c *Cycle, fit []*NodeInfo) (int64, error) {
	totals, err := p.score(ctx, c, fit)
	if err != nil {
		return 0, err
	}
	return totals[0], nil
}

// score sums the weighted scores of all plugins per node.
func (p *Profile) score(ctx context.Context, c *Cycle, fit []*NodeInfo) ([]int64, error) {
	for _, s := range p.PreScores {
		switch st := s.PreScore(ctx, c, fit); {
		case st.Is(Skip):
			if i, ok := p.scoreIndex[s.Name()]; ok {
				c.noScore |= 1 << i
			}
		case !st.OK():
			return nil, st.AsError()
		}
	}
	totals, part := make([]int64, len(fit)), make([]int64, len(fit))
	for i, s := range p.Scores {
		if c.noScore&(1<<i) != 0 {
			continue
		}
		for j, n := range fit {
			v, st := s.Score(ctx, c, n)
			if !st.OK() {
				return nil, fmt.Errorf("score node %s: %w", n.Node.Name, st.AsError())
			}
			part[j] = v
		}
		if norm, ok := s.(NormalizeScore); ok {
			if st := norm.NormalizeScore(ctx, c, part); !st.OK() {
				return nil, st.AsError()
			}
		}
		for j, v := range part {
			totals[j] += v * p.weights[i]
		}
	}
	return totals, nil
}

// pick is the index of the greatest total; among equals a random one.
func pick(totals []int64, r *rand.Rand) int {
	best, equals := 0, 1
	for i := 1; i < len(totals); i++ {
		switch {
		case totals[i] > totals[best]:
			best, equals = i, 1
		case totals[i] == totals[best] && r != nil:
			if equals++; r.IntN(equals) == 0 {
				best = i
			}
		}
	}
	return best
}

// PostFilter asks the plugins to make room and adds what they say to why. It returns the node that may become free.
func (p *Profile) PostFilter(ctx context.Context, c *Cycle, why *FitError) (nominated string) {
	for _, f := range p.PostFilters {
		node, s := f.PostFilter(ctx, c, why)
		if m := s.Message(); m != "" {
			why.Post = strings.TrimSpace(why.Post + " " + m)
		}
		if s.OK() {
			return node
		}
	}
	return ""
}

// Reserve reserves with every plugin; when one refuses, all are unreserved.
func (p *Profile) Reserve(ctx context.Context, c *Cycle, node string) *Status {
	for _, r := range p.Reserves {
		if s := r.Reserve(ctx, c, node); !s.OK() {
			p.Unreserve(ctx, c, node)
			return named(s, r.Name())
		}
	}
	return nil
}

// Unreserve undoes Reserve in reverse order.
func (p *Profile) Unreserve(ctx context.Context, c *Cycle, node string) {
	for _, r := range slices.Backward(p.Reserves) {
		r.Unreserve(ctx, c, node)
	}
}

// Permit asks every plugin. Waiting maps the plugins that want to wait to how long at most.
func (p *Profile) Permit(ctx context.Context, c *Cycle, node string) (s *Status, waiting map[string]time.Duration) {
	for _, r := range p.Permits {
		st, d := r.Permit(ctx, c, node)
		switch {
		case st.Is(Wait):
			if waiting == nil {
				waiting = make(map[string]time.Duration)
			}
			waiting[r.Name()] = d
		case !st.OK():
			return named(st, r.Name()), nil
		}
	}
	return nil, waiting
}

// Bind runs PreBind, Bind and PostBind.
func (p *Profile) Bind(ctx context.Context, c *Cycle, node string) *Status {
	for _, b := range p.PreBinds {
		if s := b.PreBind(ctx, c, node); !s.OK() {
			return named(s, b.Name())
		}
	}
	for _, b := range p.Binds {
		s := b.Bind(ctx, c, node)
		if s.Is(Skip) {
			continue
		}
		if !s.OK() {
			return named(s, b.Name())
		}
		for _, post := range p.PostBinds {
			post.PostBind(ctx, c, node)
		}
		return nil
	}
	return Fail("Bind", errors.New("every bind plugin skipped the pod"))
}

func named(s *Status, plugin string) *Status {
	if s.Plugin != "" {
		return s
	}
	n := *s
	n.Plugin = plugin
	return &n
}
