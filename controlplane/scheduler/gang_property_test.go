package scheduler_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
)

// fitsAtAll tries every way in which so many of the pods can be given to the nodes.
func fitsAtAll(least int, pods, free []int64) bool {
	if least <= 0 {
		return true
	}
	if least > len(pods) {
		return false
	}
	if fitsAtAll(least, pods[1:], free) {
		return true
	}
	for i := range free {
		if free[i] >= pods[0] {
			free[i] -= pods[0]
			ok := fitsAtAll(least-1, pods[1:], free)
			free[i] += pods[0]
			if ok {
				return true
			}
		}
	}
	return false
}

// gangWorld is a small cluster with groups of pods, the sizes of which divide each other: so what of a group fits does
// not hang on where the others went, and the twin needs no search of its own for the order.
type gangWorld struct {
	nodes  []int64
	least  []int
	groups [][]int64
}

func newGangWorld(r *rand.Rand, groups int) *gangWorld {
	w := &gangWorld{}
	for range 1 + r.IntN(3) {
		w.nodes = append(w.nodes, int64(1+r.IntN(8)))
	}
	for range groups {
		var pods []int64
		for range 1 + r.IntN(5) {
			pods = append(pods, int64(1)<<r.IntN(3))
		}
		w.groups = append(w.groups, pods)
		w.least = append(w.least, 1+r.IntN(len(pods)))
	}
	return w
}

// free is what is left of each node, and placed how many pods of each group have one.
func (w *gangWorld) look(b *bed) (free []int64, placed []int, err error) {
	free, placed = append([]int64(nil), w.nodes...), make([]int, len(w.groups))
	pods, err := client.List[*v1.Pod](b.ctx, b.client, "default", metav1.ListOptions{})
	for _, pod := range pods {
		if pod.Spec.NodeName == "" {
			continue
		}
		var node, group, i int
		if _, err := fmt.Sscanf(pod.Spec.NodeName, "n%d", &node); err != nil {
			return nil, nil, err
		}
		if _, err := fmt.Sscanf(pod.Name, "g%d-%d", &group, &i); err != nil {
			return nil, nil, err
		}
		free[node] -= w.groups[group][i]
		placed[group]++
	}
	return free, placed, err
}

// settled says what is amiss until every group has its pods, or none and no room.
func (w *gangWorld) settled(b *bed) error {
	free, placed, err := w.look(b)
	if err != nil {
		return err
	}
	for g, n := range placed {
		if n > 0 && n < w.least[g] {
			return fmt.Errorf("group %d has %d of %d pods", g, n, w.least[g])
		}
		if n == 0 && fitsAtAll(w.least[g], w.groups[g], free) {
			return fmt.Errorf("group %d of %v is not placed, and needs %d: %v is free", g, w.groups[g],
				w.least[g], free)
		}
	}
	for i, f := range free {
		if f < 0 {
			b.t.Fatalf("node %d has %d less than its pods ask for", i, -f)
		}
	}
	return nil
}

// In small random clusters the groups that fit are bound and no group is bound in part, as one finds who tries every way;
// no binding is made before the whole group has nodes; and what frees room helps those that wait.
func TestGangsEqualTwin(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 7))
			w := newGangWorld(r, 1+int(seed%3))
			b := newBed(t, nil)
			b.binding = func(pod string) {
				var group, i int
				if _, err := fmt.Sscanf(pod, "g%d-%d", &group, &i); err != nil {
					t.Error(err)
				}
				if g := b.scheduler.Group("default", fmt.Sprintf("g%d", group)); g.Placed < g.Least {
					t.Errorf("pod %s is bound while %d of %d pods of its group have nodes", pod, g.Placed, g.Least)
				}
			}
			for i, size := range w.nodes {
				b.node(fmt.Sprintf("n%d", i), fmt.Sprint(size))
			}
			early := r.IntN(2) == 0 // before the pods come, or after
			if early {
				b.lead()
			}
			type one struct{ group, i int }
			var order []one
			for g := range w.groups {
				b.group(fmt.Sprintf("g%d", g), int32(w.least[g]))
				for i := range w.groups[g] {
					order = append(order, one{g, i})
				}
			}
			r.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
			for _, o := range order {
				b.pod(fmt.Sprintf("g%d-%d", o.group, o.i), fmt.Sprint(w.groups[o.group][o.i]),
					inGroup(fmt.Sprintf("g%d", o.group)))
			}
			if !early {
				b.lead()
			}
			b.eventually("a settled world", func() error { return w.settled(b) })
			grown := r.IntN(len(w.nodes))
			n, err := client.Get[*v1.Node](b.ctx, b.client, "", fmt.Sprintf("n%d", grown))
			if err != nil {
				t.Fatal(err)
			}
			n = n.DeepCopy() // what is read is shared
			w.nodes[grown] += int64(1 + r.IntN(8))
			n.Status.Allocatable[v1.ResourceCPU] = *resource.NewQuantity(w.nodes[grown], resource.DecimalSI)
			if _, err := client.UpdateStatus(b.ctx, b.client, n); err != nil {
				t.Fatal(err)
			}
			b.eventually("a settled world with more room", func() error { return w.settled(b) })
		})
	}
}
