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

const deploymentWithin = 2 * time.Minute

// change is what happens in the middle of a Deployment's creation.
type change struct {
	name  string // of the measure
	key   string // of its targets
	leads func(ctx context.Context, p *plane, leader string) (after func(), err error)
}

func nothing() {}

var changes = []change{
	{"undisturbed", "", func(context.Context, *plane, string) (func(), error) { return nothing, nil }},
	{"leader steps down", " step-down", func(ctx context.Context, p *plane, _ string) (func(), error) {
		_, err := p.StepDown(ctx)
		return nothing, err
	}},
	{"leader killed", " killed", func(_ context.Context, p *plane, leader string) (func(), error) { return p.processes.Kill(leader) }},
}

// deployments measures one Deployment from its creation until all its pods are bound, with one leader and with two.
func (b *bench) deployments(ctx context.Context) (err error) {
	b.Say("three replicas, each a process, and %d nodes on which nobody runs", b.deploymentNodes)
	p, err := startPlane(ctx, b.memory)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	if err := p.PaperNodes(ctx, b.deploymentNodes); err != nil {
		return err
	}
	for _, c := range changes {
		if err := b.deployed(ctx, p, c); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// deployed measures one way, several times.
func (b *bench) deployed(ctx context.Context, p *plane, c change) error {
	rec := figures.Record{Measure: "deployment, " + c.name, Params: map[string]any{"replicas": b.replicas, "nodes": b.deploymentNodes}, CPU: map[string]float64{}}
	var took, gaps []float64
	for round := range b.rounds {
		b.Say("a Deployment of %d pods, %s, round %d of %d", b.replicas, c.name, round+1, b.rounds)
		one, gap, err := b.once(ctx, p, c, &rec)
		if err != nil {
			return err
		}
		b.Say("all bound within %s, longest gap %s", one.Round(time.Millisecond), gap.Round(time.Millisecond))
		took, gaps = append(took, one.Seconds()), append(gaps, float64(gap.Milliseconds()))
	}
	servers := 0.0
	for name := range p.meter.Processes {
		servers += rec.CPU[name]
	}
	rec.Samples = took
	rec.Values = map[string]float64{"bound_s": figures.Quantile(took, 0.5), "gap_ms": figures.Quantile(gaps, 1), "cpu_ms_pod": 1000 * servers / float64(b.rounds*b.replicas)}
	b.Records = append(b.Records, rec)
	label := fmt.Sprintf("Deployment of %d on %d nodes, %s", b.replicas, b.deploymentNodes, c.name)
	b.Row(figures.Row{Measure: label + ", all bound", Key: "deployment bound" + c.key, Figure: rec.Values["bound_s"], Unit: "s",
		Note: fmt.Sprintf("median of %d; %.2f ms of CPU each, all replicas; busy %.0f%%", b.rounds, rec.Values["cpu_ms_pod"], 100*rec.Busy)})
	b.Row(figures.Row{Measure: label + ", longest gap between bindings", Key: "deployment gap" + c.key, Figure: rec.Values["gap_ms"], Unit: "ms", Note: "worst round"})
	return nil
}

// once makes the Deployment, changes the leader in the middle, and takes everything away.
func (b *bench) once(ctx context.Context, p *plane, c change, rec *figures.Record) (took, gap time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, deploymentWithin)
	defer cancel()
	m, err := beginDeployment(ctx, p, b.replicas)
	if err != nil {
		return 0, 0, err
	}
	finish, back := func() error { return nil }, nothing
	if c.key == "" { // a replica that dies tells of no profile
		finish = p.profile(ctx, b.profiles, "deployment", 2*time.Second)
	}
	p.measured()
	err = p.meter.Run(rec, func() (err error) {
		back, err = m.through(ctx, c)
		return err
	})
	back()
	if err := errors.Join(err, finish()); err != nil {
		return 0, 0, err
	}
	b.Say("%d pods were made by when %d were bound", m.made, m.pods/middle)
	took, gap = m.last().Sub(m.began), m.watch.gap(m.began)
	return took, gap, errors.Join(m.settled(ctx), m.remove(ctx))
}

// making is a Deployment on its way.
type making struct {
	p                       *plane
	leader, follower, space string
	term                    uint64 // of the leader
	pods                    int
	watch                   *podWatch
	made                    int // pods that were made before the change
	began                   time.Time
}

// middle says what part of the pods is bound when the leader changes: so few that most are not made yet.
const middle = 10

const deploymentName = "many"

// beginDeployment prepares: a namespace, and a watch of its pods at a replica that does not lead.
func beginDeployment(ctx context.Context, p *plane, pods int) (*making, error) {
	m := &making{p: p, pods: pods, space: fmt.Sprintf("round-%d", time.Now().UnixNano())}
	if err := p.allReady(ctx); err != nil {
		return nil, err
	}
	var err error
	if m.leader, m.follower, err = p.follower(ctx); err != nil {
		return nil, err
	}
	s, err := p.Status(ctx, m.follower)
	if err != nil {
		return nil, err
	}
	m.term = s.Term
	cs, err := p.client(m.follower)
	if err != nil {
		return nil, err
	}
	if err := namespace(ctx, cs, m.space); err != nil {
		return nil, err
	}
	m.watch, err = watchPods(ctx, cs, m.space)
	return m, err
}

// through creates the Deployment and lets the change happen in the middle. It returns when all are.
func (m *making) through(ctx context.Context, c change) (back func(), err error) {
	back = nothing
	cs, err := m.p.client(m.follower)
	if err != nil {
		return back, err
	}
	m.began = time.Now()
	if _, err := cs.AppsV1().Deployments(m.space).Create(ctx, deployment(deploymentName, m.pods), metav1.CreateOptions{}); err != nil {
		return back, fmt.Errorf("creating the Deployment: %w", err)
	}
	if err := m.watch.await(ctx, m.pods/middle); err != nil {
		return back, err
	}
	m.made = m.watch.seen()
	if back, err = c.leads(ctx, m.p, m.leader); err != nil {
		return nothing, err
	}
	return back, m.watch.await(ctx, m.pods)
}

// last is when the last pod was bound.
func (m *making) last() time.Time {
	m.watch.mu.Lock()
	defer m.watch.mu.Unlock()
	return m.watch.bound[m.pods-1]
}

// settled says what is wrong once the Deployment's controller has seen all its pods.
func (m *making) settled(ctx context.Context) error {
	cs, err := m.p.client(m.follower)
	if err != nil {
		return err
	}
	err = wait.For(ctx, 20*time.Millisecond, func() error {
		d, err := cs.AppsV1().Deployments(m.space).Get(ctx, deploymentName, metav1.GetOptions{})
		if err == nil && int(d.Status.Replicas) != m.pods {
			err = fmt.Errorf("the Deployment tells of %d pods", d.Status.Replicas)
		}
		return err
	})
	if err != nil {
		return err
	}
	list, err := cs.CoreV1().Pods(m.space).List(ctx, metav1.ListOptions{})
	if err == nil && len(list.Items) != m.pods {
		err = fmt.Errorf("there are %d pods, %d were asked for", len(list.Items), m.pods)
	}
	return errors.Join(err, m.watch.verdict(m.pods))
}

// remove takes the pods away: nobody is on their nodes who would end them.
func (m *making) remove(ctx context.Context) error {
	cs, err := m.p.client(m.follower)
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
			return fmt.Errorf("%d ReplicaSets are left: %w", len(sets.Items), err)
		}
		err = cs.CoreV1().Pods(m.space).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{})
		if err != nil {
			return fmt.Errorf("deleting the pods: %w", err)
		}
		pods, err := cs.CoreV1().Pods(m.space).List(ctx, metav1.ListOptions{Limit: 1})
		if err != nil || len(pods.Items) > 0 {
			return fmt.Errorf("pods are left: %w", err)
		}
		return nil
	})
}
