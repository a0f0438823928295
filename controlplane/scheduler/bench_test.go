package scheduler

import (
	"context"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins"
)

func benchNode(i int) *v1.Node {
	name := fmt.Sprintf("node-%05d", i)
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
		v1.LabelHostname: name, v1.LabelTopologyZone: fmt.Sprint("zone-", i%3), v1.LabelOSStable: "linux",
		v1.LabelArchStable: "amd64"}}}
	n.Status.Allocatable = v1.ResourceList{v1.ResourceCPU: resource.MustParse("1000"),
		v1.ResourceMemory: resource.MustParse("4000Gi"), v1.ResourcePods: resource.MustParse("5000")}
	return n
}

// spent is the time that this process has had of all processors: what other work on the machine disturbs least.
func spent(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkPlacement schedules and assumes one pod after the other, snapshots included, in clusters of 1,000 and 5,000
// nodes that hold 10 pods each of 200 applications in 20 namespaces. Each new pod belongs to one of them.
func BenchmarkPlacement(b *testing.B) {
	app := func(i int) (ns string, set map[string]string) {
		return fmt.Sprint("ns-", i%20), map[string]string{"app": fmt.Sprint("app-", i%200),
			"pod-template-hash": "0123456789", "tier": "web"}
	}
	selector := func(pod *v1.Pod) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{"tier": "web", "app": pod.Labels["app"]}}
	}
	term := func(pod *v1.Pod, key string) []v1.PodAffinityTerm {
		return []v1.PodAffinityTerm{{LabelSelector: selector(pod), TopologyKey: key}}
	}
	weighted := func(pod *v1.Pod, key string) []v1.WeightedPodAffinityTerm {
		return []v1.WeightedPodAffinityTerm{{Weight: 100, PodAffinityTerm: term(pod, key)[0]}}
	}
	for _, nodes := range []int{1000, 5000} {
		for _, kind := range []struct {
			name   string
			change func(*v1.Pod)
		}{
			{"plain", func(*v1.Pod) {}},
			{"spread", func(pod *v1.Pod) {
				pod.Spec.TopologySpreadConstraints = []v1.TopologySpreadConstraint{
					{MaxSkew: 1, TopologyKey: v1.LabelTopologyZone, WhenUnsatisfiable: v1.DoNotSchedule,
						LabelSelector: selector(pod)},
					{MaxSkew: 2, TopologyKey: v1.LabelHostname, WhenUnsatisfiable: v1.ScheduleAnyway,
						LabelSelector: selector(pod)}}
			}},
			{"node-affinity", func(pod *v1.Pod) {
				pod.Spec.Affinity =
					&v1.Affinity{
						NodeAffinity: &v1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &v1.NodeSelector{
							NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: []v1.NodeSelectorRequirement{
								{Key: v1.LabelTopologyZone, Operator: v1.NodeSelectorOpIn,
									Values: []string{"zone-0", "zone-1"}}}}}}}}
			}},
			{"affinity", func(pod *v1.Pod) {
				pod.Spec.Affinity =
					&v1.Affinity{PodAffinity: &v1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: term(pod,
						v1.LabelTopologyZone)}}
			}},
			{"anti-affinity", func(pod *v1.Pod) {
				pod.Spec.Affinity =
					&v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{
						RequiredDuringSchedulingIgnoredDuringExecution: term(pod, v1.LabelHostname)}}
			}},
			{"preferred", func(pod *v1.Pod) {
				pod.Spec.Affinity =
					&v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{
						PreferredDuringSchedulingIgnoredDuringExecution: weighted(pod, v1.LabelHostname)}}
			}},
		} {
			b.Run(fmt.Sprintf("%s/%d", kind.name, nodes), func(b *testing.B) {
				c := newCluster(framework.Volumes{}, nil)
				for i := range nodes {
					c.setNode(benchNode(i))
				}
				made := 0
				pod := func() *v1.Pod {
					made++
					return testPod(fmt.Sprint("p", made), func(p *v1.Pod) {
						p.Namespace, p.Labels = app(made)
						kind.change(p)
					})
				}
				for i := range nodes * 10 {
					p := pod()
					// Applications with one pod per node begin with fewer pods than there are nodes.
					p.Spec.NodeName = fmt.Sprintf("node-%05d", i%nodes)
					c.addBoundPod(p)
				}
				c.takeSnapshot()
				prof, err := framework.NewProfile(plugins.Default(&framework.Handle{})...)
				if err != nil {
					b.Fatal(err)
				}
				ties := rand.New(rand.NewPCG(1, 2))
				start := 0
				durations := NewMetrics().profileMetrics(v1.DefaultSchedulerName)
				b.ReportAllocs()
				before := spent(b)
				for b.Loop() {
					info := framework.NewPodInfo(pod())
					snap := c.takeSnapshot()
					cycle := framework.NewCycle(info, snap)
					cycle.Durations = durations
					res, err := prof.Schedule(context.Background(), cycle,
						framework.Options{Sample: framework.SampleSize(nodes, 0), Start: start, Rand: ties})
					if err != nil {
						b.Fatal(err)
					}
					start = (start + res.Evaluated) % nodes
					c.assumePod(info, res.Node)
				}
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pods/s")
				b.ReportMetric(float64((spent(b)-before).Microseconds())/float64(b.N), "cpu-us/op")
			})
		}
	}
}

// BenchmarkAttemptMetrics measures all that the metrics cost for one pod that is bound: the
// entry into the queue, the extension points, and the result.
func BenchmarkAttemptMetrics(b *testing.B) {
	m := NewMetrics()
	p := m.profileMetrics(v1.DefaultSchedulerName)
	b.RunParallel(func(pb *testing.PB) { // the loop and the bindings record at the same time
		counts := queueCounts{entered: m.incoming}
		for pb.Next() {
			counts.countEntry(queueActive, causePodAdded)
			for at := range framework.NumTimedPoints {
				started := time.Now()
				p.ObservePoint(at, framework.Success, time.Since(started))
			}
			started := time.Now()
			m.algorithm.Observe(time.Since(started).Seconds())
			p.attempts[resultScheduled].Inc()
			p.durations[resultScheduled].Observe(time.Since(started).Seconds())
			m.observeScheduled(1, time.Since(started))
		}
	})
}
