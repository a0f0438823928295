package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/test/docpages"
)

// hosts are the machines of TestDocsOnMachines, in the order of their addresses, as docs/how-to/install-with-cluster-file.md has them.
var hosts = []string{"cp1", "cp2", "cp3", "cp4", "w1"}

// The tasks of the pages about installation, operation, upgrades, recovery and security
// (test/docpages), on machines with systemd and cgroup v2, by the command lines of the pages: a
// cluster created by hand and continued with 'kctl cluster up', a standby that replaces a machine
// without power, upgrades with drain and skip, a lost and recovered majority, key rotation, node
// revocation, restored backups. test/docpages lists the test for every line of those pages. F48,
// F53
func TestDocsOnMachines(t *testing.T) {
	if os.Getenv("KEELSON_VM") == "" {
		t.Skip("it boots machines in software, for minutes: 'make test-vm-docs' runs it")
	}
	top, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	c := &vmCluster{T: t, apiMachine: "cp1", replicas: hosts[:4], workers: hosts[4:], all: map[string]*virtualMachine{},
		before: map[string]string{}}
	defer c.logDurations()
	c.createMachines(top, os.Getenv("KEEP"))
	c.began = time.Now()
	c.runStep("machines boot: "+strings.Join(hosts, " "), func() error { return c.bootMachines(hosts...) })
	c.runStep("the release is copied before the upload", c.copyRelease)
	c.runStep("install.sh by hand: a first replica, a second, a worker", c.installByHand)
	c.runStep("kctl cluster up continues from there, and then has nothing to do", c.adoptCluster)
	c.runStep("kctl cluster add of a standby", c.addStandby)
	c.runStep("the example is applied and served", c.deployExample)
	c.runStep("a node is revoked, and joins again with a token", c.revokeNode)
	c.runStep("a voter's power is cut for good: the standby has its vote", c.awaitPromotion)
	c.runStep("back, it is refused, removed, and becomes a standby", c.checkReplaced)
	c.runStep("the majority loses its power: recover, nothing is lost", c.recoverMajority)
	c.runStep("the others are members again: rebuild and join", c.restoreOthers)
	c.runStep("kctl cluster upgrade --drain w1 --skip cp3", c.upgradeWithDrain)
	c.runStep("the release by hand, and back: pods are untouched", c.upgradeByHand)
	c.runStep("kctl cluster upgrade of what is left", c.upgradeRest)
	c.runStep("a standby by hand: join --standby, install.sh --standby", c.addStandbyByHand)
	c.runStep("keys: a rotation aborted, and one completed", c.rotateKeys)
	c.runStep("the cluster CA: previous kubeconfigs are refused", c.rotateCA)
	c.runStep("keys by hand, and removed replicas are not listed any more", c.rotateByHand)
	c.runStep("the how-to pages for operators", c.runDailyPages)
	c.runStep("a worker by the package alone", c.installByPackage)
	c.runStep("the next release's package: pods are untouched", c.upgradeByPackage)
	c.runStep("a lost worker: out-of-service", c.removeLostWorker)
	c.runStep("backups: a restore test, an inspection, a restore", c.checkBackups)
	c.runStep("the keys are lost: a new cluster from a backup", c.replaceKeys)
}

// createMachines creates the site and the machines, or reuses kept machines.
func (c *vmCluster) createMachines(top, keep string) {
	bin := filepath.Join(top, "bin")
	below := c.TempDir()
	if keep == "" {
		c.site = newAdminSite(c.T, bin, c.TempDir(), newNetwork(c.T))
	} else {
		below = keep
		ns := c.keepMachines(keep)
		c.site = newAdminSite(c.T, bin, filepath.Join(keep, "site"), ns)
	}
	c.site.kubeconfig = ".kube/keelson-keelson"
	release := releaseDisk(c.T, bin, below)
	for i, name := range append(hosts[:len(hosts):len(hosts)], packaged) {
		m := newMachine(c.T, c.site.network, filepath.Join(top, "scripts"), c.site.key+".pub", release,
			below, name, 11+i)
		c.all[name] = m
		if keep != "" {
			m.attachKept(c.T)
		}
	}
}

// writeRoles writes the cluster file with each machine's roles, or with the given roles.
func (c *vmCluster) writeRoles(roles ...string) error {
	file := "apiVersion: keelson.dev/v1\nkind: Machines\nname: keelson\nrelease: " + filepath.Join(c.site.bin, "dist") +
		"\nssh: {key: key}\ncontrolplane: {api-address-shared: " + shared +
		", replace-dead-after: 5m, backup-schedule: \"*/5 * * * *\", backup-folder: /var/backups/keelson}\nhosts:\n"
	for _, role := range roles {
		name, role, _ := strings.Cut(role, " ")
		key, err := c.hostKey(name)
		if err != nil {
			return err
		}
		file += fmt.Sprintf("- {name: %s, address: %s, roles: [%s], ssh: {user: root, hostKey: %q}}\n", name,
			c.all[name].address, role, key)
	}
	return os.WriteFile(filepath.Join(c.site.dir, "cluster.yaml"), []byte(file), 0o600)
}

// copyRelease copies the release to the folder in which "kctl cluster" looks before it uploads
// files. The upload takes minutes; TestMachines covers it.
func (c *vmCluster) copyRelease() error {
	return c.forMachines(func(m *virtualMachine) error {
		_, err := m.runCommand("mkdir -p -m 700 /var/cache/keelson && cp " + thisRelease +
			"/*.tar.gz /var/cache/keelson/")
		return err
	}, hosts...)
}

// hostKey returns the SSH host key that was read at the machine's console. The machine may be off.
func (c *vmCluster) hostKey(name string) (string, error) {
	at := filepath.Join(c.site.dir, "hostkey-"+name)
	if raw, err := os.ReadFile(at); err == nil {
		return string(raw), nil
	}
	key, err := c.all[name].runCommand("cat /etc/ssh/ssh_host_ed25519_key.pub")
	if err != nil {
		return "", err
	}
	return key, os.WriteFile(at, []byte(key), 0o600)
}

// long is for one command that puts programs on several machines.
const long = 30 * time.Minute

// runLine runs a command line of a page, at the site or on a machine. swaps are pairs of a text of
// the page and its replacement.
func (c *vmCluster) runLine(subject, text, at string, swaps ...string) (string, error) {
	all, err := docpages.ReadSubject(filepath.Join("..", "..", "docs"), subject)
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(all, func(l docpages.Line) bool { return l.Text == text })
	if i < 0 {
		return "", fmt.Errorf("no page of %s has the line %q", subject, text)
	}
	page := all[i].Page
	for i := 0; i < len(swaps); i += 2 {
		if !strings.Contains(text, swaps[i]) {
			return "", fmt.Errorf("docs/%s.md: %q has no %q in it", page, text, swaps[i])
		}
		text = strings.ReplaceAll(text, swaps[i], swaps[i+1])
	}
	began := time.Now()
	shown := text
	if len(shown) > 110 {
		shown = shown[:110] + "…"
	}
	out := ""
	if at == "site" {
		out, err = c.runAtSite(long, text)
	} else {
		out, err = c.all[at].runFor(long, text)
	}
	fmt.Printf("  %s$ %s  (%.0f s)\n", at, shown, time.Since(began).Seconds())
	return out, err
}

// runLineFor is runLine with an output that must contain want.
func (c *vmCluster) runLineFor(want, page, text, at string, swaps ...string) error {
	out, err := c.runLine(page, text, at, swaps...)
	if err == nil && !strings.Contains(out, want) {
		err = fmt.Errorf("%q does not say %q: %s", text, want, out)
	}
	return err
}

// useReadyReplica makes the kubeconfig use a replica that is ready.
func (c *vmCluster) useReadyReplica() error {
	return awaitCondition(func() error {
		var errs []error
		for _, name := range c.replicas {
			if c.all[name].qemu == nil {
				continue
			}
			c.apiMachine = name
			_, err := c.kctlFor(20*time.Second, "", "get", "--raw", "/readyz", "--request-timeout=15s",
				"--server="+c.serverURL())
			if err == nil {
				return c.pointKubeconfig()
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
}

// memberStatus returns the status of a member by its name.
func memberStatus(s api.ClusterStatus, name string) api.ClusterMember {
	for _, m := range s.Members {
		if m.Name == name {
			return m
		}
	}
	return api.ClusterMember{}
}

// shared is the address of the API that follows the leader.
const shared = "192.0.2.10"

// awaitSharedAddress waits until only the leader's machine has the shared address, and the API
// responds there with a certificate of the cluster.
func (c *vmCluster) awaitSharedAddress() error {
	if err := c.useReadyReplica(); err != nil {
		return err
	}
	return awaitCondition(func() error {
		s, err := c.clusterStatus()
		if err != nil {
			return errors.Join(err, c.useReadyReplica())
		}
		for _, name := range c.replicas {
			if c.all[name].qemu == nil {
				continue
			}
			out, err := c.all[name].runCommand("ip -o -4 address show to " + shared)
			if err != nil || (out != "") != (name == s.Leader) {
				return fmt.Errorf("%s leads, and %s has of %s: %q (%w)", s.Leader, name, shared, out, err)
			}
		}
		_, err = c.kctlFor(20*time.Second, "", "get", "--raw", "/readyz", "--request-timeout=15s",
			"--server=https://"+shared+":6443")
		return err
	})
}

// awaitMembers waits until all these replicas are members, ready and up to date.
func (c *vmCluster) awaitMembers(names ...string) error {
	if err := c.useReadyReplica(); err != nil {
		return err
	}
	return awaitCondition(func() error {
		s, err := c.clusterStatus()
		if err != nil {
			return errors.Join(err, c.useReadyReplica())
		}
		for _, name := range names {
			if m := memberStatus(s, name); m.Ready != "yes" || m.Lag > 20 {
				return fmt.Errorf("%s is %+v", name, m)
			}
		}
		return nil
	})
}

// runAtSite runs a shell command at the site.
func (c *vmCluster) runAtSite(limit time.Duration, command string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return c.runProgram(ctx, io.Discard, "", "sh", "-c", command)
}
