package nodelifecycle

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// zoned returns the nodes of one zone; the first of them are lost.
func zoned(zone string, lost, ready int) (out []*corev1.Node) {
	for i := range lost + ready {
		n := node(corev1.ConditionTrue)
		if i < lost {
			n = node(corev1.ConditionUnknown)
		}
		n.Name = fmt.Sprint(zone, i)
		n.Labels = map[string]string{corev1.LabelTopologyZone: zone}
		out = append(out, n)
	}
	return out
}

// admittedWithin calls Admit for all lost nodes every second and returns how many were admitted.
func admittedWithin(p *EvictionLimiter, nodes []*corev1.Node, from time.Time, d time.Duration) int {
	got := map[string]bool{}
	for now := from; !now.After(from.Add(d)); now = now.Add(time.Second) {
		p.UpdateZones(nodes, now)
		for _, n := range nodes {
			if readyStatus(n) == corev1.ConditionTrue {
				continue
			}
			if ok, _ := p.Admit(n, now); ok {
				got[n.Name] = true
			}
		}
	}
	return len(got)
}

func TestPace(t *testing.T) {
	join := func(lists ...[]*corev1.Node) (out []*corev1.Node) {
		for _, l := range lists {
			out = append(out, l...)
		}
		return out
	}
	for _, c := range []struct {
		name  string
		nodes []*corev1.Node
		d     time.Duration
		want  int
	}{
		{"one of three: at once", zoned("a", 1, 2), 0, 1},
		{"two of three are few", zoned("a", 2, 1), 15 * time.Second, 2},
		{"two at the same moment: one", zoned("a", 2, 8), 9 * time.Second, 1},
		{"half of ten: one every 10 s", zoned("a", 5, 5), 25 * time.Second, 3},
		{"six of ten: none, for an hour", zoned("a", 6, 4), time.Hour, 0},
		{"sixty of a hundred: none for 30 s", zoned("a", 60, 40), 30 * time.Second, 0},
		{"sixty of a hundred: one every 100 s", zoned("a", 60, 40), 250 * time.Second, 2},
		{"everything", zoned("a", 10, 0), time.Hour, 0},
		{"everything in all zones", join(zoned("a", 10, 0), zoned("b", 3, 0)), time.Hour, 0},
		{"all of one zone of two", join(zoned("a", 10, 0), zoned("b", 0, 3)), 25 * time.Second, 3},
		{"each zone by itself", join(zoned("a", 6, 4), zoned("b", 1, 3)), time.Minute, 1},
		{"nothing", zoned("a", 0, 3), time.Hour, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := NewEvictionLimiter()
			calm := join(zoned("a", 0, 3), zoned("b", 0, 3))
			p.UpdateZones(calm, epoch.Add(-time.Hour))
			if got := admittedWithin(p, c.nodes, epoch, c.d); got != c.want {
				t.Errorf("the pods of %d nodes may be evicted within %v, want %d", got, c.d, c.want)
			}
		})
	}
}

// Nodes that come back one by one after a disruption are given their time again.
func TestPaceAfterADisruption(t *testing.T) {
	p := NewEvictionLimiter()
	p.UpdateZones(zoned("a", 0, 10), epoch)
	p.UpdateZones(zoned("a", 6, 4), epoch.Add(time.Second))
	back := epoch.Add(31 * time.Second)
	half := zoned("a", 5, 5)
	p.UpdateZones(half, back)
	if got := p.Since(half[0]); !got.Equal(back) {
		t.Errorf("the time runs from %v, want %v", got, back)
	}
	if ok, _ := p.Admit(half[0], back.Add(time.Minute)); !ok {
		t.Error("a node that stays lost afterwards keeps its pods for ever")
	}
	// An admitted node that returned must be admitted again.
	p.UpdateZones(zoned("a", 0, 10), back.Add(2*time.Minute))
	p.UpdateZones(half, back.Add(3*time.Minute))
	ok1, _ := p.Admit(half[1], back.Add(3*time.Minute))
	ok0, again := p.Admit(half[0], back.Add(3*time.Minute))
	if !ok1 || ok0 || again <= 0 || again > evictEvery {
		t.Errorf("admitted %v and %v, again after %v", ok1, ok0, again)
	}
}
