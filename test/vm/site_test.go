package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"keelson.dev/keelson/test/testenv/space"
)

// adminSite is the administrator's workplace: a folder with a key, the cluster file and the
// kubeconfig, on the machines' network.
type adminSite struct {
	dir, key, bin        string
	network              netns.NsHandle
	nextRelease, version string // folder of a release that is newer, and which it is
	tarball              string // its
	kubeconfig           string // where 'kctl cluster up' writes it
}

func newAdminSite(t *testing.T, bin, dir string, ns netns.NsHandle) adminSite {
	t.Helper()
	s := adminSite{dir: dir, bin: bin, network: ns, kubeconfig: ".kube/keelson-vm"}
	s.key, s.nextRelease = filepath.Join(s.dir, "key"), filepath.Join(bin, "next")
	if _, err := os.Stat(s.key); err == nil {
		// It is a kept one.
	} else if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f",
		s.key).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	tarballs, err := filepath.Glob(filepath.Join(s.nextRelease, "keelson-*-linux-amd64.tar.gz"))
	if err != nil || len(tarballs) != 1 {
		t.Fatalf("a newer release: %v (%v): 'make test-vm' makes it", tarballs, err)
	}
	s.tarball = tarballs[0]
	s.version = strings.TrimPrefix(strings.TrimSuffix(strings.TrimPrefix(filepath.Base(tarballs[0]), "keelson-"),
		"-linux-amd64.tar.gz"), "v")
	return s
}

// writeClusterFile writes the cluster file with the host key of each machine that was read at its
// console. One machine is reached as a user with sudo.
func (c *vmCluster) writeClusterFile(names ...string) error {
	file := "apiVersion: keelson.dev/v1\nkind: Machines\nname: vm\nrelease: " + filepath.Join(c.site.bin, "dist") +
		"\nssh: {key: key}\nhosts:\n"
	for _, name := range names {
		m := c.all[name]
		key, err := m.runCommand("cat /etc/ssh/ssh_host_ed25519_key.pub")
		if err != nil {
			return err
		}
		role, more, user := "controlplane", "", "root"
		if name[0] == 'w' {
			role, more, user = "worker", ", labels: {disk: "+name+"}", "admin"
		}
		file += fmt.Sprintf("- {name: %s, address: %s, roles: [%s]%s, ssh: {user: %s, hostKey: %q}}\n", name, m.address,
			role, more, user, key)
	}
	return os.WriteFile(filepath.Join(c.site.dir, "cluster.yaml"), []byte(file), 0o600)
}

// runKctl runs kctl at the site, beside the cluster file.
func (c *vmCluster) runKctl(args ...string) (string, error) {
	words := slices.Clone(args)
	if i := slices.Index(words, "--"); i >= 0 {
		words = slices.Insert(words, i, "--server="+c.serverURL())
	} else {
		words = append(words, "--server="+c.serverURL())
	}
	return c.kctlFor(2*time.Minute, "", words...)
}

func (c *vmCluster) serverURL() string { return "https://" + c.all[c.apiMachine].address + ":6443" }

// useOtherThan makes the API be used through another machine than this one, which is about to stop.
func (c *vmCluster) useOtherThan(than string) {
	for _, name := range c.replicas {
		if name != than {
			c.apiMachine = name
			return
		}
	}
}

func (c *vmCluster) kctlFor(limit time.Duration, input string, args ...string) (string, error) {
	return c.kctlTo(io.Discard, limit, input, args...)
}

func (c *vmCluster) kctlTo(shown io.Writer, limit time.Duration, input string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return c.runProgram(ctx, shown, input, filepath.Join(c.site.bin, "kctl"), args...)
}

// runProgram runs a program at the site.
func (c *vmCluster) runProgram(ctx context.Context, shown io.Writer, input, name string, args ...string) (
	string, error,
) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "HOME="+c.site.dir, "KUBECONFIG="+filepath.Join(c.site.dir, c.site.kubeconfig),
		"SSH_AUTH_SOCK=",
		"PATH="+c.site.bin+string(filepath.ListSeparator)+os.Getenv("PATH"))
	if filepath.Base(name) == "sh" {
		cmd.Dir = c.site.dir
	}
	cmd.WaitDelay = 10 * time.Second
	cmd.Stdin = strings.NewReader(input)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = io.MultiWriter(&out, shown), &errs
	err := space.In(c.site.network, cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s", filepath.Base(name), strings.Join(args, " "), err, errs.String())
	}
	return out.String(), err
}

// pointKubeconfig makes the kubeconfig use the machine apiMachine.
func (c *vmCluster) pointKubeconfig() error {
	at := filepath.Join(c.site.dir, c.site.kubeconfig)
	raw, err := os.ReadFile(at)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	lines := strings.Split(string(raw), "\n")
	for i, line := range lines {
		if before, _, ok := strings.Cut(line, "server: "); ok {
			lines[i] = before + "server: " + c.serverURL()
		}
	}
	return os.WriteFile(at, []byte(strings.Join(lines, "\n")), 0o600)
}

// clusterVerb runs a verb of "kctl cluster" with the cluster file and prints its output.
func (c *vmCluster) clusterVerb(want string, args ...string) error {
	return c.clusterVerbWith("", want, args...)
}

func (c *vmCluster) clusterVerbWith(input, want string, args ...string) error {
	args = append([]string{"cluster"}, append(args, "-f", filepath.Join(c.site.dir, "cluster.yaml"))...)
	fmt.Printf("$ kctl %s\n", strings.ReplaceAll(strings.Join(args, " "), c.site.dir+"/", ""))
	out, err := c.kctlTo(os.Stdout, 30*time.Minute, input, args...)
	if err == nil && !strings.Contains(out, want) {
		err = fmt.Errorf("it does not say %q: %s", want, out)
	}
	return err
}

func (c *vmCluster) dryRun() error {
	if err := c.writeClusterFile(c.initialMachines()...); err != nil {
		return err
	}
	before := map[string]string{}
	for name := range c.before {
		out, err := c.all[name].runCommand(state)
		if err != nil {
			return err
		}
		before[name] = out
	}
	if err := c.clusterVerb("make the cluster: init --cluster-name=vm", "up", "--dry-run"); err != nil {
		return err
	}
	for name, was := range before {
		out, err := c.all[name].runCommand(state)
		if err != nil {
			return err
		}
		if d := diffLines(was, out); d != "" {
			return fmt.Errorf("%s was changed: %s", name, d)
		}
	}
	return nil
}

func (c *vmCluster) runUp() error {
	if err := c.clusterVerb("node w1 is ready", "up"); err != nil {
		return err
	}
	for _, name := range c.replicas {
		if mode, err := c.all[name].runCommand("stat -c %a:%U /var/lib/keelson/controlplane/admin.kubeconfig " +
			"/etc/keelson/controlplane.yaml; stat -c %a /var/lib/keelson/controlplane"); err != nil ||
			mode != "600:root\n600:root\n700" {
			return fmt.Errorf("%s: an administrator's kubeconfig, settings and their folder have the modes %q (%w)",
				name, mode, err)
		}
	}
	out, err := c.runKctl("get", "node", "w1", "-o", "jsonpath={.metadata.labels.disk}")
	if err == nil && out != "w1" {
		err = fmt.Errorf("the label disk of w1 is %q", out)
	}
	return err
}

func (c *vmCluster) runUpAgain() error { return c.clusterVerb("nothing to do", "up") }

// upgradeAll upgrades everything to another release. Each daemon runs it afterwards, and no process
// of a pod has been replaced.
func (c *vmCluster) upgradeAll() error {
	before, err := c.containerProcesses()
	if err != nil {
		return err
	}
	agent, err := c.all["w1"].runCommand("systemctl show -p MainPID --value keelson-agent")
	if err != nil {
		return err
	}
	old, err := c.runningReleases()
	if err != nil {
		return err
	}
	if err := c.clusterVerb("", "upgrade", "--to", c.site.nextRelease, "--patience", soon.String()); err != nil {
		return err
	}
	after, err := c.containerProcesses()
	if err != nil || after != before {
		return fmt.Errorf("the new agent left\n%s\nof\n%s (%w)", after, before, err)
	}
	if is, err := c.all["w1"].runCommand("systemctl show -p MainPID --value keelson-agent"); err != nil || is == agent {
		return fmt.Errorf("the agent is process %s as before (%w)", is, err)
	}
	for _, name := range c.initialMachines() {
		// A program that was replaced while it ran is shown as deleted.
		if out, err := c.all[name].runCommand("readlink /proc/$(pgrep -o -x 'keelson-(agent|control.*)')/exe"); err !=
			nil ||
			strings.Contains(out, "deleted") {
			return fmt.Errorf("%s runs %s (%w)", name, out, err)
		}
	}
	is, err := c.runningReleases()
	if err != nil || len(is) != len(old) {
		return fmt.Errorf("releases before %v and after %v (%w)", old, is, err)
	}
	for name, r := range is {
		if r == old[name] || strings.TrimPrefix(strings.TrimPrefix(r, "keelson://"), "v") != c.site.version {
			return fmt.Errorf("%s reports release %s, and before it was %s: want %s", name, r, old[name],
				c.site.version)
		}
	}
	return errors.Join(c.awaitExample(), c.checkService())
}

// runningReleases returns the releases that replicas and nodes report.
func (c *vmCluster) runningReleases() (map[string]string, error) {
	s, err := c.clusterStatus()
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, m := range s.Members {
		out[m.Name] = m.Version
	}
	said, err := c.runKctl("get", "nodes", "-o",
		"jsonpath={range .items[*]}{.metadata.name} {.status.nodeInfo.containerRuntimeVersion}{\"\\n\"}{end}")
	for line := range strings.Lines(said) {
		name, release, _ := strings.Cut(strings.TrimSpace(line), " ")
		out[name] = release
	}
	return out, err
}

func (c *vmCluster) addWorker() error {
	if err := c.writeClusterFile(append(c.initialMachines(), "w2")...); err != nil {
		return err
	}
	if err := c.clusterVerb("node w2 is ready", "add", "--release", c.site.nextRelease); err != nil {
		return err
	}
	// One half of the pods goes there, so that some have to leave with it.
	if _, err := c.runKctl("scale", "deployment", "hello", "--replicas=6"); err != nil {
		return err
	}
	return awaitCondition(func() error {
		out, err := c.runKctl("get", "pods", "-l", "app=hello", "-o",
			`jsonpath={range .items[*]}{.spec.nodeName}{.status.containerStatuses[0].ready} {end}`)
		if err == nil && (!strings.Contains(out, "w2true") || strings.Count(out, "true") != 6) {
			err = fmt.Errorf("pods are at %s", out)
		}
		return err
	})
}

func (c *vmCluster) removeWorker() error {
	if err := c.clusterVerb("w2 was removed from the cluster", "remove", "w2"); err != nil {
		return err
	}
	if out, err := c.runKctl("get", "nodes", "-o", "name"); err != nil || strings.TrimSpace(out) != "node/w1" {
		return fmt.Errorf("nodes are %s (%w)", out, err)
	}
	if err := c.requireUntouched("w2"); err != nil {
		return err
	}
	err := awaitCondition(func() error {
		out, err := c.runKctl("get", "deployment", "hello", "-o", "jsonpath={.status.readyReplicas}")
		if err == nil && out != "6" {
			err = fmt.Errorf("ready pods: %q, want 6", out)
		}
		return err
	})
	if err != nil {
		return err
	}
	return c.checkService()
}

func (c *vmCluster) removeReplica() error {
	s, err := c.clusterStatus()
	if err != nil {
		return err
	}
	name := s.Leader // the one of which it is hardest
	c.useOtherThan(name)
	if err := c.clusterVerb(name+" was removed from the cluster", "remove", name); err != nil {
		return err
	}
	left := slices.DeleteFunc(c.initialMachines(), func(n string) bool { return n == name })
	if err := c.writeClusterFile(left...); err != nil {
		return err
	}
	if err := c.clusterVerb("kubeconfig: ", "up", "--release", c.site.nextRelease); err != nil {
		return err
	}
	if s, err = c.clusterStatus(); err != nil || len(s.Members) != len(c.replicas)-1 {
		return fmt.Errorf("there are %d replicas (%w)", len(s.Members), err)
	}
	return errors.Join(c.requireUntouched(name), c.checkService())
}

// requireUntouched compares a machine with its state before the installation.
func (c *vmCluster) requireUntouched(name string) error {
	is, err := c.all[name].runCommand(state)
	if err != nil {
		return err
	}
	if d := diffLines(c.before[name], is); d != "" {
		return fmt.Errorf("%s differs from what it was before:\n%s", name, d)
	}
	return nil
}

func (c *vmCluster) resetCluster() error {
	if err := c.clusterVerbWith("vm\n", "the cluster vm was removed from", "reset"); err != nil {
		return err
	}
	return c.forMachines(func(m *virtualMachine) error {
		return c.requireUntouched(m.name)
	}, slices.Collect(func(yield func(string) bool) {
		for name := range c.before {
			if !yield(name) {
				return
			}
		}
	})...)
}
