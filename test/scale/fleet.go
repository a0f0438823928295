package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/procfs"
)

const (
	fleetSpace     = "fleet"
	ofDeployment   = 5000 // pods at most
	fleetPatience  = 20 * time.Minute
	settleWithin   = 2 * time.Minute
	quietFor       = 3 * time.Second // without a write, and the cluster has come to rest
	tellEvery      = 5 * time.Second
	heartbeatsLate = 5 * time.Second // a node that was not heard for so long has no session
)

// nodes is a control plane with agents.
type nodes struct {
	*plane
	nodes, pods int
	cs          *kubernetes.Clientset // at a replica that does not lead
	leader      string
	say         func(format string, args ...any)
}

// fleet measures a cluster whose nodes have sessions: it fills, rests, churns and loses its leader.
func (b *bench) fleet(ctx context.Context) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	b.Say("three replicas, and %d agents in %d processes", b.nodes, b.processes)
	p, err := startPlane(ctx, b.memory)
	if err != nil {
		cancel()
		return err
	}
	var crowds sync.WaitGroup
	defer func() {
		cancel()
		crowds.Wait()
		err = errors.Join(err, p.stop())
	}()
	n := &nodes{plane: p, nodes: b.nodes, pods: b.pods, say: b.Say}
	for i := range b.processes {
		first, next := i*b.nodes/b.processes, (i+1)*b.nodes/b.processes
		pid, end, err := n.crowd(first, next-first, float64(b.arrivals)/float64(b.processes)).process(ctx)
		if err != nil {
			return err
		}
		p.meter.Processes[fmt.Sprintf("agents %d", i+1)] = pid
		crowds.Go(func() {
			if err := end(); err != nil {
				b.Say("a process of agents ended: %v", err)
			}
		})
	}
	return b.measured(ctx, n)
}

// crowd are agents of this control plane, each with all replicas to begin with.
func (n *nodes) crowd(first, count int, rate float64) crowd {
	c := crowd{First: first, Count: count, Rate: rate, Token: n.Founded.NodeToken, Dir: filepath.Join(n.dir, "agents")}
	for i := range n.Names() {
		c.Servers = append(c.Servers, n.FleetAddress((i+first)%replicas))
	}
	return c
}

// measured is one measure after the other.
func (b *bench) measured(ctx context.Context, n *nodes) error {
	var err error
	for _, step := range []struct {
		name   string
		during time.Duration // of profiles
		do     func(context.Context) (map[string]float64, error)
	}{
		{"nodes join", 10 * time.Second, n.join},
		{"pods run", 5 * time.Second, n.fill},
		{"rest", b.rest, func(ctx context.Context) (map[string]float64, error) { return n.rest(ctx, b.rest) }},
		{"churn", b.churn, func(ctx context.Context) (map[string]float64, error) { return n.churn(ctx, b.churn, b.rate) }},
		{"leader killed", 0, n.storm},
	} {
		b.Say("%s", step.name)
		if n.leader, err = n.ask(ctx); err != nil { // it may have changed while the machine was busy
			return err
		}
		if step.name == "rest" {
			if err := n.settle(ctx); err != nil {
				return err
			}
		}
		rec := figures.Record{Measure: step.name, Params: map[string]any{"nodes": b.nodes, "pods": b.pods, "leader": n.leader}}
		finish := func() error { return nil }
		if step.during > 0 {
			finish = n.profile(ctx, b.profiles, step.name, step.during)
		}
		err := n.meter.Run(&rec, func() (err error) { rec.Values, err = step.do(ctx); return err })
		if err := errors.Join(err, finish()); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
		n.memory(&rec)
		b.Records = append(b.Records, rec)
		b.told(rec)
	}
	return nil
}

// ask finds the leader, and makes the client that asks another replica.
func (n *nodes) ask(ctx context.Context) (leader string, err error) {
	leader, follower, err := n.follower(ctx)
	if err == nil {
		n.cs, err = n.client(follower)
	}
	return leader, err
}

// memory adds what each process holds, in MiB.
func (n *nodes) memory(rec *figures.Record) {
	for name, pid := range n.meter.Processes {
		if m, err := procfs.ReadMemory(pid); err == nil {
			rec.Values["rss_mib "+name] = (m.Anonymous + m.File) / (1 << 20)
		}
	}
}

// until looks again and again, and tells who waits how far it is.
func (n *nodes) until(ctx context.Context, what string, limit time.Duration, look func() (done, of int, err error)) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	told := began
	err := wait.For(ctx, 200*time.Millisecond, func() error {
		done, of, err := look()
		if time.Since(told) >= tellEvery {
			told = time.Now()
			n.say("%s: %d of %d", what, done, of)
		}
		if err == nil && done < of {
			err = fmt.Errorf("%d of %d", done, of)
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("%s: %w", what, err)
	}
	return time.Since(began), nil
}

// heard is how many nodes the replicas that answer have heard since a time.
func (n *nodes) heard(ctx context.Context, since time.Time) int {
	known := map[string]bool{}
	for _, name := range n.Names() {
		cs, err := n.client(name)
		if err != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, heartbeatsLate)
		raw, err := cs.RESTClient().Get().AbsPath(api.PathClusterHeartbeats).DoRaw(ctx)
		cancel()
		var millis map[string]int64
		if err != nil || json.Unmarshal(raw, &millis) != nil {
			continue
		}
		for node, m := range millis {
			if time.UnixMilli(m).After(since) {
				known[node] = true
			}
		}
	}
	return len(known)
}

// join waits until all nodes have joined, and have been heard lately.
func (n *nodes) join(ctx context.Context) (map[string]float64, error) {
	took, err := n.until(ctx, "nodes heard", fleetPatience, func() (int, int, error) { return n.heard(ctx, time.Now().Add(-heartbeatsLate)), n.nodes, nil })
	if err != nil {
		return nil, err
	}
	_, err = n.until(ctx, "nodes ready", settleWithin, func() (int, int, error) { return n.ready(ctx) })
	return map[string]float64{"seconds": took.Seconds(), "rate": float64(n.nodes) / took.Seconds()}, err
}

// ready is how many nodes pods may go to.
func (n *nodes) ready(ctx context.Context) (int, int, error) {
	list, err := n.cs.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, n.nodes, err
	}
	ready := 0
	for i := range list.Items {
		if o := &list.Items[i]; len(o.Spec.Taints) == 0 && o.Spec.PodCIDR != "" {
			ready++
		}
	}
	return ready, n.nodes, nil
}

// fill makes Deployments and waits until their pods run.
func (n *nodes) fill(ctx context.Context) (map[string]float64, error) {
	if err := namespace(ctx, n.cs, fleetSpace); err != nil {
		return nil, err
	}
	for i := 0; i*ofDeployment < n.pods; i++ {
		d := deployment(fmt.Sprintf("d%d", i), min(ofDeployment, n.pods-i*ofDeployment))
		if _, err := n.cs.AppsV1().Deployments(fleetSpace).Create(ctx, d, metav1.CreateOptions{}); err != nil {
			return nil, fmt.Errorf("creating Deployment %s: %w", d.Name, err)
		}
	}
	took, err := n.until(ctx, "pods run", fleetPatience, func() (int, int, error) { return n.running(ctx) })
	return map[string]float64{"seconds": took.Seconds(), "rate": float64(n.pods) / took.Seconds()}, err
}

// running is how many pods run, as their Deployments tell.
func (n *nodes) running(ctx context.Context) (int, int, error) {
	list, err := n.cs.AppsV1().Deployments(fleetSpace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, n.pods, err
	}
	run := 0
	for i := range list.Items {
		run += int(list.Items[i].Status.ReadyReplicas)
	}
	return run, n.pods, nil
}

// revision is how far the store has come.
func (n *nodes) revision(ctx context.Context) (uint64, error) {
	s, err := n.Status(ctx, n.leader)
	return s.Revision, err
}

// settle waits until nothing has been written for a while.
func (n *nodes) settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleWithin)
	defer cancel()
	return n.Settle(ctx, quietFor)
}

// rest lets time pass.
func (n *nodes) rest(ctx context.Context, during time.Duration) (map[string]float64, error) {
	before, err := n.revision(ctx)
	if err != nil {
		return nil, err
	}
	if err := wait.Delay(ctx, during); err != nil {
		return nil, err
	}
	after, err := n.revision(ctx)
	return map[string]float64{"seconds": during.Seconds(), "writes": float64(after - before)}, err
}

// storm kills the leader and waits until all nodes are heard again and none was lost.
func (n *nodes) storm(ctx context.Context) (map[string]float64, error) {
	survivors := n.Names()
	back, err := n.processes.Kill(n.leader)
	if err != nil {
		return nil, err
	}
	defer back()
	killed := time.Now()
	wrote := make(chan time.Duration, 1)
	go func() { wrote <- n.writes(ctx, killed) }()
	_, err = n.until(ctx, "nodes heard", settleWithin, func() (int, int, error) { return n.heard(ctx, killed), n.nodes, nil })
	if err != nil {
		return nil, err
	}
	took := time.Since(killed)
	lost, err := n.lost(ctx)
	if err != nil {
		return nil, err
	}
	return map[string]float64{"seconds": took.Seconds(), "lost": float64(lost), "write_ms": float64((<-wrote).Milliseconds()), "survivors": float64(len(survivors) - 1)}, nil
}

// writes is how long after a moment the first write is done.
func (n *nodes) writes(ctx context.Context, since time.Time) time.Duration {
	_ = wait.For(ctx, 10*time.Millisecond, func() error {
		cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "written-"}}
		_, err := n.cs.CoreV1().ConfigMaps(fleetSpace).Create(ctx, cm, metav1.CreateOptions{})
		return err
	})
	return time.Since(since)
}

// lost is how many nodes are not Ready by what is stored.
func (n *nodes) lost(ctx context.Context) (int, error) {
	list, err := n.cs.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, err
	}
	lost := 0
	for i := range list.Items {
		for _, c := range list.Items[i].Status.Conditions {
			if c.Type == v1.NodeReady && c.Status != v1.ConditionTrue {
				lost++
			}
		}
	}
	return lost, nil
}

// anyNode is the name of a node.
func (n *nodes) anyNode() string { return nodeName(rand.IntN(n.nodes)) }
