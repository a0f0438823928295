package scheduler

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// twin is a cluster that knows nothing but its objects: every question is answered by looking at all of them.
type twin struct {
	nodes      map[string]*v1.Node
	pods       map[types.UID]*v1.Pod
	namespaces map[string]map[string]string
}

func newTwin() *twin {
	return &twin{nodes: map[string]*v1.Node{}, pods: map[types.UID]*v1.Pod{},
		namespaces: map[string]map[string]string{}}
}

func (w *twin) nodeNames() []string { return slices.Sorted(maps.Keys(w.nodes)) }

// on lists the pods on nodes that exist.
func (w *twin) on(f func(pod *v1.Pod, n *v1.Node)) {
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		if n := w.nodes[w.pods[uid].Spec.NodeName]; n != nil {
			f(w.pods[uid], n)
		}
	}
}

func matches(s *metav1.LabelSelector, set map[string]string) bool {
	if s == nil {
		return false
	}
	sel, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		panic(err)
	}
	return sel.Matches(labels.Set(set))
}

func honours(p *v1.NodeInclusionPolicy, unset bool) bool {
	if p == nil {
		return unset
	}
	return *p == v1.NodeInclusionPolicyHonor
}

// takesPart says whether a node is looked at for a constraint of the pod.
func takesPart(pod *v1.Pod, c *v1.TopologySpreadConstraint, keys []string, n *v1.Node) bool {
	for _, k := range keys {
		if _, ok := n.Labels[k]; !ok {
			return false
		}
	}
	if _, ok := n.Labels[c.TopologyKey]; !ok {
		return false
	}
	if fits, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(n); honours(c.NodeAffinityPolicy, true) &&
		(err != nil || !fits) {
		return false
	}
	if honours(c.NodeTaintsPolicy, false) {
		for _, t := range n.Spec.Taints {
			if t.Effect != v1.TaintEffectPreferNoSchedule && !framework.Tolerated(pod.Spec.Tolerations, &t) {
				return false
			}
		}
	}
	return true
}

// domains counts the pods of a constraint per domain; domains without any are there with 0.
func (w *twin) domains(pod *v1.Pod, c *v1.TopologySpreadConstraint, keys []string) map[string]int {
	out := map[string]int{}
	for _, n := range w.nodes {
		if takesPart(pod, c, keys, n) {
			out[n.Labels[c.TopologyKey]] += 0
		}
	}
	w.on(func(q *v1.Pod, n *v1.Node) {
		if takesPart(pod, c, keys, n) && counted(pod, c, q) {
			out[n.Labels[c.TopologyKey]]++
		}
	})
	return out
}

func counted(pod *v1.Pod, c *v1.TopologySpreadConstraint, q *v1.Pod) bool {
	return q.Namespace == pod.Namespace && q.DeletionTimestamp == nil && matches(c.LabelSelector, q.Labels)
}

func constraints(pod *v1.Pod, action v1.UnsatisfiableConstraintAction) (
	list []v1.TopologySpreadConstraint, keys []string,
) {
	for _, c := range pod.Spec.TopologySpreadConstraints {
		if c.WhenUnsatisfiable == action {
			list, keys = append(list, c), append(keys, c.TopologyKey)
		}
	}
	return list, keys
}

// spread is the verdict on one node; "" = fits.
func (w *twin) spread(pod *v1.Pod, n *v1.Node) string {
	list, keys := constraints(pod, v1.DoNotSchedule)
	for _, c := range list {
		value, ok := n.Labels[c.TopologyKey]
		if !ok {
			return "node(s) didn't match pod topology spread constraints (missing required label)"
		}
		counts := w.domains(pod, &c, keys)
		least := math.MaxInt
		for _, count := range counts {
			least = min(least, count)
		}
		minDomains := 1
		if c.MinDomains != nil {
			minDomains = int(*c.MinDomains)
		}
		if len(counts) < minDomains {
			least = 0
		}
		self := 0
		if matches(c.LabelSelector, pod.Labels) {
			self = 1
		}
		if counts[value]+self-least > int(c.MaxSkew) {
			return "node(s) didn't match pod topology spread constraints"
		}
	}
	return ""
}

// spreadScores are the normalised scores of nodes; nil when nothing is rated.
func (w *twin) spreadScores(pod *v1.Pod, nodes []string) []int64 {
	list, keys := constraints(pod, v1.ScheduleAnyway)
	if len(list) == 0 {
		return nil
	}
	rated := func(n *v1.Node) bool {
		return !slices.ContainsFunc(keys, func(k string) bool { _, ok := n.Labels[k]; return !ok })
	}
	raw := make([]float64, len(nodes))
	for _, c := range list {
		values := map[string]bool{}
		for _, name := range nodes {
			if n := w.nodes[name]; rated(n) {
				values[n.Labels[c.TopologyKey]] = true
				if c.TopologyKey == v1.LabelHostname {
					values[name] = true
				}
			}
		}
		size := len(values)
		if c.TopologyKey == v1.LabelHostname {
			size = 0
			for _, name := range nodes {
				if rated(w.nodes[name]) {
					size++
				}
			}
		}
		counts := w.domains(pod, &c, keys)
		for i, name := range nodes {
			n := w.nodes[name]
			pods := counts[n.Labels[c.TopologyKey]]
			if c.TopologyKey == v1.LabelHostname {
				pods = 0
				w.on(func(q *v1.Pod, on *v1.Node) {
					if on == n && counted(pod, &c, q) {
						pods++
					}
				})
			}
			raw[i] += float64(pods)*math.Log(float64(size+2)) + float64(c.MaxSkew-1)
		}
	}
	least, most := int64(math.MaxInt64), int64(0)
	for i, name := range nodes {
		if s := int64(math.Round(raw[i])); rated(w.nodes[name]) {
			least, most = min(least, s), max(most, s)
		}
	}
	out := make([]int64, len(nodes))
	for i, name := range nodes {
		switch s := int64(math.Round(raw[i])); {
		case !rated(w.nodes[name]):
		case most == 0:
			out[i] = 100
		default:
			out[i] = 100 * (most + least - s) / most
		}
	}
	return out
}

// means says whether a term of pod p is about pod q.
func (w *twin) means(pod *v1.Pod, t *v1.PodAffinityTerm, q *v1.Pod) bool {
	in := slices.Contains(t.Namespaces, q.Namespace) ||
		len(t.Namespaces) == 0 && t.NamespaceSelector == nil && pod.Namespace == q.Namespace ||
		matches(t.NamespaceSelector, w.namespaces[q.Namespace])
	return in && matches(t.LabelSelector, q.Labels)
}

func requiredOf(pod *v1.Pod) (beside, apart []v1.PodAffinityTerm) {
	if a := pod.Spec.Affinity; a != nil {
		if a.PodAffinity != nil {
			beside = a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution
		}
		if a.PodAntiAffinity != nil {
			apart = a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution
		}
	}
	return beside, apart
}

func sameDomain(a, b *v1.Node, key string) bool {
	x, ok := a.Labels[key]
	y, ok2 := b.Labels[key]
	return ok && ok2 && x == y
}

// affinity is the verdict on one node; "" = fits.
func (w *twin) affinity(pod *v1.Pod, n *v1.Node) string {
	beside, apart := requiredOf(pod)
	all := func(q *v1.Pod) bool {
		return !slices.ContainsFunc(beside, func(t v1.PodAffinityTerm) bool { return !w.means(pod, &t, q) })
	}
	met, group := true, false
	for _, t := range beside {
		if _, ok := n.Labels[t.TopologyKey]; !ok {
			return "node(s) didn't match pod affinity rules"
		}
		here := false
		w.on(func(q *v1.Pod, on *v1.Node) {
			if !all(q) {
				return
			}
			here = here || sameDomain(n, on, t.TopologyKey)
			if _, ok := on.Labels[t.TopologyKey]; ok {
				group = true
			}
		})
		met = met && here
	}
	if !met && (group || !all(pod)) {
		return "node(s) didn't match pod affinity rules"
	}
	verdict := ""
	w.on(func(q *v1.Pod, on *v1.Node) {
		for _, t := range apart {
			if sameDomain(n, on, t.TopologyKey) && w.means(pod, &t, q) {
				verdict = "node(s) didn't match pod anti-affinity rules"
			}
		}
	})
	if verdict != "" {
		return verdict
	}
	w.on(func(q *v1.Pod, on *v1.Node) {
		_, theirs := requiredOf(q)
		for _, t := range theirs {
			if sameDomain(n, on, t.TopologyKey) && w.means(q, &t, pod) {
				verdict = "node(s) didn't satisfy existing pods anti-affinity rules"
			}
		}
	})
	return verdict
}

func preferredOf(pod *v1.Pod) (list []v1.WeightedPodAffinityTerm) {
	if a := pod.Spec.Affinity; a != nil {
		if a.PodAffinity != nil {
			list = append(list, a.PodAffinity.PreferredDuringSchedulingIgnoredDuringExecution...)
		}
		if a.PodAntiAffinity != nil {
			for _, t := range a.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution {
				t.Weight = -t.Weight
				list = append(list, t)
			}
		}
	}
	return list
}

func (w *twin) affinityScores(pod *v1.Pod, nodes []string) []int64 {
	raw := make([]int64, len(nodes))
	for i, name := range nodes {
		n := w.nodes[name]
		w.on(func(q *v1.Pod, on *v1.Node) {
			for _, t := range preferredOf(pod) {
				if sameDomain(n, on, t.PodAffinityTerm.TopologyKey) && w.means(pod, &t.PodAffinityTerm, q) {
					raw[i] += int64(t.Weight)
				}
			}
			theirs := preferredOf(q)
			beside, _ := requiredOf(q)
			for _, t := range beside {
				theirs = append(theirs, v1.WeightedPodAffinityTerm{Weight: 1, PodAffinityTerm: t})
			}
			for _, t := range theirs {
				if sameDomain(n, on, t.PodAffinityTerm.TopologyKey) && w.means(q, &t.PodAffinityTerm, pod) {
					raw[i] += int64(t.Weight)
				}
			}
		})
	}
	least, most := slices.Min(raw), slices.Max(raw)
	for i, s := range raw {
		if raw[i] = 0; most > least {
			raw[i] = int64(100 * (float64(s-least) / float64(most-least)))
		}
	}
	return raw
}

// dice makes small clusters in which much collides.
type dice struct{ *rand.Rand }

func (d dice) one(list ...string) string { return list[d.IntN(len(list))] }
func (d dice) often(percent int) bool    { return d.IntN(100) < percent }

func (d dice) labels(keys, values []string) map[string]string {
	out := map[string]string{}
	for _, k := range keys {
		if d.often(70) {
			out[k] = d.one(values...)
		}
	}
	return out
}

var (
	podKeys, podValues = []string{"app", "tier", "rev"}, []string{"a", "b"}
	topologyKeys       = []string{"zone", "rack", v1.LabelHostname}
	namespaceNames     = []string{"one", "two", "three"}
)

func (d dice) node(name string) *v1.Node {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
		Labels: d.labels([]string{"zone", "rack", "disk"}, []string{"x", "y", "z"})}}
	small(n)
	if d.often(90) {
		n.Labels[v1.LabelHostname] = name
	}
	if d.often(20) {
		n.Spec.Taints = []v1.Taint{{Key: d.one("t", "u"), Effect: v1.TaintEffectNoSchedule}}
	}
	return n
}

func (d dice) selector() *metav1.LabelSelector {
	switch d.IntN(8) {
	case 0:
		return nil
	case 1:
		return &metav1.LabelSelector{}
	case 2:
		op := []metav1.LabelSelectorOperator{metav1.LabelSelectorOpExists,
			metav1.LabelSelectorOpDoesNotExist}[d.IntN(2)]
		return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: d.one(podKeys...),
			Operator: op}}}
	case 3:
		op := []metav1.LabelSelectorOperator{metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn}[d.IntN(2)]
		return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: d.one(podKeys...), Operator: op, Values: podValues[d.IntN(2):]}}}
	}
	return &metav1.LabelSelector{MatchLabels: map[string]string{d.one(podKeys...): d.one(podValues...)}}
}

func (d dice) spread() (out []v1.TopologySpreadConstraint) {
	policies := []v1.NodeInclusionPolicy{v1.NodeInclusionPolicyHonor, v1.NodeInclusionPolicyIgnore}
	for _, key := range topologyKeys {
		for _, action := range []v1.UnsatisfiableConstraintAction{v1.DoNotSchedule, v1.ScheduleAnyway} {
			if !d.often(35) {
				continue
			}
			c := v1.TopologySpreadConstraint{MaxSkew: int32(1 + d.IntN(2)), TopologyKey: key, WhenUnsatisfiable: action,
				LabelSelector: d.selector()}
			if n := int32(1 + d.IntN(3)); action == v1.DoNotSchedule && d.often(30) {
				c.MinDomains = &n
			}
			if d.often(40) {
				c.NodeAffinityPolicy = &policies[d.IntN(2)]
			}
			if d.often(40) {
				c.NodeTaintsPolicy = &policies[d.IntN(2)]
			}
			out = append(out, c)
		}
	}
	return out
}

func (d dice) term() v1.PodAffinityTerm {
	t := v1.PodAffinityTerm{LabelSelector: d.selector(), TopologyKey: d.one(topologyKeys...)}
	if d.often(30) {
		t.Namespaces = []string{d.one(namespaceNames...)}
	}
	if d.often(30) {
		t.NamespaceSelector = &metav1.LabelSelector{}
		if d.often(60) {
			t.NamespaceSelector.MatchLabels = map[string]string{"team": d.one("a", "b")}
		}
	}
	return t
}

func (d dice) terms(most int) (required []v1.PodAffinityTerm, preferred []v1.WeightedPodAffinityTerm) {
	for range d.IntN(most + 1) {
		required = append(required, d.term())
	}
	for range d.IntN(most + 1) {
		preferred = append(preferred, v1.WeightedPodAffinityTerm{Weight: int32(1 + d.IntN(100)),
			PodAffinityTerm: d.term()})
	}
	return required, preferred
}

var serial int

func (d dice) pod() *v1.Pod {
	serial++
	name := fmt.Sprint("pod-", serial)
	pod := testPod(name, priority(int32(d.IntN(4))))
	pod.Status.StartTime = &metav1.Time{Time: time.Unix(int64(1000+d.IntN(1000)), 0)}
	pod.Namespace, pod.Labels = d.one(namespaceNames...), d.labels(podKeys, podValues)
	if d.often(50) {
		pod.Spec.TopologySpreadConstraints = d.spread()
	}
	if d.often(60) {
		pod.Spec.Affinity = &v1.Affinity{}
		if required, preferred := d.terms(2); d.often(50) {
			pod.Spec.Affinity.PodAffinity = &v1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: required,
				PreferredDuringSchedulingIgnoredDuringExecution: preferred}
		}
		if required, preferred := d.terms(2); d.often(60) {
			pod.Spec.Affinity.PodAntiAffinity = &v1.PodAntiAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution:  required,
				PreferredDuringSchedulingIgnoredDuringExecution: preferred}
		}
	}
	if d.often(30) {
		pod.Spec.NodeSelector = map[string]string{"disk": d.one("x", "y")}
	}
	if d.often(30) {
		pod.Spec.Tolerations = []v1.Toleration{{Key: "t", Operator: v1.TolerationOpExists}}
	}
	return pod
}
