package scheduler

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/internal/virtual"
)

// After any sequence of operations, the counts of gated and refused pods are those of the pods in
// the queue. Only known causes have series.
func TestQueueCounts(t *testing.T) {
	gate := func(pod *v1.Pod) { pod.Spec.SchedulingGates = []v1.PodSchedulingGate{{Name: "g"}} }
	for seed := range uint64(20) {
		virtual.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			q := testQueue(t)
			q.counts.entered = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "n", Help: "n"},
				[]string{"queue", "event"})
			ctx := t.Context()
			for range 500 {
				name := string(rune('a' + random.IntN(8)))
				switch random.IntN(8) {
				case 0, 1:
					q.addOrUpdate(ctx, testPod(name))
				case 2:
					q.addOrUpdate(ctx, testPod(name, gate))
				case 3, 4, 5:
					pod, _ := q.popActive()
					if pod == nil {
						continue
					}
					checkQueueCounts(t, q)
					q.requeueFailed(ctx, pod, [](map[string]bool){nil, {"NodeAffinity": true},
						{"NodeResourcesFit": true, "TaintToleration": true}}[random.IntN(3)])
				case 6:
					q.handleEvent(ctx, framework.NodeAdded, &v1.Node{})
				case 7:
					q.removePod(testPod(name).UID)
				}
				time.Sleep(time.Duration(random.IntN(200)) * time.Millisecond)
				checkQueueCounts(t, q)
			}
			q.requeueAll(ctx)
			checkQueueCounts(t, q)
			for _, name := range "abcdefgh" {
				q.removePod(testPod(string(name)).UID)
			}
			sizes, refused := q.queueSizes()
			if sizes != [numQueues]int{} {
				t.Errorf("an empty queue has the sizes %v", sizes)
			}
			for by, n := range refused {
				if n != 0 {
					t.Errorf("an empty queue has %d pods that %s refused", n, by.plugin)
				}
			}
		})
	}
	causes := slices.Concat(slices.Collect(maps.Values(eventLabels)), []string{causePodAdded, causePodUpdated,
		causeFailure, causeBackoffOver, causeOverdue, causeActivated})
	slices.Sort(causes)
	if all := slices.Compact(slices.Clone(causes)); len(all) != len(causes) || slices.Contains(all, "") {
		t.Errorf("causes are not distinct: %v", causes)
	}
}

// checkQueueCounts compares the counts of the queue with its pods.
func checkQueueCounts(t *testing.T, q *queue) {
	t.Helper()
	gated, refused := 0, map[refusal]int{}
	for _, pod := range q.pods {
		if pod.place.state == inGated {
			gated++
		}
		for plugin := range pod.attempt.countedFor {
			refused[refusal{plugin, v1.DefaultSchedulerName}]++
		}
		mustCount := pod.place.state == inGated || pod.place.state == inWaiting
		if mustCount && len(pod.attempt.countedFor) == 0 {
			t.Fatalf("pod %s is refused and not counted", pod.Pod.Name)
		}
		if pod.place.state == inProgress && len(pod.attempt.countedFor) > 0 {
			t.Fatalf("pod %s is counted as refused during an attempt", pod.Pod.Name)
		}
	}
	sizes, counted := q.queueSizes()
	if sizes[queueGated] != gated || sizes[queueUnschedulable] != len(q.waiting) {
		t.Fatalf("sizes %v, want %d gated and %d unschedulable", sizes, gated, len(q.waiting))
	}
	for by, n := range counted {
		if refused[by] != n {
			t.Fatalf("%d pods are counted as refused by %s, want %d", n, by.plugin, refused[by])
		}
	}
	for by, n := range refused {
		if counted[by] != n {
			t.Fatalf("%d pods are counted as refused by %s, want %d", counted[by], by.plugin, n)
		}
	}
}
