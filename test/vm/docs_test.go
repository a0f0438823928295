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

// What the pages of install, operate, upgrade, recover and secure (test/docpages) have an operator do, on machines with systemd and
// cgroup v2, by the command lines that stand there: a cluster begun by hand and gone on with by 'kctl cluster up', a standby that gets
// the vote of a machine without power, upgrades that drain and skip, the majority lost and recovered, keys exchanged, nodes revoked,
// backups restored. test/docpages says of every line of those pages which test runs it. F48, F53
func TestDocsOnMachines(t *testing.T) {
	if os.Getenv("KEELSON_VM") == "" {
		t.Skip("it boots machines in software, for minutes: 'make test-vm-docs' runs it")
	}
	top, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{T: t, asked: "cp1", replicas: hosts[:4], workers: hosts[4:], all: map[string]*machine{}, before: map[string]string{}}
	defer c.tell()
	c.machines(top, os.Getenv("KEEP"))
	c.began = time.Now()
	c.step("machines boot: "+strings.Join(hosts, " "), func() error { return c.boot(hosts...) })
	c.step("the release is there before it is uploaded", c.seed)
	c.step("install.sh by hand: a first replica, a second, a worker", c.byHand)
	c.step("kctl cluster up goes on from there, and then has nothing to do", c.goOn)
	c.step("kctl cluster add of a standby", c.addStandby)
	c.step("the example is applied and served", c.example)
	c.step("a node is revoked, and comes back by a token", c.revoked)
	c.step("a voter's power is cut for good: the standby has its vote", c.promoted)
	c.step("back, it is refused, removed, and waits for a vote itself", c.back)
	c.step("the majority loses its power: recover, nothing is lost", c.lostMajority)
	c.step("the others are members again: rebuild and join", c.othersAgain)
	c.step("kctl cluster upgrade --drain w1 --skip cp3", c.drainAndSkip)
	c.step("the release by hand, and back: pods are untouched", c.upgradeByHand)
	c.step("kctl cluster upgrade of what is left", c.upgradeRest)
	c.step("a standby by hand: join --standby, install.sh --standby", c.standbyByHand)
	c.step("keys: an exchange given up, and one to the end", c.exchangeKeys)
	c.step("the cluster's CA: former kubeconfigs are refused", c.exchangeCA)
	c.step("keys by hand, and no word more of removed replicas", c.keysByHand)
	c.step("what the pages for operators do on an ordinary day", c.ordinaryDay)
	c.step("a worker by the package alone", c.byPackage)
	c.step("the next release's package: pods are untouched", c.upgradeByPackage)
	c.step("a worker without power for good: out-of-service", c.offForGood)
	c.step("backups: a drill, a look, a restore", c.backups)
	c.step("the keys are lost: a new cluster of a backup", c.newKeys)
}

// machines makes the site and the machines, or takes them up again.
func (c *cluster) machines(top, keep string) {
	bin := filepath.Join(top, "bin")
	below := c.TempDir()
	if keep == "" {
		c.site = newSite(c.T, bin, c.TempDir(), network(c.T))
	} else {
		below = keep
		ns := c.keep(keep)
		c.site = newSite(c.T, bin, filepath.Join(keep, "site"), ns)
	}
	c.site.kubeconfig = ".kube/keelson-keelson"
	release := releaseDisk(c.T, bin, below)
	for i, name := range append(hosts[:len(hosts):len(hosts)], packaged) {
		m := newMachine(c.T, c.site.network, filepath.Join(top, "scripts"), c.site.key+".pub", release, below, name, 11+i)
		c.all[name] = m
		if keep != "" {
			m.again(c.T)
		}
	}
}

// file writes the cluster file: each machine with its roles, or those that it has been said to have.
func (c *cluster) file(roles ...string) error {
	file := "apiVersion: keelson.dev/v1\nkind: Machines\nname: keelson\nrelease: " + filepath.Join(c.site.bin, "dist") + "\nssh: {key: key}\n" +
		"controlplane: {api-address-shared: " + shared + ", replace-dead-after: 5m, backup-schedule: \"*/5 * * * *\", backup-folder: /var/backups/keelson}\nhosts:\n"
	for _, role := range roles {
		name, role, _ := strings.Cut(role, " ")
		key, err := c.hostKey(name)
		if err != nil {
			return err
		}
		file += fmt.Sprintf("- {name: %s, address: %s, roles: [%s], ssh: {user: root, hostKey: %q}}\n", name, c.all[name].address, role, key)
	}
	return os.WriteFile(filepath.Join(c.site.dir, "cluster.yaml"), []byte(file), 0o600)
}

// seed puts the release where 'kctl cluster' looks before it uploads them, which TestMachines has it do: that takes minutes.
func (c *cluster) seed() error {
	return c.each(func(m *machine) error {
		_, err := m.run("mkdir -p -m 700 /var/cache/keelson && cp " + thisRelease + "/*.tar.gz /var/cache/keelson/")
		return err
	}, hosts...)
}

// hostKey is what was read at the machine's console, which may be off now.
func (c *cluster) hostKey(name string) (string, error) {
	at := filepath.Join(c.site.dir, "hostkey-"+name)
	if raw, err := os.ReadFile(at); err == nil {
		return string(raw), nil
	}
	key, err := c.all[name].run("cat /etc/ssh/ssh_host_ed25519_key.pub")
	if err != nil {
		return "", err
	}
	return key, os.WriteFile(at, []byte(key), 0o600)
}

// long is for one command that puts programs on several machines.
const long = 30 * time.Minute

// line runs a command line of a page of a subject, at the site or on a machine. swaps are, in pairs, what the page has and what it is
// here.
func (c *cluster) line(subject, text, at string, swaps ...string) (string, error) {
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
		out, err = c.sh(long, text)
	} else {
		out, err = c.all[at].runFor(long, text)
	}
	fmt.Printf("  %s$ %s  (%.0f s)\n", at, shown, time.Since(began).Seconds())
	return out, err
}

// says runs a line that has to say something.
func (c *cluster) lineSays(want, page, text, at string, swaps ...string) error {
	out, err := c.line(page, text, at, swaps...)
	if err == nil && !strings.Contains(out, want) {
		err = fmt.Errorf("%q does not say %q: %s", text, want, out)
	}
	return err
}

// ask has the API asked at a replica that is ready.
func (c *cluster) ask() error {
	return until(func() error {
		var errs []error
		for _, name := range c.replicas {
			if c.all[name].qemu == nil {
				continue
			}
			c.asked = name
			_, err := c.kctlFor(20*time.Second, "", "get", "--raw", "/readyz", "--request-timeout=15s", "--server="+c.server())
			if err == nil {
				return c.toAsked()
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
}

// member is what the cluster says of a replica.
func member(s api.ClusterStatus, name string) api.ClusterMember {
	for _, m := range s.Members {
		if m.Name == name {
			return m
		}
	}
	return api.ClusterMember{}
}

// shared is the address of the API that follows the leader.
const shared = "192.0.2.10"

// follows waits until the leader's machine has that address, and no other, and the API answers there and proves that it is the cluster's.
func (c *cluster) follows() error {
	if err := c.ask(); err != nil {
		return err
	}
	return until(func() error {
		s, err := c.status()
		if err != nil {
			return errors.Join(err, c.ask())
		}
		for _, name := range c.replicas {
			if c.all[name].qemu == nil {
				continue
			}
			out, err := c.all[name].run("ip -o -4 address show to " + shared)
			if err != nil || (out != "") != (name == s.Leader) {
				return fmt.Errorf("%s leads, and %s has of %s: %q (%w)", s.Leader, name, shared, out, err)
			}
		}
		_, err = c.kctlFor(20*time.Second, "", "get", "--raw", "/readyz", "--request-timeout=15s", "--server=https://"+shared+":6443")
		return err
	})
}

// allReady waits until all of those are members, ready, and have everything.
func (c *cluster) allReady(names ...string) error {
	if err := c.ask(); err != nil {
		return err
	}
	return until(func() error {
		s, err := c.status()
		if err != nil {
			return errors.Join(err, c.ask())
		}
		for _, name := range names {
			if m := member(s, name); m.Ready != "yes" || m.Lag > 20 {
				return fmt.Errorf("%s is %+v", name, m)
			}
		}
		return nil
	})
}

// sh runs a command at the site, as a person there would.
func (c *cluster) sh(limit time.Duration, command string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return c.command(ctx, io.Discard, "", "sh", "-c", command)
}
