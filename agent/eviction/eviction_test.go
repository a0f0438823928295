package eviction

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func newLevel(left int64) Level { return Level{Left: left, Floor: 100, Known: true} }

// One line per reading: the levels, and the verdict. F95
func TestNext(t *testing.T) {
	type look struct {
		after        time.Duration // the previous reading
		memory, disk int64
		ended        bool
		reclaiming   time.Duration
		reclaimed    bool
		want         string
	}
	for name, looks := range map[string][]look{
		"enough": {{0, 100, 100, false, 0, false, ""}, {Interval, 500, 500, false, 0, true, ""}},
		"memory": {
			{0, 99, 100, false, 0, false, "memory! evict memory.available"},
			{Interval, 50, 100, false, 0, false, "memory!"}, // the evicted pod has not ended
			{Interval, 50, 100, true, 0, false, "memory! evict memory.available"},
			{Interval - 1, 50, 100, true, 0, false, "memory!"}, // too soon
			{1, 50, 100, true, 0, false, "memory! evict memory.available"},
			{Interval, 200, 100, true, 0, false, "memory!"}, // the shortage is over, the condition stays true
			{PressureTransition - Interval - 1, 200, 100, true, 0, false, "memory!"},
			{1, 200, 100, true, 0, false, ""},
		},
		"a pod that does not end": {
			{0, 99, 100, false, 0, false, "memory! evict memory.available"},
			{EvictionTimeout - 1, 99, 100, false, 0, false, "memory!"},
			{1, 99, 100, false, 0, false, "memory! evict memory.available"},
		},
		"disk": {
			{0, 100, 99, false, 0, true, "disk! reclaim"}, // unused data first
			{Interval, 100, 99, false, Interval, false, "disk! reclaim"},
			{Interval, 100, 99, false, 2 * Interval, true, "disk! reclaim evict nodefs.available"},
			{Interval, 100, 99, false, 3 * Interval, true, "disk! reclaim"},
			{Interval, 100, 100, true, 4 * Interval, true, "disk!"},
			{PressureTransition, 100, 100, true, 0, true, ""},
		},
		"a disk on which removing takes for ever": {
			{0, 100, 99, false, 0, false, "disk! reclaim"},
			{ReclaimTimeout - 1, 100, 99, false, ReclaimTimeout - 1, false, "disk! reclaim"},
			{1, 100, 99, false, ReclaimTimeout, false, "disk! reclaim evict nodefs.available"},
		},
		"both": {
			{0, 99, 99, false, Interval, true, "memory! disk! reclaim evict memory.available"},
			{Interval, 100, 99, true, Interval, true, "memory! disk! reclaim evict nodefs.available"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var s State
			now := epoch
			for i, l := range looks {
				now = now.Add(l.after)
				var v Verdict
				s, v = s.Next(Reading{now, [Signals]Level{Memory: newLevel(l.memory), Disk: newLevel(l.disk)}, l.ended,
					l.reclaiming, l.reclaimed})
				if got := v.describe(); got != l.want {
					t.Errorf("look %d: %q, want %q", i, got, l.want)
				}
				if v.Evict {
					s = s.WithEvicted("u1", now)
				}
			}
		})
	}
}

func (v Verdict) describe() string {
	var out []string
	for i, word := range []string{"memory!", "disk!", "inodes!"} {
		if v.Pressure[i] {
			out = append(out, word)
		}
	}
	if v.Reclaim {
		out = append(out, "reclaim")
	}
	if v.Evict {
		out = append(out, "evict", v.Signal.String())
	}
	return strings.Join(out, " ")
}

// On a disk without free inodes, unused data is removed first, as without free space. Space comes
// before inodes, and memory before both. F95
func TestNextOfInodes(t *testing.T) {
	var s State
	for i, l := range []struct {
		memory, disk, inodes int64
		reclaiming           time.Duration
		want                 string
	}{
		{100, 100, 99, 0, "inodes! reclaim"},
		{100, 100, 99, 2 * Interval, "inodes! reclaim evict nodefs.inodesFree"},
		{100, 99, 99, 3 * Interval, "disk! inodes! reclaim evict nodefs.available"},
		{99, 99, 99, 4 * Interval, "memory! disk! inodes! reclaim evict memory.available"},
		{100, 100, 100, 5 * Interval, "memory! disk! inodes!"},
	} {
		now := epoch.Add(time.Duration(i) * Interval)
		var v Verdict
		s, v = s.Next(Reading{now, [Signals]Level{newLevel(l.memory), newLevel(l.disk), newLevel(l.inodes)}, true,
			l.reclaiming, true})
		if got := v.describe(); got != l.want {
			t.Errorf("look %d: %q, want %q", i, got, l.want)
		}
		if v.Evict {
			s = s.WithEvicted("u1", now)
		}
	}
}

// Properties: nothing is evicted without a shortage. At most one pod is evicted per interval, and
// none while another is waited for. On a full disk no pod is evicted before unused data is removed,
// or its removal timed out. A node that stays short of memory evicts. F95
func TestWhateverHappens(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		var s State
		now, evicted, waiting := epoch, time.Time{}, false
		var short [Signals]time.Time
		for range rapid.IntRange(1, 60).Draw(r, "looks") {
			now = now.Add(time.Duration(rapid.IntRange(1, 40).Draw(r, "seconds")) * time.Second)
			look := Reading{At: now, Ended: rapid.Bool().Draw(r, "ended"), Reclaimed: rapid.Bool().Draw(r, "reclaimed"),
				Reclaiming: time.Duration(rapid.IntRange(0, 200).Draw(r, "reclaiming")) * time.Second}
			for i := range look.Levels {
				look.Levels[i] = Level{rapid.Int64Range(-5, 10).Draw(r, "left"), 5,
					rapid.IntRange(0, 9).Draw(r, "known") > 0}
				if look.Levels[i].IsShort() {
					short[i] = now
				}
			}
			var v Verdict
			s, v = s.Next(look)
			for i := range look.Levels {
				if want := !short[i].IsZero() && now.Sub(short[i]) < PressureTransition; v.Pressure[i] != want {
					r.Fatalf("pressure %v %s after it was short: %v", Signal(i), now.Sub(short[i]), v.Pressure[i])
				}
			}
			waits := waiting && !look.Ended && now.Sub(evicted) < EvictionTimeout
			rests := !evicted.IsZero() && now.Sub(evicted) < Interval
			switch {
			case v.Evict && !look.Levels[v.Signal].IsShort():
				r.Fatalf("evicts for %s, of which there is enough: %+v", v.Signal, look)
			case v.Evict && (waits || rests):
				r.Fatalf("evicts again after %s; the one before has ended: %v", now.Sub(evicted), look.Ended)
			case v.Evict && v.Signal.IsDisk() &&
				(look.Reclaiming == 0 || !look.Reclaimed && look.Reclaiming < ReclaimTimeout):
				r.Fatalf("evicts before all has gone that nobody needs: %+v", look)
			case !v.Evict && look.Levels[Memory].IsShort() && !waits && !rests:
				r.Fatalf("does nothing about %+v", look)
			}
			waiting = waits
			if v.Evict && rapid.IntRange(0, 3).Draw(r, "somebody can go") > 0 {
				s, evicted, waiting = s.WithEvicted("u", now), now, true
			}
		}
	})
}

func newCandidate(name string, used, request int64, priority int32) Candidate {
	return Candidate{Pod: &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)},
		Spec: v1.PodSpec{Priority: &priority}}, Used: used, Request: request}
}

func rankedNames(list []Candidate) string {
	var names []string
	for _, c := range Rank(list) {
		names = append(names, c.Pod.Name)
	}
	return strings.Join(names, " ")
}

// The order: above the request, then lower priority, then furthest above the request. Critical pods
// stay. F95
func TestRank(t *testing.T) {
	list := []Candidate{newCandidate("guaranteed", 100, 100, 0), newCandidate("within", 50, 100, 0),
		newCandidate("best-effort", 10, 0, 0), newCandidate("burstable", 150, 100, 0),
		newCandidate("important", 900, 100, 1000), newCandidate("unimportant", 2, 1, -5),
		newCandidate("cluster-critical", 900, 0, 2000000000), newCandidate("node-critical", 900, 0, 2000001000),
		newCandidate("called-mirror", 900, 0, 0), newCandidate("nothing", 0, 0, 0)}
	list[8].Pod.Annotations = map[string]string{v1.MirrorPodAnnotationKey: "x"}
	young := newCandidate("young", 10, 0, 0)
	young.Pod.CreationTimestamp = metav1.NewTime(epoch)
	list = append(list, young)
	const want = "unimportant called-mirror burstable young best-effort important guaranteed nothing within"
	for range 20 {
		if got := rankedNames(list); got != want {
			t.Fatalf("%s\nwant %s", got, want)
		}
		list = append(list[1:], list[0])
	}
}

// Rank returns all evictable candidates, and each is before those with a lower rank. F95
func TestRankIsAnOrder(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		var list []Candidate
		for i := range rapid.IntRange(0, 12).Draw(r, "pods") {
			list = append(list, newCandidate(fmt.Sprint(i), rapid.Int64Range(0, 5).Draw(r, "used"),
				rapid.Int64Range(0, 5).Draw(r, "request"),
				rapid.SampledFrom([]int32{-1, 0, 7, 2000000000}).Draw(r, "priority")))
		}
		before := slices.Clone(list)
		got := Rank(list)
		may := 0
		for i, c := range list {
			if c.Pod != before[i].Pod {
				r.Fatal("what was given is changed")
			}
			if *c.Pod.Spec.Priority < 2000000000 {
				may++
			}
		}
		if len(got) != may {
			r.Fatalf("%d of %d may go, %d are named", may, len(list), len(got))
		}
		for i := range got {
			for _, b := range got[i+1:] {
				a := got[i]
				over, bover := a.Used > a.Request, b.Used > b.Request
				p, q := *a.Pod.Spec.Priority, *b.Pod.Spec.Priority
				if bover && !over || over == bover && (q < p || q == p && b.Used-b.Request > a.Used-a.Request) {
					r.Fatalf("%+v stands before %+v", a, b)
				}
			}
		}
	})
}

// The status message of a pod has the sentences of Kubernetes, and names the containers that exceed
// their request. F95
func TestMessage(t *testing.T) {
	c := newCandidate("a", 0, 0, 0)
	c.Containers = []Container{{"app", 300<<20 + 5000, 0}, {"side", 1 << 20, 2 << 20}, {"big", 3 << 30, 1 << 30}}
	want := "The node was low on resource: memory. Threshold quantity: 100Mi, available: 61444Ki. Container app was " +
		"using 307204Ki, request is 0, " +
		"has larger consumption of memory. Container big was using 3Gi, request is 1Gi, has larger " +
		"consumption of memory. "
	if got := Message(Memory, Level{Left: 60<<20 + 4097, Floor: 100 << 20}, c); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	want = "The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi, available: 0. With its volumes " +
		"the pod was using 7Mi, request is 2Mi. "
	if got := Message(Disk, Level{Left: -1, Floor: 1 << 30}, newCandidate("a", 7<<20, 2<<20, 0)); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	want = "The node was low on resource: inodes. Threshold quantity: 50k, available: 1234. With its volumes the pod " +
		"was using 70001. "
	if got := Message(Inodes, Level{Left: 1234, Floor: 50000}, newCandidate("a", 70001, 0, 0)); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}
