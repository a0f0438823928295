package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/procfs"
)

const (
	manyClients = 64
	// manyConnections is smaller than manyClients, because the goroutines of a component share
	// connections. It is a multiple of the number of replicas.
	manyConnections = 12
	fewConnections  = 3
)

// measureAPI measures requests over HTTPS. The pods name a scheduler that does not exist, so that
// they are never scheduled.
func (b *benchmarks) measureAPI(ctx context.Context, c *cluster) (err error) {
	namespace, remove, err := c.createNamespace(ctx)
	if err != nil {
		return err
	}
	defer func() {
		b.tally.LogProgress("deleting the created objects")
		if removed := remove(); err == nil {
			err = removed
		}
	}()
	few, err := c.newConnections(fewConnections)
	if err != nil {
		return err
	}
	many, err := c.newConnections(manyConnections)
	if err != nil {
		return err
	}
	a := &apiLoad{run: b, namespace: namespace}
	if err := a.measureCreates(ctx, few, many); err != nil {
		return err
	}
	if err := a.measureGets(ctx, many); err != nil {
		return err
	}
	if err := a.measureLists(ctx, few[0]); err != nil {
		return err
	}
	return a.measureDeleteCollection(ctx, c)
}

// apiLoad is the state of the measurements of the API: its clients and the pods that it has
// created.
type apiLoad struct {
	run        *benchmarks
	namespace  string
	pods       atomic.Int64 // number of created pods, named p-0, p-1 and so on
	configMaps atomic.Int64
}

func (a *apiLoad) measureCreates(ctx context.Context, few, many []rest.Interface) error {
	pod := func(ctx context.Context, on rest.Interface) error {
		name := "p-" + strconv.FormatInt(a.pods.Add(1)-1, 10)
		return on.Post().Namespace(a.namespace).Resource("pods").Body(newIdlePod(name)).Do(ctx).Error()
	}
	config := func(ctx context.Context, on rest.Interface) error {
		name := "c-" + strconv.FormatInt(a.configMaps.Add(1)-1, 10)
		return on.Post().Namespace(a.namespace).Resource("configmaps").Body(newConfigMap(name)).Do(ctx).Error()
	}
	if _, err := a.runLoad(ctx, "create pod", 1, few, pod); err != nil {
		return err
	}
	if _, err := a.runLoad(ctx, "create pod", manyClients, many, pod); err != nil {
		return err
	}
	_, err := a.runLoad(ctx, "create configmap", manyClients, many, config)
	return err
}

func (a *apiLoad) measureGets(ctx context.Context, many []rest.Interface) error {
	var next atomic.Int64
	existing := a.pods.Load()
	_, err := a.runLoad(ctx, "get pod", manyClients, many, func(ctx context.Context, on rest.Interface) error {
		// A prime stride above the number of pods visits all pods in a scattered order.
		name := "p-" + strconv.FormatInt(next.Add(1)*1000003%existing, 10)
		return on.Get().Namespace(a.namespace).Resource("pods").Name(name).Do(ctx).Error()
	})
	return err
}

// runLoad sends calls from concurrent clients, each in a closed loop over its connection, and adds
// the rows with the results.
func (a *apiLoad) runLoad(
	ctx context.Context, what string, clients int, on []rest.Interface,
	call func(context.Context, rest.Interface) error,
) (figures.Record, error) {
	a.run.tally.LogProgress("%s, %s", what, pluralize(clients, "client"))
	rec, err := a.run.runMeasurement(what, map[string]any{"clients": clients, "connections": len(on)},
		func() (map[string]float64, error) {
			got, err := closedLoop{clients: clients, during: a.run.options.duration,
				call: func(ctx context.Context, client, n int) error {
					return call(ctx, on[(client+n)%len(on)])
				}}.runClients(ctx)
			values := figures.Latencies(got.latencies)
			values["rate"] = got.callsPerSecond()
			return values, err
		})
	if err != nil {
		return rec, err
	}
	key := fmt.Sprintf("%s %d", what, clients)
	name := fmt.Sprintf("%s, %s", what, pluralize(clients, "client"))
	commit := func(value string) *figures.Reference {
		if !strings.HasPrefix(what, "create") {
			return nil
		}
		return a.run.commitReference(clients, value)
	}
	a.run.tally.AddRow(figures.Row{Measure: name, Key: key, Figure: rec.Values["rate"], Unit: "/s",
		Note:      formatCost(rec),
		Reference: commit("rate")})
	a.run.tally.AddRow(figures.Row{Measure: name + ", p50", Key: key + " p50", Figure: rec.Values["p50_ms"], Unit: "ms",
		Reference: commit("p50_ms")})
	a.run.tally.AddRow(figures.Row{Measure: name + ", p99", Key: key + " p99", Figure: rec.Values["p99_ms"], Unit: "ms",
		Reference: commit("p99_ms")})
	return rec, nil
}

// measureLists measures listing all pods in one request, several times.
func (a *apiLoad) measureLists(ctx context.Context, on rest.Interface) error {
	const times = 7
	pods := float64(a.pods.Load())
	a.run.tally.LogProgress("list of %.0f pods", pods)
	var size int64
	rec, err := a.run.runMeasurement("list pods", map[string]any{"pods": pods, "times": times},
		func() (map[string]float64, error) {
			var took []time.Duration
			for range times {
				began := time.Now()
				body, err := on.Get().Namespace(a.namespace).Resource("pods").Stream(ctx)
				if err != nil {
					return nil, err
				}
				n, err := io.Copy(io.Discard, body)
				_ = body.Close()
				if err != nil {
					return nil, err
				}
				took, size = append(took, time.Since(began)), n
			}
			values := figures.Latencies(took)
			values["bytes"] = float64(size)
			values["p50_ms_per_10000"] = values["p50_ms"] * 10000 / pods
			return values, nil
		})
	if err != nil {
		return err
	}
	a.run.tally.AddRow(figures.Row{
		Measure: "list pods, p50 for 10,000", Key: "list 10000 pods",
		Figure: rec.Values["p50_ms_per_10000"], Unit: "ms",
		Note: fmt.Sprintf("%.0f pods, %.1f MB: %s", pods, float64(size)/1e6,
			figures.Format(rec.Values["p50_ms"], "ms")),
	})
	return nil
}

// measureDeleteCollection measures deleting all pods. It waits until they are gone, so that they do
// not disturb the next measurement or the lab's user.
func (a *apiLoad) measureDeleteCollection(ctx context.Context, c *cluster) error {
	pods := c.client.CoreV1().Pods(a.namespace)
	rec, err := a.run.runMeasurement("delete collection of pods", map[string]any{"pods": a.pods.Load()},
		func() (map[string]float64, error) {
			ctx, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			zero := int64(0)
			began := time.Now()
			if err := pods.DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: &zero},
				metav1.ListOptions{}); err != nil {
				return nil, err
			}
			err := wait.For(ctx, 20*time.Millisecond, func() error {
				left, err := pods.List(ctx, metav1.ListOptions{Limit: 1})
				if err == nil && len(left.Items) > 0 {
					err = fmt.Errorf("pods still exist")
				}
				return err
			})
			return map[string]float64{"rate": float64(a.pods.Load()) / time.Since(began).Seconds()}, err
		})
	if err != nil {
		return err
	}
	a.run.tally.AddRow(figures.Row{Measure: "delete collection of pods", Figure: rec.Values["rate"], Unit: "/s",
		Note: formatCost(rec)})
	return nil
}

// commitReference returns the same value from the store's measurement with the same number of
// clients, as the reference of an API measurement. It returns nil if there is no such record.
func (b *benchmarks) commitReference(clients int, value string) *figures.Reference {
	through := "all"
	if clients == 1 {
		through = "follower" // like most requests
	}
	r, ok := figures.FindRecord(b.tally.Records, "store: put", map[string]any{"clients": clients, "through": through})
	if !ok {
		return nil
	}
	return &figures.Reference{Name: "commit", Figure: r.Values[value]}
}

// newIdlePod returns a pod with the fields of an ordinary pod that is never scheduled.
func newIdlePod(name string) *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "bench", "tier": "web"}},
		Spec: v1.PodSpec{
			SchedulerName: "none-so-never-scheduled",
			Containers: []v1.Container{{
				Name: "main", Image: helloImage,
				Env:   []v1.EnvVar{{Name: "GREETING", Value: "hello"}, {Name: "LEVEL", Value: "info"}},
				Ports: []v1.ContainerPort{{Name: "http", ContainerPort: 8080}},
				ReadinessProbe: &v1.Probe{ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/healthz",
					Port: intstr.FromString("http")}}, PeriodSeconds: 1},
				Resources: v1.ResourceRequirements{
					Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("50m"),
						v1.ResourceMemory: resource.MustParse("16Mi")},
					Limits: v1.ResourceList{v1.ResourceMemory: resource.MustParse("64Mi")},
				},
			}},
		},
	}
}

func newConfigMap(name string) *v1.ConfigMap {
	return &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name},
		Data: map[string]string{"value": strings.Repeat("x", 1024)}}
}

// formatCost describes the CPU seconds of a measurement: of the replicas, of the workers with all
// their processes, and of this client. It includes the share of the machine that was busy, and the
// share of other work.
func formatCost(r figures.Record) string {
	replicas, workers := cpuSeconds(r)
	out := fmt.Sprintf("cpu s: replicas %.1f, workers %.1f, client %.1f; busy %.0f%%", replicas, workers,
		r.CPU[procfs.Self], 100*r.Busy)
	if r.Others > 0.01 {
		out += fmt.Sprintf(", of which others %.0f%%", 100*r.Others)
	}
	return out
}

// cpuSeconds returns the CPU seconds of a measurement: of all replicas, and of all workers with all
// their processes.
func cpuSeconds(r figures.Record) (replicas, workers float64) {
	for name, s := range r.CPU {
		switch {
		case strings.HasPrefix(name, "cp"):
			replicas += s
		case strings.HasSuffix(name, " in all"):
			workers += s
		}
	}
	return replicas, workers
}

func pluralize(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
