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

// Trial is a copy of the cluster state in which the rebalance controller evaluates where running
// pods would be placed. Its methods do not change the cluster. It is not safe for concurrent use,
// but may be used while the scheduler runs.
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

// Evaluation is the result of Trial.Evaluate: where a running pod would be placed if it were
// pending. The utilization of a node is the percentage of its CPU or memory that pods request,
// whichever is higher.
type Evaluation struct {
	// SkipReason is the reason why the pod was not evaluated; "" if it was evaluated.
	SkipReason string
	// Refusal is the reason why the pod's current node would refuse the pod; "" if the node would
	// accept it.
	Refusal string
	// Best contains the nodes with the highest score. Gain is that score minus the score of the
	// pod's current node.
	Best []string
	Gain int64
	// WithPod and WithoutPod are the utilizations of the current node with the pod and without it.
	// InBest is the highest utilization that a node in Best would have with the pod.
	WithPod, WithoutPod, InBest float64
}

// Trial returns a Trial of the current cluster state. It returns an error if the scheduler's
// profiles are invalid.
func (s *Scheduler) Trial() (*Trial, error) {
	if s.err != nil {
		return nil, s.err
	}
	// The scheduler's own plugins hold the state of pods that are being scheduled.
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

// copySnapshot returns a new snapshot of the current state, which the caller may modify. It shares
// no modifiable state with the snapshots of takeSnapshot.
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

// hasRequiredRules reports whether the pod has required affinity terms or DoNotSchedule spread
// constraints. Moving another pod may violate such rules.
func hasRequiredRules(pod *framework.PodInfo) bool {
	return pod.Affinity != nil && len(pod.Affinity.Required) > 0 ||
		slices.ContainsFunc(pod.Pod.Spec.TopologySpreadConstraints, func(c v1.TopologySpreadConstraint) bool {
			return c.WhenUnsatisfiable == v1.DoNotSchedule
		})
}

// withoutNode returns a copy of the pod without spec.nodeName, so that it can be evaluated like a
// pending pod.
func withoutNode(pod *v1.Pod) *framework.PodInfo {
	pod = pod.DeepCopy()
	pod.Spec.NodeName = ""
	return framework.NewPodInfo(pod)
}

// replaceNode replaces the node old in the trial's snapshot by now, another version of the same
// node.
func (t *Trial) replaceNode(old, now *framework.NodeInfo) {
	t.snap.Index.Replace(old, now)
	t.snap.ByName[now.Node.Name] = now
	i, _ := slices.BinarySearchFunc(t.snap.Nodes, now.Node.Name, func(n *framework.NodeInfo, name string) int {
		return strings.Compare(n.Node.Name, name)
	})
	t.snap.Nodes[i] = now
}

// withoutPod removes the pod from its node in the snapshot, calls f, and restores the previous
// state of the node. f receives that previous state, which includes the pod.
func (t *Trial) withoutPod(info *trialPod, f func(had *framework.NodeInfo) error) error {
	had := t.snap.ByName[info.node]
	less := had.Clone()
	less.RemovePod(info.Pod.UID)
	t.replaceNode(had, less)
	defer t.replaceNode(less, had)
	return f(had)
}

// Evaluate returns where the scheduler would place the running pod if it were pending, without
// moving it.
func (t *Trial) Evaluate(ctx context.Context, pod *v1.Pod) (Evaluation, error) {
	info, profile := t.pods[pod.UID], t.profiles.forPod(pod)
	switch {
	case info == nil:
		return Evaluation{SkipReason: "it is not on a known node"}, nil
	case profile == nil:
		return Evaluation{SkipReason: "another scheduler is responsible for it"}, nil
	}
	as := withoutNode(info.Pod)
	for _, v := range []framework.Verb{framework.VerbFilter, framework.VerbPrioritize} {
		if len(framework.InterestedExtenders(profile.Extenders, v, as)) > 0 {
			return Evaluation{SkipReason: "an extender decides about its node"}, nil
		}
	}
	var out Evaluation
	err := t.withoutPod(info, func(had *framework.NodeInfo) error {
		c := framework.NewCycle(as, t.snap)
		rated, err := profile.Rate(ctx, c, had.Node.Name)
		if err != nil {
			return fmt.Errorf("weighing pod %s/%s: %w", pod.Namespace, pod.Name, err)
		}
		if rated.Refusal != nil && had.Cordoned {
			out.SkipReason = "its node is cordoned"
			return nil
		}
		out.Refusal, out.Best = rated.Refusal.Message(), rated.Best()
		out.WithPod, out.WithoutPod = had.Fullness(nil), t.snap.ByName[had.Node.Name].Fullness(nil)
		for _, name := range out.Best {
			out.Gain = rated.Scores[name] - rated.Scores[had.Node.Name]
			out.InBest = max(out.InBest, t.snap.ByName[name].Fullness(as))
		}
		return nil
	})
	return out, err
}

// FindHarmedPod returns the name of another pod whose required affinity terms or DoNotSchedule
// constraints would be violated if pod moved to newNode. It returns "" if no such pod exists. Pods
// whose rules are already violated are ignored.
func (t *Trial) FindHarmedPod(ctx context.Context, pod *v1.Pod, newNode string) (string, error) {
	info, target := t.pods[pod.UID], t.snap.ByName[newNode]
	if info == nil || target == nil || info.node == newNode {
		return "", fmt.Errorf("pod %s/%s cannot move to node %s", pod.Namespace, pod.Name, newNode)
	}
	as := withoutNode(info.Pod)
	as.Pod.Spec.NodeName = newNode
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

// stillFits reports whether the running pod q would fit its own node if q were pending.
func (t *Trial) stillFits(ctx context.Context, q *trialPod) (ok bool, err error) {
	profile := t.profiles.any
	if own := t.profiles.forPod(q.Pod); own != nil {
		profile = own.Profile
	}
	err = t.withoutPod(q, func(had *framework.NodeInfo) error {
		s, err := profile.RefusalBy(ctx, framework.NewCycle(withoutNode(q.Pod), t.snap), had.Node.Name)
		ok = s.OK()
		return err
	})
	return ok, err
}
