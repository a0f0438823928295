package scheduler

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	helpers "k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins/interpodaffinity"
	"keelson.dev/keelson/controlplane/scheduler/plugins/nodeaffinity"
	"keelson.dev/keelson/controlplane/scheduler/plugins/podtopologyspread"
)

// change makes one random change to both.
func (w *twin) change(d dice, c *cluster) {
	node := d.one("n1", "n2", "n3", "n4", "n5")
	anyPod := func() *v1.Pod {
		if len(w.pods) == 0 {
			return nil
		}
		uids := make([]types.UID, 0, len(w.pods))
		for uid := range w.pods {
			uids = append(uids, uid)
		}
		slices.Sort(uids)
		return w.pods[uids[d.IntN(len(uids))]]
	}
	switch d.IntN(12) {
	case 0, 1, 2:
		w.nodes[node] = d.node(node)
		c.setNode(w.nodes[node])
	case 3:
		if d.often(30) {
			delete(w.nodes, node)
			c.removeNode(node)
		}
	case 4, 5, 6, 7:
		pod := d.pod()
		pod.Spec.NodeName = node
		w.pods[pod.UID] = pod
		if d.often(50) {
			c.assumePod(framework.NewPodInfo(pod), node)
		} else {
			c.addBoundPod(pod)
		}
	case 8:
		if pod := anyPod(); pod != nil {
			delete(w.pods, pod.UID)
			c.removePod(pod.UID)
		}
	case 9:
		if pod := anyPod(); pod != nil {
			now := pod.DeepCopy()
			now.Labels = d.labels(podKeys, podValues)
			w.pods[pod.UID] = now
			c.addBoundPod(now)
		}
	case 10:
		if pod := anyPod(); pod != nil {
			now := pod.DeepCopy()
			now.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
			w.pods[pod.UID] = now
			c.addBoundPod(now)
		}
	case 11:
		name := d.one(namespaceNames...)
		w.namespaces[name] = map[string]string{"team": d.one("a", "b", "c")}
		c.setNamespace(name, w.namespaces[name])
	}
}

// F84, F85: over thousands of small clusters that change step by step, spread and affinity decide and rate as one does
// who looks at all objects every time.
func TestPlacementEqualsTwin(t *testing.T) {
	const clusters, steps = 1500, 24
	verdicts := map[string]int{}
	for seed := range uint64(clusters) {
		d := dice{rand.New(rand.NewPCG(seed, 7))}
		w, c := newTwin(), newCluster(framework.Volumes{}, nil)
		var asked []*v1.Pod
		for step := range steps {
			w.change(d, c)
			if d.often(40) || len(w.nodes) == 0 {
				continue
			}
			pod := d.pod()
			if len(asked) > 0 && d.often(70) { // its counts are kept, and must have followed
				pod = asked[d.IntN(len(asked))]
			}
			asked = append(asked, pod)
			snap := c.takeSnapshot()
			w.compareSpread(t, seed, step, pod, snap, verdicts)
			w.compareAffinity(t, seed, step, pod, snap, verdicts)
			if t.Failed() {
				return
			}
		}
	}
	for _, v := range []string{"", "node(s) didn't match pod topology spread constraints (missing required label)",
		"node(s) didn't match pod topology spread constraints", "node(s) didn't match pod affinity rules",
		"node(s) didn't match pod anti-affinity rules", "node(s) didn't satisfy existing pods anti-affinity rules"} {
		if verdicts[v] < 100 {
			t.Errorf("only %d verdicts %q: the clusters show too little", verdicts[v], v)
		}
	}
}

type filterAndScore interface {
	framework.PreFilter
	framework.Filter
	framework.PreScore
	framework.NormalizeScore
}

// ask runs one plugin over the snapshot.
func ask(t *testing.T, plugin filterAndScore, pod *v1.Pod, snap *framework.Snapshot) (
	verdicts []string, scores []int64,
) {
	c := framework.NewCycle(framework.NewPodInfo(pod), snap)
	ctx := t.Context()
	_, st := plugin.PreFilter(ctx, c)
	for _, n := range snap.Nodes {
		verdict := ""
		if !st.Is(framework.Skip) {
			verdict = plugin.Filter(ctx, c, n).Message()
		}
		verdicts = append(verdicts, verdict)
	}
	if plugin.PreScore(ctx, c, snap.Nodes).Is(framework.Skip) {
		return verdicts, nil
	}
	for _, n := range snap.Nodes {
		s, _ := plugin.Score(ctx, c, n)
		scores = append(scores, s)
	}
	plugin.NormalizeScore(ctx, c, scores)
	return verdicts, scores
}

func (w *twin) compareSpread(
	t *testing.T, seed uint64, step int, pod *v1.Pod, snap *framework.Snapshot, seen map[string]int,
) {
	got, scores := ask(t, podtopologyspread.Plugin{}, pod, snap)
	for i, name := range w.nodeNames() {
		want := w.spread(pod, w.nodes[name])
		seen[want]++
		if got[i] != want {
			t.Errorf("seed %d step %d: spread on %s: %q, want %q", seed, step, name, got[i], want)
		}
	}
	if want := w.spreadScores(pod, w.nodeNames()); !slices.Equal(scores, want) {
		t.Errorf("seed %d step %d: spread scores %v, want %v", seed, step, scores, want)
	}
}

func (w *twin) compareAffinity(
	t *testing.T, seed uint64, step int, pod *v1.Pod, snap *framework.Snapshot, seen map[string]int,
) {
	got, scores := ask(t, interpodaffinity.Plugin{}, pod, snap)
	for i, name := range w.nodeNames() {
		want := w.affinity(pod, w.nodes[name])
		seen[want]++
		if got[i] != want {
			t.Errorf("seed %d step %d: affinity on %s: %q, want %q", seed, step, name, got[i], want)
		}
	}
	if scores == nil {
		scores = make([]int64, len(w.nodes))
	}
	if want := w.affinityScores(pod, w.nodeNames()); !slices.Equal(scores, want) {
		t.Errorf("seed %d step %d: affinity scores %v, want %v", seed, step, scores, want)
	}
}

// nodeRules gives a pod what it wants of nodes.
func (d dice) nodeRules(pod *v1.Pod) {
	term := func() v1.NodeSelectorTerm {
		ops := []v1.NodeSelectorOperator{v1.NodeSelectorOpIn, v1.NodeSelectorOpNotIn}
		t := v1.NodeSelectorTerm{MatchExpressions: []v1.NodeSelectorRequirement{
			{Key: d.one("zone", "rack", "disk"), Operator: ops[d.IntN(2)], Values: []string{d.one("x", "y", "z")}}}}
		switch d.IntN(12) {
		case 0:
			t.MatchFields = []v1.NodeSelectorRequirement{{Key: "metadata.name", Operator: v1.NodeSelectorOpIn,
				Values: []string{d.one("n1", "n2", "n3")}}}
		case 1:
			t.MatchExpressions[0].Values = nil // cannot be read
		case 2:
			t.MatchExpressions = nil // matches nothing
		}
		return t
	}
	a := &v1.NodeAffinity{}
	if d.often(70) {
		a.RequiredDuringSchedulingIgnoredDuringExecution =
			&v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{term()}}
		if d.often(50) {
			terms := &a.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
			*terms = append(*terms, term())
		}
	}
	for range d.IntN(3) {
		a.PreferredDuringSchedulingIgnoredDuringExecution = append(a.PreferredDuringSchedulingIgnoredDuringExecution,
			v1.PreferredSchedulingTerm{Weight: int32(1 + d.IntN(100)), Preference: term()})
	}
	pod.Spec.Affinity = &v1.Affinity{NodeAffinity: a}
}

// F82: what is kept of nodes follows them: over thousands of small clusters whose nodes come, go and change, a pod is
// refused and drawn as Kubernetes' own matching says, computed for each node.
func TestNodeAffinityEqualsTwin(t *testing.T) {
	const clusters, steps = 1000, 24
	verdicts := map[string]int{}
	for seed := range uint64(clusters) {
		d := dice{rand.New(rand.NewPCG(seed, 11))}
		w, c := newTwin(), newCluster(framework.Volumes{}, nil)
		var asked []*v1.Pod
		for step := range steps {
			w.change(d, c)
			pod := d.pod()
			d.nodeRules(pod)
			if len(asked) > 0 && d.often(80) {
				pod = asked[d.IntN(len(asked))]
			}
			asked = append(asked, pod)
			w.compareNodeAffinity(t, pod, c.takeSnapshot(), verdicts)
			if t.Failed() {
				t.Fatalf("seed %d step %d", seed, step)
			}
		}
	}
	if len(verdicts) < 3 {
		t.Errorf("verdicts %v: the clusters show too little", verdicts)
	}
	for v, n := range verdicts {
		if n < 100 {
			t.Errorf("only %d verdicts %q: the clusters show too little", n, v)
		}
	}
}

func (w *twin) compareNodeAffinity(t *testing.T, pod *v1.Pod, snap *framework.Snapshot, seen map[string]int) {
	c, plugin := framework.NewCycle(framework.NewPodInfo(pod), snap), nodeaffinity.Plugin{}
	only, st := plugin.PreFilter(t.Context(), c)
	terms := pod.Spec.Affinity.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution
	preferred, readable := helpers.NewPreferredSchedulingTerms(terms)
	rated := plugin.PreScore(t.Context(), c, snap.Nodes)
	if len(terms) > 0 && rated.OK() != (readable == nil) {
		t.Fatalf("preferred terms: %v, want %v", rated.AsError(), readable)
	}
	for _, n := range snap.Nodes {
		got := ""
		if !st.Is(framework.Skip) {
			got = plugin.Filter(t.Context(), c, n).Message()
		}
		want := ""
		fits, err := helpers.GetRequiredNodeAffinity(pod).Match(w.nodes[n.Node.Name])
		switch {
		case err != nil:
			want = err.Error()
		case !fits:
			want = "node(s) didn't match Pod's node affinity/selector"
		}
		if seen[want]++; err != nil {
			seen["cannot be read"]++
			delete(seen, want)
		}
		if _, left := only[n.Node.Name]; only != nil && !left && want == "" {
			t.Errorf("node %s is left out", n.Node.Name)
		}
		if got != want {
			t.Errorf("node %s: %q, want %q", n.Node.Name, got, want)
		}
		if len(terms) > 0 && rated.OK() {
			if score, _ := plugin.Score(t.Context(), c, n); score != preferred.Score(w.nodes[n.Node.Name]) {
				t.Errorf("node %s: score %d, want %d", n.Node.Name, score, preferred.Score(w.nodes[n.Node.Name]))
			}
		}
	}
}
