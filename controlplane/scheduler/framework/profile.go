package framework

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	storagev1 "k8s.io/api/storage/v1"
)

// StorageClassLookup returns a StorageClass by name.
type StorageClassLookup func(name string) (*storagev1.StorageClass, bool)

// Weighted is a plugin with the weight of its score; a weight of 0 means 1.
type Weighted struct {
	Plugin Plugin
	Weight int64
}

// Profile contains the plugins for the pods of one schedulerName, by extension point. It is
// immutable once it is used.
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
	// Extenders are external services that are called after the plugins. They must be set before
	// the profile is used.
	Extenders []Extender

	weights     []int64
	filterIndex map[string]int
	scoreIndex  map[string]int

	scratchPool sync.Pool // of *scratch
}

// NewProfile returns a profile in which each plugin runs at all extension points that it
// implements. Plugins run in the given order.
func NewProfile(plugins ...Weighted) (*Profile, error) {
	seen := make(map[string]bool)
	for _, w := range plugins {
		if seen[w.Plugin.Name()] {
			return nil, fmt.Errorf("scheduler: plugin %s is listed twice", w.Plugin.Name())
		}
		seen[w.Plugin.Name()] = true
	}
	l := make(Layout)
	for _, at := range Points() {
		for _, w := range plugins {
			if at.Has(w.Plugin) {
				l[at] = append(l[at], w)
			}
		}
	}
	return NewProfileOf(l)
}

// NewProfileOf returns a profile with the plugins that are listed for each extension point, in that
// order.
func NewProfileOf(l Layout) (*Profile, error) {
	p := &Profile{Requeues: make(map[string]Requeue), filterIndex: make(map[string]int), scoreIndex: make(map[string]int)}
	sorts := pluginsOfType[QueueSort](l[AtQueueSort])
	switch {
	case len(sorts) == 0:
		return nil, errors.New("scheduler: no plugin sorts the queue")
	case len(sorts) > 1:
		return nil, fmt.Errorf("scheduler: both %s and %s sort the queue", sorts[0].Name(), sorts[1].Name())
	}
	p.QueueSort = sorts[0]
	p.PreEnqueues, p.PreFilters = pluginsOfType[PreEnqueue](l[AtPreEnqueue]), pluginsOfType[PreFilter](l[AtPreFilter])
	p.Filters, p.PostFilters = pluginsOfType[Filter](l[AtFilter]), pluginsOfType[PostFilter](l[AtPostFilter])
	p.PreScores, p.Scores = pluginsOfType[PreScore](l[AtPreScore]), pluginsOfType[Score](l[AtScore])
	p.Reserves, p.Permits = pluginsOfType[Reserve](l[AtReserve]), pluginsOfType[Permit](l[AtPermit])
	p.PreBinds, p.Binds, p.PostBinds = pluginsOfType[PreBind](l[AtPreBind]), pluginsOfType[Bind](l[AtBind]), pluginsOfType[PostBind](l[AtPostBind])
	if len(p.Binds) == 0 {
		return nil, errors.New("scheduler: no plugin binds")
	}
	if len(p.Filters) > 64 || len(p.Scores) > 64 {
		return nil, errors.New("scheduler: more than 64 plugins at one point")
	}
	for i, f := range p.Filters {
		p.filterIndex[f.Name()] = i
	}
	for i, s := range p.Scores {
		p.scoreIndex[s.Name()] = i
	}
	for _, w := range l[AtScore] {
		p.weights = append(p.weights, max(w.Weight, 1))
	}
	for _, list := range l {
		for _, w := range list {
			if r, ok := w.Plugin.(Requeue); ok {
				p.Requeues[w.Plugin.Name()] = r
			}
		}
	}
	return p, nil
}

// Options are the inputs of Profile.Schedule in addition to the snapshot and the pod.
type Options struct {
	// Sample is how many feasible nodes must be found before filtering stops; 0 = filter all nodes.
	Sample int
	// Start is the index in the snapshot's nodes of the first node to filter.
	Start int
	// Rand chooses among nodes with the same score. If it is nil, the first node is chosen.
	Rand *rand.Rand
}

// SampleSize returns how many feasible nodes must be found before filtering stops, in a cluster of
// n nodes. Up to 100 nodes the result is n. Otherwise it is the given percentage of n, but at least
// 100. 0 percent means a percentage that decreases with the number of nodes.
func SampleSize(n, percent int) int {
	const least = 100
	if n <= least {
		return n
	}
	if percent == 0 {
		percent = max(50-n/125, 5)
	}
	return max(n*percent/100, least)
}

// Result is the node that Profile.Schedule chose.
type Result struct {
	Node      string
	Score     int64
	Evaluated int // number of filtered nodes
	Feasible  int // number of nodes that fit
	Total     int
}

// Explain returns the result as text for the pod's timeline.
func (r Result) Explain() string {
	return fmt.Sprintf("filtered %d of %d nodes, score %d on %s", r.Evaluated-r.Feasible, r.Total, r.Score, r.Node)
}

// FitError is the error that no node fits the pod, with the reasons.
type FitError struct {
	Total     int
	Reasons   map[string]int  // number of nodes by reason
	Plugins   map[string]bool // plugins that refused
	PreFilter string          // a refusal by PreFilter, which applies to all nodes; "" = none
	Post      string          // message of PostFilter
	// Mendable are the nodes on which preemption of pods may help.
	Mendable []*NodeInfo
}

// MayMend reports whether preemption of pods on the named node may help.
func (e *FitError) MayMend(node string) bool {
	return slices.ContainsFunc(e.Mendable, func(n *NodeInfo) bool { return n.Node.Name == node })
}

// NoNodes is the message of a FitError if the cluster has no nodes.
const NoNodes = "no nodes available to schedule pods"

// Error returns the reasons in the format of kube-scheduler's events.
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

// noNodes is the plugin name that RefusedBy returns if the cluster has no nodes. No plugin with
// this name implements Requeue, so every event causes a retry of the pod.
const noNodes = "NoNodes"

// RefusedBy returns the names of the plugins that refused the pod. The result is never empty.
func (e *FitError) RefusedBy() map[string]bool {
	if len(e.Plugins) == 0 { // no nodes: any event that adds one helps
		return map[string]bool{noNodes: true}
	}
	return e.Plugins
}

// addRefusal records that a plugin refused the given number of nodes.
func (e *FitError) addRefusal(s *Status, plugin string, nodes int) {
	if s.Plugin != "" {
		plugin = s.Plugin
	}
	e.Plugins[plugin] = true
	for _, r := range s.Reasons {
		e.Reasons[r] += nodes
	}
}

// Schedule chooses the best node for the cycle's pod. It modifies only the cycle. The error is
// *FitError if no node fits; any other error means that a plugin or an extender failed.
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
		nodes = nodesNamed(c.Snapshot, only)
	}
	r := p.getScratch()
	defer p.putScratch(r)
	evaluated, err := p.filterNodes(ctx, c, nodes, o, why, r)
	if err != nil {
		return Result{}, err
	}
	if asked := Asked(p.Extenders, VerbFilter, c.Pod); len(asked) > 0 && len(r.fit) > 0 {
		if err := runExtenderFilters(ctx, asked, c, r, why); err != nil {
			return Result{}, err
		}
	}
	fit := r.fit
	res := Result{Evaluated: evaluated, Feasible: len(fit), Total: len(c.Snapshot.Nodes)}
	switch len(fit) {
	case 0:
		return res, why
	case 1:
		res.Node = fit[0].Node.Name
		res.Score, err = p.scoreOne(ctx, c, r)
		return res, err
	}
	totals, err := p.scoreNodes(ctx, c, r)
	if err != nil {
		return res, err
	}
	addExtenderScores(ctx, Asked(p.Extenders, VerbPrioritize, c.Pod), c, r)
	best := pickBest(totals, o.Rand)
	res.Node, res.Score = fit[best].Node.Name, totals[best]
	return res, nil
}

// nodesNamed returns the nodes of the snapshot with the names in only, sorted by name.
func nodesNamed(s *Snapshot, only map[string]struct{}) []*NodeInfo {
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
			why.addRefusal(s, f.Name(), 1)
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

// filterNodes runs the filters for nodes, from o.Start on and around the end of the list, until
// o.Sample nodes fit. It stores the feasible nodes in r.fit and returns how many nodes it
// evaluated. The pod's nominated node, if it fits, is the only result. If no node fits, the reasons
// are added to why.
func (p *Profile) filterNodes(ctx context.Context, c *Cycle, nodes []*NodeInfo, o Options, why *FitError, r *scratch) (evaluated int, err error) {
	enough := o.Sample
	if enough <= 0 || enough > len(nodes) {
		enough = len(nodes)
	}
	r.active = p.activeFilters(c, r.active)
	// The pod's nominated node is preferred if the pod fits.
	if n := c.Snapshot.ByName[c.Snapshot.NominationOf(c.Pod.Pod.UID)]; n != nil && slices.Contains(nodes, n) &&
		len(Asked(p.Extenders, VerbFilter, c.Pod)) == 0 { // an extender must see all nodes that fit
		if s, _ := fitsNode(ctx, r.active, c, n); s.OK() {
			r.fit = append(r.fit, n)
			return 1, nil
		}
	}
	at := 0
	if len(nodes) > 0 {
		at = o.Start % len(nodes)
	}
	for evaluated < len(nodes) {
		n := nodes[at]
		evaluated++
		if at++; at == len(nodes) {
			at = 0
		}
		s, name := fitsNode(ctx, r.active, c, n)
		switch {
		case s.OK():
			if r.fit = append(r.fit, n); len(r.fit) == enough {
				return evaluated, nil
			}
		case s.Refused():
			r.addRefusal(s, name, n, why)
		default:
			return evaluated, fmt.Errorf("filter node %s: %w", n.Node.Name, s.AsError())
		}
	}
	if len(r.fit) == 0 {
		r.explainRefusals(why)
	}
	return evaluated, nil
}

// activeFilters appends to out the filters of the profile that PreFilter has not disabled for this
// cycle.
func (p *Profile) activeFilters(c *Cycle, out []Filter) []Filter {
	for i, f := range p.Filters {
		if c.skip&(1<<i) == 0 {
			out = append(out, f)
		}
	}
	return out
}

// Fits runs all filters for one node and returns the first refusal, or nil. PreFilter must have run
// in the cycle.
func (p *Profile) Fits(ctx context.Context, c *Cycle, n *NodeInfo) *Status {
	s, _ := fitsNode(ctx, p.activeFilters(c, nil), c, n)
	return s
}

// fitsNode runs the filters for one node and returns the first refusal with the name of the plugin.
// The pod must fit together with the pods of equal or higher priority that are nominated for the
// node. It must also fit without them, because some rules require other pods, and nominated pods
// may still be placed elsewhere.
func fitsNode(ctx context.Context, active []Filter, c *Cycle, n *NodeInfo) (*Status, string) {
	if len(c.Snapshot.Nominated) > 0 {
		if s, name := fitsWithNominated(ctx, active, c, n); !s.OK() {
			return s, name
		}
	}
	return runFilters(ctx, active, c, n)
}

func fitsWithNominated(ctx context.Context, active []Filter, c *Cycle, n *NodeInfo) (*Status, string) {
	var with []*PodInfo
	for _, pod := range c.Snapshot.Nominated[n.Node.Name] {
		if pod.Priority >= c.Pod.Priority && pod.Pod.UID != c.Pod.Pod.UID {
			with = append(with, pod)
		}
	}
	if with == nil {
		return nil, ""
	}
	trial := n.Clone()
	for _, pod := range with {
		trial.AddPod(pod)
	}
	c.With = with
	defer func() { c.With = nil }()
	return runFilters(ctx, active, c, trial)
}

func runFilters(ctx context.Context, active []Filter, c *Cycle, n *NodeInfo) (*Status, string) {
	for _, f := range active {
		if s := f.Filter(ctx, c, n); !s.OK() {
			return s, f.Name()
		}
	}
	return nil, ""
}

// scoreOne returns the score of the only feasible node. It does not affect the choice; it is shown
// in the pod's timeline.
func (p *Profile) scoreOne(ctx context.Context, c *Cycle, r *scratch) (int64, error) {
	totals, err := p.scoreNodes(ctx, c, r)
	if err != nil {
		return 0, err
	}
	return totals[0], nil
}

// scoreNodes returns, for each node in r.fit, the sum of the weighted scores of all plugins.
func (p *Profile) scoreNodes(ctx context.Context, c *Cycle, r *scratch) ([]int64, error) {
	fit := r.fit
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
	r.totals, r.part = zeroed(r.totals, len(fit)), zeroed(r.part, len(fit))
	totals, part := r.totals, r.part
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

// pickBest returns the index of the highest total. Among equal totals it chooses a random one, or
// the first one if r is nil.
func pickBest(totals []int64, r *rand.Rand) int {
	best, equals := 0, 1
	for i := 1; i < len(totals); i++ {
		switch {
		case totals[i] > totals[best]:
			best, equals = i, 1
		case totals[i] == totals[best]:
			equals++
		}
	}
	if equals == 1 || r == nil {
		return best
	}
	most := totals[best]
	for skip := r.IntN(equals); ; best++ {
		if totals[best] != most {
			continue
		}
		if skip == 0 {
			return best
		}
		skip--
	}
}

// PostFilter runs the PostFilter plugins until one returns success, and adds their messages to why.
// It returns the nominated node of that plugin, or "".
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

// Reserve runs the Reserve plugins. If one of them does not return success, it runs Unreserve of
// all plugins and returns the status.
func (p *Profile) Reserve(ctx context.Context, c *Cycle, node string) *Status {
	for _, r := range p.Reserves {
		if s := r.Reserve(ctx, c, node); !s.OK() {
			p.Unreserve(ctx, c, node)
			return withPlugin(s, r.Name())
		}
	}
	return nil
}

// Unreserve runs Unreserve of all Reserve plugins, in reverse order.
func (p *Profile) Unreserve(ctx context.Context, c *Cycle, node string) {
	for _, r := range slices.Backward(p.Reserves) {
		r.Unreserve(ctx, c, node)
	}
}

// Permit runs the Permit plugins. It returns the first status that is neither success nor Wait.
// waiting contains the plugins that delay the binding, with the maximum delay of each.
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
			return withPlugin(st, r.Name()), nil
		}
	}
	return nil, waiting
}

// Bind runs the PreBind plugins and binds the pod to the node. An extender that binds has priority;
// otherwise the first Bind plugin binds that does not skip the pod. Bind then runs the PostBind
// plugins.
func (p *Profile) Bind(ctx context.Context, c *Cycle, node string) *Status {
	for _, b := range p.PreBinds {
		if s := b.PreBind(ctx, c, node); !s.OK() {
			return withPlugin(s, b.Name())
		}
	}
	if s, done := p.bindBy(ctx, c, node); done {
		if s.OK() {
			p.postBind(ctx, c, node)
		}
		return s
	}
	for _, b := range p.Binds {
		s := b.Bind(ctx, c, node)
		if s.Is(Skip) {
			continue
		}
		if !s.OK() {
			return withPlugin(s, b.Name())
		}
		p.postBind(ctx, c, node)
		return nil
	}
	return Fail("Bind", errors.New("every bind plugin skipped the pod"))
}

func (p *Profile) postBind(ctx context.Context, c *Cycle, node string) {
	for _, post := range p.PostBinds {
		post.PostBind(ctx, c, node)
	}
}

func withPlugin(s *Status, plugin string) *Status {
	if s.Plugin != "" {
		return s
	}
	n := *s
	n.Plugin = plugin
	return &n
}
