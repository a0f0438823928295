package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/figures"
)

const deploymentTimeout = 2 * time.Minute

// disturbance is an event that is caused while the pods of a Deployment are created.
type disturbance struct {
	name  string // name of the measurement
	key   string // suffix of the keys of its targets
	apply func(ctx context.Context, p *plane, leader string) (after func(), err error)
}

func doNothing() {}

var disturbances = []disturbance{
	{"undisturbed", "", func(context.Context, *plane, string) (func(), error) { return doNothing, nil }},
	{"leader steps down", " step-down", func(ctx context.Context, p *plane, _ string) (func(), error) {
		_, err := p.StepDown(ctx)
		return doNothing, err
	}},
	{"leader killed", " killed", func(_ context.Context, p *plane, leader string) (func(), error) {
		return p.processes.Kill(leader)
	}},
}

// measureDeployments measures the time from a Deployment's creation until all its pods are bound:
// undisturbed, with a leadership transfer and with the leader killed.
func (b *benchmarks) measureDeployments(ctx context.Context) (err error) {
	b.tally.LogProgress("three replicas in separate processes, and %d nodes without agents", b.options.deploymentNodes)
	p, err := startPlane(ctx, b.options.memory)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.stopPlane()) }()
	if err := p.CreateAgentlessNodes(ctx, b.options.deploymentNodes); err != nil {
		return err
	}
	for _, c := range disturbances {
		if err := b.measureDeployment(ctx, p, c); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// measureDeployment measures a Deployment with the disturbance c several times and adds the rows to
// the table.
func (b *benchmarks) measureDeployment(ctx context.Context, p *plane, c disturbance) error {
	rec := figures.Record{Measure: "deployment, " + c.name,
		Params: map[string]any{"replicas": b.options.replicas, "nodes": b.options.deploymentNodes},
		CPU:    map[string]float64{}}
	var took, gaps []float64
	for round := range b.options.rounds {
		b.tally.LogProgress("a Deployment of %d pods, %s, round %d of %d", b.options.replicas, c.name, round+1,
			b.options.rounds)
		one, gap, err := b.createDeploymentOnce(ctx, p, c, &rec)
		if err != nil {
			return err
		}
		b.tally.LogProgress("all bound within %s, longest gap %s", one.Round(time.Millisecond),
			gap.Round(time.Millisecond))
		took, gaps = append(took, one.Seconds()), append(gaps, float64(gap.Milliseconds()))
	}
	servers := 0.0
	for name := range p.meter.Processes {
		servers += rec.CPU[name]
	}
	rec.Samples = took
	rec.Values = map[string]float64{"bound_s": figures.Quantile(took, 0.5), "gap_ms": figures.Quantile(gaps, 1),
		"cpu_ms_pod": 1000 * servers / float64(b.options.rounds*b.options.replicas)}
	b.tally.Records = append(b.tally.Records, rec)
	label := fmt.Sprintf("Deployment of %d on %d nodes, %s", b.options.replicas, b.options.deploymentNodes, c.name)
	b.tally.AddRow(figures.Row{Measure: label + ", all bound", Key: "deployment bound" + c.key,
		Figure: rec.Values["bound_s"], Unit: "s",
		Note: fmt.Sprintf("median of %d; %.2f ms of CPU per pod, all replicas; busy %.0f%%", b.options.rounds,
			rec.Values["cpu_ms_pod"], 100*rec.Busy)})
	b.tally.AddRow(figures.Row{Measure: label + ", longest gap between bindings", Key: "deployment gap" + c.key,
		Figure: rec.Values["gap_ms"], Unit: "ms", Note: "worst round"})
	return nil
}

// createDeploymentOnce creates the Deployment, applies the disturbance c, checks the pods and
// deletes everything. It returns the results of the measurement.
func (b *benchmarks) createDeploymentOnce(ctx context.Context, p *plane, c disturbance, rec *figures.Record) (
	took, gap time.Duration, err error,
) {
	ctx, cancel := context.WithTimeout(ctx, deploymentTimeout)
	defer cancel()
	m, err := prepareDeployment(ctx, p, b.options.replicas)
	if err != nil {
		return 0, 0, err
	}
	finish, back := func() error { return nil }, doNothing
	if c.key == "" { // a killed replica cannot return a profile
		finish = p.startProfiles(ctx, b.options.profiles, "deployment", 2*time.Second)
	}
	p.updateMeter()
	err = p.meter.Run(rec, func() (err error) {
		back, err = m.createAndBind(ctx, c)
		return err
	})
	back()
	if err := errors.Join(err, finish()); err != nil {
		return 0, 0, err
	}
	b.tally.LogProgress("%d pods existed when %d were bound", m.made, m.pods/disturbanceDivisor)
	took, gap = m.lastBinding().Sub(m.began), m.watch.longestGap(m.began)
	return took, gap, errors.Join(m.checkPods(ctx), m.deleteAll(ctx))
}

// deploymentRun is the state of one measured Deployment.
type deploymentRun struct {
	p                       *plane
	leader, follower, space string
	term                    uint64 // the leader's term at the start
	pods                    int
	watch                   *podWatch
	made                    int // pods created before the disturbance
	began                   time.Time
}

// disturbanceDivisor is the divisor of the number of pods that are bound when the disturbance is
// applied. It is large, so that most pods are not created yet.
const disturbanceDivisor = 10

const deploymentName = "many"

// prepareDeployment waits until all replicas are ready. It creates a namespace and watches the
// namespace's pods at a follower.
func prepareDeployment(ctx context.Context, p *plane, pods int) (*deploymentRun, error) {
	m := &deploymentRun{p: p, pods: pods, space: fmt.Sprintf("round-%d", time.Now().UnixNano())}
	if err := p.awaitAllReady(ctx); err != nil {
		return nil, err
	}
	var err error
	if m.leader, m.follower, err = p.selectFollower(ctx); err != nil {
		return nil, err
	}
	s, err := p.Status(ctx, m.follower)
	if err != nil {
		return nil, err
	}
	m.term = s.Term
	cs, err := p.newClient(m.follower)
	if err != nil {
		return nil, err
	}
	if err := createNamespace(ctx, cs, m.space); err != nil {
		return nil, err
	}
	m.watch, err = watchPods(ctx, cs, m.space)
	return m, err
}

// createAndBind creates the Deployment, applies the disturbance when a tenth of the pods is bound,
// and returns when all pods are bound. back restarts a killed replica.
func (m *deploymentRun) createAndBind(ctx context.Context, c disturbance) (back func(), err error) {
	back = doNothing
	cs, err := m.p.newClient(m.follower)
	if err != nil {
		return back, err
	}
	m.began = time.Now()
	if _, err := cs.AppsV1().Deployments(m.space).Create(ctx, newDeployment(deploymentName, m.pods),
		metav1.CreateOptions{}); err != nil {
		return back, fmt.Errorf("creating the Deployment: %w", err)
	}
	if err := m.watch.awaitBound(ctx, m.pods/disturbanceDivisor); err != nil {
		return back, err
	}
	m.made = m.watch.seenCount()
	if back, err = c.apply(ctx, m.p, m.leader); err != nil {
		return doNothing, err
	}
	return back, m.watch.awaitBound(ctx, m.pods)
}

// lastBinding returns the time at which the last pod was bound. All pods must be bound.
func (m *deploymentRun) lastBinding() time.Time {
	m.watch.mu.Lock()
	defer m.watch.mu.Unlock()
	return m.watch.bound[m.pods-1]
}

// checkPods waits until the Deployment's status counts all pods. It returns an error if the number
// of pods is wrong, or a pod was created or bound more than once.
func (m *deploymentRun) checkPods(ctx context.Context) error {
	cs, err := m.p.newClient(m.follower)
	if err != nil {
		return err
	}
	err = wait.For(ctx, 20*time.Millisecond, func() error {
		d, err := cs.AppsV1().Deployments(m.space).Get(ctx, deploymentName, metav1.GetOptions{})
		if err == nil && int(d.Status.Replicas) != m.pods {
			err = fmt.Errorf("the Deployment's status counts %d pods", d.Status.Replicas)
		}
		return err
	})
	if err != nil {
		return err
	}
	list, err := cs.CoreV1().Pods(m.space).List(ctx, metav1.ListOptions{})
	if err == nil && len(list.Items) != m.pods {
		err = fmt.Errorf("%d pods exist, want %d", len(list.Items), m.pods)
	}
	return errors.Join(err, m.watch.checkCounts(m.pods))
}

// deleteAll deletes the Deployment, its ReplicaSets and its pods with grace period 0, because no
// agents run on the nodes.
func (m *deploymentRun) deleteAll(ctx context.Context) error {
	cs, err := m.p.newClient(m.follower)
	if err != nil {
		return err
	}
	orphan, now := metav1.DeletePropagationOrphan, int64(0)
	alone := metav1.DeleteOptions{PropagationPolicy: &orphan}
	if err := cs.AppsV1().Deployments(m.space).Delete(ctx, deploymentName, alone); err != nil {
		return fmt.Errorf("deleting the Deployment: %w", err)
	}
	return wait.For(ctx, 100*time.Millisecond, func() error {
		if err := cs.AppsV1().ReplicaSets(m.space).DeleteCollection(ctx, alone, metav1.ListOptions{}); err != nil {
			return err
		}
		sets, err := cs.AppsV1().ReplicaSets(m.space).List(ctx, metav1.ListOptions{})
		if err != nil || len(sets.Items) > 0 {
			return fmt.Errorf("%d ReplicaSets still exist: %w", len(sets.Items), err)
		}
		err = cs.CoreV1().Pods(m.space).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: &now},
			metav1.ListOptions{})
		if err != nil {
			return fmt.Errorf("deleting the pods: %w", err)
		}
		pods, err := cs.CoreV1().Pods(m.space).List(ctx, metav1.ListOptions{Limit: 1})
		if err != nil || len(pods.Items) > 0 {
			return fmt.Errorf("pods still exist: %w", err)
		}
		return nil
	})
}
