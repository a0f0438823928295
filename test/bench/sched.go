package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/testenv/loopback"
)

const (
	rounds               = 3    // per placement
	schedNodes           = 1000 // of the control plane, without agents
	schedPods            = 5000 // created concurrently
	pendingPods          = 10000
	pendingSchedulerName = "ahead" // scheduler name of the pods that are created ahead
	bindingFactor        = 10      // multiple of the pods in turn, as pods that do not start cost little
	planeTimeout         = time.Minute
)

// Kinds of scheduling constraints, and numbers of nodes.
var (
	placementKinds = []string{"plain", "spread", "node-affinity", "affinity", "anti-affinity", "preferred"}
	placementSizes = []int{1000, 5000}
)

// measureScheduler measures the scheduler alone.
func (b *benchmarks) measureScheduler(ctx context.Context) error {
	for _, nodes := range placementSizes {
		for _, kind := range placementKinds {
			if err := b.measurePlacement(ctx, kind, nodes); err != nil {
				return err
			}
		}
	}
	return nil
}

// measurePlacement runs the scheduler's own benchmark: pods are placed one after the other in one
// goroutine.
func (b *benchmarks) measurePlacement(ctx context.Context, kind string, nodes int) error {
	b.tally.LogProgress("placements: %s, %d nodes, %d times", kind, nodes, rounds)
	var spent time.Duration
	var rates, cpu []float64
	rec, err := b.runMeasurement("placement", map[string]any{"kind": kind, "nodes": nodes, "rounds": rounds},
		func() (map[string]float64, error) {
			cmd := exec.CommandContext(ctx, filepath.Join(b.options.programs, "sched.test"), "-test.run",
				"^$", "-test.count",
				strconv.Itoa(rounds),
				"-test.bench", fmt.Sprintf("^BenchmarkPlacement$/^%s$/^%d$", kind, nodes), "-test.benchtime",
				(b.options.duration / rounds).String())
			out, err := cmd.CombinedOutput()
			if err != nil {
				return nil, fmt.Errorf("%w: %s", err, out)
			}
			spent = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
			if rates, err = parseMetric(out, "pods/s"); err != nil {
				return nil, err
			}
			if cpu, err = parseMetric(out, "cpu-us/op"); err != nil {
				return nil, err
			}
			return map[string]float64{"rate": figures.Quantile(slices.Clone(rates), 0.5),
				"cpu_us": figures.Quantile(cpu, 0.5)}, nil
		})
	if err != nil {
		return err
	}
	rec.CPU["scheduler"] = spent.Seconds()
	b.tally.Records[len(b.tally.Records)-1].Samples = rates
	b.tally.AddRow(figures.Row{Measure: fmt.Sprintf("placement, %s, %d nodes", kind, nodes),
		Key:    fmt.Sprintf("placement %s %d", kind, nodes),
		Figure: rec.Values["rate"], Unit: "/s", Note: fmt.Sprintf("median of %d; %.0f µs of CPU each; busy %.0f%%",
			rounds, rec.Values["cpu_us"], 100*rec.Busy)})
	return nil
}

// parseMetric returns the values with a unit from the output of a Go benchmark. There must be one
// value for each round.
func parseMetric(out []byte, unit string) ([]float64, error) {
	var found []float64
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		words := strings.Fields(lines.Text())
		at := slices.Index(words, unit)
		if at < 1 || !strings.HasPrefix(words[0], "BenchmarkPlacement/") {
			continue
		}
		figure, err := strconv.ParseFloat(words[at-1], 64)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", lines.Text(), err)
		}
		found = append(found, figure)
	}
	if len(found) != rounds {
		return nil, fmt.Errorf("the benchmark has printed %d figures in %s, want %d: %s", len(found), unit, rounds, out)
	}
	return found, nil
}

// measureBinding measures pods from create to bound through the API and the store of three replicas
// in this process. The nodes have no agents.
func (b *benchmarks) measureBinding(ctx context.Context) (err error) {
	b.tally.LogProgress("three replicas on loopback, %d nodes", schedNodes)
	dir, err := os.MkdirTemp("", "keelson-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	plane, err := loopback.Start(ctx, dir, loopback.Shape{Name: "bench", Replicas: 3, Ready: planeTimeout,
		Heartbeat: time.Hour})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plane.Stop()) }()
	c := &cluster{}
	for _, cfg := range plane.Configs {
		c.hosts = append(c.hosts, cfg.Host)
	}
	if err := c.createClient(plane.Configs[0]); err != nil {
		return err
	}
	many, err := c.newConnections(manyConnections)
	if err != nil {
		return err
	}
	if err := plane.CreateAgentlessNodes(ctx, schedNodes); err != nil {
		return err
	}
	namespace, _, err := c.createNamespace(ctx)
	if err != nil {
		return err
	}
	watching, stop := context.WithCancel(ctx)
	defer stop()
	o, err := observePods(watching, c.client, namespace)
	if err != nil {
		return err
	}
	// The cluster must be idle: creating a thousand nodes causes writes of events for a while.
	if err := awaitIdleStore(ctx, plane); err != nil {
		return err
	}
	if err := b.measureSequentialBinding(ctx, c, o, namespace); err != nil {
		return err
	}
	if err := b.measureConcurrentBinding(ctx, many, o, namespace); err != nil {
		return err
	}
	stop()
	return b.measurePendingPods(ctx, plane, dir, many)
}

// runEach calls do for 0 to n-1 from the given number of goroutines. A goroutine stops at its first
// error; all errors are joined.
func runEach(n, goroutines int, do func(i int) error) error {
	var wg sync.WaitGroup
	errs := make([]error, goroutines)
	for c := range goroutines {
		wg.Go(func() {
			for i := c; i < n && errs[c] == nil; i += goroutines {
				errs[c] = do(i)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// newSmallPod returns a pod with small resource requests.
func newSmallPod(name string) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "bench"}},
		Spec: v1.PodSpec{
			Containers: []v1.Container{{Name: "main", Image: helloImage,
				Resources: v1.ResourceRequirements{Requests: v1.ResourceList{
					v1.ResourceCPU: resource.MustParse("100m"), v1.ResourceMemory: resource.MustParse("64Mi")}}}},
		}}
}

func awaitIdleStore(ctx context.Context, plane *loopback.Plane) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return plane.AwaitQuiet(ctx, time.Second)
}

// measureSequentialBinding measures pods that are created one after the other, each when the
// previous pod is bound.
func (b *benchmarks) measureSequentialBinding(ctx context.Context, c *cluster, o *podObserver, namespace string) error {
	count := bindingFactor * b.options.sequentialPods
	b.tally.LogProgress("%d pods, one at a time", count)
	one := func(name string) (time.Duration, error) {
		ctx, cancel := context.WithTimeout(ctx, podTimeout)
		defer cancel()
		began := time.Now()
		if _, err := c.client.CoreV1().Pods(namespace).Create(ctx, newSmallPod(name), metav1.CreateOptions{}); err !=
			nil {
			return 0, fmt.Errorf("creating pod %s: %w", name, err)
		}
		s, err := o.awaitPod(ctx, name, "bound", podView.isBound)
		return s.bound.Sub(began), err
	}
	for i := range b.options.sequentialPods {
		if _, err := one(fmt.Sprintf("warm-%d", i)); err != nil {
			return err
		}
	}
	rec, err := b.runMeasurement("pod create to bound, no node",
		map[string]any{"pods": count, "nodes": schedNodes, "replicas": 3}, func() (map[string]float64, error) {
			took := make([]time.Duration, count)
			for i := range took {
				var err error
				if took[i], err = one(fmt.Sprintf("one-%d", i)); err != nil {
					return nil, err
				}
			}
			return figures.Latencies(took), nil
		})
	if err != nil {
		return err
	}
	label := fmt.Sprintf("pod create to bound, one at a time, %d nodes", schedNodes)
	b.tally.AddRow(figures.Row{Measure: label + ", p50", Key: "bound p50", Figure: rec.Values["p50_ms"], Unit: "ms",
		Note: formatCPUPerPod(rec, count)})
	b.tally.AddRow(figures.Row{Measure: label + ", p99", Figure: rec.Values["p99_ms"], Unit: "ms"})
	return nil
}

// formatCPUPerPod describes the CPU time per pod of a measurement. Replicas and clients are in this
// process.
func formatCPUPerPod(r figures.Record, pods int) string {
	return fmt.Sprintf("%.2f ms of CPU per pod, replicas and clients; busy %.0f%%",
		1000*r.CPU["bench"]/float64(pods), 100*r.Busy)
}

func (s podView) isBound() bool { return !s.bound.IsZero() }

// measureConcurrentBinding measures the rate of pods from many clients until all are bound.
func (b *benchmarks) measureConcurrentBinding(
	ctx context.Context, many []rest.Interface, o *podObserver, namespace string,
) error {
	b.tally.LogProgress("%d pods by %d clients", schedPods, manyClients)
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	name := func(i int) string { return fmt.Sprintf("many-%d", i) }
	rec, err := b.runMeasurement("pods create to all bound",
		map[string]any{"pods": schedPods, "nodes": schedNodes, "replicas": 3, "clients": manyClients},
		func() (map[string]float64, error) {
			began := time.Now()
			err := runEach(schedPods, manyClients, func(i int) error {
				return many[i%len(many)].Post().Namespace(namespace).Resource("pods").Body(newSmallPod(name(i))).Do(
					ctx).
					Error()
			})
			if err != nil {
				return nil, fmt.Errorf("creating pods: %w", err)
			}
			created := time.Since(began)
			var last time.Time
			for i := range schedPods {
				s, err := o.awaitPod(ctx, name(i), "bound", podView.isBound)
				if err != nil {
					return nil, err
				}
				if s.bound.After(last) {
					last = s.bound
				}
			}
			return map[string]float64{"rate": schedPods / last.Sub(began).Seconds(),
				"created_rate": schedPods / created.Seconds()}, nil
		})
	if err != nil {
		return err
	}
	b.tally.AddRow(figures.Row{Measure: fmt.Sprintf("pods create to all bound, %d nodes, %d clients",
		schedNodes, manyClients),
		Key:    fmt.Sprintf("all bound %d", schedNodes),
		Figure: rec.Values["rate"], Unit: "/s", Note: fmt.Sprintf("created at %.0f/s; %s", rec.Values["created_rate"],
			formatCPUPerPod(rec, schedPods))})
	return nil
}

// measurePendingPods creates pods of an unknown scheduler name, and restarts the replicas with a
// scheduler of this name. It measures the rate of bindings.
func (b *benchmarks) measurePendingPods(
	ctx context.Context, plane *loopback.Plane, dir string, many []rest.Interface,
) error {
	b.tally.LogProgress("creating %d pods before their scheduler starts", pendingPods)
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	ns := &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: pendingSchedulerName}}
	if err := many[0].Post().Resource("namespaces").Body(ns).Do(ctx).Error(); err != nil {
		return err
	}
	account := &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	if err := many[0].Post().Namespace(pendingSchedulerName).Resource("serviceaccounts").Body(account).Do(ctx).
		Error(); err !=
		nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	err := runEach(pendingPods, manyClients, func(i int) error {
		p := newSmallPod(fmt.Sprintf("ahead-%d", i))
		p.Spec.SchedulerName = pendingSchedulerName
		return many[i%len(many)].Post().Namespace(pendingSchedulerName).Resource("pods").Body(p).Do(ctx).Error()
	})
	if err != nil {
		return fmt.Errorf("creating pending pods: %w", err)
	}
	file := filepath.Join(dir, "scheduler.yaml")
	const config = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nprofiles:\n- " +
		"schedulerName: " + pendingSchedulerName + "\n"
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return err
	}
	if err := plane.Stop(); err != nil {
		return err
	}
	again := &cluster{}
	if err := again.createClient(plane.Configs[0]); err != nil {
		return err
	}
	rec, err := b.runMeasurement("pods created ahead to bound",
		map[string]any{"pods": pendingPods, "nodes": schedNodes, "replicas": 3}, func() (map[string]float64, error) {
			begun := make(chan error, 1)
			go func() { begun <- plane.Restart(ctx, func(cfg *server.Config) { cfg.Leader.SchedulerConfig = file }) }()
			rate, err := measureBindingRate(ctx, again.client.CoreV1().RESTClient(), pendingSchedulerName, pendingPods)
			return rate, errors.Join(err, <-begun)
		})
	if err != nil {
		return err
	}
	b.tally.AddRow(figures.Row{Measure: fmt.Sprintf("pods created ahead to bound, %d nodes", schedNodes),
		Key:    "bound ahead",
		Figure: rec.Values["rate"], Unit: "/s",
		Note: fmt.Sprintf("of %d pods; %.0f were bound before the watch started", pendingPods, rec.Values["before"])})
	return nil
}

// measureBindingRate watches the pods of a namespace until all are bound. It starts as soon as a
// replica responds. It returns the bindings per second, and the number of pods that were bound
// before the watch started.
func measureBindingRate(ctx context.Context, client rest.Interface, namespace string, pods int) (
	map[string]float64, error,
) {
	var list v1.PodList
	err := wait.For(ctx, 5*time.Millisecond, func() error {
		return client.Get().Namespace(namespace).Resource("pods").Do(ctx).Into(&list)
	})
	if err != nil {
		return nil, fmt.Errorf("listing the pending pods: %w", err)
	}
	bound := map[string]bool{}
	for i := range list.Items {
		if list.Items[i].Spec.NodeName != "" {
			bound[list.Items[i].Name] = true
		}
	}
	w, err := client.Get().Namespace(namespace).Resource("pods").VersionedParams(
		&metav1.ListOptions{Watch: true, ResourceVersion: list.ResourceVersion}, scheme.ParameterCodec).Watch(ctx)
	if err != nil {
		return nil, fmt.Errorf("watching the pending pods: %w", err)
	}
	defer w.Stop()
	before := len(bound)
	var first, last time.Time
	for len(bound) < pods {
		e, ok := <-w.ResultChan()
		p, is := e.Object.(*v1.Pod)
		if !ok || !is {
			return nil, fmt.Errorf("the watch of pods ended with %d of %d bound: %v", len(bound), pods, e.Object)
		}
		if p.Spec.NodeName == "" || bound[p.Name] {
			continue
		}
		bound[p.Name], last = true, time.Now()
		if first.IsZero() {
			first = last
		}
	}
	podView := float64(pods - before)
	return map[string]float64{"rate": (podView - 1) / last.Sub(first).Seconds(), "before": float64(before)}, nil
}
