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
	if asked, err := runRole(); asked {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

const testTimeout = 5 * time.Minute

func startTestPlane(t *testing.T) (context.Context, *plane) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	t.Cleanup(cancel)
	p, err := startPlane(ctx, replicaMemory)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.stopPlane(); err != nil {
			t.Error(err)
		}
	})
	return ctx, p
}

// The leader steps down or is killed while the pods of a Deployment are created and bound. Each pod
// is created and bound exactly once.
func TestLeaderChangesInTheMiddleOfADeployment(t *testing.T) {
	const pods, nodes = 1000, 50
	ctx, p := startTestPlane(t)
	if err := p.CreateAgentlessNodes(ctx, nodes); err != nil {
		t.Fatal(err)
	}
	for _, c := range disturbances {
		t.Run(c.name, func(t *testing.T) {
			m, err := prepareDeployment(ctx, p, pods)
			if err != nil {
				t.Fatal(err)
			}
			back, err := m.createAndBind(ctx, c)
			back()
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("bound within %s, longest gap %s; %d were created before the disturbance",
				m.lastBinding().Sub(m.began),
				m.watch.longestGap(m.began), m.made)
			if err := m.checkPods(ctx); err != nil {
				t.Error(err)
			}
			now, err := p.Status(ctx, m.follower)
			if err != nil {
				t.Fatal(err)
			}
			if c.key != "" && now.Term <= m.term {
				t.Errorf("%s is the leader in term %d, after %s in term %d", now.Leader, now.Term, m.leader, m.term)
			}
			if err := m.deleteAll(ctx); err != nil {
				t.Error(err)
			}
		})
	}
}

// Fifty nodes with real sessions run five hundred pods, each bound once. The idle cluster writes
// nothing and uses hardly any CPU time. Deleted pods are replaced. No node becomes NotReady when
// the leader is killed.
func TestSmallFleet(t *testing.T) {
	const count, pods = 50, 500
	ctx, p := startTestPlane(t)
	n := &agentFleet{plane: p, nodes: count, pods: pods, logProgress: t.Logf}
	var err error
	if n.leader, err = n.findLeader(ctx); err != nil {
		t.Fatal(err)
	}
	agents, cancel := context.WithCancel(ctx)
	pid, end, err := n.newAgentGroup(0, count, float64(count)).startProcess(agents)
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
	must(n.measureJoin(ctx))
	w, err := watchPods(ctx, n.cs, fleetNamespace)
	if err != nil {
		t.Fatal(err)
	}
	must(n.createPods(ctx))
	if err := w.checkCounts(pods); err != nil {
		t.Error(err)
	}
	checkRest(t, ctx, n)
	must(n.measureChurn(ctx, 2*time.Second, 50))
	if err := w.checkBoundOnce(); err != nil {
		t.Error(err)
	}
	if v := must(n.measureLeaderKill(ctx)); v["lost"] != 0 {
		t.Errorf("%v nodes became NotReady when the leader was killed", v["lost"])
	}
}

// checkRest fails the test unless an idle cluster writes nothing and uses hardly any CPU time. It
// measures up to six times, because nodes can lose their sessions for a moment on a busy machine.
func checkRest(t *testing.T, ctx context.Context, n *agentFleet) {
	t.Helper()
	const window, windows = 5 * time.Second, 6
	var err error
	for range windows {
		if err = n.awaitIdle(ctx); err != nil {
			t.Fatal(err)
		}
		var cost figures.Record
		var v map[string]float64
		if err = n.plane.meter.Run(&cost, func() (err error) {
			v, err = n.measureRest(ctx, window)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		t.Logf("%v writes at rest, seconds of CPU: %v", v["writes"], cost.CPU)
		if v["writes"] != 0 {
			err = fmt.Errorf("the idle store received %v writes", v["writes"])
		}
		for name, s := range cost.CPU {
			if name != procfs.Self && s > window.Seconds()/4 {
				err = errors.Join(err, fmt.Errorf("%s used %.2f s of CPU time within %s in the idle cluster",
					name, s, window))
			}
		}
		if err == nil {
			return
		}
	}
	t.Error(err)
}

// The leader's process is killed under applies and watches at every replica. No call or watch at a
// surviving replica fails. Watches of the killed replica resume at another replica and miss no
// event. No acknowledged write is lost. Controllers, scheduler and agents resume.
func TestEverythingGoesOnAfterTheLeader(t *testing.T) {
	ctx, p := startTestPlane(t)
	ctx, cancel := context.WithCancel(ctx)
	l := &failoverLoad{plane: p}
	defer func() { cancel(); l.awaitEnd() }()
	if err := l.startLoad(ctx, 3); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		times, err := l.killLeader(ctx)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("milliseconds: %v", times)
	}
	l.end()
	seen, err := l.load.Finish(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", seen)
	if err := seen.Err(); err != nil {
		t.Error(err)
	}
}
