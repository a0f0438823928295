package framework

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"

	storagev1 "k8s.io/api/storage/v1"
)

// StorageClassLookup returns the StorageClass with the given name, and false if it does not exist.
type StorageClassLookup func(name string) (*storagev1.StorageClass, bool)

// WeightedPlugin is a plugin with the weight of its score; a weight of 0 means 1.
type WeightedPlugin struct {
	Plugin Plugin
	Weight int64
}

// Profile contains the plugins for the pods of one schedulerName, by extension point. It must not
// be modified after its first use.
type Profile struct {
	Queueing    QueuePlugins
	PreFilters  []PreFilter
	Filters     []Filter
	PostFilters []PostFilter
	PreScores   []PreScore
	Scores      []Score
	Binding     BindingPlugins
	// Extenders are the external services that take part in filtering, scoring and binding, after
	// the plugins. They must be set before the first use of the profile.
	Extenders []Extender

	weights     []int64
	filterIndex map[string]int
	scoreIndex  map[string]int

	scratchPool sync.Pool // holds *scratch
}

// NewProfile returns a profile in which each plugin runs at all extension points that it
// implements. Plugins run in the given order.
func NewProfile(plugins ...WeightedPlugin) (*Profile, error) {
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

// NewProfileOf returns a profile that runs the plugins which the layout lists for each extension
// point, in the order of that list. It returns an error if the layout is invalid.
func NewProfileOf(l Layout) (*Profile, error) {
	p := &Profile{Queueing: QueuePlugins{Requeues: make(map[string]Requeue)}, filterIndex: make(map[string]int),
		scoreIndex: make(map[string]int)}
	sorts := pluginsOfType[QueueSort](l[AtQueueSort])
	switch {
	case len(sorts) == 0:
		return nil, errors.New("scheduler: no plugin sorts the queue")
	case len(sorts) > 1:
		return nil, fmt.Errorf("scheduler: both %s and %s sort the queue", sorts[0].Name(), sorts[1].Name())
	}
	p.Queueing.Sort = sorts[0]
	p.Queueing.PreEnqueues, p.PreFilters = pluginsOfType[PreEnqueue](l[AtPreEnqueue]),
		pluginsOfType[PreFilter](l[AtPreFilter])
	p.Filters, p.PostFilters = pluginsOfType[Filter](l[AtFilter]), pluginsOfType[PostFilter](l[AtPostFilter])
	p.PreScores, p.Scores = pluginsOfType[PreScore](l[AtPreScore]), pluginsOfType[Score](l[AtScore])
	p.Binding.Reserves, p.Binding.Permits = pluginsOfType[Reserve](l[AtReserve]), pluginsOfType[Permit](l[AtPermit])
	p.Binding.PreBinds, p.Binding.Binds, p.Binding.PostBinds = pluginsOfType[PreBind](l[AtPreBind]),
		pluginsOfType[Bind](l[AtBind]), pluginsOfType[PostBind](l[AtPostBind])
	if len(p.Binding.Binds) == 0 {
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
				p.Queueing.Requeues[w.Plugin.Name()] = r
			}
		}
	}
	return p, nil
}

// Options are the options of Profile.Schedule.
type Options struct {
	// Sample is the number of nodes that fit the pod after which filtering stops; 0 = filter all
	// nodes.
	Sample int
	// Start is the index in Snapshot.Nodes of the node that is filtered first.
	Start int
	// Rand chooses one of the nodes with the highest score. If it is nil, the first of them is
	// chosen.
	Rand *rand.Rand
}

// SampleSize returns the number of feasible nodes after which filtering stops in a cluster of n
// nodes. For up to 100 nodes it is n. Otherwise it is the given percentage of n, but at least 100.
// If percent is 0, the percentage decreases with the number of nodes, as in kube-scheduler.
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

// Result is the result of Profile.Schedule: the chosen node with its score, the number of nodes
// that were filtered, and the number of those that fit the pod.
type Result struct {
	Node      string
	Score     int64
	Evaluated int // number of nodes for which the Filter plugins ran
	Feasible  int // number of these nodes that fit the pod
	Total     int
}

// Explain returns the result as text, for the timeline of the pod.
func (r Result) Explain() string {
	return fmt.Sprintf("filtered %d of %d nodes, score %d on %s", r.Evaluated-r.Feasible, r.Total, r.Score, r.Node)
}

// FitError is the error that no node fits the pod. It contains the reasons and the plugins that
// refused nodes.
type FitError struct {
	Total     int
	Reasons   map[string]int  // number of refused nodes by reason
	Plugins   map[string]bool // names of the plugins that refused nodes
	PreFilter string          // reason if a PreFilter plugin refused the pod, and so all nodes; otherwise ""
	Post      string          // messages of the PostFilter plugins, for example about preemption
	// PreemptableNodes are the nodes that may fit the pod after preemption: their refusals have the
	// code Unschedulable and not Unresolvable.
	PreemptableNodes []*NodeInfo

	code Code // code of the PreFilter plugin that refused the pod; Success if no PreFilter plugin refused it
}

// PreemptionMayHelp reports whether the node with the given name may fit the pod after preemption
// of pods on that node.
func (e *FitError) PreemptionMayHelp(node string) bool {
	return slices.ContainsFunc(e.PreemptableNodes, func(n *NodeInfo) bool { return n.Node.Name == node })
}

// NoNodes is the message of a FitError if the cluster has no nodes.
const NoNodes = "no nodes available to schedule pods"

// Error returns the reasons in the format of the FailedScheduling Events of kube-scheduler.
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

// RefusedBy returns the names of the plugins that refused the pod or nodes for it. The set is never
// empty: if no plugin refused anything, it contains the constant noNodes.
func (e *FitError) RefusedBy() map[string]bool {
	if len(e.Plugins) == 0 { // the cluster has no nodes
		return map[string]bool{noNodes: true}
	}
	return e.Plugins
}

// addRefusal records the reasons and the plugin of the refusal s, which applies to the given number
// of nodes.
func (e *FitError) addRefusal(s *Status, plugin string, nodes int) {
	if s.Plugin != "" {
		plugin = s.Plugin
	}
	e.Plugins[plugin] = true
	for _, r := range s.Reasons {
		e.Reasons[r] += nodes
	}
}

// Schedule runs the extension points from PreFilter to Score and returns the node with the highest
// score. It modifies only the cycle. If no node fits the pod, the error is a *FitError. Any other
// error means that a plugin or an extender failed.
func (p *Profile) Schedule(ctx context.Context, c *Cycle, o Options) (Result, error) {
	nodes := c.Snapshot.Nodes
	why := &FitError{Total: len(nodes), Reasons: make(map[string]int), Plugins: make(map[string]bool)}
	if len(nodes) == 0 {
		return Result{}, why
	}
	started := c.startPoint()
	only, err := p.preFilter(ctx, c, why)
	c.observePoint(TimedPreFilter, started, codeOfError(err))
	if err != nil {
		return Result{}, err
	}
	if only != nil {
		nodes = nodesNamed(c.Snapshot, only)
	}
	r := p.getScratch()
	defer p.putScratch(r)
	started = c.startPoint()
	evaluated, err := p.filterNodes(ctx, c, nodes, o, why, r)
	c.observePoint(TimedFilter, started, codeOfError(err))
	if err != nil {
		return Result{}, err
	}
	if asked := InterestedExtenders(p.Extenders, VerbFilter, c.Pod); len(asked) > 0 && len(r.fit) > 0 {
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
	addExtenderScores(ctx, InterestedExtenders(p.Extenders, VerbPrioritize, c.Pod), c, r)
	best := pickBest(totals, o.Rand)
	res.Node, res.Score = fit[best].Node.Name, totals[best]
	return res, nil
}

// nodesNamed returns the nodes of the snapshot with the given names, sorted by name.
func nodesNamed(s *Snapshot, names map[string]struct{}) []*NodeInfo {
	out := make([]*NodeInfo, 0, len(names))
	for name := range names {
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
			why.PreFilter, why.code = s.Message(), s.Code
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

// filterNodes runs the Filter plugins for nodes until o.Sample nodes fit. It starts at index
// o.Start and, after the end of the list, continues at index 0. It stores the nodes that fit in
// r.fit and returns the number of evaluated nodes. If the pod's nominated node fits, only that node
// is stored. If no node fits, the reasons are added to why.
func (p *Profile) filterNodes(ctx context.Context, c *Cycle, nodes []*NodeInfo, o Options, why *FitError, r *scratch) (
	evaluated int, err error,
) {
	enough := o.Sample
	if enough <= 0 || enough > len(nodes) {
		enough = len(nodes)
	}
	r.active = p.activeFilters(c, r.active)
	// The pod's nominated node is preferred if the pod fits.
	if n := c.Snapshot.ByName[c.Snapshot.NominationOf(c.Pod.Pod.UID)]; n != nil && slices.Contains(nodes, n) &&
		len(InterestedExtenders(p.Extenders, VerbFilter, c.Pod)) == 0 { // an extender must receive all nodes that fit
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

// activeFilters appends to out the profile's Filter plugins, without those that PreFilter has
// disabled for the cycle with the code Skip.
func (p *Profile) activeFilters(c *Cycle, out []Filter) []Filter {
	for i, f := range p.Filters {
		if c.skip&(1<<i) == 0 {
			out = append(out, f)
		}
	}
	return out
}

// Fits runs all Filter plugins for the node n and returns the first refusal, or nil if the node
// fits the cycle's pod. The PreFilter plugins must have run in the cycle before.
func (p *Profile) Fits(ctx context.Context, c *Cycle, n *NodeInfo) *Status {
	s, _ := fitsNode(ctx, p.activeFilters(c, nil), c, n)
	return s
}

// fitsNode runs the Filter plugins for the node n. It returns the first refusal and the name of its
// plugin, or nil. If pods of equal or higher priority are nominated for the node, the pod must fit
// both with these pods added to the node and without them. Without them it must fit because they
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

// scoreOne returns the score of the only node in r.fit. The score does not affect the choice; it is
// recorded in the pod's timeline.
func (p *Profile) scoreOne(ctx context.Context, c *Cycle, r *scratch) (int64, error) {
	totals, err := p.scoreNodes(ctx, c, r)
	if err != nil {
		return 0, err
	}
	return totals[0], nil
}

// scoreNodes runs the PreScore and Score plugins and returns the total score of each node in r.fit:
// the sum of the plugins' normalized scores, each multiplied by the plugin's weight.
func (p *Profile) scoreNodes(ctx context.Context, c *Cycle, r *scratch) ([]int64, error) {
	started := c.startPoint()
	err := p.preScore(ctx, c, r.fit)
	c.observePoint(TimedPreScore, started, codeOfError(err))
	if err != nil {
		return nil, err
	}
	r.totals, r.part = zeroed(r.totals, len(r.fit)), zeroed(r.part, len(r.fit))
	started = c.startPoint()
	err = p.addScores(ctx, c, r)
	c.observePoint(TimedScore, started, codeOfError(err))
	if err != nil {
		return nil, err
	}
	return r.totals, nil
}

// preScore runs the PreScore plugins. It disables the Score plugins that PreScore skips.
func (p *Profile) preScore(ctx context.Context, c *Cycle, fit []*NodeInfo) error {
	for _, s := range p.PreScores {
		switch st := s.PreScore(ctx, c, fit); {
		case st.Is(Skip):
			if i, ok := p.scoreIndex[s.Name()]; ok {
				c.noScore |= 1 << i
			}
		case !st.OK():
			return st.AsError()
		}
	}
	return nil
}

// addScores adds the weighted scores of the Score plugins to r.totals, which has an entry for each
// node in r.fit. r.part has the same length.
func (p *Profile) addScores(ctx context.Context, c *Cycle, r *scratch) error {
	totals, part := r.totals, r.part
	for i, s := range p.Scores {
		if c.noScore&(1<<i) != 0 {
			continue
		}
		for j, n := range r.fit {
			v, st := s.Score(ctx, c, n)
			if !st.OK() {
				return fmt.Errorf("score node %s: %w", n.Node.Name, st.AsError())
			}
			part[j] = v
		}
		if norm, ok := s.(NormalizeScore); ok {
			if st := norm.NormalizeScore(ctx, c, part); !st.OK() {
				return st.AsError()
			}
		}
		for j, v := range part {
			totals[j] += v * p.weights[i]
		}
	}
	return nil
}

// pickBest returns the index of the highest total score. If several are highest, it returns a
// random one of them, or the first one if r is nil.
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
