package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/procfs"
)

func TestMain(m *testing.M) {
	if asked, err := role(); asked {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

const patience = 5 * time.Minute

func testPlane(t *testing.T) (context.Context, *plane) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	p, err := startPlane(ctx, replicaMemory)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.stop(); err != nil {
			t.Error(err)
		}
	})
	return ctx, p
}

// The leader changes while a Deployment's pods are made and bound: each is made once and bound once, and no more of them,
// whether the leader hands over or dies.
func TestLeaderChangesInTheMiddleOfADeployment(t *testing.T) {
	const pods, nodes = 1000, 50
	ctx, p := testPlane(t)
	if err := p.PaperNodes(ctx, nodes); err != nil {
		t.Fatal(err)
	}
	for _, c := range changes {
		t.Run(c.name, func(t *testing.T) {
			m, err := beginDeployment(ctx, p, pods)
			if err != nil {
				t.Fatal(err)
			}
			back, err := m.through(ctx, c)
			back()
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("bound within %s, longest gap %s; %d were made before the change", m.last().Sub(m.began), m.watch.gap(m.began), m.made)
			if err := m.settled(ctx); err != nil {
				t.Error(err)
			}
			now, err := p.Status(ctx, m.follower)
			if err != nil {
				t.Fatal(err)
			}
			if c.key != "" && now.Term <= m.term {
				t.Errorf("%s leads in term %d, and %s led in term %d", now.Leader, now.Term, m.leader, m.term)
			}
			if err := m.remove(ctx); err != nil {
				t.Error(err)
			}
		})
	}
}

// Fifty nodes with real sessions, and five hundred pods: all run, each bound once; a cluster at rest writes nothing and
// costs next to nothing; pods are replaced; and the death of the leader loses no node.
func TestSmallFleet(t *testing.T) {
	const count, pods = 50, 500
	ctx, p := testPlane(t)
	n := &nodes{plane: p, nodes: count, pods: pods, say: t.Logf}
	var err error
	if n.leader, err = n.ask(ctx); err != nil {
		t.Fatal(err)
	}
	agents, cancel := context.WithCancel(ctx)
	pid, end, err := n.crowd(0, count, float64(count)).process(agents)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if err := end(); err != nil {
			t.Errorf("the agents: %v", err)
		}
	})
	p.meter.Processes["agents"] = pid
	must := func(v map[string]float64, err error) map[string]float64 {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Log(v)
		return v
	}
	must(n.join(ctx))
	w, err := watchPods(ctx, n.cs, fleetSpace)
	if err != nil {
		t.Fatal(err)
	}
	must(n.fill(ctx))
	if err := w.verdict(pods); err != nil {
		t.Error(err)
	}
	rests(t, ctx, n)
	must(n.churn(ctx, 2*time.Second, 50))
	if err := w.boundOnce(); err != nil {
		t.Error(err)
	}
	if v := must(n.storm(ctx)); v["lost"] != 0 {
		t.Errorf("%v nodes were lost with the leader", v["lost"])
	}
}

// rests sees that a cluster to which nothing happens comes to rest: no write, and hardly any work. On a machine so busy that
// nodes and replicas lose each other for a moment it is looked at again.
func rests(t *testing.T, ctx context.Context, n *nodes) {
	t.Helper()
	const window, windows = 5 * time.Second, 6
	var err error
	for range windows {
		if err = n.settle(ctx); err != nil {
			t.Fatal(err)
		}
		var cost figures.Record
		var v map[string]float64
		if err = n.meter.Run(&cost, func() (err error) { v, err = n.rest(ctx, window); return err }); err != nil {
			t.Fatal(err)
		}
		t.Logf("%v writes at rest, seconds of CPU: %v", v["writes"], cost.CPU)
		if v["writes"] != 0 {
			err = fmt.Errorf("nothing happened, and the store took %v writes", v["writes"])
		}
		for name, s := range cost.CPU {
			if name != procfs.Self && s > window.Seconds()/4 {
				err = errors.Join(err, fmt.Errorf("%s took %.2f s of a processor within %s in which nothing happened", name, s, window))
			}
		}
		if err == nil {
			return
		}
	}
	t.Error(err)
}

// The leader's process is killed under applies and watches at every replica: no call at a survivor fails, no watch of a
// survivor ends, those of the dead one go on at another and miss nothing, and nothing acknowledged is lost; controllers,
// scheduler and agents go on.
func TestEverythingGoesOnAfterTheLeader(t *testing.T) {
	ctx, p := testPlane(t)
	ctx, cancel := context.WithCancel(ctx)
	l := &failoverLoad{plane: p}
	defer func() { cancel(); l.wait() }()
	if err := l.start(ctx, 3); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		times, err := l.killed(ctx)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("milliseconds: %v", times)
	}
	l.end()
	seen, err := l.Verdict(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", seen)
	if err := seen.Err(); err != nil {
		t.Error(err)
	}
}
