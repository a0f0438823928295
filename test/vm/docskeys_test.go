package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// exchanged waits until an exchange of keys is at a step.
func (c *cluster) exchanged(kind, step string) error {
	return until(func() error {
		return c.lineSays("exchange of "+kind+": "+step, "secure", "kctl cluster rotate --status", "site")
	})
}

// exchangeKeys gives one exchange up while a node is away, and does another to its end.
func (c *cluster) exchangeKeys() error {
	if err := c.allReady(c.replicas...); err != nil {
		return err
	}
	// A node that is away holds the step trust up, and is named.
	if _, err := c.all["w1"].run("systemctl stop keelson-agent"); err != nil {
		return err
	}
	if _, err := c.line("secure", "kctl cluster rotate cluster-ca", "site"); err != nil {
		return err
	}
	if err := until(func() error { return c.lineSays("w1", "secure", "kctl cluster rotate --status", "site") }); err != nil {
		return err
	}
	if err := c.lineSays("step trust", "secure", "kctl cluster rotate --status", "site"); err != nil {
		return err
	}
	if _, err := c.line("secure", "kctl cluster rotate --abort", "site"); err != nil {
		return err
	}
	if _, err := c.all["w1"].run("systemctl start keelson-agent"); err != nil {
		return err
	}
	if err := errors.Join(c.nodeReady(), c.exchanged("cluster-ca", "aborted")); err != nil {
		return err
	}
	if err := c.lineSays("service-account-key", "secure", "kctl cluster certs", "site"); err != nil {
		return err
	}
	text := "kctl cluster rotate service-account-key"
	if _, err := c.line("secure", text, "site", text, text+" --grace-period 0s"); err != nil {
		return err
	}
	if err := c.exchanged("service-account-key", "done"); err != nil {
		return err
	}
	if _, err := c.line("secure", "kctl cluster rotate peers-ca", "site"); err != nil {
		return err
	}
	if err := c.exchanged("peers-ca", "done"); err != nil {
		return err
	}
	if _, err := c.line("secure", "kctl cluster rotate encryption-key", "site"); err != nil {
		return err
	}
	if err := c.exchanged("encryption-key", "done"); err != nil {
		return err
	}
	return errors.Join(c.allReady(c.replicas...), c.nodeReady(), c.serves())
}

// exchangeCA has a kubeconfig of before be refused, as after one has leaked.
func (c *cluster) exchangeCA() error {
	if err := c.allReady(c.replicas...); err != nil {
		return err
	}
	raw, err := os.ReadFile(filepath.Join(c.site.dir, c.site.kubeconfig))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(c.site.dir, "leaked"), raw, 0o600); err != nil {
		return err
	}
	if _, err := c.line("secure", "kctl cluster rotate cluster-ca --grace-period 0s", "site"); err != nil {
		return err
	}
	if err := until(func() error {
		_, err := c.line("secure", "kctl cluster renew", "site")
		if err != nil && strings.Contains(err.Error(), "not run in time") {
			// With --grace-period 0s it may be over before the next renewal: then a replica's is taken, as the error says.
			err = c.takeKubeconfig(c.replicas[0])
		}
		return errors.Join(err, c.lineSays("exchange of cluster-ca: done", "secure", "kctl cluster rotate --status", "site"))
	}); err != nil {
		return err
	}
	if _, err := c.line("secure", "kctl rollout restart deployment/NAME", "site", "NAME", "hello"); err != nil {
		return err
	}
	if err := errors.Join(c.allReady(c.replicas...), c.nodeReady()); err != nil {
		return err
	}
	if err := until(func() error {
		out, err := c.sh(soon, "KUBECONFIG=leaked kctl get nodes --insecure-skip-tls-verify 2>&1; true")
		if err == nil && !strings.Contains(out, "Unauthorized") && !strings.Contains(out, "must be logged in") && !strings.Contains(out, "certificate") {
			err = fmt.Errorf("with a kubeconfig of before one reads %s", out)
		}
		return err
	}); err != nil {
		return err
	}
	return errors.Join(c.follows(), c.ready(), c.serves())
}

// keysByHand exchanges the replicas' authority without 'kctl cluster rotate', and has nothing told any more of replicas that were removed
// and have been wiped.
func (c *cluster) keysByHand() error {
	if err := c.allReady(c.replicas...); err != nil {
		return err
	}
	const file = "/root/peers.pem"
	first := c.all[c.asked]
	if _, err := first.run("rm -f " + file); err != nil {
		return err
	}
	if err := c.lineSays("holds a new authority", "secure", "keelson-controlplane peer-ca create FILE", first.name, "FILE", file); err != nil {
		return err
	}
	key, err := first.run("stat -c %a " + file + " && cat " + file)
	if err != nil {
		return err
	}
	mode, key, _ := strings.Cut(key, "\n")
	if mode != "600" {
		return fmt.Errorf("%s has the mode %s", file, mode)
	}
	for _, text := range []string{"keelson-controlplane peer-ca trust FILE", "keelson-controlplane peer-ca use FILE", "keelson-controlplane peer-ca prune"} {
		for _, name := range c.replicas {
			if _, err := c.all[name].run("umask 077; cat >" + file + " <<'EOT'\n" + key + "\nEOT"); err != nil {
				return err
			}
			var swaps []string
			if strings.Contains(text, "FILE") {
				swaps = []string{"FILE", file}
			}
			if _, err := c.line("secure", text, name, swaps...); err != nil {
				return err
			}
		}
		if err := c.allReady(c.replicas...); err != nil {
			return err
		}
	}
	if err := c.each(func(m *machine) error {
		out, err := c.line("secure", "keelson-controlplane peer-ca list", m.name)
		if err == nil && (strings.Count(out, "signs") != 1 || strings.Contains(out, "believed")) {
			err = fmt.Errorf("%s has the authorities %s", m.name, out)
		}
		_, err2 := m.run("rm " + file)
		return errors.Join(err, err2)
	}, c.replicas...); err != nil {
		return err
	}
	// What was removed before is told of, for it may have the cluster's secret.
	told, err := c.line("secure", "kctl cluster certs", "site")
	if err != nil {
		return err
	}
	gone := removed.FindAllStringSubmatch(told, -1)
	if len(gone) == 0 {
		return fmt.Errorf("nobody was removed: %s", told)
	}
	for _, name := range gone {
		if _, err := c.line("secure", "kctl cluster rotate --clear-removed NAME", "site", "NAME", name[1]); err != nil {
			return err
		}
	}
	if told, err := c.line("secure", "kctl cluster certs", "site"); err != nil || removed.MatchString(told) {
		return fmt.Errorf("removed replicas are told of: %s (%w)", told, err)
	}
	return errors.Join(c.allReady(c.replicas...), c.nodeReady(), c.serves())
}

// removed is what certs tells of a replica that was removed.
var removed = regexp.MustCompile(`(?m)^(\S+) was removed .* still: cluster-secret\.`)

// takeKubeconfig gives the site the administrator's kubeconfig of a replica.
func (c *cluster) takeKubeconfig(name string) error {
	raw, err := c.all[name].run("cat /var/lib/keelson/controlplane/admin.kubeconfig")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.site.dir, c.site.kubeconfig), []byte(raw), 0o600)
}

// revoked has a node's certificates be good for nothing, and it come back by a token.
func (c *cluster) revoked() error {
	if err := c.allReady(c.replicas...); err != nil {
		return err
	}
	if err := c.lineSays("node/w1 is revoked", "secure", "kctl cluster revoke node/NAME", "site", "NAME", "w1"); err != nil {
		return err
	}
	if err := c.notReady(); err != nil {
		return err
	}
	// Not by being started again, either.
	if _, err := c.all["w1"].run("systemctl restart keelson-agent"); err != nil {
		return err
	}
	if err := until(func() error {
		_, err := c.all["w1"].run("journalctl -u keelson-agent --no-pager -o cat -n 200 | grep -i revoked")
		return err
	}); err != nil {
		return err
	}
	if err := c.notReady(); err != nil {
		return err
	}
	if err := c.nodeByToken(); err != nil {
		return err
	}
	// To be deleted is the same for who is there.
	if err := c.lineSays("deleted", "operate", "kctl delete node w3", "site", "w3", "w1"); err != nil {
		return err
	}
	if err := until(func() error {
		out, err := c.kctl("get", "nodes", "-o", "name")
		if err == nil && out != "" {
			err = fmt.Errorf("there is %s", out)
		}
		return err
	}); err != nil {
		return err
	}
	if err := c.nodeByToken(); err != nil {
		return err
	}
	return errors.Join(c.ready(), c.serves())
}

func (c *cluster) notReady() error {
	return until(func() error {
		out, err := c.kctl("get", "node", "w1", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out == "True" {
			err = errors.New("node w1 is ready")
		}
		return err
	})
}

// nodeByToken gives the worker a token in its file, which lets it take the name of the Node that is there.
func (c *cluster) nodeByToken() error {
	out, err := c.line("secure", "kctl cluster token create --names NAME --replace", "site", "NAME", "w1")
	if err != nil {
		return err
	}
	t, err := token(out, "node")
	if err != nil {
		return err
	}
	if _, err := c.all["w1"].run("umask 077; echo " + t + " >/var/lib/keelson/join-token; systemctl restart keelson-agent"); err != nil {
		return err
	}
	return c.nodeReady()
}
