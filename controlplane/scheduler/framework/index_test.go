package framework

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
)

// Counts are those of a map, in whichever form they lie, and take room for what is counted only.
func TestCountsEqualMap(t *testing.T) {
	sparse, dense := 0, 0
	for seed := range uint64(300) {
		d := rand.New(rand.NewPCG(seed, 1))
		var c sparseCounts
		want := map[int32]int{}
		span := int32(1) << (3 + d.IntN(9))
		for range 600 {
			at, by := d.Int32N(span), 1+d.IntN(2)
			if d.IntN(600) < 5 {
				span = int32(1) << (3 + d.IntN(9))
			}
			if have := want[at]; have > 0 && d.IntN(5) < 3 {
				by = -min(by, have)
			}
			if want[at] += by; want[at] == 0 {
				delete(want, at)
			}
			if got := c.addTo(at, by); got != want[at] {
				t.Fatalf("seed %d: add says %d at %d, want %d", seed, got, at, want[at])
			}
			if d.IntN(10) > 0 {
				continue
			}
			got := map[int32]int{}
			c.forEach(func(at int32, n int) { got[at] = n })
			if !maps.Equal(got, want) || c.used != len(want) {
				t.Fatalf("seed %d: %d used: %v, want %v", seed, c.used, got, want)
			}
			if other := d.Int32N(span); c.value(other) != want[other] {
				t.Fatalf("seed %d: %d at %d, want %d", seed, c.value(other), other, want[other])
			}
			if len(c.dense) > max(smallSlice, (c.used+1)*sparseShare) {
				t.Fatalf("seed %d: %d places for %d counts", seed, len(c.dense), c.used)
			}
			if c.dense != nil {
				dense++
			} else if c.sorted != nil {
				sparse++
			}
		}
	}
	if sparse < 500 || dense < 500 {
		t.Errorf("%d times sparse, %d times dense: too little was seen", sparse, dense)
	}
}

// rows is a cluster as plain lists.
type rows struct {
	*rand.Rand
	x     *Index
	nodes map[string]*NodeInfo
	made  int
}

func (r *rows) node() string { return fmt.Sprint("node-", r.IntN(120)) }

func (r *rows) freshNode(name string) *v1.Node {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"host": name}}}
	if r.IntN(10) > 0 {
		n.Labels["rack"] = fmt.Sprint("rack-", r.IntN(30))
	}
	if r.IntN(4) == 0 {
		n.Labels["disk"] = "fast"
	}
	return n
}

func (r *rows) change() {
	name := r.node()
	old := r.nodes[name]
	var now *NodeInfo
	switch {
	case old == nil:
		now = &NodeInfo{}
		now.SetNode(r.freshNode(name))
	case r.IntN(40) == 0: // gone
	case r.IntN(20) == 0:
		now = old.Clone()
		now.SetNode(r.freshNode(name))
	default:
		now = old.Clone()
		if r.IntN(5) < 2 && len(now.Pods) > 0 {
			now.RemovePod(now.Pods[r.IntN(len(now.Pods))].Pod.UID)
		} else {
			r.made++
			now.AddPod(NewPodInfo(&v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: types.UID(fmt.Sprint(r.made)),
				Namespace: "one",
				Labels:    map[string]string{"app": fmt.Sprint(r.IntN(4)), "tier": fmt.Sprint(r.IntN(2))}}}))
		}
	}
	r.x.Replace(old, now)
	if now == nil {
		delete(r.nodes, name)
	} else {
		r.nodes[name] = now
	}
}

// recount compares what the index says of one selector and key with a look at all nodes.
func (r *rows) recount(t *testing.T, app, key string, choice NodeSelection) {
	selector := labels.SelectorFromSet(labels.Set{"app": app})
	set := r.x.Set(NewNamespacePodSelector("one", selector))
	d := r.x.Domains(set, key, choice)
	pods, all := map[string]int{}, 0
	for _, n := range r.nodes {
		on := 0
		for _, pod := range n.Pods {
			if selector.Matches(labels.Set(pod.Pod.Labels)) {
				on++
			}
		}
		if got := set.OnNode(n); got != on {
			t.Errorf("%d pods on %s, want %d", got, n.Node.Name, on)
		}
		if value, ok := n.Node.Labels[key]; ok && choice.Has(n.Node) {
			pods[value] += on
			all += on
		}
	}
	least := 0
	if len(pods) > 0 {
		least = slices.Min(slices.Collect(maps.Values(pods)))
	}
	if d.Size() != len(pods) || d.All() != all || d.Least() != least {
		t.Errorf("%d domains, %d pods, least %d; want %d, %d, %d", d.Size(), d.All(), d.Least(), len(pods), all, least)
	}
	for _, n := range r.nodes {
		value, ok := n.Node.Labels[key]
		at := d.At(n)
		if (at != NoDomain) != ok || d.Counts(n) != (ok && choice.Has(n.Node)) || d.Pods(at) != pods[value] {
			t.Errorf("node %s: domain %d, counted %t, %d pods; want %d in %q", n.Node.Name, at, d.Counts(n), d.Pods(at),
				pods[value], value)
		}
		for _, more := range []int{-1, 2} {
			if have, in := pods[value]; in && have+more >= 0 {
				pods[value] += more
				if want := slices.Min(slices.Collect(maps.Values(pods))); d.LeastWith(at, more) != want {
					t.Errorf("least with %d more in %q: %d, want %d", more, value, d.LeastWith(at, more), want)
				}
				pods[value] -= more
			}
		}
	}
	list := slices.Collect(maps.Values(r.nodes))[:len(r.nodes)/2]
	distinct := map[string]bool{}
	for _, n := range list {
		distinct[n.Node.Labels[key]] = true
	}
	if got := d.Distinct(list); got != len(distinct) {
		t.Errorf("%d distinct domains, want %d", got, len(distinct))
	}
}

// F84, F85: in clusters with many domains, where nodes come, go and change their labels, what is counted change by
// change is what a look at all pods finds. When all is gone, nothing is kept.
func TestIndexEqualsRecount(t *testing.T) {
	fast := NodeSelection{ID: "fast", Has: func(n *v1.Node) bool { return n.Labels["disk"] == "fast" }}
	for seed := range uint64(30) {
		r := &rows{Rand: rand.New(rand.NewPCG(seed, 3)), x: NewIndex(), nodes: map[string]*NodeInfo{}}
		for step := range 1200 {
			r.change()
			if step%20 == 19 {
				choice := EveryNode
				if r.IntN(3) == 0 {
					choice = fast
				}
				r.recount(t, fmt.Sprint(r.IntN(4)), []string{"host", "rack", "disk", "none"}[r.IntN(4)], choice)
				if t.Failed() {
					t.Fatalf("seed %d step %d", seed, step)
				}
			}
		}
		for _, n := range r.nodes {
			r.x.Replace(n, nil)
		}
		if len(r.x.classes) > 0 || len(r.x.free) != len(r.x.nodes)-1 {
			t.Errorf("%d classes, %d of %d slots are left", len(r.x.classes), len(r.x.nodes)-1-len(r.x.free),
				len(r.x.nodes)-1)
		}
		for key, v := range r.x.values {
			if len(v.ids) > 0 {
				t.Errorf("values of %s are left: %v", key, v.ids)
			}
		}
		for _, s := range r.x.sets {
			if s.perNode.used != 0 {
				t.Errorf("pods of %s are left", s.id)
			}
		}
	}
}

// Terms that nobody carries any more, and sets beyond the bound, take their tables along.
func TestIndexForgets(t *testing.T) {
	x := NewIndex()
	n := &NodeInfo{}
	n.SetNode(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{"host": "n"}}})
	x.Replace(nil, n)
	now := n.Clone()
	now.AddPod(NewPodInfo(&v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "1", Namespace: "one",
		Labels: map[string]string{"app": "a"}},
		Spec: v1.PodSpec{Affinity: &v1.Affinity{
			PodAntiAffinity: &v1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{
				{TopologyKey: "host", LabelSelector: &metav1.LabelSelector{}}}}}}}))
	x.Replace(n, now)
	if got := x.AntiAffinityTerms(now.Pods[0].Pod); len(got) != 1 || got[0].Pods(got[0].At(now)) != 1 ||
		len(x.values) != 1 {
		t.Fatalf("the term is not counted: %v", got)
	}
	every := labels.Everything()
	for i := range maxSets + 10 {
		x.Domains(x.Set(NewNamespacePodSelector("one", every), NewNamespacePodSelector(fmt.Sprint("other-", i), every)),
			fmt.Sprint("key-", i), EveryNode)
		x.Domains(x.Set(NewNamespacePodSelector("one", labels.SelectorFromSet(labels.Set{"x": fmt.Sprint(i)})),
			NewNamespacePodSelector("one", every)),
			"host", EveryNode)
	}
	if got := x.Set(NewNamespacePodSelector("one", every)).OnNode(now); got != 1 {
		t.Errorf("%d pods on the node, want 1", got)
	}
	for _, classes := range x.classes["one"] {
		for _, c := range classes {
			if len(c.sets) > maxSets {
				t.Errorf("a class keeps %d sets", len(c.sets))
			}
		}
	}
	if len(x.sets) > maxSets || len(x.topologies) > maxTopologies || len(x.values) > maxTopologies+1 {
		t.Errorf("%d sets, %d topologies, %d keys", len(x.sets), len(x.topologies), len(x.values))
	}
	x.Replace(now, n)
	users := 0
	for _, topology := range x.topologies {
		if topology.values.key == "host" {
			users++
		}
	}
	if len(x.termCounts) != 0 || x.values["host"] != nil && x.values["host"].users != users {
		t.Errorf("%d terms are left", len(x.termCounts))
	}
}
