package upgrade

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/test/testenv"
	"keelson.dev/keelson/test/testenv/stream"
)

const soon = 3 * time.Minute // for a machine that is three times slower and does other work; nothing here measures time

// upgradeTest is a cluster under load, from one step to the next.
type upgradeTest struct {
	*testing.T
	cs       kubernetes.Interface
	ns       string
	now      string // folder of this release's programs
	made     int
	load     *stream.Load
	requests *serviceRequests
	old      map[string]podContainers // of the pods that have to live through everything
}

// A cluster of the release before becomes one of this release, agents and replicas in either order, goes back while it may,
// and is refused the way back afterwards. Meanwhile clients at the lab's one address write, read and watch, and others ask
// a Service from both nodes: no call fails, no write is lost, watches that begin again miss nothing, and no container of the
// pods that were there before ends. F48
func TestUpgradeAndBack(t *testing.T) {
	if c := testenv.Lab().Config; c.Programs != previous || len(c.ControlPlaneFlags) == 0 {
		t.Fatal("the lab that is up was made without the release before: take it down with 'kctl lab down', so " +
			"that one is made")
	}
	l := &upgradeTest{T: t, cs: testenv.Client(t), ns: testenv.Namespace(t), now: testenv.Lab().Config.BinDir}
	l.createPods()
	ctx, end := context.WithCancel(context.Background())
	l.load = &stream.Load{Names: []string{"a", "b", "c"}, Clients: map[string]kubernetes.Interface{}, Namespace: l.ns,
		Call: 20 * time.Second}
	for _, name := range l.load.Names { // each by connections of its own to whichever replica is ready
		l.load.Clients[name] = testenv.Client(t)
	}
	defer l.load.Wait()
	defer end()
	if err := l.load.Start(ctx); err != nil {
		t.Fatal(err)
	}
	var beside sync.WaitGroup
	defer beside.Wait()
	calm, stop := context.WithCancel(ctx)
	defer stop()
	for _, node := range []string{"w1", "w2"} {
		beside.Go(func() { l.requests.sendUntil(calm, testenv.PatientHTTP(testenv.Host(t, node))) })
	}
	for _, step := range []struct {
		name string
		run  func(*upgradeTest)
	}{
		{"new agent, old replicas, and back", (*upgradeTest).upgradeAgentFirst},
		{"mixed replicas, and back", (*upgradeTest).upgradeReplicaAndBack},
		{"new replicas, old agents", (*upgradeTest).upgradeReplicas},
		{"no way back", (*upgradeTest).checkDowngradeRefused},
		{"stopped at a node, and resumed", (*upgradeTest).upgradeAgents},
	} {
		began := time.Now()
		if !t.Run(step.name, func(t *testing.T) { one := *l; one.T = t; step.run(&one); l.made = one.made }) {
			return // each step starts with the result of the previous step
		}
		t.Logf("%s: %s", step.name, time.Since(began).Round(100*time.Millisecond))
	}
	stop()
	beside.Wait()
	seen, err := l.load.Finish(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d calls, %d failed; %d writes, %d lost; %d events at %d watches, %d wrong; %d reads, %d stale; %d "+
		"requests to the Service",
		seen.Calls, seen.Failed, seen.Acked, seen.Lost, seen.Events, seen.Watches, seen.Wrong, seen.Reads,
		seen.Stale, l.requests.n)
	if seen.Broken == 0 {
		t.Error("no watch was ended by a replica that was exchanged: the load was not at it")
	}
	seen.Broken = 0 // watches end with their replica and continue at another
	if err := seen.Err(); err != nil {
		t.Error(err)
	}
	l.requests.checkResult(t)
}

// upgradeAgentFirst checks one node with this release's agent and replicas of the previous release,
// and then the reverse. The programs are in one folder, as on a machine: a running process finds
// other programs at the same path after the upgrade.
func (l *upgradeTest) upgradeAgentFirst() {
	dir := l.TempDir()
	l.replacePrograms(previous, dir)
	l.replaceHost("w1", dir)
	l.createPod("in-place", "w1") // its shim is of the release before, and of this folder
	l.replacePrograms(l.now, dir)
	l.replaceHost("w1", dir)
	l.checkNode("w1")
	l.checkUntouched()
	l.checkOldPod("old-w1", "w1")   // an old shim, and the old programs beside it
	l.checkOldPod("in-place", "w1") // an old shim, and the new programs in its place
	made := l.checkNode("w1")
	l.replaceHost("w1", previous)
	l.checkOldPod(made, "w1") // a new shim below an old agent
	l.checkNode("w1")
	l.checkUntouched()
}

// replacePrograms replaces the programs in a folder, as install.sh does.
func (l *upgradeTest) replacePrograms(from, to string) {
	l.Helper()
	for _, name := range []string{"keelson-agent", "keelson-shim", "keelson-oci", "keelson-pause"} {
		raw, err := os.ReadFile(filepath.Join(from, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(to, name+".new"), raw, 0o755)
		}
		if err == nil {
			err = os.Rename(filepath.Join(to, name+".new"), filepath.Join(to, name))
		}
		if err != nil {
			l.Fatal(err)
		}
	}
}

// upgradeReplicaAndBack upgrades one replica, checks that the feature level stays and that requests
// that need a higher level are refused, and downgrades the replica.
func (l *upgradeTest) upgradeReplicaAndBack() {
	_, others := testenv.Leader(l, soon)
	first := others[0]
	l.replaceHost(first, l.now)
	status := l.clusterStatus()
	if status.FeatureLevel != 1 {
		l.Errorf("level %d while two replicas are of the release before", status.FeatureLevel)
	}
	testenv.Eventually(l, soon, func() error { // replicas exchange their releases periodically
		if out := testenv.Kctl(l, "cluster", "status"); !strings.Contains(out, "level    1; 3 waits for ") {
			return fmt.Errorf("cluster status:\n%s", out)
		}
		return nil
	})
	// The new replica leads, too.
	testenv.Eventually(l, soon, func() error { // the target of the transfer may lag behind briefly
		out, err := testenv.Try(l, l.kctlPath(), "cluster", "step-down", "--to", first)
		if err != nil && !strings.Contains(out, "leads already") {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	body, err := json.Marshal(api.ClusterRotate{Kind: "service-account-key"})
	if err != nil {
		l.Fatal(err)
	}
	err =
		testenv.ClientAt(l, first).CoreV1().RESTClient().Post().AbsPath(api.PathClusterKeys).SetHeader("Content-Type",
			"application/json").
			Body(body).Do(l.Context()).Error()
	if err == nil ||
		!strings.Contains(err.Error(), "a key rotation needs feature level 2, and the cluster is at level 1") {
		l.Errorf("an exchange of keys while releases are mixed: %v", err)
	}
	l.checkNode("w1")
	l.replaceHost(first, previous)
	l.checkNode("w2")
	if s := l.clusterStatus(); s.FeatureLevel != 1 {
		l.Errorf("level %d in the release before", s.FeatureLevel)
	}
}

// upgradeReplicas upgrades all replicas as a user does, with agents of the previous release.
func (l *upgradeTest) upgradeReplicas() {
	leader, _ := testenv.Leader(l, soon)
	plan := testenv.Kctl(l, "lab", "upgrade", "--to", l.now, "--skip", "w1,w2", "--dry-run")
	lines := strings.Split(strings.TrimSpace(plan), "\n")
	if len(lines) != 4 || !strings.HasPrefix(lines[2], leader+" hands the lead over to ") ||
		!strings.HasPrefix(lines[3], "replica "+leader+":") {
		l.Errorf("plan:\n%s", plan)
	}
	out := testenv.Kctl(l, "lab", "upgrade", "--to", l.now, "--skip", "w1,w2")
	l.Log(out)
	testenv.Eventually(l, soon, func() error {
		if s := l.clusterStatus(); s.FeatureLevel < 3 || len(s.Alarms) > 0 {
			return fmt.Errorf("level %d, alarms %+v", s.FeatureLevel, s.Alarms)
		}
		return nil
	})
	l.checkNode("w1")
	l.checkNode("w2")
	l.checkUntouched()
}

// checkDowngradeRefused starts a replica of the previous release after the feature level has risen.
// The replica must refuse to start.
func (l *upgradeTest) checkDowngradeRefused() {
	_, others := testenv.Leader(l, soon)
	err := testenv.Lab().Replace(l.Context(), others[0], previous)
	want := "the cluster stores forms of feature level 3"
	if err == nil || !strings.Contains(err.Error(), want) ||
		!strings.Contains(err.Error(), "and this release understands levels up to 1: start the release that the other "+
			"replicas run, or one after it") {
		l.Errorf("the release before after the level has risen: %v", err)
	}
	l.replaceHost(others[0], l.now)
	// Of the release before the upgrade cannot know whether it could be gone back to.
	out, err := testenv.Try(l, l.kctlPath(), "lab", "upgrade", "--to", previous)
	if err == nil || !strings.Contains(out, "is too old to report its feature level") {
		l.Errorf("%v: %s", err, out)
	}
}

// upgradeAgents upgrades the agents. The first attempt uses an agent that exits at its start.
func (l *upgradeTest) upgradeAgents() {
	out, err := testenv.Try(l, l.kctlPath(), "lab", "upgrade", "--to", l.brokenRelease())
	if err == nil || !strings.Contains(out, "stopped at this step: node w1: programs exchanged, pods stay") ||
		!strings.Contains(out, "the agent of w1 exited") {
		l.Fatalf("an agent that does not start: %v\n%s", err, out)
	}
	if n, err := l.cs.CoreV1().Nodes().Get(l.Context(), "w2", metav1.GetOptions{}); err != nil ||
		l.nodeRelease(n) == l.nodeRelease(l.getNode("w1")) &&
			strings.Contains(l.nodeRelease(n), l.clusterStatus().Members[0].Version) {
		l.Errorf("w2 was touched: %v", n.Status.NodeInfo)
	}
	l.checkUntouched()
	// The starting agent is the first program to be upgraded. Then a pod that no controller would
	// recreate blocks the upgrade.
	out, err = testenv.Try(l, l.kctlPath(), "lab", "upgrade", "--to", l.now, "--drain", "w2")
	if err == nil || !strings.Contains(out, "node w1: programs exchanged") ||
		!strings.Contains(out, "stopped at this step: node w2: drained: draining node w2: cannot delete") {
		l.Fatalf("a drain with a bare pod in its way: %v\n%s", err, out)
	}
	if n := l.getNode("w2"); n.Spec.Unschedulable || len(n.Annotations["keelson.dev/upgrade-drain"]) > 0 {
		l.Errorf("w2 stays cordoned: %+v %v", n.Spec, n.Annotations)
	}
	testenv.Kctl(l, "-n", l.ns, "delete", "pod", "--field-selector", "spec.nodeName=w2", "-l", "made=here")
	out = testenv.Kctl(l, "lab", "upgrade", "--to", l.now, "--drain", "w2")
	l.Log(out)
	for _, want := range []string{"node w2: drained", "node w2: takes pods again",
		"every replica and node has the programs"} {
		if !strings.Contains(out, want) {
			l.Errorf("it does not say %q:\n%s", want, out)
		}
	}
	if n := l.getNode("w2"); n.Spec.Unschedulable || len(n.Annotations["keelson.dev/upgrade-drain"]) > 0 {
		l.Errorf("w2 stays drained: %+v %v", n.Spec, n.Annotations)
	}
	l.checkNode("w1")
	l.checkNode("w2")
	l.checkUntouched()
	l.checkOldPod("old-w1", "w1")
	if out := testenv.Kctl(l, "lab", "upgrade", "--to", l.now, "--dry-run"); !strings.Contains(out,
		"there is nothing to do") {
		l.Errorf("what is done is to be done again:\n%s", out)
	}
}

// brokenRelease returns a folder with this release's programs, except for an agent that exits at
// its start.
func (l *upgradeTest) brokenRelease() string {
	dir := l.TempDir()
	entries, err := os.ReadDir(l.now)
	if err != nil {
		l.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() == "keelson-agent" {
			script := fmt.Sprintf("#!/bin/sh\n[ \"$1\" != --version ] || exec %s --version\necho it ends >&2\nexit 1\n",
				filepath.Join(l.now, e.Name()))
			err = os.WriteFile(filepath.Join(dir, e.Name()), []byte(script), 0o755)
		} else {
			err = os.Symlink(filepath.Join(l.now, e.Name()), filepath.Join(dir, e.Name()))
		}
		if err != nil {
			l.Fatal(err)
		}
	}
	return dir
}

func (l *upgradeTest) kctlPath() string { return filepath.Join(l.now, "kctl") }

func (l *upgradeTest) getNode(name string) *v1.Node {
	l.Helper()
	n, err := l.cs.CoreV1().Nodes().Get(l.Context(), name, metav1.GetOptions{})
	if err != nil {
		l.Fatal(err)
	}
	return n
}

func (l *upgradeTest) nodeRelease(n *v1.Node) string {
	return n.Status.NodeInfo.ContainerRuntimeVersion
}

func (l *upgradeTest) replaceHost(host, dir string) {
	l.Helper()
	if err := testenv.Lab().Replace(l.Context(), host, dir); err != nil {
		l.Fatal(err)
	}
}

func (l *upgradeTest) clusterStatus() (s api.ClusterStatus) {
	l.Helper()
	if err := json.Unmarshal([]byte(testenv.Kctl(l, "cluster", "status", "-o", "json")), &s); err != nil {
		l.Fatal(err)
	}
	return s
}
