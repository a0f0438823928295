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

// Trial is the cluster as it was when it was taken, for asking what would be if one of its pods were elsewhere. It
// changes nothing. One goroutine uses it at a time, beside the scheduler.
type Trial struct {
	profiles  *profiles
	snap      *framework.Snapshot
	pods      map[types.UID]*trialPod
	withRules []*trialPod // of those whose rules are about other pods
}

// trialPod is a pod on a node.
type trialPod struct {
	*framework.PodInfo
	node string
}

// Weighed is what the scheduler says of a pod that runs, were it pending and not where it is. Parts of a node in use are
// in hundredths of what it has, of processor or memory, whichever is scarcer.
type Weighed struct {
	// Passed over: why nothing is said of the pod; "" = it was weighed.
	Passed string
	// Stays is why its node would not take it again; "" = it would.
	Stays string
	// Best are the nodes that are as good as any, and Gain how much higher than its node they are rated.
	Best []string
	Gain int64
	// Full is the pod's node in use with it, and Left without it; There is the fullest of the best with it.
	Full, Left, There float64
}

// Trial takes the cluster as it is now.
func (s *Scheduler) Trial() (*Trial, error) {
	if s.err != nil {
		return nil, s.err
	}
	// What plugins remember of pods in flight is the loop's: these are others.
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

// copySnapshot is a snapshot that belongs to the caller.
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

// hasRequiredRules says whether a pod has required rules that other pods' moves may break.
func hasRequiredRules(pod *framework.PodInfo) bool {
	return pod.Affinity != nil && len(pod.Affinity.Required) > 0 ||
		slices.ContainsFunc(pod.Pod.Spec.TopologySpreadConstraints, func(c v1.TopologySpreadConstraint) bool { return c.WhenUnsatisfiable == v1.DoNotSchedule })
}

// withoutNode is a pod as it would be before it had a node.
func withoutNode(pod *v1.Pod) *framework.PodInfo {
	pod = pod.DeepCopy()
	pod.Spec.NodeName = ""
	return framework.NewPodInfo(pod)
}

// replaceNode puts another state of a node into the snapshot.
func (t *Trial) replaceNode(old, now *framework.NodeInfo) {
	t.snap.Index.Replace(old, now)
	t.snap.ByName[now.Node.Name] = now
	i, _ := slices.BinarySearchFunc(t.snap.Nodes, now.Node.Name, func(n *framework.NodeInfo, name string) int { return strings.Compare(n.Node.Name, name) })
	t.snap.Nodes[i] = now
}

// withoutPod does something while the pod is not where it is.
func (t *Trial) withoutPod(info *trialPod, f func(had *framework.NodeInfo) error) error {
	had := t.snap.ByName[info.node]
	less := had.Clone()
	less.RemovePod(info.Pod.UID)
	t.replaceNode(had, less)
	defer t.replaceNode(less, had)
	return f(had)
}

// Weigh says where the pod would go if it were pending.
func (t *Trial) Weigh(ctx context.Context, pod *v1.Pod) (Weighed, error) {
	info, profile := t.pods[pod.UID], t.profiles.forPod(pod)
	switch {
	case info == nil:
		return Weighed{Passed: "it is on no node that is known"}, nil
	case profile == nil:
		return Weighed{Passed: "it is another scheduler's"}, nil
	}
	as := withoutNode(info.Pod)
	for _, v := range []framework.Verb{framework.VerbFilter, framework.VerbPrioritize} {
		if len(framework.Asked(profile.Extenders, v, as)) > 0 {
			return Weighed{Passed: "an extender has a say in where it goes"}, nil
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

// Harms names a pod that its rules would no longer let onto its node once this one had moved; "" = there is none that
// could stay before.
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

// stillFits says whether a pod's node would take it again.
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
