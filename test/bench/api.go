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
	// Clients share connections as the goroutines of a component do; a multiple of the replicas.
	manyConnections = 12
	fewConnections  = 3
)

// api measures requests over HTTPS. The pods name a scheduler that is not there.
func (b *bench) api(ctx context.Context, c *cluster) (err error) {
	namespace, remove, err := c.namespace(ctx)
	if err != nil {
		return err
	}
	defer func() {
		b.Say("deleting what was created")
		if removed := remove(); err == nil {
			err = removed
		}
	}()
	few, err := c.connections(fewConnections)
	if err != nil {
		return err
	}
	many, err := c.connections(manyConnections)
	if err != nil {
		return err
	}
	a := &apiLoad{bench: b, namespace: namespace}
	if err := a.creates(ctx, few, many); err != nil {
		return err
	}
	if err := a.gets(ctx, many); err != nil {
		return err
	}
	if err := a.lists(ctx, few[0]); err != nil {
		return err
	}
	return a.emptied(ctx, c)
}

// apiLoad is the state of the API's measures.
type apiLoad struct {
	*bench
	namespace string
	pods      atomic.Int64 // created so far: p-0, p-1 ...
	maps      atomic.Int64
}

func (a *apiLoad) creates(ctx context.Context, few, many []rest.Interface) error {
	pod := func(ctx context.Context, on rest.Interface) error {
		name := "p-" + strconv.FormatInt(a.pods.Add(1)-1, 10)
		return on.Post().Namespace(a.namespace).Resource("pods").Body(idlePod(name)).Do(ctx).Error()
	}
	config := func(ctx context.Context, on rest.Interface) error {
		name := "c-" + strconv.FormatInt(a.maps.Add(1)-1, 10)
		return on.Post().Namespace(a.namespace).Resource("configmaps").Body(configMap(name)).Do(ctx).Error()
	}
	if _, err := a.through(ctx, "create pod", 1, few, pod); err != nil {
		return err
	}
	if _, err := a.through(ctx, "create pod", manyClients, many, pod); err != nil {
		return err
	}
	_, err := a.through(ctx, "create configmap", manyClients, many, config)
	return err
}

func (a *apiLoad) gets(ctx context.Context, many []rest.Interface) error {
	var next atomic.Int64
	existing := a.pods.Load()
	_, err := a.through(ctx, "get pod", manyClients, many, func(ctx context.Context, on rest.Interface) error {
		// A prime stride above the number of pods visits all, in no order.
		name := "p-" + strconv.FormatInt(next.Add(1)*1000003%existing, 10)
		return on.Get().Namespace(a.namespace).Resource("pods").Name(name).Do(ctx).Error()
	})
	return err
}

// through runs a load over connections and adds its rows.
func (a *apiLoad) through(ctx context.Context, what string, clients int, on []rest.Interface, call func(context.Context, rest.Interface) error) (figures.Record, error) {
	a.Say("%s, %s", what, counted(clients, "client"))
	rec, err := a.measure(what, map[string]any{"clients": clients, "connections": len(on)}, func() (map[string]float64, error) {
		got, err := load{clients: clients, during: a.duration, call: func(ctx context.Context, client, n int) error {
			return call(ctx, on[(client+n)%len(on)])
		}}.run(ctx)
		values := figures.Latencies(got.latencies)
		values["rate"] = got.rate()
		return values, err
	})
	if err != nil {
		return rec, err
	}
	key := fmt.Sprintf("%s %d", what, clients)
	name := fmt.Sprintf("%s, %s", what, counted(clients, "client"))
	commit := func(value string) *figures.Reference {
		if !strings.HasPrefix(what, "create") {
			return nil
		}
		return a.commitReference(clients, value)
	}
	a.Row(figures.Row{Measure: name, Key: key, Figure: rec.Values["rate"], Unit: "/s", Note: cost(rec), Reference: commit("rate")})
	a.Row(figures.Row{Measure: name + ", p50", Key: key + " p50", Figure: rec.Values["p50_ms"], Unit: "ms", Reference: commit("p50_ms")})
	a.Row(figures.Row{Measure: name + ", p99", Key: key + " p99", Figure: rec.Values["p99_ms"], Unit: "ms", Reference: commit("p99_ms")})
	return rec, nil
}

// lists reads all pods at once, several times.
func (a *apiLoad) lists(ctx context.Context, on rest.Interface) error {
	const times = 7
	pods := float64(a.pods.Load())
	a.Say("list of %.0f pods", pods)
	var size int64
	rec, err := a.measure("list pods", map[string]any{"pods": pods, "times": times}, func() (map[string]float64, error) {
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
	a.Row(figures.Row{
		Measure: "list pods, p50 for 10,000", Key: "list 10000 pods", Figure: rec.Values["p50_ms_per_10000"], Unit: "ms",
		Note: fmt.Sprintf("%.0f pods, %.1f MB: %s", pods, float64(size)/1e6, figures.Format(rec.Values["p50_ms"], "ms")),
	})
	return nil
}

// emptied deletes the pods and waits until they are gone, so that the next
// measure, or the user of the lab, does not pay for them.
func (a *apiLoad) emptied(ctx context.Context, c *cluster) error {
	pods := c.client.CoreV1().Pods(a.namespace)
	rec, err := a.measure("delete collection of pods", map[string]any{"pods": a.pods.Load()}, func() (map[string]float64, error) {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		zero := int64(0)
		began := time.Now()
		if err := pods.DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: &zero}, metav1.ListOptions{}); err != nil {
			return nil, err
		}
		err := wait.For(ctx, 20*time.Millisecond, func() error {
			left, err := pods.List(ctx, metav1.ListOptions{Limit: 1})
			if err == nil && len(left.Items) > 0 {
				err = fmt.Errorf("pods are left")
			}
			return err
		})
		return map[string]float64{"rate": float64(a.pods.Load()) / time.Since(began).Seconds()}, err
	})
	if err != nil {
		return err
	}
	a.Row(figures.Row{Measure: "delete collection of pods", Figure: rec.Values["rate"], Unit: "/s", Note: cost(rec)})
	return nil
}

// commitReference is the same value of the store's own measure at as many clients.
func (b *bench) commitReference(clients int, value string) *figures.Reference {
	through := "all"
	if clients == 1 {
		through = "follower" // as most requests come in
	}
	r, ok := figures.Find(b.Records, "store: put", map[string]any{"clients": clients, "through": through})
	if !ok {
		return nil
	}
	return &figures.Reference{Name: "commit", Figure: r.Values[value]}
}

// idlePod has the fields of an ordinary pod and is never scheduled.
func idlePod(name string) *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "bench", "tier": "web"}},
		Spec: v1.PodSpec{
			SchedulerName: "none-so-never-scheduled",
			Containers: []v1.Container{{
				Name: "main", Image: helloImage,
				Env:            []v1.EnvVar{{Name: "GREETING", Value: "hello"}, {Name: "LEVEL", Value: "info"}},
				Ports:          []v1.ContainerPort{{Name: "http", ContainerPort: 8080}},
				ReadinessProbe: &v1.Probe{ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/healthz", Port: intstr.FromString("http")}}, PeriodSeconds: 1},
				Resources: v1.ResourceRequirements{
					Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("50m"), v1.ResourceMemory: resource.MustParse("16Mi")},
					Limits:   v1.ResourceList{v1.ResourceMemory: resource.MustParse("64Mi")},
				},
			}},
		},
	}
}

func configMap(name string) *v1.ConfigMap {
	return &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"value": strings.Repeat("x", 1024)}}
}

// cost is the CPU time of a measure in a few words: replicas, workers with all
// their processes, this client, and how busy the machine was, with what else.
func cost(r figures.Record) string {
	replicas, workers := cpuOf(r)
	out := fmt.Sprintf("cpu s: replicas %.1f, workers %.1f, client %.1f; busy %.0f%%", replicas, workers, r.CPU[procfs.Self], 100*r.Busy)
	if r.Others > 0.01 {
		out += fmt.Sprintf(", of which others %.0f%%", 100*r.Others)
	}
	return out
}

// cpuOf is the CPU time of a measure, in seconds: of all replicas, and of all workers with all their processes.
func cpuOf(r figures.Record) (replicas, workers float64) {
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

func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
