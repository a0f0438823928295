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

// soon is long for machines that are ten times slower than the one that they run on.
const soon = 8 * time.Minute

// cluster is three machines of the control plane and two workers, or fewer.
type cluster struct {
	*testing.T
	all  map[string]*machine
	site site
	// The machines of each role. A second worker comes later.
	replicas, workers []string
	asked             string // whose replica the API is asked at
	mu                sync.Mutex
	before            map[string]string // what each machine was like before
	table             []string
	began             time.Time
	kept              string // folder of machines that go on when the test ends: KEEP of 'make test-vm-docs'
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
	c := &cluster{T: t, asked: "cp1", replicas: []string{"cp1", "cp2", "cp3"}, workers: []string{"w1", "w2"}, all: map[string]*machine{}, before: map[string]string{}}
	defer c.tell()
	c.few(os.Getenv("MACHINES"))
	c.site = newSite(t, filepath.Join(top, "bin"), t.TempDir(), network(t))
	release := releaseDisk(t, filepath.Join(top, "bin"), t.TempDir())
	c.began = time.Now()
	for i, name := range append(c.first(), c.workers[1:]...) {
		c.all[name] = newMachine(t, c.site.network, filepath.Join(top, "scripts"), c.site.key+".pub", release, c.TempDir(), name, 11+i)
	}
	c.step("machines boot: "+strings.Join(c.first(), " "), func() error { return c.boot(c.first()...) })
	c.step("the .deb on the worker", func() error {
		_, err := c.all["w1"].run("dpkg -i /opt/release/keelson-*.deb")
		return err
	})
	c.step("kctl cluster up --dry-run changes nothing", c.dryRun)
	c.step("kctl cluster up", c.up)
	c.step("kctl cluster up again has nothing to do", c.again)
	c.step("the example is applied and served", c.example)
	c.step("a pod with a claim: log, a command in it, a Service by name", c.core)
	c.step("an Ingress, by the proxy that the release brings", c.entry)
	c.step("limits of cgroup v2, and a container out of memory", c.limits)
	c.step("pods that do not end, and that are frozen, are killed", c.kill)
	c.step("the agent is restarted, pods are untouched", c.restart)
	c.step("kctl cluster upgrade --to: pods are untouched", c.upgrade)
	c.step("an Ingress, by the proxy that the newer release brings", c.entry)
	c.step("the worker is rebooted, its pods and their data come back", c.reboot)
	if len(c.replicas) > 2 {
		c.step("the leader's power is cut, the rest serves, it comes back", c.powerCut)
	}
	if len(c.workers) > 1 {
		c.step("a second worker boots", func() error { return c.boot("w2") })
		c.step("kctl cluster add", c.add)
		c.step("kctl cluster remove of a worker: its pods move, nothing is left", c.removeWorker)
	}
	if len(c.replicas) > 2 {
		c.step("kctl cluster remove of a control plane, nothing is left", c.removeReplica)
	}
	c.step("kctl cluster reset leaves nothing", c.reset)
}

// few keeps those machines alone that are named: a computer with little to spare has not all of them at once.
func (c *cluster) few(names string) {
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

// first are the machines that the cluster begins with.
func (c *cluster) first() []string { return append(slices.Clone(c.replicas), "w1") }

// boot switches machines on, and notes what they are like.
func (c *cluster) boot(names ...string) error {
	return c.each(func(m *machine) error {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		if err := m.on(ctx); err != nil {
			return err
		}
		if err := c.look(m); err != nil {
			return err
		}
		// Its images are there before its agent: no registry is within reach.
		_, err := m.run("mkdir -p /var/lib/keelson/images.d && cp /opt/release/hello.tar /opt/release/tools.tar /var/lib/keelson/images.d/")
		return err
	}, names...)
}

// releaseDisk packs what 'make dist' made.
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

// step does one thing and notes how long it took. What comes after one that failed cannot tell anything.
func (c *cluster) step(name string, do func() error) {
	c.Helper()
	if c.passed(name) {
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
		c.explain()
		c.Fatalf("%s: %v", name, err)
	}
	c.pass(name)
}

// explain tells what machines know of what went wrong.
func (c *cluster) explain() {
	for _, name := range c.replicas {
		if m := c.all[name]; m != nil && m.conn != nil {
			out, err := m.runFor(30*time.Second, `journalctl -u keelson-controlplane --no-pager -o cat | tail -n 15`)
			c.Logf("%s says:\n%s (%v)", name, out, err)
		}
	}
	for _, name := range []string{"w1", "w2"} {
		if m := c.all[name]; m != nil && m.conn != nil {
			out, err := m.runFor(30*time.Second, `journalctl -u keelson-agent --no-pager -o cat | tail -n 60; dmesg | tail -n 20`)
			c.Logf("%s says:\n%s (%v)", name, out, err)
		}
	}
	out, err := c.kctl("get", "pods,events", "-A")
	c.Logf("the cluster says:\n%.20000s (%v)", out, err)
}

func (c *cluster) tell() {
	c.Logf("\n%s\n%-70s %4.0f s", strings.Join(c.table, "\n"), "in all", time.Since(c.began).Seconds())
}

// each does something on machines side by side.
func (c *cluster) each(do func(*machine) error, names ...string) error {
	errs := make([]error, len(names))
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() { errs[i] = do(c.all[name]) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// until repeats what has to come true.
func until(f func() error) error { return within(soon, f) }

func within(limit time.Duration, f func() error) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return wait.For(ctx, time.Second, f)
}

// look notes what an installation may change of a machine.
func (c *cluster) look(m *machine) error {
	out, err := m.run(state)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.before[m.name] = out
	return err
}

const state = `ip -o link | sed 's/ qdisc.*//'; ip -o -4 addr; ip route; ip rule; nft list ruleset; cut -d' ' -f2,3 /proc/mounts | sort; find /sys/fs/cgroup -type d -path '*keelson*'
ls -d /etc/* /opt/* /opt/cni/bin/* /usr/bin/* /usr/sbin/* /usr/lib/* /var/lib/* /var/log/pods* /var/log/containers* /var/cache/* /root/.[a-z]* /run/keelson-* /run/keelson* /run/netns* /usr/lib/systemd/system/* /etc/systemd/system/* /etc/systemd/system/*/* 2>/dev/null; pgrep -a keelson; true`

// ready waits for the example's pods.
func (c *cluster) ready() error {
	return until(func() error {
		out, err := c.kctl("get", "deployment", "hello", "-o", "jsonpath={.status.readyReplicas} {.status.observedGeneration}")
		if err == nil && !strings.HasPrefix(out, "3 ") {
			err = fmt.Errorf("ready pods: %q, want 3", out)
		}
		return err
	})
}

// serves asks the example's Service from the node.
func (c *cluster) serves() error {
	return until(func() error {
		out, err := c.kctl("get", "service", "hello", "-o", "jsonpath={.spec.clusterIP}:{.spec.ports[0].port}")
		if err != nil {
			return err
		}
		out, err = c.all["w1"].run("curl -s -m 10 http://" + out + "/")
		if err == nil && !strings.Contains(out, "Hello from Keelson") {
			err = errors.New(out)
		}
		return err
	})
}

func (c *cluster) example() error {
	if _, err := c.kctl("apply", "-f", "../../examples/hello/hello.yaml"); err != nil {
		return err
	}
	if err := c.ready(); err != nil {
		return err
	}
	return c.serves()
}

// running are the processes of containers, with when they began.
func (c *cluster) running() (string, error) { return c.all["w1"].run(running) }

const running = "ps -o pid=,lstart=,comm= -C hello,keelson-pause,keelson-shim | sort"

func (c *cluster) restart() error {
	before, err := c.running()
	if err != nil {
		return err
	}
	if n := len(strings.Split(before, "\n")); n < 9 {
		return fmt.Errorf("%d processes of pods, want 9 at least: %s", n, before)
	}
	for _, command := range []string{"systemctl restart keelson-agent", "systemctl stop keelson-agent", "systemctl start keelson-agent"} {
		if _, err := c.all["w1"].run(command); err != nil {
			return err
		}
		if after, err := c.running(); err != nil || after != before {
			return fmt.Errorf("after %s there run\n%s\nand before\n%s (%w)", command, after, before, err)
		}
	}
	if err := c.ready(); err != nil {
		return err
	}
	if after, err := c.running(); err != nil || after != before {
		return fmt.Errorf("the new agent left\n%s\nof\n%s (%w)", after, before, err)
	}
	return c.serves()
}

func (c *cluster) reboot() error {
	m := c.all["w1"]
	boot, err := m.run("cat /proc/sys/kernel/random/boot_id")
	if err != nil {
		return err
	}
	m.runFor(time.Second, "systemctl reboot") // its answer may come or not
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	err = wait.For(ctx, time.Second, func() error {
		if err := m.meet(ctx); err != nil {
			return err
		}
		now, err := m.run("cat /proc/sys/kernel/random/boot_id")
		if err == nil && now == boot {
			err = errors.New("it has not rebooted yet")
		}
		return err
	})
	if err != nil {
		return err
	}
	err = until(func() error {
		out, err := c.kctl("get", "pods", "-l", "app=hello", "-o", "jsonpath={range .items[*]}{.status.containerStatuses[0].restartCount}{.status.containerStatuses[0].ready} {end}")
		if err == nil && strings.TrimSpace(out) != "1true 1true 1true" {
			err = fmt.Errorf("restarts and readiness of the pods: %s", out)
		}
		return err
	})
	if err != nil {
		return err
	}
	return errors.Join(c.serves(), c.says("kept", "exec", "core", "--", "cat", "/data/file"))
}

// status is what the cluster says of its replicas.
func (c *cluster) status() (s api.ClusterStatus, err error) {
	out, err := c.kctl("cluster", "status", "-o", "json")
	if err == nil {
		err = json.Unmarshal([]byte(out), &s)
	}
	return s, err
}

func (c *cluster) powerCut() error {
	s, err := c.status()
	if err != nil {
		return err
	}
	m := c.all[s.Leader]
	if m == nil || len(s.Members) != len(c.replicas) {
		return fmt.Errorf("leader %q of %d replicas", s.Leader, len(s.Members))
	}
	c.askAnother(m.name)
	m.cut()
	if err := until(func() error {
		_, err := c.kctl("create", "configmap", "after-the-cut", "--from-literal=a=b")
		return err
	}); err != nil {
		return err
	}
	if err := c.serves(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	if err := m.on(ctx); err != nil {
		return err
	}
	return until(func() error {
		s, err := c.status()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(s.Members, func(r api.ClusterMember) bool { return r.Name == m.name })
		if i < 0 || s.Members[i].Ready != "yes" {
			return fmt.Errorf("%s is not ready again", m.name)
		}
		// Its own root may ask its own replica.
		_, err = m.run("HOME=/var/lib/keelson kctl --kubeconfig /var/lib/keelson/controlplane/admin.kubeconfig get configmap after-the-cut")
		return err
	})
}

// differ are the lines that only one has.
func differ(a, b string) string {
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
