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
	fleetNamespace    = "fleet"
	podsPerDeployment = 5000 // most pods of one Deployment
	fleetTimeout      = 20 * time.Minute
	settleTimeout     = 2 * time.Minute
	idlePeriod        = 3 * time.Second // time without a write after which the cluster is idle
	progressInterval  = 5 * time.Second
	heartbeatTimeout  = 5 * time.Second // age of a node's last heartbeat after which the node has no session
)

// agentFleet is a control plane with simulated agents.
type agentFleet struct {
	plane       *plane
	nodes, pods int
	cs          *kubernetes.Clientset // of a follower
	leader      string
	logProgress func(format string, args ...any)
}

// measureFleet measures a cluster of agents with sessions in these phases: nodes join, pods are
// created, nothing happens, pods are replaced (churn), and the leader is killed.
func (b *benchmarks) measureFleet(ctx context.Context) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	b.tally.LogProgress("three replicas, and %d agents in %d processes", b.options.nodes, b.options.processes)
	p, err := startPlane(ctx, b.options.memory)
	if err != nil {
		cancel()
		return err
	}
	var crowds sync.WaitGroup
	defer func() {
		cancel()
		crowds.Wait()
		err = errors.Join(err, p.stopPlane())
	}()
	n := &agentFleet{plane: p, nodes: b.options.nodes, pods: b.options.pods, logProgress: b.tally.LogProgress}
	for i := range b.options.processes {
		first, next := i*b.options.nodes/b.options.processes, (i+1)*b.options.nodes/b.options.processes
		pid, end, err := n.newAgentGroup(first, next-first, float64(b.options.arrivals)/float64(b.options.processes)).
			startProcess(ctx)
		if err != nil {
			return err
		}
		p.meter.Processes[fmt.Sprintf("agents %d", i+1)] = pid
		crowds.Go(func() {
			if err := end(); err != nil {
				b.tally.LogProgress("a process of agents has exited: %v", err)
			}
		})
	}
	return b.runFleetSteps(ctx, n)
}

// newAgentGroup returns a group of agents of this control plane. Each agent has the addresses of
// all replicas.
func (n *agentFleet) newAgentGroup(first, count int, rate float64) agentGroup {
	c := agentGroup{First: first, Count: count, Rate: rate, Token: n.plane.Founded.NodeToken,
		Dir: filepath.Join(n.plane.dir, "agents")}
	for i := range n.plane.Names() {
		c.Servers = append(c.Servers, n.plane.FleetAddress((i+first)%replicas))
	}
	return c
}

// runFleetSteps runs the measurements of the fleet one after the other.
func (b *benchmarks) runFleetSteps(ctx context.Context, n *agentFleet) error {
	var err error
	for _, step := range []struct {
		name   string
		during time.Duration // of CPU profiles
		do     func(context.Context) (map[string]float64, error)
	}{
		{"nodes join", 10 * time.Second, n.measureJoin},
		{"pods run", 5 * time.Second, n.createPods},
		{"rest", b.options.rest, func(ctx context.Context) (map[string]float64, error) {
			return n.measureRest(ctx, b.options.rest)
		}},
		{"churn", b.options.churn, func(ctx context.Context) (map[string]float64, error) {
			return n.measureChurn(ctx, b.options.churn, b.options.rate)
		}},
		{"leader killed", 0, n.measureLeaderKill},
	} {
		b.tally.LogProgress("%s", step.name)
		if n.leader, err = n.findLeader(ctx); err != nil { // leadership may have changed while the machine was busy
			return err
		}
		if step.name == "rest" {
			if err := n.awaitIdle(ctx); err != nil {
				return err
			}
		}
		rec := figures.Record{Measure: step.name,
			Params: map[string]any{"nodes": b.options.nodes, "pods": b.options.pods, "leader": n.leader}}
		finish := func() error { return nil }
		if step.during > 0 {
			finish = n.plane.startProfiles(ctx, b.options.profiles, step.name, step.during)
		}
		err := n.plane.meter.Run(&rec, func() (err error) { rec.Values, err = step.do(ctx); return err })
		if err := errors.Join(err, finish()); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
		n.recordMemory(&rec)
		b.tally.Records = append(b.tally.Records, rec)
		b.addFleetRows(rec)
	}
	return nil
}

// findLeader returns the leader's name and sets cs to a client of a follower.
func (n *agentFleet) findLeader(ctx context.Context) (leader string, err error) {
	leader, follower, err := n.plane.selectFollower(ctx)
	if err == nil {
		n.cs, err = n.plane.newClient(follower)
	}
	return leader, err
}

// recordMemory adds the resident memory of each process in MiB.
func (n *agentFleet) recordMemory(rec *figures.Record) {
	for name, pid := range n.plane.meter.Processes {
		if m, err := procfs.ReadMemory(pid); err == nil {
			rec.Values["rss_mib "+name] = (m.Anonymous + m.File) / (1 << 20)
		}
	}
}

// awaitCount polls count until its result done reaches its result of, and prints the progress. It
// returns the time that this took, or an error after the limit. what names the counted objects in
// texts.
func (n *agentFleet) awaitCount(
	ctx context.Context, what string, limit time.Duration, count func() (done, of int, err error),
) (
	time.Duration, error,
) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	told := began
	err := wait.For(ctx, 200*time.Millisecond, func() error {
		done, of, err := count()
		if time.Since(told) >= progressInterval {
			told = time.Now()
			n.logProgress("%s: %d of %d", what, done, of)
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

// countHeartbeats returns the number of nodes of which any replica has received a heartbeat after
// since. Replicas that do not respond are skipped.
func (n *agentFleet) countHeartbeats(ctx context.Context, since time.Time) int {
	known := map[string]bool{}
	for _, name := range n.plane.Names() {
		cs, err := n.plane.newClient(name)
		if err != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, heartbeatTimeout)
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

// measureJoin waits until all nodes have recent heartbeats and are ready.
func (n *agentFleet) measureJoin(ctx context.Context) (map[string]float64, error) {
	took, err := n.awaitCount(ctx, "nodes with heartbeats", fleetTimeout, func() (int, int, error) {
		return n.countHeartbeats(ctx, time.Now().Add(-heartbeatTimeout)), n.nodes, nil
	})
	if err != nil {
		return nil, err
	}
	_, err = n.awaitCount(ctx, "nodes ready", settleTimeout, func() (int, int, error) { return n.countReadyNodes(ctx) })
	return map[string]float64{"seconds": took.Seconds(), "rate": float64(n.nodes) / took.Seconds()}, err
}

// countReadyNodes returns the number of nodes that have a pod CIDR and no taints, and the number of
// all nodes.
func (n *agentFleet) countReadyNodes(ctx context.Context) (int, int, error) {
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

// createPods creates Deployments and waits until their pods are ready.
func (n *agentFleet) createPods(ctx context.Context) (map[string]float64, error) {
	if err := createNamespace(ctx, n.cs, fleetNamespace); err != nil {
		return nil, err
	}
	for i := 0; i*podsPerDeployment < n.pods; i++ {
		d := newDeployment(fmt.Sprintf("d%d", i), min(podsPerDeployment, n.pods-i*podsPerDeployment))
		if _, err := n.cs.AppsV1().Deployments(fleetNamespace).Create(ctx, d, metav1.CreateOptions{}); err != nil {
			return nil, fmt.Errorf("creating Deployment %s: %w", d.Name, err)
		}
	}
	took, err := n.awaitCount(ctx, "pods run", fleetTimeout, func() (int, int, error) { return n.countReadyPods(ctx) })
	return map[string]float64{"seconds": took.Seconds(), "rate": float64(n.pods) / took.Seconds()}, err
}

// countReadyPods returns the number of ready pods according to the Deployments' status, and the
// number of all pods.
func (n *agentFleet) countReadyPods(ctx context.Context) (int, int, error) {
	list, err := n.cs.AppsV1().Deployments(fleetNamespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, n.pods, err
	}
	run := 0
	for i := range list.Items {
		run += int(list.Items[i].Status.ReadyReplicas)
	}
	return run, n.pods, nil
}

// storeRevision returns the store's revision at the leader.
func (n *agentFleet) storeRevision(ctx context.Context) (uint64, error) {
	s, err := n.plane.Status(ctx, n.leader)
	return s.Revision, err
}

// awaitIdle waits until the store has had no write for idlePeriod.
func (n *agentFleet) awaitIdle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	return n.plane.AwaitQuiet(ctx, idlePeriod)
}

// measureRest waits for the time during, and returns the number of writes meanwhile.
func (n *agentFleet) measureRest(ctx context.Context, during time.Duration) (map[string]float64, error) {
	before, err := n.storeRevision(ctx)
	if err != nil {
		return nil, err
	}
	if err := wait.Delay(ctx, during); err != nil {
		return nil, err
	}
	after, err := n.storeRevision(ctx)
	return map[string]float64{"seconds": during.Seconds(), "writes": float64(after - before)}, err
}

// measureLeaderKill kills the leader and waits until all nodes have sent heartbeats again. It
// returns the time that this took, the number of nodes that are not Ready, and the time until the
// first write.
func (n *agentFleet) measureLeaderKill(ctx context.Context) (map[string]float64, error) {
	survivors := n.plane.Names()
	back, err := n.plane.processes.Kill(n.leader)
	if err != nil {
		return nil, err
	}
	defer back()
	killed := time.Now()
	wrote := make(chan time.Duration, 1)
	go func() { wrote <- n.timeUntilWrite(ctx, killed) }()
	_, err = n.awaitCount(ctx, "nodes with heartbeats", settleTimeout, func() (int, int, error) {
		return n.countHeartbeats(ctx, killed),
			n.nodes, nil
	})
	if err != nil {
		return nil, err
	}
	took := time.Since(killed)
	lost, err := n.countLostNodes(ctx)
	if err != nil {
		return nil, err
	}
	return map[string]float64{"seconds": took.Seconds(), "lost": float64(lost),
		"write_ms": float64((<-wrote).Milliseconds()), "survivors": float64(len(survivors) - 1)}, nil
}

// timeUntilWrite returns the time from start until a write succeeds.
func (n *agentFleet) timeUntilWrite(ctx context.Context, start time.Time) time.Duration {
	_ = wait.For(ctx, 10*time.Millisecond, func() error {
		cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "written-"}}
		_, err := n.cs.CoreV1().ConfigMaps(fleetNamespace).Create(ctx, cm, metav1.CreateOptions{})
		return err
	})
	return time.Since(start)
}

// countLostNodes returns the number of nodes with a stored Ready condition other than True.
func (n *agentFleet) countLostNodes(ctx context.Context) (int, error) {
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

// randomNodeName returns the name of a random node.
func (n *agentFleet) randomNodeName() string { return nodeName(rand.IntN(n.nodes)) }
