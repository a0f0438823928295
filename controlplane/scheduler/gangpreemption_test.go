package scheduler_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/client"
)

// ending are the pods that are being deleted, in order.
func (b *bed) ending() (out []string) {
	b.t.Helper()
	pods, err := client.List[*v1.Pod](b.ctx, b.client, "default", metav1.ListOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, pod := range pods {
		if pod.DeletionTimestamp != nil {
			out = append(out, pod.Name)
		}
	}
	slices.Sort(out)
	return out
}

func (b *bed) awaitEnding(want ...string) {
	b.t.Helper()
	b.eventually("victims", func() error {
		if got := b.ending(); !slices.Equal(got, want) {
			return fmt.Errorf("%q are being ended, want %q", got, want)
		}
		return nil
	})
}

// full is a bed of two nodes with room for two pods each, taken by pods a to d of rising priority.
func full(t *testing.T) *bed {
	b := newBed(t, nil)
	b.node("w1", "2")
	b.node("w2", "2")
	b.lead()
	for i, name := range []string{"a", "b", "c", "d"} {
		b.pod(name, "1", important(int32(i+1)))
		b.awaitNode(name, "")
	}
	return b
}

func (b *bed) gang(name string, least int32, count int, change ...func(*v1.Pod)) {
	b.t.Helper()
	b.group(name, least)
	for i := range count {
		b.pod(fmt.Sprint(name, i), "1", append(change, inGroup(name))...)
	}
}

// A group that does not fit has as many pods of lower priority ended as its least number needs, the least important ones, all at
// once; nobody else gets the room while they end, and no more are ended meanwhile. F89
func TestGangPreempts(t *testing.T) {
	b := full(t)
	b.gang("g", 3, 3, important(10))
	b.awaitEnding("a", "b", "c")
	b.awaitWords("g0", "preemption: pods of lower priority are being evicted for the group")
	b.pod("late", "1", important(0))
	b.delete("a")
	b.awaitReason("late", "0/2 nodes are available: 2 Insufficient cpu. preemption: 0/2 nodes are available: 2 No "+
		"preemption victims found for incoming pod.")
	b.awaitEnding("b", "c")
	b.without("g0", "g1", "g2", "late")
	b.delete("b")
	b.delete("c")
	for i := range 3 {
		b.awaitNode(fmt.Sprint("g", i), "")
	}
	if got := b.ending(); len(got) > 0 || b.get("d").Spec.NodeName == "" {
		t.Errorf("%q are being ended too", got)
	}
}

// Nobody is ended for a part of a group, for one that says it does not want that, for one that claims volumes, or by pods that
// are no more important; the group says why.
func TestGangPreemptsNobody(t *testing.T) {
	never := v1.PreemptNever
	for want, make := range map[string]func(b *bed){
		"preemption: evicting pods of lower priority would not help 5 pods of the group": func(b *bed) {
			b.gang("g", 5, 5, important(10))
		},
		"preemption: a pod of the group has preemptionPolicy=Never": func(b *bed) {
			b.gang("g", 3, 3, important(10), func(pod *v1.Pod) { pod.Spec.PreemptionPolicy = &never })
		},
		"preemption: not supported for groups whose pods claim devices or volumes": func(b *bed) {
			b.gang("g", 3, 3, important(10), func(pod *v1.Pod) {
				pod.Spec.Volumes = []v1.Volume{{Name: "v",
					VolumeSource: v1.VolumeSource{Ephemeral: &v1.EphemeralVolumeSource{
						VolumeClaimTemplate: &v1.PersistentVolumeClaimTemplate{Spec: v1.PersistentVolumeClaimSpec{
							AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
							Resources: v1.VolumeResourceRequirements{
								Requests: v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")}}}}}}}}
			})
		},
		"preemption: evicting pods of lower priority would not help 3 pods of the group": func(b *bed) {
			b.gang("g", 3, 3, important(3))
		},
		"only 0 of 3 pods had a node": func(b *bed) { b.gang("g", 3, 3, important(1)) },
	} {
		t.Run(want, func(t *testing.T) {
			b := full(t)
			make(b)
			b.awaitGroup("g", metav1.ConditionFalse, "Unschedulable", want)
			if got := b.ending(); len(got) > 0 {
				t.Errorf("%q are being ended", got)
			}
		})
	}
}

// Whom a budget protects is ended last, although others are more important.
func TestGangPreemptsWithinBudgets(t *testing.T) {
	b := newBed(t, nil)
	b.node("w1", "2")
	none := intstr.FromInt32(0)
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "keep"},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MaxUnavailable: &none, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"keep": "yes"}}}}
	if _, err := client.Create(b.ctx, b.client, budget); err != nil {
		t.Fatal(err)
	}
	b.lead()
	b.pod("kept", "1", important(1), func(pod *v1.Pod) { pod.Labels = map[string]string{"keep": "yes"} })
	b.pod("more", "500m", important(1))
	b.pod("most", "500m", important(1))
	for _, name := range []string{"kept", "more", "most"} {
		b.awaitNode(name, "w1")
	}
	b.group("g", 2)
	for i := range 2 {
		b.pod(fmt.Sprint("g", i), "500m", important(10), inGroup("g"))
	}
	b.awaitEnding("more", "most")
}

// In small random clusters somebody is ended for a group when, and only when, the whole group fits with that, as one finds who
// tries every way, and nobody who is as important or would have room beside the group.
func TestGangRoomEqualsTwin(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 11))
			w := newGangWorld(r, 1)
			if seed%2 == 0 {
				w.least[0] = len(w.groups[0])
			}
			b := newBed(t, nil)
			for i, size := range w.nodes {
				b.node(fmt.Sprintf("n%d", i), fmt.Sprint(size))
			}
			b.lead()
			type one struct {
				node, size int64
				priority   int32
			}
			there, room := map[string]one{}, slices.Clone(w.nodes)
			for i, size := range w.nodes {
				for j := 0; size > 0; j++ {
					p := one{int64(i), min(size, int64(1)<<r.IntN(3)), int32(r.IntN(4))}
					size -= p.size
					if r.IntN(6) == 0 {
						continue
					}
					name := fmt.Sprintf("p%d-%d", i, j)
					there[name] = p
					b.pod(name, fmt.Sprint(p.size), important(p.priority), func(pod *v1.Pod) {
						pod.Spec.NodeSelector = map[string]string{v1.LabelHostname: fmt.Sprintf("n%d", i)}
					})
					b.awaitNode(name, fmt.Sprintf("n%d", i))
					if p.priority >= 2 {
						room[i] -= p.size
					}
				}
			}
			b.group("g0", int32(w.least[0]))
			for i, size := range w.groups[0] {
				b.pod(fmt.Sprintf("g0-%d", i), fmt.Sprint(size), important(2), inGroup("g0"))
			}
			if !fitsAtAll(w.least[0], w.groups[0], slices.Clone(room)) {
				b.awaitGroup("g0", metav1.ConditionFalse, "Unschedulable", "")
				if got := b.ending(); len(got) > 0 {
					t.Errorf("%q are being ended for a group that does not fit", got)
				}
				return
			}
			var ended []string
			b.eventually("the group", func() error {
				for _, name := range b.ending() {
					ended = append(ended, name)
					b.delete(name)
				}
				n := 0
				for i := range w.groups[0] {
					if b.get(fmt.Sprintf("g0-%d", i)).Spec.NodeName != "" {
						n++
					}
				}
				if n < w.least[0] {
					return errors.New("it is not placed")
				}
				return nil
			})
			free := slices.Clone(w.nodes)
			for name, p := range there {
				if !slices.Contains(ended, name) {
					free[p.node] -= p.size
				}
			}
			for i, size := range w.groups[0] {
				var n int
				if _, err := fmt.Sscanf(b.get(fmt.Sprintf("g0-%d", i)).Spec.NodeName, "n%d", &n); err == nil {
					free[n] -= size
				}
			}
			for _, name := range ended {
				if p := there[name]; w.least[0] == len(w.groups[0]) && free[p.node] >= p.size {
					// otherwise pods beyond the least number preempt too
					t.Errorf("%s of %d was ended, and its node has %d left", name, p.size, free[p.node])
				}
				if there[name].priority >= 2 {
					t.Errorf("%s of priority %d was ended", name, there[name].priority)
				}
			}
		})
	}
}
