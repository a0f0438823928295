package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/test/bench/figures"
)

const (
	helloImage = "keelson.dev/hello:v1"
	podTimeout = 30 * time.Second
)

// newWebPod returns a pod with a web server and a readiness probe, on a node or on any node ("").
// The server exits at once when it is terminated, because a drain period is not a cost of the
// cluster.
func newWebPod(name, node string) *v1.Pod {
	p := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "bench"}},
		Spec: v1.PodSpec{Containers: []v1.Container{{
			Name: "main", Image: helloImage, Args: []string{"-linger=0s"},
			Ports: []v1.ContainerPort{{Name: "http", ContainerPort: 8080}},
			ReadinessProbe: &v1.Probe{ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/healthz",
				Port: intstr.FromString("http")}}, PeriodSeconds: 1},
		}}},
	}
	if node != "" {
		p.Spec.NodeSelector = map[string]string{v1.LabelHostname: node}
	}
	return p
}

// measurePods measures the start and deletion of pods: one at a time, compared with the minimum
// cost on the machine, and in a burst. It also measures their memory.
func (b *benchmarks) measurePods(ctx context.Context, c *cluster) error {
	floor, err := b.measureFloor(ctx, c)
	if err != nil {
		return err
	}
	return b.withPodLoad(ctx, c, func(n *podLoad) error {
		if err := n.measureSequentialPods(ctx, floor); err != nil {
			return err
		}
		return n.measureBurst(ctx)
	})
}

// withPodLoad calls measure with a new namespace and a watch of its pods, after all workers have
// unpacked the image.
func (b *benchmarks) withPodLoad(ctx context.Context, c *cluster, measure func(*podLoad) error) (err error) {
	namespace, remove, err := c.createNamespace(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if removed := remove(); err == nil {
			err = removed
		}
	}()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	o, err := observePods(watching, c.client, namespace)
	if err != nil {
		return err
	}
	n := &podLoad{run: b, cluster: c, observer: o, namespace: namespace}
	if err := n.warmUp(ctx); err != nil {
		return fmt.Errorf("warming up: %w", err)
	}
	return measure(n)
}

// measureFloor measures the parts of a pod's start without Keelson: a network namespace, CNI ADD,
// and create and start of two containers by runc. Alternating with that, Keelson's runtime creates
// the same pod without the rest of Keelson.
func (b *benchmarks) measureFloor(ctx context.Context, c *cluster) (figures.Record, error) {
	b.tally.LogProgress("measuring the floor: network namespace, CNI ADD, two runc create and start")
	records, err := b.runProgram(ctx, "floor", "", "-bin", c.loan.Lab.Config.BinDir, "-images",
		c.loan.Lab.Config.ImageDir,
		"-cni", c.loan.Lab.Config.CNIBinDir, "-n", strconv.Itoa(b.options.sequentialPods))
	if err != nil {
		return figures.Record{}, err
	}
	floor, ok := figures.FindRecord(records, "floor: pod", nil)
	own, also := figures.FindRecord(records, "keelson: pod", nil)
	if !ok || !also {
		return floor, errors.New("program floor has written no records of its pods and of Keelson's pods")
	}
	b.tally.AddRow(figures.Row{Measure: "floor: netns, CNI ADD, 2 runc create+start, p50",
		Figure: floor.Values["p50_ms"], Unit: "ms"})
	b.tally.AddRow(figures.Row{Measure: "the same pod by Keelson's runtime, p50", Figure: own.Values["p50_ms"],
		Unit:      "ms",
		Reference: &figures.Reference{Name: "floor", Figure: floor.Values["p50_ms"]}})
	return floor, nil
}

// podLoad is the state of the measurements of pods: the watch of their namespace, and its client.
type podLoad struct {
	run       *benchmarks
	cluster   *cluster
	observer  *podObserver
	namespace string
}

func (n *podLoad) createPod(ctx context.Context, p *v1.Pod) error {
	_, err := n.cluster.client.CoreV1().Pods(n.namespace).Create(ctx, p, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("creating pod %s: %w", p.Name, err)
	}
	return nil
}

// startPod creates a pod and waits until a watch event shows it as Ready. since is the time just
// before the request.
func (n *podLoad) startPod(ctx context.Context, p *v1.Pod) (s podView, since time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, podTimeout)
	defer cancel()
	since = time.Now()
	if err := n.createPod(ctx, p); err != nil {
		return s, since, err
	}
	s, err = n.observer.awaitPod(ctx, p.Name, "Ready", func(s podView) bool { return !s.ready.IsZero() })
	return s, since, err
}

// deletePod deletes a pod gracefully and returns the time until it is gone.
func (n *podLoad) deletePod(ctx context.Context, name string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, podTimeout)
	defer cancel()
	return n.deleteAndAwaitGone(ctx, name)
}

func (n *podLoad) deleteAndAwaitGone(ctx context.Context, name string) (time.Duration, error) {
	began := time.Now()
	if err := n.cluster.client.CoreV1().Pods(n.namespace).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return 0, fmt.Errorf("deleting pod %s: %w", name, err)
	}
	s, err := n.observer.awaitPod(ctx, name, "gone", func(s podView) bool { return !s.gone.IsZero() })
	return s.gone.Sub(began), err
}

// warmUp runs a pod on every worker, so that all workers have unpacked the image.
func (n *podLoad) warmUp(ctx context.Context) error {
	n.run.tally.LogProgress("warming up: a pod on each of %v", n.cluster.workerNames())
	for _, w := range n.cluster.workerNames() {
		if _, _, err := n.startPod(ctx, newWebPod("warm-"+w, w)); err != nil {
			return err
		}
		if _, err := n.deletePod(ctx, "warm-"+w); err != nil {
			return err
		}
	}
	return nil
}

// measureSequentialPods measures starting and deleting pods, one after the other.
func (n *podLoad) measureSequentialPods(ctx context.Context, floor figures.Record) error {
	n.run.tally.LogProgress("%d pods, one at a time", n.run.options.sequentialPods)
	var bound, ready, gone []time.Duration
	var pods []podView
	starts, err := n.run.runMeasurement("pod create to Ready",
		map[string]any{"pods": n.run.options.sequentialPods, "burst": 1},
		func() (map[string]float64, error) {
			for i := range n.run.options.sequentialPods {
				name := fmt.Sprintf("one-%d", i)
				s, since, err := n.startPod(ctx, newWebPod(name, ""))
				if err != nil {
					return nil, err
				}
				bound, ready, pods = append(bound, s.bound.Sub(since)), append(ready, s.ready.Sub(since)),
					append(pods, s)
				took, err := n.deletePod(ctx, name)
				if err != nil {
					return nil, err
				}
				gone = append(gone, took)
			}
			return figures.Latencies(ready), nil
		})
	if err != nil {
		return err
	}
	reference := &figures.Reference{Name: "floor", Figure: floor.Values["p50_ms"]}
	n.run.tally.AddRow(figures.Row{Measure: "pod create to Ready, p50", Key: "ready p50",
		Figure: starts.Values["p50_ms"],
		Unit:   "ms", Note: formatCost(starts) + ", deletion included", Reference: reference})
	n.run.tally.AddRow(figures.Row{Measure: "pod create to Ready, p99", Key: "ready p99",
		Figure: starts.Values["p99_ms"],
		Unit:   "ms", Reference: &figures.Reference{Name: "floor", Figure: floor.Values["p99_ms"]}})
	if err := n.recordStages(ctx, pods); err != nil {
		return err
	}
	for _, m := range []struct {
		label, key string
		took       []time.Duration
	}{{"pod create to bound", "bound", bound}, {"pod delete to gone", "gone", gone}} {
		values := figures.Latencies(m.took)
		n.run.tally.Records = append(n.run.tally.Records,
			figures.Record{Measure: m.label, Params: map[string]any{"pods": n.run.options.sequentialPods},
				Values: values})
		n.run.tally.AddRow(figures.Row{Measure: m.label + ", p50", Key: m.key + " p50",
			Figure: values["p50_ms"], Unit: "ms"})
		n.run.tally.AddRow(figures.Row{Measure: m.label + ", p99", Figure: values["p99_ms"], Unit: "ms"})
	}
	return nil
}

// measureBurst measures starting many pods at once on one node, and their memory.
func (n *podLoad) measureBurst(ctx context.Context) error {
	node := n.cluster.workerNames()[0]
	n.run.tally.LogProgress("a burst of %d pods on %s", n.run.options.burstPods, node)
	rec, err := n.run.runMeasurement("pod create to Ready",
		map[string]any{"pods": n.run.options.burstPods, "burst": n.run.options.burstPods},
		func() (map[string]float64, error) {
			took, all, err := runConcurrently(n.run.options.burstPods, func(i int) (time.Duration, error) {
				s, since, err := n.startPod(ctx, newWebPod(fmt.Sprintf("burst-%d", i), node))
				return s.ready.Sub(since), err
			})
			values := figures.Latencies(took)
			values["rate"] = float64(n.run.options.burstPods) / all.Seconds()
			return values, err
		})
	if err != nil {
		return err
	}
	n.run.tally.AddRow(figures.Row{Measure: fmt.Sprintf("burst of %d pods on one node", n.run.options.burstPods),
		Key:    "burst",
		Figure: rec.Values["rate"], Unit: "/s", Note: formatCost(rec)})
	n.run.tally.AddRow(figures.Row{Measure: fmt.Sprintf("burst of %d pods on one node, p99", n.run.options.burstPods),
		Key:    "burst p99",
		Figure: rec.Values["p99_ms"], Unit: "ms"})
	if err := n.recordPodMemory(node); err != nil {
		return err
	}
	n.recordDaemonMemory(fmt.Sprintf(", %d pods on %s", n.run.options.burstPods, node), " with pods",
		map[string]any{"pods": n.run.options.burstPods, "node": node})
	return n.measureBurstDeletion(ctx)
}

// runConcurrently calls do concurrently with 0 to times-1. It returns the duration of each call,
// the duration of all, and the error of the lowest argument that failed.
func runConcurrently(times int, do func(i int) (time.Duration, error)) (
	took []time.Duration, all time.Duration, err error,
) {
	took = make([]time.Duration, times)
	errs := make([]error, times)
	began := time.Now()
	var wg sync.WaitGroup
	for i := range times {
		wg.Go(func() { took[i], errs[i] = do(i) })
	}
	wg.Wait()
	return took, time.Since(began), cmp.Or(errs...)
}

// measureBurstDeletion measures the time in which all pods of measureBurst are deleted.
func (n *podLoad) measureBurstDeletion(ctx context.Context) error {
	rec, err := n.run.runMeasurement("pod delete to gone",
		map[string]any{"pods": n.run.options.burstPods, "burst": n.run.options.burstPods},
		func() (map[string]float64, error) {
			took, _, err := runConcurrently(n.run.options.burstPods, func(i int) (time.Duration, error) {
				return n.deletePod(ctx, fmt.Sprintf("burst-%d", i))
			})
			return figures.Latencies(took), err
		})
	if err != nil {
		return err
	}
	n.run.tally.AddRow(figures.Row{Measure: fmt.Sprintf("delete of %d pods on one node, p99", n.run.options.burstPods),
		Figure: rec.Values["p99_ms"],
		Unit:   "ms", Note: formatCost(rec)})
	return nil
}
