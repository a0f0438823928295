package scheduler

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Trial is a copy of the cluster state for evaluating where running pods would be placed, for the
// rebalance controller. It changes nothing outside of it. It is not safe for concurrent use, but
// may be used while the scheduler runs.
type Trial struct {
	profiles  *profiles
	snap      *framework.Snapshot
	pods      map[types.UID]*trialPod
	withRules []*trialPod // pods with required affinity terms or DoNotSchedule spread constraints
}

// trialPod is a pod in a Trial and the name of its node.
type trialPod struct {
	*framework.PodInfo
	node string
}

// Weighed is the result of Trial.Weigh: how a running pod would be placed if it were pending. The
// utilization of a node is that of CPU or memory, whichever is higher, in percent.
type Weighed struct {
	// Passed is the reason why the pod was not evaluated; "" if it was.
	Passed string
	// Stays is the reason why the pod's current node would refuse it; "" if the node would accept
	// it.
	Stays string
	// Best are the nodes with the highest score. Gain is that score minus the score of the pod's
	// current node.
	Best []string
	Gain int64
	// Full is the current node's utilization with the pod, and Left its utilization without the
	// pod. There is the highest utilization with the pod among the nodes in Best.
	Full, Left, There float64
}

// Trial returns a Trial of the current cluster state. It returns an error if the scheduler's
// profiles are invalid.
func (s *Scheduler) Trial() (*Trial, error) {
	if s.err != nil {
		return nil, s.err
	}
	// New plugins, because the state of the loop's plugins belongs to pods in progress.
	p, err := s.makeProfiles()
	if err != nil {
		return nil, err
	}
	return newTrial(p, s.cluster.copySnapshot()), nil
}

func newTrial(p *profiles, snap *framework.Snapshot) *Trial {
	t := &Trial{profiles: p, snap: snap, pods: make(map[types.UID]*trialPod)}
	for _, n := range snap.Nodes {
		for _, pod := range n.Pods {
			at := &trialPod{pod, n.Node.Name}
			t.pods[pod.Pod.UID] = at
			if pod.Pod.DeletionTimestamp == nil && hasRequiredRules(pod) {
				t.withRules = append(t.withRules, at)
			}
		}
	}
	return t
}

// copySnapshot returns a snapshot that is independent of those of takeSnapshot. The caller may
// modify it.
func (c *cluster) copySnapshot() *framework.Snapshot {
	c.mu.Lock()
	defer c.mu.Unlock()
	var nodes []*framework.NodeInfo
	for _, n := range c.nodes {
		if n.Node != nil {
			nodes = append(nodes, n.Clone())
		}
	}
	s := framework.NewSnapshot(nodes...)
	s.Index.SetNamespaces(maps.Clone(c.namespaces))
	s.Volumes, s.Workloads = c.snapshot.Volumes, c.snapshot.Workloads
	s.Nominated = make(map[string][]*framework.PodInfo)
	for _, p := range c.nominated {
		s.Nominated[p.node] = append(s.Nominated[p.node], p.info)
	}
	return s
}

// hasRequiredRules reports whether a pod has required affinity terms or DoNotSchedule spread
// constraints, which moving another pod may violate.
func hasRequiredRules(pod *framework.PodInfo) bool {
	return pod.Affinity != nil && len(pod.Affinity.Required) > 0 ||
		slices.ContainsFunc(pod.Pod.Spec.TopologySpreadConstraints, func(c v1.TopologySpreadConstraint) bool { return c.WhenUnsatisfiable == v1.DoNotSchedule })
}

// withoutNode returns a copy of the pod with an empty spec.nodeName.
func withoutNode(pod *v1.Pod) *framework.PodInfo {
	pod = pod.DeepCopy()
	pod.Spec.NodeName = ""
	return framework.NewPodInfo(pod)
}

// replaceNode replaces the state of a node in the snapshot.
func (t *Trial) replaceNode(old, now *framework.NodeInfo) {
	t.snap.Index.Replace(old, now)
	t.snap.ByName[now.Node.Name] = now
	i, _ := slices.BinarySearchFunc(t.snap.Nodes, now.Node.Name, func(n *framework.NodeInfo, name string) int { return strings.Compare(n.Node.Name, name) })
	t.snap.Nodes[i] = now
}

// withoutPod calls f while the pod is removed from its node in the snapshot. The argument of f is
// the node with the pod.
func (t *Trial) withoutPod(info *trialPod, f func(had *framework.NodeInfo) error) error {
	had := t.snap.ByName[info.node]
	less := had.Clone()
	less.RemovePod(info.Pod.UID)
	t.replaceNode(had, less)
	defer t.replaceNode(less, had)
	return f(had)
}

// Weigh evaluates where a running pod would be placed if it were pending.
func (t *Trial) Weigh(ctx context.Context, pod *v1.Pod) (Weighed, error) {
	info, profile := t.pods[pod.UID], t.profiles.forPod(pod)
	switch {
	case info == nil:
		return Weighed{Passed: "it is not on a known node"}, nil
	case profile == nil:
		return Weighed{Passed: "another scheduler is responsible for it"}, nil
	}
	as := withoutNode(info.Pod)
	for _, v := range []framework.Verb{framework.VerbFilter, framework.VerbPrioritize} {
		if len(framework.Asked(profile.Extenders, v, as)) > 0 {
			return Weighed{Passed: "an extender decides about its node"}, nil
		}
	}
	var out Weighed
	err := t.withoutPod(info, func(had *framework.NodeInfo) error {
		c := framework.NewCycle(as, t.snap)
		rated, err := profile.Rate(ctx, c, had.Node.Name)
		if err != nil {
			return fmt.Errorf("weighing pod %s/%s: %w", pod.Namespace, pod.Name, err)
		}
		if rated.Refusal != nil && had.Cordoned {
			out.Passed = "its node is cordoned"
			return nil
		}
		out.Stays, out.Best = rated.Refusal.Message(), rated.Best()
		out.Full, out.Left = had.Fullness(nil), t.snap.ByName[had.Node.Name].Fullness(nil)
		for _, name := range out.Best {
			out.Gain = rated.Scores[name] - rated.Scores[had.Node.Name]
			out.There = max(out.There, t.snap.ByName[name].Fullness(as))
		}
		return nil
	})
	return out, err
}

// Harms returns the name of another pod that could not stay on its node if pod moved to the node
// "to". The other pod's required rules would be violated. It returns "" if none exists. Pods with
// rules that are violated already are ignored.
func (t *Trial) Harms(ctx context.Context, pod *v1.Pod, to string) (string, error) {
	info, target := t.pods[pod.UID], t.snap.ByName[to]
	if info == nil || target == nil || info.node == to {
		return "", fmt.Errorf("pod %s/%s cannot move to node %s", pod.Namespace, pod.Name, to)
	}
	as := withoutNode(info.Pod)
	as.Pod.Spec.NodeName = to
	var broken []*trialPod
	err := t.withoutPod(info, func(*framework.NodeInfo) (err error) {
		more := target.Clone()
		more.AddPod(as)
		t.replaceNode(target, more)
		defer t.replaceNode(more, target)
		for _, q := range t.withRules {
			if q == info {
				continue
			}
			if ok, err := t.stillFits(ctx, q); err != nil {
				return err
			} else if !ok {
				broken = append(broken, q)
			}
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	for _, q := range broken {
		if ok, err := t.stillFits(ctx, q); err != nil || ok {
			return q.Pod.Namespace + "/" + q.Pod.Name, err
		}
	}
	return "", nil
}

// stillFits reports whether the node of the pod q would accept the pod if it were pending.
func (t *Trial) stillFits(ctx context.Context, q *trialPod) (ok bool, err error) {
	profile := t.profiles.any
	if own := t.profiles.forPod(q.Pod); own != nil {
		profile = own.Profile
	}
	err = t.withoutPod(q, func(had *framework.NodeInfo) error {
		s, err := profile.Takes(ctx, framework.NewCycle(withoutNode(q.Pod), t.snap), had.Node.Name)
		ok = s.OK()
		return err
	})
	return ok, err
}
