package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/wait"
)

// soon is sufficient for machines that are ten times slower than their host.
const soon = 8 * time.Minute

// vmCluster is three control plane machines and two workers, or fewer.
type vmCluster struct {
	*testing.T
	all  map[string]*virtualMachine
	site adminSite
	// The machines of each role. A second worker comes later.
	replicas, workers []string
	apiMachine        string // the machine whose API is used
	mu                sync.Mutex
	before            map[string]string // state of each machine before the installation
	table             []string
	began             time.Time
	kept              string // folder of machines that keep running when the test ends: KEEP of 'make test-vm-docs'
}

// A cluster on machines with systemd and cgroup v2: made by 'kctl cluster up' over ssh, and the package on one of them, through a
// restart of the agent, a reboot of the worker, a power cut of the leader, newer programs under running pods, a machine more and
// two less, and gone without a trace.
func TestMachines(t *testing.T) {
	if os.Getenv("KEELSON_VM") == "" {
		t.Skip("it boots machines in software, for minutes: 'make test-vm' runs it")
	}
	top, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	c := &vmCluster{T: t, apiMachine: "cp1", replicas: []string{"cp1", "cp2", "cp3"}, workers: []string{"w1", "w2"},
		all: map[string]*virtualMachine{}, before: map[string]string{}}
	defer c.logDurations()
	c.limitMachines(os.Getenv("MACHINES"))
	c.site = newAdminSite(t, filepath.Join(top, "bin"), t.TempDir(), newNetwork(t))
	release := releaseDisk(t, filepath.Join(top, "bin"), t.TempDir())
	c.began = time.Now()
	for i, name := range append(c.initialMachines(), c.workers[1:]...) {
		c.all[name] = newMachine(t, c.site.network, filepath.Join(top, "scripts"), c.site.key+".pub", release,
			c.TempDir(), name, 11+i)
	}
	c.runStep("machines boot: "+strings.Join(c.initialMachines(), " "), func() error {
		return c.bootMachines(c.initialMachines()...)
	})
	c.runStep("the .deb on the worker", func() error {
		_, err := c.all["w1"].runCommand("dpkg -i /opt/release/keelson-*.deb")
		return err
	})
	c.runStep("kctl cluster up --dry-run changes nothing", c.dryRun)
	c.runStep("kctl cluster up", c.runUp)
	c.runStep("kctl cluster up again has nothing to do", c.runUpAgain)
	c.runStep("the example is applied and served", c.deployExample)
	c.runStep("a pod with a claim: log, a command in it, a Service by name", c.checkPod)
	c.runStep("an Ingress, by the proxy that the release brings", c.checkIngress)
	c.runStep("limits of cgroup v2, and a container out of memory", c.checkLimits)
	c.runStep("pods that do not end, and that are frozen, are killed", c.checkForcedDeletion)
	c.runStep("the agent is restarted, pods are untouched", c.restartDaemons)
	c.runStep("kctl cluster upgrade --to: pods are untouched", c.upgradeAll)
	c.runStep("an Ingress, by the proxy that the newer release brings", c.checkIngress)
	c.runStep("the worker is rebooted, its pods and their data come back", c.rebootWorker)
	if len(c.replicas) > 2 {
		c.runStep("the leader's power is cut, the other replicas serve, it comes back", c.powerCut)
	}
	if len(c.workers) > 1 {
		c.runStep("a second worker boots", func() error { return c.bootMachines("w2") })
		c.runStep("kctl cluster add", c.addWorker)
		c.runStep("kctl cluster remove of a worker: its pods move, nothing is left", c.removeWorker)
	}
	if len(c.replicas) > 2 {
		c.runStep("kctl cluster remove of a control plane, nothing is left", c.removeReplica)
	}
	c.runStep("kctl cluster reset leaves nothing", c.resetCluster)
}

// limitMachines keeps only the named machines: a small computer cannot run all at once.
func (c *vmCluster) limitMachines(names string) {
	keep := strings.Fields(names)
	if len(keep) == 0 {
		return
	}
	gone := func(name string) bool { return !slices.Contains(keep, name) }
	c.replicas, c.workers = slices.DeleteFunc(c.replicas, gone), slices.DeleteFunc(c.workers, gone)
	if len(c.replicas)+len(c.workers) != len(keep) || gone("cp1") || gone("w1") {
		c.Fatalf("MACHINES=%q: want cp1 and w1, and of cp2, cp3 and w2 what may be", names)
	}
}

// initialMachines returns the machines that the cluster starts with.
func (c *vmCluster) initialMachines() []string { return append(slices.Clone(c.replicas), "w1") }

// bootMachines switches machines on and records their state.
func (c *vmCluster) bootMachines(names ...string) error {
	return c.forMachines(func(m *virtualMachine) error {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		if err := m.switchOn(ctx); err != nil {
			return err
		}
		if err := c.recordState(m); err != nil {
			return err
		}
		// Its images are there before its agent: no registry is within reach.
		_, err := m.runCommand("mkdir -p /var/lib/keelson/images.d && cp /opt/release/hello.tar " +
			"/opt/release/tools.tar " +
			"/var/lib/keelson/images.d/")
		return err
	}, names...)
}

// releaseDisk creates a disk image with the output of "make dist" and returns its path.
func releaseDisk(t *testing.T, folder, dir string) string {
	t.Helper()
	release := filepath.Join(t.TempDir(), "release")
	script := `set -e; mkdir -p "$2/next"; cd "$1"
cp dist/keelson-*-linux-amd64.deb dist/keelson-*-linux-amd64.tar.gz images/hello.tar images/tools.tar "$2"/
cp next/keelson-*-linux-amd64.deb next/keelson-*-linux-amd64.tar.gz "$2/next/"
truncate -s 896M "$3"; mkfs.ext4 -q -F -d "$2" "$3"`
	disk := filepath.Join(dir, "release.img")
	if _, err := os.Stat(disk); err == nil {
		return disk // of kept machines
	}
	if out, err := exec.Command("sh", "-c", script, "sh", folder, release, disk).CombinedOutput(); err != nil {
		t.Fatalf("packing the release ('make test-vm' makes it): %v: %s", err, out)
	}
	return disk
}

// runStep runs one step and records its duration. Steps after a failed step are skipped.
func (c *vmCluster) runStep(name string, do func() error) {
	c.Helper()
	if c.stepDone(name) {
		return
	}
	began := time.Now()
	err := do()
	result := "ok"
	if err != nil {
		result = "failed"
	}
	line := fmt.Sprintf("%-62s %-7s %4.0f s", name, result, time.Since(began).Seconds())
	c.table = append(c.table, line)
	fmt.Println(line)
	if err != nil {
		c.logMachines()
		c.Fatalf("%s: %v", name, err)
	}
	c.markStepDone(name)
}

// logMachines logs the machines' information about a failure.
func (c *vmCluster) logMachines() {
	for _, name := range c.replicas {
		if m := c.all[name]; m != nil && m.conn != nil {
			out, err := m.runFor(30*time.Second, `journalctl -u keelson-controlplane --no-pager -o cat | tail -n 15`)
			c.Logf("%s says:\n%s (%v)", name, out, err)
		}
	}
	for _, name := range []string{"w1", "w2"} {
		if m := c.all[name]; m != nil && m.conn != nil {
			out, err := m.runFor(30*time.Second,
				`journalctl -u keelson-agent --no-pager -o cat | tail -n 60; dmesg | tail -n 20`)
			c.Logf("%s says:\n%s (%v)", name, out, err)
		}
	}
	out, err := c.runKctl("get", "pods,events", "-A")
	c.Logf("the status of the cluster:\n%.20000s (%v)", out, err)
}

func (c *vmCluster) logDurations() {
	c.Logf("\n%s\n%-70s %4.0f s", strings.Join(c.table, "\n"), "in all", time.Since(c.began).Seconds())
}

// forMachines calls do for machines concurrently.
func (c *vmCluster) forMachines(do func(*virtualMachine) error, names ...string) error {
	errs := make([]error, len(names))
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() { errs[i] = do(c.all[name]) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// awaitCondition repeats f until it returns nil.
func awaitCondition(f func() error) error { return awaitWithin(soon, f) }

func awaitWithin(limit time.Duration, f func() error) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return wait.For(ctx, time.Second, f)
}

// recordState records everything that an installation may change on a machine.
func (c *vmCluster) recordState(m *virtualMachine) error {
	out, err := m.runCommand(state)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.before[m.name] = out
	return err
}

const state = `ip -o link | sed 's/ qdisc.*//'; ip -o -4 addr; ip route; ip rule; nft list ruleset; cut -d' ' -f2,3 /proc/mounts | sort; find /sys/fs/cgroup -type d -path '*keelson*'
ls -d /etc/* /opt/* /opt/cni/bin/* /usr/bin/* /usr/sbin/* /usr/lib/* /var/lib/* /var/log/pods* /var/log/containers* /var/cache/* /root/.[a-z]* /run/keelson-* /run/keelson* /run/netns* /usr/lib/systemd/system/* /etc/systemd/system/* /etc/systemd/system/*/* 2>/dev/null; pgrep -a keelson; true`

// awaitExample waits for the example's pods.
func (c *vmCluster) awaitExample() error {
	return awaitCondition(func() error {
		out, err := c.runKctl("get", "deployment", "hello", "-o",
			"jsonpath={.status.readyReplicas} {.status.observedGeneration}")
		if err == nil && !strings.HasPrefix(out, "3 ") {
			err = fmt.Errorf("ready pods: %q, want 3", out)
		}
		return err
	})
}

// checkService requests the example's Service from the node.
func (c *vmCluster) checkService() error {
	return awaitCondition(func() error {
		out, err := c.runKctl("get", "service", "hello", "-o", "jsonpath={.spec.clusterIP}:{.spec.ports[0].port}")
		if err != nil {
			return err
		}
		out, err = c.all["w1"].runCommand("curl -s -m 10 http://" + out + "/")
		if err == nil && !strings.Contains(out, "Hello from Keelson") {
			err = errors.New(out)
		}
		return err
	})
}

func (c *vmCluster) deployExample() error {
	if _, err := c.runKctl("apply", "-f", "../../examples/hello/hello.yaml"); err != nil {
		return err
	}
	if err := c.awaitExample(); err != nil {
		return err
	}
	return c.checkService()
}

// containerProcesses returns the processes of containers with their start times.
func (c *vmCluster) containerProcesses() (string, error) { return c.all["w1"].runCommand(running) }

const running = "ps -o pid=,lstart=,comm= -C hello,keelson-pause,keelson-shim | sort"

func (c *vmCluster) restartDaemons() error {
	before, err := c.containerProcesses()
	if err != nil {
		return err
	}
	if n := len(strings.Split(before, "\n")); n < 9 {
		return fmt.Errorf("%d processes of pods, want 9 at least: %s", n, before)
	}
	for _, command := range []string{"systemctl restart keelson-agent", "systemctl stop keelson-agent",
		"systemctl start keelson-agent"} {
		if _, err := c.all["w1"].runCommand(command); err != nil {
			return err
		}
		if after, err := c.containerProcesses(); err != nil || after != before {
			return fmt.Errorf("after %s there run\n%s\nand before\n%s (%w)", command, after, before, err)
		}
	}
	if err := c.awaitExample(); err != nil {
		return err
	}
	if after, err := c.containerProcesses(); err != nil || after != before {
		return fmt.Errorf("the new agent left\n%s\nof\n%s (%w)", after, before, err)
	}
	return c.checkService()
}

func (c *vmCluster) rebootWorker() error {
	m := c.all["w1"]
	boot, err := m.runCommand("cat /proc/sys/kernel/random/boot_id")
	if err != nil {
		return err
	}
	m.runFor(time.Second, "systemctl reboot") // its answer may come or not
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	err = wait.For(ctx, time.Second, func() error {
		if err := m.awaitShell(ctx); err != nil {
			return err
		}
		now, err := m.runCommand("cat /proc/sys/kernel/random/boot_id")
		if err == nil && now == boot {
			err = errors.New("it has not rebooted yet")
		}
		return err
	})
	if err != nil {
		return err
	}
	err = awaitCondition(func() error {
		out, err := c.runKctl("get", "pods", "-l", "app=hello", "-o",
			"jsonpath={range "+
				".items[*]}{.status.containerStatuses[0].restartCount}{.status.containerStatuses[0].ready} {end}")
		if err == nil && strings.TrimSpace(out) != "1true 1true 1true" {
			err = fmt.Errorf("restarts and readiness of the pods: %s", out)
		}
		return err
	})
	if err != nil {
		return err
	}
	return errors.Join(c.checkService(), c.awaitOutput("kept", "exec", "core", "--", "cat", "/data/file"))
}

// clusterStatus returns the status of the cluster's replicas.
func (c *vmCluster) clusterStatus() (s api.ClusterStatus, err error) {
	out, err := c.runKctl("cluster", "status", "-o", "json")
	if err == nil {
		err = json.Unmarshal([]byte(out), &s)
	}
	return s, err
}

func (c *vmCluster) powerCut() error {
	s, err := c.clusterStatus()
	if err != nil {
		return err
	}
	m := c.all[s.Leader]
	if m == nil || len(s.Members) != len(c.replicas) {
		return fmt.Errorf("leader %q of %d replicas", s.Leader, len(s.Members))
	}
	c.useOtherThan(m.name)
	m.cutPower()
	if err := awaitCondition(func() error {
		_, err := c.runKctl("create", "configmap", "after-the-cut", "--from-literal=a=b")
		return err
	}); err != nil {
		return err
	}
	if err := c.checkService(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	if err := m.switchOn(ctx); err != nil {
		return err
	}
	return awaitCondition(func() error {
		s, err := c.clusterStatus()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(s.Members, func(r api.ClusterMember) bool { return r.Name == m.name })
		if i < 0 || s.Members[i].Ready != "yes" {
			return fmt.Errorf("%s is not ready again", m.name)
		}
		// Its own root may ask its own replica.
		_, err = m.runCommand("HOME=/var/lib/keelson kctl --kubeconfig " +
			"/var/lib/keelson/controlplane/admin.kubeconfig " +
			"get " +
			"configmap after-the-cut")
		return err
	})
}

// diffLines returns the lines that only one of the texts has.
func diffLines(a, b string) string {
	var out []string
	x, y := strings.Split(a, "\n"), strings.Split(b, "\n")
	for _, l := range x {
		if !slices.Contains(y, l) {
			out = append(out, "- "+l)
		}
	}
	for _, l := range y {
		if !slices.Contains(x, l) {
			out = append(out, "+ "+l)
		}
	}
	return strings.Join(out, "\n")
}
