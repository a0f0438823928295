// Package defaultpreemption preempts pods of lower priority for a pod that fits on no node. It
// evicts as few and as unimportant pods as possible, and respects PodDisruptionBudgets if possible.
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

// Default number of candidate nodes after which the search stops: a tenth of the nodes where
// preemption may help, but at least 100.
const (
	triedPercent = 10
	triedLeast   = 100
)

const (
	notHelpful = "Preemption is not helpful for scheduling"
	noVictims  = "No preemption victims found for incoming pod"
)

// Plugin is the PostFilter plugin that preempts pods of lower priority.
type Plugin struct {
	H *framework.Handle
	// Percent and Least determine how many candidate nodes are enough: a percentage of the nodes
	// where preemption may help, but at least Least. nil means the default.
	Percent, Least *int32
}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// Candidate is a node on which the pod would fit after the eviction of the victims.
type Candidate struct {
	Node    string
	Victims []*framework.PodInfo // the most important first
	// Violations is how many of the evictions would violate a PodDisruptionBudget.
	Violations int
}

// PostFilter implements framework.PostFilter. It finds candidate nodes, starts the eviction of the
// victims on the best one, and returns that node as nominated. If no candidate exists, it clears
// the pod's nominated node and returns the reasons.
func (p Plugin) PostFilter(ctx context.Context, c *framework.Cycle, why *framework.FitError) (string, *framework.Status) {
	if reason := p.ineligibleReason(c, why); reason != "" {
		return "", framework.Refuse(Name, "preemption: not eligible due to "+reason)
	}
	found, refusals := p.Candidates(ctx, c, why)
	found, err := p.askExtenders(ctx, c.Pod, found)
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

// askExtenders lets the extenders remove candidates and change the victims of the others. It
// returns the remaining candidates in their order. An error of an extender that is not ignorable is
// returned.
func (p Plugin) askExtenders(ctx context.Context, pod *framework.PodInfo, found []Candidate) ([]Candidate, error) {
	asked := framework.Asked(p.H.Extenders, framework.VerbPreempt, pod)
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
	for _, c := range found { // in their order
		if v, ok := nodes[c.Node]; ok {
			slices.SortStableFunc(v.Pods, p.moreImportant)
			out = append(out, Candidate{Node: c.Node, Victims: v.Pods, Violations: v.Violations})
		}
	}
	return out, nil
}

// ineligibleReason returns the reason why the pod may not preempt others now, or "" if it may. It
// may not if its preemptionPolicy is Never, or while a pod that it has preempted is terminating on
// its nominated node.
func (p Plugin) ineligibleReason(c *framework.Cycle, why *framework.FitError) string {
	if policy := c.Pod.Pod.Spec.PreemptionPolicy; policy != nil && *policy == v1.PreemptNever {
		return "preemptionPolicy=Never."
	}
	node := c.Snapshot.NominationOf(c.Pod.Pod.UID)
	n := c.Snapshot.ByName[node]
	if n == nil || !why.MayMend(node) {
		return ""
	}
	for _, victim := range n.Pods {
		if victim.Priority < c.Pod.Priority && victim.Pod.DeletionTimestamp != nil && wasPreempted(p.latestPod(victim.Pod)) {
			return "a terminating pod on the nominated node."
		}
	}
	return ""
}

func wasPreempted(pod *v1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c v1.PodCondition) bool {
		return c.Type == v1.DisruptionTarget && c.Status == v1.ConditionTrue && c.Reason == v1.PodReasonPreemptionByScheduler
	})
}

// Candidates returns nodes on which the pod would fit after preemption, from those in why.Mendable.
// The FitError contains the reasons of the other nodes.
func (p Plugin) Candidates(ctx context.Context, c *framework.Cycle, why *framework.FitError) ([]Candidate, *framework.FitError) {
	refusals := &framework.FitError{Total: why.Total, Reasons: make(map[string]int), Plugins: make(map[string]bool)}
	if n := why.Total - len(why.Mendable); n > 0 {
		refusals.Reasons[notHelpful] = n
	}
	enough := p.candidateCount(len(why.Mendable))
	var budgets []*policyv1.PodDisruptionBudget
	if p.H.Budgets != nil {
		budgets = p.H.Budgets()
	}
	var found []Candidate
	start := startOffset(c.Pod.Pod, len(why.Mendable))
	for i := range why.Mendable {
		if len(found) == enough || ctx.Err() != nil {
			break
		}
		n := why.Mendable[(start+i)%len(why.Mendable)]
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

// candidateCount returns the number of candidates after which the search stops, if preemption may
// help on the given number of nodes. It is at least 1.
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

// startOffset returns the index at which the search starts in a list of n nodes. It is derived from
// the pod's UID, so that not all pods preempt on the same nodes.
func startOffset(pod *v1.Pod, n int) int {
	if n == 0 {
		return 0
	}
	h := fnv.New32a()
	h.Write([]byte(pod.UID))
	return int(h.Sum32() % uint32(n))
}

// findVictims returns the node as a candidate with the pods that must be evicted from it. If the
// pod does not fit even without all pods of lower priority, it returns the reasons. It removes
// those pods from a copy of the node, and restores them one by one as long as the pod still fits.
// Pods that a budget protects are restored first, then the more important ones.
func (p Plugin) findVictims(ctx context.Context, c *framework.Cycle, n *framework.NodeInfo, budgets *budgetLedger) (*Candidate, []string) {
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

// moreImportant is a comparison that sorts more important pods first: higher priority, then earlier
// start time. Pods that are equal in both are sorted by UID.
func (p Plugin) moreImportant(a, b *framework.PodInfo) int {
	if a.Priority != b.Priority {
		return cmp.Compare(b.Priority, a.Priority)
	}
	return cmp.Or(p.startOf(a).Compare(p.startOf(b)), cmp.Compare(a.Pod.UID, b.Pod.UID))
}

// startOf returns the start time of the pod. A pod that has not started counts as the newest.
func (p Plugin) startOf(pod *framework.PodInfo) time.Time {
	if t := p.latestPod(pod.Pod).Status.StartTime; t != nil {
		return t.Time
	}
	return time.Unix(math.MaxInt32, 0)
}

// latestPod returns the current state of a pod from the informer. The status of the pod in a
// snapshot may be as old as its binding.
func (p Plugin) latestPod(pod *v1.Pod) *v1.Pod {
	if p.H.Pod != nil {
		if now, ok := p.H.Pod(pod.Namespace, pod.Name); ok && now.UID == pod.UID {
			return now
		}
	}
	return pod
}

// Best returns the candidate with the least harm. Candidates are compared in this order: fewest
// violated budgets, lowest priority of the most important victim, lowest sum of priorities, fewest
// victims, and latest start of the most important victims. start returns a pod's start time. The
// first of equal candidates is returned.
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

// Order implements framework.Preempts: it sorts pods that a PodDisruptionBudget protects first,
// then by importance.
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
