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
	rounds       = 3    // of each placement
	schedNodes   = 1000 // of the control plane; nobody runs on them
	schedPods    = 5000 // created by many at once
	aheadPods    = 10000
	aheadName    = "ahead" // of the scheduler of the pods that are created ahead
	idleFactor   = 10      // as many pods in turn as where they also start: these cost little
	planePatient = time.Minute
)

// Rules that pods are placed by, and in how large clusters.
var (
	placementKinds = []string{"plain", "spread", "node-affinity", "affinity", "anti-affinity", "preferred"}
	placementSizes = []int{1000, 5000}
)

// sched measures the scheduler alone.
func (b *bench) sched(ctx context.Context) error {
	for _, nodes := range placementSizes {
		for _, kind := range placementKinds {
			if err := b.placement(ctx, kind, nodes); err != nil {
				return err
			}
		}
	}
	return nil
}

// placement is the scheduler's own benchmark: one pod after the other is placed and counted, in one goroutine.
func (b *bench) placement(ctx context.Context, kind string, nodes int) error {
	b.Say("placements: %s, %d nodes, %d times", kind, nodes, rounds)
	var spent time.Duration
	var rates, cpu []float64
	rec, err := b.measure("placement", map[string]any{"kind": kind, "nodes": nodes, "rounds": rounds}, func() (map[string]float64, error) {
		cmd := exec.CommandContext(ctx, filepath.Join(b.programs, "sched.test"), "-test.run", "^$", "-test.count", strconv.Itoa(rounds),
			"-test.bench", fmt.Sprintf("^BenchmarkPlacement$/^%s$/^%d$", kind, nodes), "-test.benchtime", (b.duration / rounds).String())
		out, err := cmd.CombinedOutput()
		if err != nil {
			return nil, fmt.Errorf("%w: %s", err, out)
		}
		spent = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
		if rates, err = metric(out, "pods/s"); err != nil {
			return nil, err
		}
		if cpu, err = metric(out, "cpu-us/op"); err != nil {
			return nil, err
		}
		return map[string]float64{"rate": figures.Quantile(slices.Clone(rates), 0.5), "cpu_us": figures.Quantile(cpu, 0.5)}, nil
	})
	if err != nil {
		return err
	}
	rec.CPU["scheduler"] = spent.Seconds()
	b.Records[len(b.Records)-1].Samples = rates
	b.Row(figures.Row{Measure: fmt.Sprintf("placement, %s, %d nodes", kind, nodes), Key: fmt.Sprintf("placement %s %d", kind, nodes),
		Figure: rec.Values["rate"], Unit: "/s", Note: fmt.Sprintf("median of %d; %.0f µs of CPU each; busy %.0f%%", rounds, rec.Values["cpu_us"], 100*rec.Busy)})
	return nil
}

// metric reads the figures with a unit from what the benchmark prints.
func metric(out []byte, unit string) ([]float64, error) {
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
		return nil, fmt.Errorf("%d figures in %s where there must be %d: %s", len(found), unit, rounds, out)
	}
	return found, nil
}

// untilBound measures pods from create to bound through the API and the store of three replicas in this process. Their
// nodes are objects alone.
func (b *bench) untilBound(ctx context.Context) (err error) {
	b.Say("three replicas on loopback, %d nodes", schedNodes)
	dir, err := os.MkdirTemp("", "keelson-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	plane, err := loopback.Start(ctx, dir, loopback.Shape{Name: "bench", Replicas: 3, Ready: planePatient, Heartbeat: time.Hour})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plane.Stop()) }()
	c := &cluster{}
	for _, cfg := range plane.Configs {
		c.hosts = append(c.hosts, cfg.Host)
	}
	if err := c.through(plane.Configs[0]); err != nil {
		return err
	}
	many, err := c.connections(manyConnections)
	if err != nil {
		return err
	}
	if err := plane.PaperNodes(ctx, schedNodes); err != nil {
		return err
	}
	namespace, _, err := c.namespace(ctx)
	if err != nil {
		return err
	}
	watching, stop := context.WithCancel(ctx)
	defer stop()
	o, err := observe(watching, c.client, namespace)
	if err != nil {
		return err
	}
	// The cluster is to be idle: thousand nodes that came leave events to write for a while.
	if err := settled(ctx, plane); err != nil {
		return err
	}
	if err := b.boundInTurn(ctx, c, o, namespace); err != nil {
		return err
	}
	if err := b.boundTogether(ctx, many, o, namespace); err != nil {
		return err
	}
	stop()
	return b.boundAhead(ctx, plane, dir, many)
}

// each calls do for 0 to n-1, so many at once, and returns what failed.
func each(n, atOnce int, do func(i int) error) error {
	var wg sync.WaitGroup
	errs := make([]error, atOnce)
	for c := range atOnce {
		wg.Go(func() {
			for i := c; i < n && errs[c] == nil; i += atOnce {
				errs[c] = do(i)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// smallPod asks for little.
func smallPod(name string) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "bench"}}, Spec: v1.PodSpec{
		Containers: []v1.Container{{Name: "main", Image: helloImage, Resources: v1.ResourceRequirements{Requests: v1.ResourceList{
			v1.ResourceCPU: resource.MustParse("100m"), v1.ResourceMemory: resource.MustParse("64Mi")}}}},
	}}
}

func settled(ctx context.Context, plane *loopback.Plane) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return plane.Settle(ctx, time.Second)
}

// boundInTurn creates one pod after the other, each when the one before is bound.
func (b *bench) boundInTurn(ctx context.Context, c *cluster, o *observer, namespace string) error {
	count := idleFactor * b.inTurn
	b.Say("%d pods, one at a time", count)
	one := func(name string) (time.Duration, error) {
		ctx, cancel := context.WithTimeout(ctx, podTimeout)
		defer cancel()
		began := time.Now()
		if _, err := c.client.CoreV1().Pods(namespace).Create(ctx, smallPod(name), metav1.CreateOptions{}); err != nil {
			return 0, fmt.Errorf("creating pod %s: %w", name, err)
		}
		s, err := o.await(ctx, name, "bound", seen.isBound)
		return s.bound.Sub(began), err
	}
	for i := range b.inTurn {
		if _, err := one(fmt.Sprintf("warm-%d", i)); err != nil {
			return err
		}
	}
	rec, err := b.measure("pod create to bound, no node", map[string]any{"pods": count, "nodes": schedNodes, "replicas": 3}, func() (map[string]float64, error) {
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
	b.Row(figures.Row{Measure: label + ", p50", Key: "bound p50", Figure: rec.Values["p50_ms"], Unit: "ms", Note: onePod(rec, count)})
	b.Row(figures.Row{Measure: label + ", p99", Figure: rec.Values["p99_ms"], Unit: "ms"})
	return nil
}

// onePod is what a measure cost for each pod. Replicas and clients are in this process.
func onePod(r figures.Record, pods int) string {
	return fmt.Sprintf("%.2f ms of CPU each, replicas and clients; busy %.0f%%", 1000*r.CPU["bench"]/float64(pods), 100*r.Busy)
}

func (s seen) isBound() bool { return !s.bound.IsZero() }

// boundTogether creates pods from many clients and waits until all are bound.
func (b *bench) boundTogether(ctx context.Context, many []rest.Interface, o *observer, namespace string) error {
	b.Say("%d pods by %d clients", schedPods, manyClients)
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	name := func(i int) string { return fmt.Sprintf("many-%d", i) }
	rec, err := b.measure("pods create to all bound", map[string]any{"pods": schedPods, "nodes": schedNodes, "replicas": 3, "clients": manyClients}, func() (map[string]float64, error) {
		began := time.Now()
		err := each(schedPods, manyClients, func(i int) error {
			return many[i%len(many)].Post().Namespace(namespace).Resource("pods").Body(smallPod(name(i))).Do(ctx).Error()
		})
		if err != nil {
			return nil, fmt.Errorf("creating pods: %w", err)
		}
		created := time.Since(began)
		var last time.Time
		for i := range schedPods {
			s, err := o.await(ctx, name(i), "bound", seen.isBound)
			if err != nil {
				return nil, err
			}
			if s.bound.After(last) {
				last = s.bound
			}
		}
		return map[string]float64{"rate": schedPods / last.Sub(began).Seconds(), "created_rate": schedPods / created.Seconds()}, nil
	})
	if err != nil {
		return err
	}
	b.Row(figures.Row{Measure: fmt.Sprintf("pods create to all bound, %d nodes, %d clients", schedNodes, manyClients), Key: fmt.Sprintf("all bound %d", schedNodes),
		Figure: rec.Values["rate"], Unit: "/s", Note: fmt.Sprintf("created at %.0f/s; %s", rec.Values["created_rate"], onePod(rec, schedPods))})
	return nil
}

// boundAhead creates pods that no scheduler is responsible for yet, and begins the replicas anew with one that is.
func (b *bench) boundAhead(ctx context.Context, plane *loopback.Plane, dir string, many []rest.Interface) error {
	b.Say("%d pods created ahead", aheadPods)
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	ns := &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: aheadName}}
	if err := many[0].Post().Resource("namespaces").Body(ns).Do(ctx).Error(); err != nil {
		return err
	}
	account := &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	if err := many[0].Post().Namespace(aheadName).Resource("serviceaccounts").Body(account).Do(ctx).Error(); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	err := each(aheadPods, manyClients, func(i int) error {
		p := smallPod(fmt.Sprintf("ahead-%d", i))
		p.Spec.SchedulerName = aheadName
		return many[i%len(many)].Post().Namespace(aheadName).Resource("pods").Body(p).Do(ctx).Error()
	})
	if err != nil {
		return fmt.Errorf("creating pods ahead: %w", err)
	}
	file := filepath.Join(dir, "scheduler.yaml")
	const config = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nprofiles:\n- schedulerName: " + aheadName + "\n"
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return err
	}
	if err := plane.Stop(); err != nil {
		return err
	}
	again := &cluster{}
	if err := again.through(plane.Configs[0]); err != nil {
		return err
	}
	rec, err := b.measure("pods created ahead to bound", map[string]any{"pods": aheadPods, "nodes": schedNodes, "replicas": 3}, func() (map[string]float64, error) {
		begun := make(chan error, 1)
		go func() { begun <- plane.Again(ctx, func(cfg *server.Config) { cfg.SchedulerConfig = file }) }()
		rate, err := boundRate(ctx, again.client.CoreV1().RESTClient(), aheadName, aheadPods)
		return rate, errors.Join(err, <-begun)
	})
	if err != nil {
		return err
	}
	b.Row(figures.Row{Measure: fmt.Sprintf("pods created ahead to bound, %d nodes", schedNodes), Key: "bound ahead", Figure: rec.Values["rate"], Unit: "/s",
		Note: fmt.Sprintf("of %d; %.0f were bound before the first was seen", aheadPods, rec.Values["before"])})
	return nil
}

// boundRate watches the pods of a namespace until all are bound, from as soon as a replica answers.
func boundRate(ctx context.Context, client rest.Interface, namespace string, pods int) (map[string]float64, error) {
	var list v1.PodList
	err := wait.For(ctx, 5*time.Millisecond, func() error {
		return client.Get().Namespace(namespace).Resource("pods").Do(ctx).Into(&list)
	})
	if err != nil {
		return nil, fmt.Errorf("listing the pods that were created ahead: %w", err)
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
		return nil, fmt.Errorf("watching the pods that were created ahead: %w", err)
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
	seen := float64(pods - before)
	return map[string]float64{"rate": (seen - 1) / last.Sub(first).Seconds(), "before": float64(before)}, nil
}
