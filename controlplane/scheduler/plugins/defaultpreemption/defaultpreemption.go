// Package defaultpreemption is the PostFilter plugin DefaultPreemption. For a pod that fits on no
// node, it evicts pods of lower priority from one node: as few and as unimportant pods as possible.
// It violates PodDisruptionBudgets only if necessary.
package defaultpreemption

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "DefaultPreemption"

// Default of the number of candidates after which the search for them stops: a tenth of the nodes
// on which preemption may help, but at least 100.
const (
	triedPercent = 10
	triedLeast   = 100
)

const (
	notHelpful = "Preemption is not helpful for scheduling"
	noVictims  = "No preemption victims found for incoming pod"
)

// Plugin is the PostFilter plugin that evicts pods of lower priority for a pod that fits on no
// node.
type Plugin struct {
	H *framework.Handle
	// Percent and Least determine the number of candidates after which the search for them stops: a
	// percentage of the nodes on which preemption may help, but at least Least. nil means the
	// default.
	Percent, Least *int32
}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// Candidate is a node on which the pod would fit after the eviction of the victims.
type Candidate struct {
	Node    string
	Victims []*framework.PodInfo // pods to evict, the most important first
	// Violations is the number of evictions that would violate a PodDisruptionBudget.
	Violations int
}

// PostFilter implements framework.PostFilter. It finds candidates, which are nodes that would fit
// the pod after evictions. It starts the evictions on the best one and returns that node as the
// nominated node. If there is no candidate, it clears the pod's nominated node and returns the
// reasons.
func (p Plugin) PostFilter(ctx context.Context, c *framework.Cycle, why *framework.FitError) (
	string, *framework.Status,
) {
	if reason := p.ineligibleReason(c, why); reason != "" {
		return "", framework.Refuse(Name, "preemption: not eligible due to "+reason)
	}
	found, refusals := p.Candidates(ctx, c, why)
	found, err := p.callExtenders(ctx, c.Pod, found)
	if err != nil {
		return "", framework.Refuse(Name, "preemption: "+err.Error())
	}
	if len(found) == 0 {
		p.H.Nominate(c.Pod.Pod, "")
		return "", framework.Refuse(Name, "preemption: "+refusals.Error())
	}
	best := Best(found, p.startOf)
	p.H.Preempt(ctx, c.Pod, best.Node, best.Victims)
	return best.Node, nil
}

// callExtenders passes the candidates to the extenders, which may remove candidates and replace
// their victims. It returns the remaining candidates in the same order. It returns the error of an
// extender that is not ignorable.
func (p Plugin) callExtenders(ctx context.Context, pod *framework.PodInfo, found []Candidate) ([]Candidate, error) {
	asked := framework.InterestedExtenders(p.H.Extenders, framework.VerbPreempt, pod)
	if len(asked) == 0 || len(found) == 0 {
		return found, nil
	}
	nodes := make(map[string]framework.Victims, len(found))
	for _, c := range found {
		nodes[c.Node] = framework.Victims{Pods: c.Victims, Violations: c.Violations}
	}
	for _, e := range asked {
		left, err := e.Preempt(ctx, pod.Pod, nodes)
		if err != nil && !e.Ignorable() {
			return nil, fmt.Errorf("%s: preempt: %s", e.Name(), framework.Brief(err.Error()))
		}
		if err == nil {
			nodes = left
		}
	}
	out := make([]Candidate, 0, len(nodes))
	for _, c := range found { // keep the order of the candidates
		if v, ok := nodes[c.Node]; ok {
			slices.SortStableFunc(v.Pods, p.moreImportant)
			out = append(out, Candidate{Node: c.Node, Victims: v.Pods, Violations: v.Violations})
		}
	}
	return out, nil
}

// ineligibleReason returns the reason why the pod may not preempt other pods, or "" if it may. It
// may not if its preemptionPolicy is Never, or while a pod of lower priority that was preempted is
// terminating on its nominated node.
func (p Plugin) ineligibleReason(c *framework.Cycle, why *framework.FitError) string {
	if policy := c.Pod.Pod.Spec.PreemptionPolicy; policy != nil && *policy == v1.PreemptNever {
		return "preemptionPolicy=Never."
	}
	node := c.Snapshot.NominationOf(c.Pod.Pod.UID)
	n := c.Snapshot.ByName[node]
	if n == nil || !why.PreemptionMayHelp(node) {
		return ""
	}
	for _, victim := range n.Pods {
		if victim.Priority < c.Pod.Priority && victim.Pod.DeletionTimestamp != nil &&
			wasPreempted(p.latestPod(victim.Pod)) {
			return "a terminating pod on the nominated node."
		}
	}
	return ""
}

func wasPreempted(pod *v1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c v1.PodCondition) bool {
		return c.Type == v1.DisruptionTarget && c.Status == v1.ConditionTrue &&
			c.Reason == v1.PodReasonPreemptionByScheduler
	})
}

// Candidates checks the nodes in why.PreemptableNodes until it has found enough candidates, which
// are nodes that would fit the pod after evictions. The returned FitError contains the reasons why
// the other checked nodes are no candidates.
func (p Plugin) Candidates(ctx context.Context, c *framework.Cycle, why *framework.FitError) (
	[]Candidate, *framework.FitError,
) {
	refusals := &framework.FitError{Total: why.Total, Reasons: make(map[string]int), Plugins: make(map[string]bool)}
	if n := why.Total - len(why.PreemptableNodes); n > 0 {
		refusals.Reasons[notHelpful] = n
	}
	enough := p.candidateCount(len(why.PreemptableNodes))
	var budgets []*policyv1.PodDisruptionBudget
	if p.H.Budgets != nil {
		budgets = p.H.Budgets()
	}
	var found []Candidate
	start := startOffset(c.Pod.Pod, len(why.PreemptableNodes))
	for i := range why.PreemptableNodes {
		if len(found) == enough || ctx.Err() != nil {
			break
		}
		n := why.PreemptableNodes[(start+i)%len(why.PreemptableNodes)]
		one, reasons := p.findVictims(ctx, c, n, newLedger(budgets))
		if one != nil {
			found = append(found, *one)
			continue
		}
		for _, r := range reasons {
			refusals.Reasons[r]++
		}
	}
	return found, refusals
}

// candidateCount returns the number of candidates after which the search for them stops. nodes is
// the number of nodes on which preemption may help. The result is at least 1.
func (p Plugin) candidateCount(nodes int) int {
	percent, least := triedPercent, triedLeast
	if p.Percent != nil {
		percent = int(*p.Percent)
	}
	if p.Least != nil {
		least = int(*p.Least)
	}
	return max(nodes*percent/100, least, 1)
}

// startOffset returns the index in a list of n nodes at which the search for candidates starts. It
// is derived from the pod's UID, so that different pods preempt on different nodes.
func startOffset(pod *v1.Pod, n int) int {
	if n == 0 {
		return 0
	}
	h := fnv.New32a()
	h.Write([]byte(pod.UID))
	return int(h.Sum32() % uint32(n))
}

// findVictims returns the node n as a candidate with the pods to evict, or the reasons if the pod
// does not fit even without all pods of lower priority. It removes these pods from a copy of the
// node and adds each of them again if the pod still fits. Pods that a PodDisruptionBudget protects
// are added first, then the more important pods.
func (p Plugin) findVictims(ctx context.Context, c *framework.Cycle, n *framework.NodeInfo, budgets *budgetLedger) (
	*Candidate, []string,
) {
	trial := n.Clone()
	var lower []*framework.PodInfo
	for _, pod := range n.Pods {
		if pod.Priority < c.Pod.Priority {
			lower = append(lower, pod)
		}
	}
	if len(lower) == 0 {
		return nil, []string{noVictims}
	}
	for _, pod := range lower {
		trial.RemovePod(pod.Pod.UID)
	}
	c.Without = lower
	defer func() { c.Without = nil }()
	if s := p.H.Fits(ctx, c, trial); !s.OK() {
		return nil, s.Reasons
	}
	slices.SortStableFunc(lower, p.moreImportant)
	protected, free := budgets.splitProtected(lower)
	out := &Candidate{Node: n.Node.Name}
	c.Without = slices.Clone(lower)
	back := func(pod *framework.PodInfo) bool {
		trial.AddPod(pod)
		i := slices.Index(c.Without, pod)
		c.Without = slices.Delete(c.Without, i, i+1)
		if p.H.Fits(ctx, c, trial).OK() {
			return true
		}
		trial.RemovePod(pod.Pod.UID)
		c.Without = append(c.Without, pod)
		out.Victims = append(out.Victims, pod)
		return false
	}
	for _, pod := range protected {
		if !back(pod) {
			out.Violations++
		}
	}
	for _, pod := range free {
		back(pod)
	}
	slices.SortStableFunc(out.Victims, p.moreImportant)
	return out, nil
}

// moreImportant compares two pods for sorting the more important pod first: higher priority, then
// earlier start time, then UID.
func (p Plugin) moreImportant(a, b *framework.PodInfo) int {
	if a.Priority != b.Priority {
		return cmp.Compare(b.Priority, a.Priority)
	}
	return cmp.Or(p.startOf(a).Compare(p.startOf(b)), cmp.Compare(a.Pod.UID, b.Pod.UID))
}

// startOf returns the pod's start time, from its current status. For a pod that has not started it
// returns a time in 2038, so that the pod counts as the newest.
func (p Plugin) startOf(pod *framework.PodInfo) time.Time {
	if t := p.latestPod(pod.Pod).Status.StartTime; t != nil {
		return t.Time
	}
	return time.Unix(math.MaxInt32, 0)
}

// latestPod returns the version of the pod in the informer's store. The status of the pod in the
// snapshot may be older: status updates do not always change the snapshot.
func (p Plugin) latestPod(pod *v1.Pod) *v1.Pod {
	if p.H.Pod != nil {
		if now, ok := p.H.Pod(pod.Namespace, pod.Name); ok && now.UID == pod.UID {
			return now
		}
	}
	return pod
}

// Best returns the candidate whose evictions do the least harm. It compares, in this order: fewest
// violated PodDisruptionBudgets, lowest priority of the most important victim, lowest sum of the
// victims' priorities, fewest victims, and latest start time of the most important victims. start
// returns a pod's start time. Of equal candidates the first is returned.
func Best(list []Candidate, start func(*framework.PodInfo) time.Time) Candidate {
	return slices.MinFunc(list, func(a, b Candidate) int {
		return cmp.Or(
			cmp.Compare(a.Violations, b.Violations),
			cmp.Compare(a.highestPriority(), b.highestPriority()),
			cmp.Compare(a.prioritySum(), b.prioritySum()),
			cmp.Compare(len(a.Victims), len(b.Victims)),
			b.earliestStart(start).Compare(a.earliestStart(start)),
		)
	})
}

func (c Candidate) highestPriority() int32 {
	if len(c.Victims) == 0 {
		return math.MinInt32
	}
	return c.Victims[0].Priority
}

// prioritySum returns the sum of the victims' priorities. Each priority is shifted to be positive,
// so that more victims always give a higher sum.
func (c Candidate) prioritySum() int64 {
	var sum int64
	for _, v := range c.Victims {
		sum += int64(v.Priority) + math.MaxInt32 + 1
	}
	return sum
}

// earliestStart returns the earliest start time among the victims with the highest priority.
func (c Candidate) earliestStart(start func(*framework.PodInfo) time.Time) time.Time {
	var first time.Time
	for i, v := range c.Victims {
		if t := start(v); v.Priority == c.highestPriority() && (i == 0 || t.Before(first)) {
			first = t
		}
	}
	return first
}

// Order implements framework.PreemptionPlugin: it returns the pods with those first that a
// PodDisruptionBudget protects, and otherwise the more important ones first.
func (p Plugin) Order(pods []*framework.PodInfo) []*framework.PodInfo {
	var budgets []*policyv1.PodDisruptionBudget
	if p.H.Budgets != nil {
		budgets = p.H.Budgets()
	}
	pods = slices.Clone(pods)
	slices.SortStableFunc(pods, p.moreImportant)
	protected, free := newLedger(budgets).splitProtected(pods)
	return slices.Concat(protected, free)
}
