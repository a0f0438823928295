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

// webPod is a web server with a readiness probe, as users have it; "" = any node.
// It ends at once when asked to: how long a process drains is not the cluster's figure.
func webPod(name, node string) *v1.Pod {
	p := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "bench"}},
		Spec: v1.PodSpec{Containers: []v1.Container{{
			Name: "main", Image: helloImage, Args: []string{"-linger=0s"},
			Ports:          []v1.ContainerPort{{Name: "http", ContainerPort: 8080}},
			ReadinessProbe: &v1.Probe{ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/healthz", Port: intstr.FromString("http")}}, PeriodSeconds: 1},
		}}},
	}
	if node != "" {
		p.Spec.NodeSelector = map[string]string{v1.LabelHostname: node}
	}
	return p
}

// node measures pods: one at a time beside the floor of the machine, a burst, memory.
func (b *bench) node(ctx context.Context, c *cluster) error {
	floor, err := b.floor(ctx, c)
	if err != nil {
		return err
	}
	return b.onPods(ctx, c, func(n *nodeLoad) error {
		if err := n.oneAtATime(ctx, floor); err != nil {
			return err
		}
		return n.together(ctx)
	})
}

// onPods has pods measured in a namespace of their own, when all workers have their image.
func (b *bench) onPods(ctx context.Context, c *cluster, measure func(*nodeLoad) error) (err error) {
	namespace, remove, err := c.namespace(ctx)
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
	o, err := observe(watching, c.client, namespace)
	if err != nil {
		return err
	}
	n := &nodeLoad{bench: b, cluster: c, observer: o, namespace: namespace}
	if err := n.warmUp(ctx); err != nil {
		return fmt.Errorf("warming up: %w", err)
	}
	return measure(n)
}

// floor is what the parts of a pod's start cost on this machine without Keelson:
// a network namespace, CNI ADD, and create and start of two containers by runc.
// In turns with it the node's runtime makes the same, without the rest of Keelson.
func (b *bench) floor(ctx context.Context, c *cluster) (figures.Record, error) {
	b.Say("the floor: network namespace, CNI ADD, two runc create and start")
	records, err := b.program(ctx, "floor", "", "-bin", c.loan.Config.BinDir, "-images", c.loan.Config.ImageDir,
		"-cni", c.loan.Config.CNIBinDir, "-n", strconv.Itoa(b.inTurn))
	if err != nil {
		return figures.Record{}, err
	}
	floor, ok := figures.Find(records, "floor: pod", nil)
	own, also := figures.Find(records, "keelson: pod", nil)
	if !ok || !also {
		return floor, errors.New("the program printed no records of the floor's and of Keelson's pods")
	}
	b.Row(figures.Row{Measure: "floor: netns, CNI ADD, 2 runc create+start, p50", Figure: floor.Values["p50_ms"], Unit: "ms"})
	b.Row(figures.Row{Measure: "the same by Keelson's runtime, p50", Figure: own.Values["p50_ms"], Unit: "ms", Reference: &figures.Reference{Name: "floor", Figure: floor.Values["p50_ms"]}})
	return floor, nil
}

// nodeLoad is the state of the pods' measures.
type nodeLoad struct {
	*bench
	*cluster
	*observer
	namespace string
}

func (n *nodeLoad) create(ctx context.Context, p *v1.Pod) error {
	_, err := n.client.CoreV1().Pods(n.namespace).Create(ctx, p, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("creating pod %s: %w", p.Name, err)
	}
	return nil
}

// start creates a pod and waits until it is seen as Ready; since is the time from
// just before the request.
func (n *nodeLoad) start(ctx context.Context, p *v1.Pod) (s seen, since time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, podTimeout)
	defer cancel()
	since = time.Now()
	if err := n.create(ctx, p); err != nil {
		return s, since, err
	}
	s, err = n.await(ctx, p.Name, "Ready", func(s seen) bool { return !s.ready.IsZero() })
	return s, since, err
}

// end deletes a pod, in good order, and returns how long it took to be gone.
func (n *nodeLoad) end(ctx context.Context, name string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, podTimeout)
	defer cancel()
	return n.untilGone(ctx, name)
}

func (n *nodeLoad) untilGone(ctx context.Context, name string) (time.Duration, error) {
	began := time.Now()
	if err := n.client.CoreV1().Pods(n.namespace).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return 0, fmt.Errorf("deleting pod %s: %w", name, err)
	}
	s, err := n.await(ctx, name, "gone", func(s seen) bool { return !s.gone.IsZero() })
	return s.gone.Sub(began), err
}

// warmUp runs a pod on every worker, so that all have the image unpacked.
func (n *nodeLoad) warmUp(ctx context.Context) error {
	n.Say("warming up: a pod on each of %v", n.workers())
	for _, w := range n.workers() {
		if _, _, err := n.start(ctx, webPod("warm-"+w, w)); err != nil {
			return err
		}
		if _, err := n.end(ctx, "warm-"+w); err != nil {
			return err
		}
	}
	return nil
}

// oneAtATime starts and ends pods, each alone in the cluster.
func (n *nodeLoad) oneAtATime(ctx context.Context, floor figures.Record) error {
	n.Say("%d pods, one at a time", n.inTurn)
	var bound, ready, gone []time.Duration
	var pods []seen
	starts, err := n.measure("pod create to Ready", map[string]any{"pods": n.inTurn, "burst": 1}, func() (map[string]float64, error) {
		for i := range n.inTurn {
			name := fmt.Sprintf("one-%d", i)
			s, since, err := n.start(ctx, webPod(name, ""))
			if err != nil {
				return nil, err
			}
			bound, ready, pods = append(bound, s.bound.Sub(since)), append(ready, s.ready.Sub(since)), append(pods, s)
			took, err := n.end(ctx, name)
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
	n.Row(figures.Row{Measure: "pod create to Ready, p50", Key: "ready p50", Figure: starts.Values["p50_ms"], Unit: "ms", Note: cost(starts) + ", with the deletes", Reference: reference})
	n.Row(figures.Row{Measure: "pod create to Ready, p99", Key: "ready p99", Figure: starts.Values["p99_ms"], Unit: "ms", Reference: &figures.Reference{Name: "floor", Figure: floor.Values["p99_ms"]}})
	if err := n.stages(ctx, pods); err != nil {
		return err
	}
	for _, m := range []struct {
		label, key string
		took       []time.Duration
	}{{"pod create to bound", "bound", bound}, {"pod delete to gone", "gone", gone}} {
		values := figures.Latencies(m.took)
		n.Records = append(n.Records, figures.Record{Measure: m.label, Params: map[string]any{"pods": n.inTurn}, Values: values})
		n.Row(figures.Row{Measure: m.label + ", p50", Key: m.key + " p50", Figure: values["p50_ms"], Unit: "ms"})
		n.Row(figures.Row{Measure: m.label + ", p99", Figure: values["p99_ms"], Unit: "ms"})
	}
	return nil
}

// together starts many pods at once on one node and looks at the memory they take.
func (n *nodeLoad) together(ctx context.Context) error {
	node := n.workers()[0]
	n.Say("a burst of %d pods on %s", n.burst, node)
	rec, err := n.measure("pod create to Ready", map[string]any{"pods": n.burst, "burst": n.burst}, func() (map[string]float64, error) {
		took, all, err := atOnce(n.burst, func(i int) (time.Duration, error) {
			s, since, err := n.start(ctx, webPod(fmt.Sprintf("burst-%d", i), node))
			return s.ready.Sub(since), err
		})
		values := figures.Latencies(took)
		values["rate"] = float64(n.burst) / all.Seconds()
		return values, err
	})
	if err != nil {
		return err
	}
	n.Row(figures.Row{Measure: fmt.Sprintf("burst of %d pods on one node", n.burst), Key: "burst", Figure: rec.Values["rate"], Unit: "/s", Note: cost(rec)})
	n.Row(figures.Row{Measure: fmt.Sprintf("burst of %d pods on one node, p99", n.burst), Key: "burst p99", Figure: rec.Values["p99_ms"], Unit: "ms"})
	if err := n.podMemory(node); err != nil {
		return err
	}
	n.daemonMemory(fmt.Sprintf(", %d pods on %s", n.burst, node), " with pods", map[string]any{"pods": n.burst, "node": node})
	return n.endAll(ctx)
}

// atOnce does something many times at once, and says what each took, and all of them. The error is the first one's.
func atOnce(times int, do func(i int) (time.Duration, error)) (took []time.Duration, all time.Duration, err error) {
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

// endAll deletes the burst and waits until all are gone.
func (n *nodeLoad) endAll(ctx context.Context) error {
	rec, err := n.measure("pod delete to gone", map[string]any{"pods": n.burst, "burst": n.burst}, func() (map[string]float64, error) {
		took, _, err := atOnce(n.burst, func(i int) (time.Duration, error) { return n.end(ctx, fmt.Sprintf("burst-%d", i)) })
		return figures.Latencies(took), err
	})
	if err != nil {
		return err
	}
	n.Row(figures.Row{Measure: fmt.Sprintf("delete of %d pods on one node, p99", n.burst), Figure: rec.Values["p99_ms"], Unit: "ms", Note: cost(rec)})
	return nil
}
